"""Costs of any run of layers in constant time, from sums made once."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from penstock.profile.model_profile import Affine, ModelProfile

__all__ = ["AffineSums", "LayerSums", "layer_sums"]


@dataclass(frozen=True, slots=True)
class AffineSums:
    """Prefix sums of one affine cost: entry ``i`` is the cost of layers ``0..i-1``."""

    fixed: tuple[float, ...]
    per_sample: tuple[float, ...]

    def of(self, layers: range, samples: float) -> float:
        """The cost of ``layers`` on ``samples`` samples; never below zero by rounding."""
        fixed = self.fixed[layers.stop] - self.fixed[layers.start]
        per_sample = self.per_sample[layers.stop] - self.per_sample[layers.start]
        return max(0.0, fixed + per_sample * samples)


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The sums that simulating a plan needs, so that many plans of one profile share them."""

    forward_s: AffineSums
    backward_s: AffineSums
    backward_input_s: AffineSums
    backward_weight_s: AffineSums
    saved_bytes: AffineSums


def layer_sums(profile: ModelProfile) -> LayerSums:
    """Prefix sums over the layers of ``profile``.

    >>> from penstock.profile.model_profile import LayerCost
    >>> layer = LayerCost("linear", Affine(1.0, 0.5), Affine(2.0), Affine(1.0))
    >>> layer_sums(ModelProfile("net", (layer,) * 3)).forward_s.of(range(1, 3), samples=4)
    6.0
    """
    layers = profile.layers
    return LayerSums(
        forward_s=affine_sums(layer.forward_s for layer in layers),
        backward_s=affine_sums(layer.backward_s for layer in layers),
        backward_input_s=affine_sums(layer.backward_input_s for layer in layers),
        backward_weight_s=affine_sums(layer.backward_weight_s for layer in layers),
        saved_bytes=affine_sums(layer.saved_bytes for layer in layers),
    )


def affine_sums(costs: Iterable[Affine]) -> AffineSums:
    """Prefix sums of ``costs``, starting with zero."""
    kept = tuple(costs)
    return AffineSums(
        tuple(accumulate((cost.fixed for cost in kept), initial=0.0)),
        tuple(accumulate((cost.per_sample for cost in kept), initial=0.0)),
    )
