"""Costs and memory as integers, for the solver."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from penstock.schedule.shape import ROUNDING, PipelineShape, StageCost

__all__ = ["Rounded", "rounded_shape"]

DIGITS = 7
"""A unit is searched among the powers of ten within this many digits of the largest value."""

NEARLY = 1e-6
"""A value this close to an integer, in units, counts as that integer."""


@dataclass(frozen=True)
class Rounded:
    """A shape whose costs and memory are integers; times are in units of ``unit_s`` seconds.

    ``grain`` is 1 unless an action takes no time. The solver needs positive durations, so then
    every action takes ``grain`` times its own plus 1. ``grain`` exceeds ``actions``, the most
    actions that there can be, so all the ones together stay below one unit.
    """

    shape: PipelineShape
    unit_s: float
    grain: int
    actions: int

    def seconds(self, bound: int) -> float:
        """The lower bound in seconds on the true shape, from one on the integer shape.

        >>> Rounded(PipelineShape(1, 1), unit_s=0.5, grain=5, actions=4).seconds(13)
        1.0
        """
        if self.grain == 1:
            return bound * self.unit_s
        return ceil((bound - self.actions) / self.grain) * self.unit_s


def rounded_shape(shape: PipelineShape) -> Rounded:
    """``shape`` in integers: times rounded down, bytes up, memory down; integers stay exact.

    >>> costs = (StageCost(0.5, 0.6, 0.4, transfer_s=0.05),)
    >>> rounded = rounded_shape(PipelineShape(stages=1, micro_batches=1, costs=costs))
    >>> rounded.unit_s, rounded.shape.cost(0)
    (0.01, StageCost(forward_s=50, input_backward_s=60, weight_backward_s=40, transfer_s=5, \
saved_bytes=1, kept_bytes=1))
    """
    costs = [shape.cost(stage) for stage in range(shape.stages)]
    work_s = [t for c in costs for t in (c.forward_s, c.input_backward_s, c.weight_backward_s)]
    sizes = [b for c in costs for b in (c.saved_bytes, c.bytes_until_weight_backward)]
    unit_s = unit_of(work_s + [cost.transfer_s for cost in costs])
    unit_bytes = unit_of(sizes)
    actions = 4 * shape.stages * shape.micro_batches
    grain = 1 if all(floor(t / unit_s + NEARLY) for t in work_s) else actions + 1

    def work(seconds: float) -> int:
        return floor(seconds / unit_s + NEARLY) * grain + (grain > 1)

    def size(amount: float) -> int:
        return ceil(amount / unit_bytes - NEARLY)

    def room(amount: float, group: int) -> int:
        all_saved = sum(size(costs[s].saved_bytes) for s in shape.stages_of(group))
        return floor(min(amount * ROUNDING / unit_bytes, all_saved * shape.micro_batches))

    return Rounded(
        replace(
            shape,
            costs=tuple(
                StageCost(
                    work(cost.forward_s),
                    work(cost.input_backward_s),
                    work(cost.weight_backward_s),
                    floor(cost.transfer_s / unit_s + NEARLY) * grain,
                    size(cost.saved_bytes),
                    size(cost.bytes_until_weight_backward),
                )
                for cost in costs
            ),
            memory_bytes=tuple(room(b, group) for group, b in enumerate(shape.memory_bytes)),
        ),
        unit_s,
        grain,
        actions,
    )


def unit_of(values: Sequence[float]) -> float:
    """The largest power of ten that divides all values, else a small fraction of the largest.

    >>> unit_of([0.25, 3.0]), unit_of([1 / 3]) < 1e-6
    (0.01, True)
    """
    largest = max(values)
    if largest <= 0:
        return 1.0
    highest = floor(log10(largest))
    for exponent in range(highest, highest - DIGITS, -1):
        # Division by a positive power of ten is exact; a negative power is not.
        unit = 10.0**exponent if exponent >= 0 else 1 / 10.0**-exponent
        if all(abs(value / unit - round(value / unit)) < NEARLY for value in values):
            return unit
    return largest / 10**DIGITS * 10
