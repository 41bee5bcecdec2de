"""What a profile says of its cuts."""

from reference.crossing import crossing

from penstock.costs.link_bound import sent_tensors
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


def test_tensors_of_one_name_in_two_layers_are_two() -> None:
    """For a layer that reads both, and for a bound on what is sent."""
    one = Affine(0.0, 1.0)
    layers = (LayerCost("layer", one, one, one),) * 4
    edges = tuple(Edge(i, 2, "x", Affine(0.0, 10.0 + i), one) for i in (0, 1))
    profile = ModelProfile("three", layers, edges)
    assert profile.by_block.layers[2].saved_bytes == Affine(0.0, 21.0)
    assert sorted(sent_tensors(profile, 1)) == [(11.0, 0, 2), (12.0, 1, 2)]
