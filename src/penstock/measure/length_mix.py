"""One profile from the profiles of batches of several lengths.

    seconds, bytes sent    the means over the lengths, weighted by their share of the batches
    bytes saved            those of the longest batch, since a plan that fits it fits the others

The mean step time is the mean over lengths of the step time at each. The means of layers give the
same if one path through the pipeline is the longest at every length; otherwise they give less.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.profile.model_profile import Affine, Edge, LayerCost, LengthCosts, ModelProfile

__all__ = ["mean_profile"]


def mean_profile(
    profiles: Sequence[tuple[Sequence[tuple[str, int]], float, ModelProfile]],
    longest: ModelProfile,
) -> ModelProfile:
    """The profile of a mixture; each of ``profiles`` is sizes by name, share, and profile."""
    by_length = tuple(
        LengthCosts(tuple(lengths), share, profile.layers, profile.edges)
        for lengths, share, profile in profiles
    )
    shares = [share for _, share, _ in profiles]

    def mean(costs: Sequence[Affine]) -> Affine:
        pairs = zip(costs, shares, strict=True)
        return sum((cost.scaled(share) for cost, share in pairs), Affine())

    def layer(costs: Sequence[LayerCost], largest: LayerCost) -> LayerCost:
        return replace(
            largest,
            forward_s=mean([cost.forward_s for cost in costs]),
            backward_input_s=mean([cost.backward_input_s for cost in costs]),
            backward_weight_s=mean([cost.backward_weight_s for cost in costs]),
        )

    def edge(edges: Sequence[Edge]) -> Edge:
        return replace(
            edges[0],
            bytes=mean([edge.bytes for edge in edges]),
            gradient_bytes=mean([edge.gradient_bytes for edge in edges]),
        )

    layers = zip(*(costs.layers for costs in by_length), strict=True)
    edges = zip(*(costs.edges for costs in by_length), strict=True)
    return replace(
        longest,
        layers=tuple(layer(own, at) for own, at in zip(layers, longest.layers, strict=True)),
        edges=tuple(map(edge, edges)),
        by_length=by_length,
    )
