"""One profile from those of batches of several lengths.

    seconds, bytes sent    the means over the lengths, by their shares of the batches
    bytes kept             those of the longest batch: a plan that holds it holds the others

The mean step takes the mean over lengths of what a step of each takes. Means of layers give the
same where one path through the pipeline is the longest at every length, and never more.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.profile.model_profile import Affine, Edge, LayerCost, LengthCosts, ModelProfile

__all__ = ["mean_profile"]


def mean_profile(
    profiles: Sequence[tuple[Sequence[tuple[str, int]], float, ModelProfile]],
    longest: ModelProfile,
) -> ModelProfile:
    """The profile of a mixture: of each length the sizes by name, the share, and the profile."""
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
