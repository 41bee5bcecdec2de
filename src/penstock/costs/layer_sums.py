"""Prefix sums that give the costs of any run of layers in constant time."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from penstock.profile.model_profile import Affine, ModelProfile


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
class ByteSums:
    """Prefix sums of integer bytes: ``before[i]`` is the sum over layers ``0..i-1``."""

    before: tuple[int, ...]

    def of(self, layers: range) -> int:
        return self.before[layers.stop] - self.before[layers.start]

    def highest(self, stop: int, size: int) -> int:
        """The highest layer such that it and those up to ``stop`` have ``size`` bytes; -1: none."""
        return bisect_right(self.before, self.before[stop] - size) - 1

    def lowest(self, start: int) -> int:
        """The first layer from ``start`` on that has any bytes."""
        return bisect_right(self.before, self.before[start]) - 1


@dataclass(frozen=True, slots=True)
class LargestAffine:
    """The largest value of an affine cost over any run of layers."""

    fixed: npt.NDArray[np.float64]
    per_sample: npt.NDArray[np.float64]

    def of(self, layers: range, samples: int) -> float:
        run = slice(layers.start, layers.stop)
        return float((self.fixed[run] + self.per_sample[run] * samples).max())


class LayerSums:
    """Prefix sums over the layers of a profile: all that simulating and bounding a plan needs.

    >>> from penstock.profile.model_profile import LayerCost
    >>> layer = LayerCost("linear", Affine(1.0, 0.5), Affine(2.0), Affine(1.0))
    >>> LayerSums(ModelProfile("net", (layer,) * 3)).forward_s.of(range(1, 3), samples=4)
    6.0
    """

    def __init__(self, profile: ModelProfile) -> None:
        layers = profile.layers
        self.profile = profile
        self.forward_s = affine_sums(layer.forward_s for layer in layers)
        self.backward_s = affine_sums(layer.backward_s for layer in layers)
        self.backward_input_s = affine_sums(layer.backward_input_s for layer in layers)
        self.backward_weight_s = affine_sums(layer.backward_weight_s for layer in layers)
        self.saved_bytes = affine_sums(layer.saved_bytes for layer in layers)
        self.workspace_bytes = LargestAffine(
            np.array([layer.workspace_bytes.fixed for layer in layers], dtype=np.float64),
            np.array([layer.workspace_bytes.per_sample for layer in layers], dtype=np.float64),
        )
        self.own_parameter_bytes = byte_sums(layer.parameter_bytes for layer in layers)
        self.buffer_bytes = byte_sums(layer.buffer_bytes for layer in layers)
        self.cast_bytes = byte_sums(layer.cast_bytes for layer in layers)
        self.norms = byte_sums(layer.norms for layer in layers)
        self.norm_channels = byte_sums(layer.norm_channels for layer in layers)

    @cached_property
    def by_block(self) -> "LayerSums":
        """The same of stages that recompute by block."""
        return LayerSums(self.profile.by_block)

    def parameter_bytes(self, layers: range) -> int:
        """Parameter bytes of ``layers``, counting shared parameters once."""
        return self.own_parameter_bytes.of(layers) + sum(
            shared.bytes
            for shared in self.profile.shared
            if any(layer in layers for layer in shared.layers)
        )


def affine_sums(costs: Iterable[Affine]) -> AffineSums:
    """Prefix sums of ``costs``, starting with zero."""
    kept = tuple(costs)
    return AffineSums(
        tuple(accumulate((cost.fixed for cost in kept), initial=0.0)),
        tuple(accumulate((cost.per_sample for cost in kept), initial=0.0)),
    )


def byte_sums(sizes: Iterable[int]) -> ByteSums:
    """Prefix sums of ``sizes``, starting with zero."""
    return ByteSums(tuple(accumulate(sizes, initial=0)))
