"""What a profile says of its cuts."""

from reference.crossing import crossing

from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile


def test_the_edges_of_every_cut_are_those_that_cross_it() -> None:
    """To the next layer, over one layer, and two of one tensor."""
    one = Affine(0.0, 1.0)
    layers = (LayerCost("layer", one, one, one),) * 4
    ends = [(0, 1), (0, 2), (1, 2), (2, 3), (1, 3)]
    edges = tuple(Edge(i, j, f"tensor{i}", one, one) for i, j in ends)
    profile = ModelProfile("four", layers, edges)
    crossed = [[(edge.producer, edge.consumer) for edge in cut] for cut in crossing(profile)]
    assert crossed == [[], [(0, 1), (0, 2)], [(0, 2), (1, 2), (1, 3)], [(2, 3), (1, 3)], []]
