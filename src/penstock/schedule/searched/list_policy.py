"""Policies of the list schedulers: how a device group ranks its actions, in fifteen numbers.

A policy assumes an ideal timetable, in which every micro-batch passes the pipeline in the same
steps, one period after the previous one. This is the building block of Qi et al. (Pipeline
Parallelism with Controllable Memory, NeurIPS 2024), with steps of any length instead of slots. The
start of an action in that timetable is its *key*; groups prefer the least key. The *depth* of a
stage, the most micro-batches it holds, is the number of periods between forward and backward.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.schedule.searched.list_loop import ScheduleArrays, Wishes, keys_of

T = TypeVar("T")

__all__ = ["CHOICES", "Draws", "Policy", "changed", "drawn", "wishes_of"]


class Policy(NamedTuple):
    """How a group chooses; lengths are in steps and periods.

    A period is the work of the busiest group on one micro-batch. A step is a third of a period
    divided by the stages of a group; with ``even`` it is the longest of all F, I and W.

    - ``forward_early`` to ``backward_early``: steps from a stage to the next, on the first and the
      second half of the stages, forward and backward; never less than the work takes.
    - ``turn``: periods between the last forward and the first backward.
    - ``stretch``: periods from a micro-batch to the next; less than 1 prefers younger ones.
    - ``depth_factor``, ``depth_more``: depth is the number of periods between forward and backward
      times ``depth_factor``, plus ``depth_more``.
    - ``idle_price``: how much a second of waiting adds to a key, in seconds.
    - ``overlap``: the fraction of another action by which it may delay the preferred one.
    - ``most_pending``: with more W pending than this, one runs. ``weight_overlap``: ``overlap`` for
      W.
    - ``forward_delay``: periods added to the keys of forwards.
    - ``lead``: how many periods before its key a micro-batch may enter the pipeline.
    """

    forward_early: float = 1.0
    forward_late: float = 1.0
    backward_late: float = 1.0
    backward_early: float = 1.0
    turn: float = 0.0
    stretch: float = 1.0
    depth_factor: float = 1.0
    depth_more: float = 0.0
    idle_price: float = 1000.0
    overlap: float = 0.3
    most_pending: float = 1e9
    weight_overlap: float = 0.3
    forward_delay: float = 0.0
    lead: float = 1e9
    even: float = 0.0


HOPS = (0.0, 1.0, 1.0, 1.0, 1.25, 1.5, 2.0, 2.0, 2.5, 3.0)

CHOICES: dict[str, tuple[float, ...]] = dict(
    forward_early=HOPS,
    forward_late=HOPS,
    backward_late=HOPS,
    backward_early=HOPS,
    turn=(0.0, 0.0, 1 / 6, 1 / 3, 0.5),
    stretch=(0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.5),
    depth_factor=(0.5, 0.75, 0.9, 1.0, 1.0, 1.1, 1.25, 1.5, 2.0, 1e9),
    depth_more=(-1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0, 3.0),
    idle_price=(0.0, 0.5, 1.0, 2.0, 5.0, 1000.0),
    overlap=(0.0, 0.1, 0.3, 0.5, 1.0, 1e9),
    most_pending=(0.0, 1.0, 2.0, 3.0, 1e9, 1e9),
    weight_overlap=(0.0, 0.1, 0.3, 0.5, 1.0, 1e9),
    forward_delay=(0.0, 0.0, 0.0, -1 / 3, 1 / 3, -1.0, 1.0),
    lead=(0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 1e9, 1e9, 1e9, 1e9),
    even=(0.0, 1.0, 1.0, 1.0),
)
"""Values that each number is drawn from; those that often help are listed several times."""


class Draws:
    """A pseudo-random sequence that is the same on every machine (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, limit: int) -> int:
        """An integer from 0 to ``limit - 1``."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return ((z ^ (z >> 31)) >> 11) % limit

    def one_of(self, values: Sequence[T]) -> T:
        """One of ``values``."""
        return values[self.below(len(values))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.below(1 << 30) < probability * (1 << 30)

    def span(self, limit: int) -> tuple[int, int]:
        """Start and stop of a non-empty part of ``range(limit)``."""
        one, other = self.below(limit + 1), self.below(limit + 1)
        start = min(one, other, limit - 1)
        return start, max(one, other, start + 1)


MASK = (1 << 64) - 1


def changed(policy: Policy, draws: Draws) -> Policy:
    """``policy`` with one to three of its numbers drawn again."""
    names = [draws.one_of(Policy._fields) for _ in range(1 + draws.below(3))]
    return policy._replace(**{name: draws.one_of(CHOICES[name]) for name in names})


def drawn(draws: Draws) -> Policy:
    """A policy whose numbers are all drawn."""
    return Policy(*(draws.one_of(CHOICES[name]) for name in Policy._fields))


def wishes_of(policy: Policy, arrays: ScheduleArrays) -> Wishes:
    """The keys and depths that a policy leads to on a pipeline."""
    stages, directions = arrays.stages, arrays.directions
    micro_batches = int(arrays.micro_batches[::stages].sum())
    rounds = len(arrays.group) / len(arrays.limit_bytes)
    # A pipeline may cost nothing at all; avoid a division by zero.
    period_s = max(float(arrays.work_s.max()), 1e-30) / micro_batches
    step_s = period_s / 3 / rounds * directions
    if policy.even:
        step_s = float(arrays.seconds.max())
        period_s = max(period_s, 3 * rounds / directions * step_s)
    hops_s = np.array(
        [
            (policy.forward_early * step_s, policy.forward_late * step_s),
            (policy.backward_early * step_s, policy.backward_late * step_s),
        ]
    )
    keys = keys_of(arrays, hops_s, policy.turn * period_s, policy.stretch * period_s)
    periods = (keys[2] - keys[0])[:, 0] / (period_s * directions)
    depth = np.ceil(periods * policy.depth_factor + policy.depth_more - 1e-9)
    return Wishes(
        keys,
        np.minimum(np.maximum(depth, 1), micro_batches).astype(np.int64),
        # Whole numbers become floats: the loop is compiled anew for each combination of types.
        float(policy.idle_price),
        float(policy.overlap),
        float(policy.most_pending),
        float(policy.weight_overlap),
        float(policy.forward_delay * period_s),
        float(policy.lead * period_s),
    )
