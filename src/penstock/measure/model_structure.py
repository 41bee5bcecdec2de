"""What a profile takes from a model without running it: parameters, and tensors between layers."""

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import LengthsOf
from penstock.profile.model_profile import Affine, Edge, SharedParameter

__all__ = ["edges_of", "parameters_of"]


def parameters_of(
    graph: LayerGraph,
) -> tuple[list[tuple[int, int]], tuple[SharedParameter, ...]]:
    """For each layer the bytes of its own parameters and of its buffers; and shared parameters.

    Parameters that are not trained need no gradient and no optimizer state, so they count as
    buffers. If several layers use one, it counts for each, since each may be on another stage.
    """
    own = [(0, 0)] * len(graph.layer_names)
    shared: list[SharedParameter] = []
    for use in graph.parameter_uses:
        if not use.layers:
            continue
        first = use.layers[0]
        parameters, buffers = own[first]
        if use.is_buffer:
            own[first] = (parameters, buffers + use.bytes)
        elif not use.requires_grad:
            for layer in use.layers:
                own[layer] = (own[layer][0], own[layer][1] + use.bytes)
        elif len(use.layers) > 1:
            shared.append(SharedParameter(use.name, use.bytes, use.layers))
        else:
            own[first] = (parameters + use.bytes, buffers)
    return own, tuple(shared)


def edges_of(graph: LayerGraph, lengths: LengthsOf) -> tuple[Edge, ...]:
    """One edge for each tensor and layer that reads it, for batches of these lengths.

    Bytes are affine in the number of samples.
    """
    edges: list[Edge] = []
    for example, producer, consumers in graph.crossings:
        spec = example.at(lengths)
        one, two = spec.bytes_for(1), spec.bytes_for(2)
        size = Affine(float(2 * one - two), float(two - one))
        back = size if spec.requires_grad else Affine()
        edges += (Edge(producer, consumer, spec.name, size, back) for consumer in consumers)
    return tuple(edges)
