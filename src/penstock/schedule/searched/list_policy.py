"""Policies of the list schedulers: what a device group likes to do first, in a dozen numbers.

A policy imagines that every micro-batch passes the pipeline in the same steps, one period after
the one before it: the building block of Qi et al. (Pipeline Parallelism with Controllable Memory,
NeurIPS 2024), with steps of any length instead of slots. When an action would start in that world
is its *key*; groups prefer the least key. How many periods a micro-batch spends between forward
and backward of a stage is how many of them the stage holds, which is its *depth*.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.schedule.searched.list_loop import Arrays, Wishes, keys_of

T = TypeVar("T")

__all__ = ["CHOICES", "Draws", "Policy", "changed", "drawn", "wishes_of"]


class Policy(NamedTuple):
    """How a group chooses; lengths in steps and periods.

    A period is the work of the busiest group on one micro-batch. A step is a third of what a period
    has for one stage, or with ``even`` the longest of F, I and W, as if all took so long.

    - ``forward_early`` to ``backward_early``: steps from a stage to the next, on the first and the
      second half of the stages, on the way there and back; never less than the work takes.
    - ``turn``: periods between the last forward and the first backward.
    - ``stretch``: periods from a micro-batch to the next; less than 1 prefers younger ones.
    - ``depth_factor``, ``depth_more``: a stage holds the periods that a micro-batch spends between
      forward and backward, times the one plus the other.
    - ``idle_price``: what a second of waiting for a better action is worth, in seconds of keys.
    - ``overlap``: the part of another action for which the awaited one may have to wait.
    - ``most_pending``: more W than this are not put off. ``weight_overlap``: as ``overlap``, for W.
    - ``forward_delay``: periods by which keys of forwards are later than imagined.
    - ``lead``: periods by which a micro-batch may enter the pipeline before its key.
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
"""What each number is drawn from; what often helps stands there several times."""


class Draws:
    """Numbers that look random and are the same every time (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, limit: int) -> int:
        """A whole number from 0 to ``limit - 1``."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return ((z ^ (z >> 31)) >> 11) % limit

    def one_of(self, values: Sequence[T]) -> T:
        """One of ``values``."""
        return values[self.below(len(values))]

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self.below(1 << 30) < probability * (1 << 30)

    def span(self, limit: int) -> tuple[int, int]:
        """A part of ``range(limit)`` that is not empty: its start and stop."""
        one, other = self.below(limit + 1), self.below(limit + 1)
        start = min(one, other, limit - 1)
        return start, max(one, other, start + 1)


MASK = (1 << 64) - 1


def changed(policy: Policy, draws: Draws) -> Policy:
    """``policy`` with one to three of its numbers drawn anew."""
    names = [draws.one_of(Policy._fields) for _ in range(1 + draws.below(3))]
    return policy._replace(**{name: draws.one_of(CHOICES[name]) for name in names})


def drawn(draws: Draws) -> Policy:
    """A policy whose numbers are all drawn."""
    return Policy(*(draws.one_of(CHOICES[name]) for name in Policy._fields))


def wishes_of(policy: Policy, arrays: Arrays) -> Wishes:
    """The keys and depths that a policy leads to on a pipeline."""
    stages, ways = arrays.stages, arrays.ways
    micro_batches = int(arrays.micro_batches[::stages].sum())
    rounds = len(arrays.group) / len(arrays.room_bytes)
    # A pipeline may cost nothing at all.
    period_s = max(float(arrays.work_s.max()), 1e-30) / micro_batches
    step_s = period_s / 3 / rounds * ways
    if policy.even:
        step_s = float(arrays.seconds.max())
        period_s = max(period_s, 3 * rounds / ways * step_s)
    hops_s = np.array(
        [
            (policy.forward_early * step_s, policy.forward_late * step_s),
            (policy.backward_early * step_s, policy.backward_late * step_s),
        ]
    )
    keys = keys_of(arrays, hops_s, policy.turn * period_s, policy.stretch * period_s)
    periods = (keys[2] - keys[0])[:, 0] / (period_s * ways)
    depth = np.ceil(periods * policy.depth_factor + policy.depth_more - 1e-9)
    return Wishes(
        keys,
        np.minimum(np.maximum(depth, 1), micro_batches).astype(np.int64),
        policy.idle_price,
        policy.overlap,
        policy.most_pending,
        policy.weight_overlap,
        policy.forward_delay * period_s,
        policy.lead * period_s,
    )
