"""Searches for the fastest order: seeded policies, then changed policies, then changed keys.

Policies that the list schedulers try first, the most useful one first.

Each was the best that a longer search found for some pipeline. Among these, the ones that shorten
the orders of all pipelines most were picked one by one. The pipelines are the cases of
`benchmarks/schedules/zero_bubble.py` with up to 32 micro-batches, and 36 random ones: up to four
stages a group, whole and split backwards, unequal stages, transfers, and 0.4 to 2 times the memory
of 1F1B. The last two policies are for four chunks on each of eight groups, as in
`benchmarks/schedules/torch_schedules.py`.

Policies of the list schedulers: how a device group ranks its actions, in fifteen numbers.

A policy assumes an ideal timetable, in which every micro-batch passes the pipeline in the same
steps, one period after the previous one. This is the building block of Qi et al. (Pipeline
Parallelism with Controllable Memory, NeurIPS 2024), with steps of any length instead of slots. The
start of an action in that timetable is its *key*; groups prefer the least key. The *depth* of a
stage, the most micro-batches it holds, is the number of periods between forward and backward.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import ACTION_KINDS, KIND_CODES
from penstock.schedule.clock import makespan_s, times_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.searched.bound import makespan_bound_s
from penstock.schedule.searched.list_arrays import (
    ScheduleArrays,
    Wishes,
    arrays_of,
    keys_of,
    list_order,
    quick_bound_s,
)
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_of_groups

T = TypeVar("T")


class Policy(NamedTuple):
    """Parameters by which a group chooses; lengths are in steps and periods.

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
        return values[self.below(len(values))]

    def chance(self, probability: float) -> bool:
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
    rounds = len(arrays.group) / arrays.groups
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
        policy.idle_price,
        policy.overlap,
        policy.most_pending,
        policy.weight_overlap,
        policy.forward_delay * period_s,
        policy.lead * period_s,
    )


ALL = 1e9
"""No limit."""

SEEDS: tuple[Policy, ...] = tuple(
    Policy(*numbers)
    for numbers in (
        (1.25, 1, 2.5, 3, 1 / 3, 1, 1.25, 0, 2, 0.1, ALL, 1, 0, 4, 0),
        (1, 0, 1.25, 1.25, 0, 1, 0.9, 0, 0, 0.5, 1, 0.3, 1 / 3, ALL, 0),
        (2, 2.5, 3, 3, 1 / 3, 1, 1, 1, 5, 0.5, ALL, 0.5, 0, ALL, 1),
        (0, 1.25, 3, 1.25, 0, 1, 0.5, 2, 1000, 0.1, 3, 0.3, 1, 2, 1),
        (2, 2.5, 1.5, 2, 0.5, 1, 0.75, 0, 1000, 0.1, ALL, 0, 0, ALL, 0),
        (2, 0, 2, 3, 1 / 6, 0.25, 2, 3, 1000, ALL, 3, ALL, 0, 1, 1),
        (1, 2, 0, 1, 1 / 6, 1, 0.9, 0, 1000, 0, 1, 0.3, 1 / 3, 2, 0),
        (1.25, 1, 2, 0, 1 / 6, 1.5, 0.75, 0, 1, 0, ALL, 1, 1 / 3, 1, 0),
        (1.5, 1, 2, 3, 1 / 6, 0.75, ALL, 0, 1000, 0.5, ALL, 0.3, 0, 2, 1),
        (1.25, 1, 2, 2, 0, 1.5, 0.5, 0, 5, 0.1, 2, 0.5, 0, ALL, 1),
        (2, 1, 3, 0, 0, 0.5, ALL, 0, 1, 0.5, ALL, ALL, 0, ALL, 1),
        (1.25, 1, 1.5, 1, 1 / 6, 1, 2, 0.5, 0.5, 0, 1, 0.5, 1 / 3, 0.5, 0),
        (0, 1.5, 1.25, 0, 1 / 3, 1.5, 0.75, 1, 1, ALL, ALL, 0, 1, 2, 1),
        (0, 2, 2, 0, 0, 1, 1.1, 0, 1, 0.5, ALL, ALL, 0, 2, 1),
        (3, 1, 1.25, 1.5, 1 / 6, 1, 1.5, -0.5, 0, 0, ALL, 0.3, -1 / 3, ALL, 0),
        (1, 1, 1, 0, 0, 1, ALL, 0, 0, 0.5, ALL, ALL, 0, 0, 1),
        (1, 2, 1, 2, 1 / 3, 1, 1, 0, 0, ALL, ALL, 0.5, 0, ALL, 0),
        (2, 1, 1, 1, 0, 1, ALL, 0, 1000, 0.5, ALL, 1, 1, ALL, 1),
        (2, 1, 3, 3, 0, 0.5, ALL, 1, 5, 0, 2, ALL, 0, ALL, 1),
        (3, 1, 1, 2, 1 / 6, 1, 1.25, 0, 1, 0, 1, 1, 0, ALL, 1),
        (1, 2, 3, 1, 0, 0.75, ALL, 1, 5, 0.1, ALL, 0.3, 0, 4, 1),
        (2, 3, 2, 2.5, 0, 0.5, 1.5, 1, 5, 0.1, ALL, 0.5, 0, ALL, 1),
        (1.25, 1.5, 2, 2, 1 / 3, 0.75, 1, -0.5, 0.5, 0.1, 3, 0.5, 1 / 3, ALL, 0),
        (1, 1, 1, 0, 0, 0.5, ALL, 0, 0, 0.5, 2, 0, 0, ALL, 1),
        (1.5, 2, 3, 1.5, 0, 0.75, ALL, 3, 5, 0.1, ALL, 0.5, 0, 4, 1),
        (2, 1, 2.5, 1, 0, 1, ALL, 2, 2, 0, 2, 1, -1, ALL, 0),
        (2, 1, 2.5, 0, 0, 0.5, 0.75, 0, 1, 0.5, 2, 0, 1, ALL, 1),
        (1.5, 1.5, 3, 1.25, 0, 0.5, ALL, 0.5, 1000, ALL, ALL, 0.3, 0, ALL, 1),
        (1.25, 1.25, 1.5, 3, 0, 0.25, ALL, 3, 2, 0.5, ALL, ALL, 0, ALL, 1),
        (1.25, 2.5, 3, 1.25, 0, 0.75, ALL, 3, 5, 0.3, ALL, 0.5, 0, ALL, 1),
    )
)
"""Numbers in the order of the fields of `Policy`."""


Numbers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

F, B, I, W, _ = (KIND_CODES[kind] for kind in ACTION_KINDS)  # noqa: E741

CLOSE = 1e-9
"""Makespans within this fraction of each other count as equal."""

CHEAP_PLACINGS, MOST_PLACINGS = 400_000, 10_000_000
"""The least and the most actions placed in all attempts together."""

ATTEMPTS_PER_PERCENT = 80
"""Attempts for each per cent between the best order and the bound."""


MOST_PROVEN = 1024
"""With at most this many micro-batches, summed over stages, `makespan_bound_s` is quick enough."""


@dataclass
class ListSearch:
    """The best order so far, what led to it, and the number of attempts.

    ``bound_s`` decides how many attempts are worthwhile. No order takes less than ``proven_s``.
    """

    arrays: ScheduleArrays
    bound_s: float
    most_attempts: int
    proven_s: float = 0.0
    best_s: float = np.inf
    policy: Policy = SEEDS[0]
    wishes: Wishes | None = None
    order: Numbers | None = None
    attempts: int = 0

    def attempt(self, wishes: Wishes, policy: Policy | None = None) -> None:
        """Make the order of ``wishes``, and keep it if it is no slower than the best."""
        self.attempts += 1
        limit_s = self.best_s * (1 + CLOSE)
        order, end_s = list_order(self.arrays, wishes, limit_s)
        if end_s < np.inf:
            self.best_s, self.wishes, self.order = min(end_s, self.best_s), wishes, order
            self.policy = policy or self.policy

    def goes_on(self, share: float = 1.0) -> bool:
        """Return whether the best can improve and less than ``share`` of the attempts are used."""
        gap = self.best_s / self.bound_s - 1 if self.bound_s > 0 else 0.0
        actions = self.arrays.actions
        worth = max(100 * gap * ATTEMPTS_PER_PERCENT, CHEAP_PLACINGS / actions)
        worth = min(worth, self.most_attempts, MOST_PLACINGS / actions)
        return gap > CLOSE and self.attempts < share * worth and not self.is_proven(self.best_s)

    def is_proven(self, makespan_s: float) -> bool:
        """Return whether no order takes less than ``makespan_s``."""
        return makespan_s <= self.proven_s * (1 + CLOSE)


def quickest_order(
    shape: PipelineShape, *, split: bool, others: Iterable[Schedule], most_attempts: int
) -> Schedule:
    """The fastest order found for ``shape``, never slower than ``others``, which must fit.

    1. Try the policies of `list_seeds`, and compare ``others``.
    2. Change some numbers of the best policy, again and again.
    3. Change keys, depths or numbers, for parts of the stages and micro-batches.

    A change stays if the order is no slower. The number of attempts is proportional to the gap
    between the best order and a lower bound (`quick_bound_s`). The search ends when the best
    reaches that bound, or on small pipelines
    `penstock.schedule.searched.bound.makespan_bound_s`, which also considers memory. The result is
    deterministic.
    """
    arrays = arrays_of(shape, split=split)
    search = ListSearch(arrays, quick_bound_s(arrays, shape), most_attempts)
    for policy in SEEDS:
        if search.best_s > search.bound_s * (1 + CLOSE):
            search.attempt(wishes_of(policy, arrays), policy)
    other: Schedule | None = None
    other_s = np.inf
    if search.goes_on(np.inf):
        for schedule in others:
            took_s = makespan_s(schedule, shape)
            if took_s < other_s:
                other, other_s = schedule, took_s
        if arrays.micro_batches.sum() <= MOST_PROVEN:
            search.proven_s = makespan_bound_s(shape)
        if other is not None and search.is_proven(other_s) and other_s < search.best_s:
            return other
    draws = Draws(seed=1)
    while search.goes_on(share=0.5):
        climb(search, draws)
    if other is not None and other_s < search.best_s * (1 - CLOSE):
        for wishes in wishes_like(other, shape, search):
            search.attempt(wishes)
    while search.goes_on():
        shake(search, draws)
    if other is not None and other_s < search.best_s * (1 - CLOSE):
        return other
    assert search.order is not None
    return decoded_schedule(search.order, arrays, shape)


def climb(search: ListSearch, draws: Draws) -> None:
    """Try the best policy with some numbers changed, or now and then an entirely new one."""
    new = draws.chance(0.15)
    policy = drawn(draws) if new else changed(search.policy, draws)
    search.attempt(wishes_of(policy, search.arrays), policy)


def shake(search: ListSearch, draws: Draws) -> None:
    """Try the best wishes with one to three changes to keys, depths or numbers."""
    assert search.wishes is not None
    wishes = search.wishes
    arrays = search.arrays
    places, numbers = wishes.keys.shape[1:]
    step_s = (
        float(arrays.work_s.max()) / max(1, int(arrays.micro_batches.sum())) * arrays.groups / 3
    )
    for _ in range(1 + draws.below(3)):
        kind = draws.below(100)
        start, stop = (0, places) if draws.chance(0.3) else draws.span(places)
        if kind < 70:
            wishes = wishes._replace(
                keys=moved_keys(
                    wishes.keys, (start, stop), range_drawn(numbers, draws), step_s, draws
                )
            )
        elif kind < 80:
            name = draws.one_of(("idle_price", "overlap", "most_pending", "weight_overlap"))
            wishes = wishes._replace(**{name: draws.one_of(CHOICES[name])})
        elif kind < 97:
            depth = wishes.depth.copy()
            depth[start:stop] = np.maximum(1, depth[start:stop] + draws.one_of((-2, -1, 1, 2)))
            wishes = wishes._replace(depth=depth)
        else:
            lead = draws.one_of(CHOICES["lead"])
            wishes = wishes._replace(lead_s=3 * step_s * lead)
    search.attempt(wishes)


def range_drawn(numbers: int, draws: Draws) -> tuple[int, int]:
    """A range of micro-batches: all, the first, the last, or some in between."""
    start, stop = draws.span(numbers)
    return draws.one_of(((0, numbers), (0, numbers), (0, stop), (start, numbers), (start, stop)))


def moved_keys(
    keys: Floats, places: tuple[int, int], numbers: tuple[int, int], step_s: float, draws: Draws
) -> Floats:
    """``keys`` with those of one row, for some places and micro-batches, earlier or later."""
    row = draws.one_of((0, 0, 1, 1, 2))
    by_s = step_s * draws.one_of((-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0))
    count = places[1] - places[0]
    ramp = np.arange(1, count + 1) / count if draws.chance(0.3) else np.ones(count)
    keys = keys.copy()
    keys[row, slice(*places), slice(*numbers)] += by_s * ramp[:, None]
    return keys


def wishes_like(schedule: Schedule, shape: PipelineShape, search: ListSearch) -> Iterator[Wishes]:
    """Wishes whose keys are the start times of a schedule, with several idle prices."""
    assert search.wishes is not None
    keys = np.zeros_like(search.wishes.keys)
    directions = search.arrays.directions
    for order, start_s in zip(schedule.orders, times_of(schedule, shape).start_s, strict=True):
        for row, codes in enumerate(((F,), (B, I), (W,))):
            mine = np.isin(order.kinds, codes)
            numbers, direction = np.divmod(order.micro_batches[mine], directions)
            keys[row, direction * shape.stages + order.stages[mine], numbers] = start_s[mine]
    whole = keys[2] == 0.0
    keys[2][whole] = (keys[1] + search.arrays.seconds[1][:, None])[whole]
    for idle_price in (0.0, 1.0, 1000.0):
        for overlap in (0.0, 0.3, 1.0):
            yield search.wishes._replace(
                keys=keys,
                depth=np.full_like(search.wishes.depth, shape.micro_batches),
                idle_price=idle_price,
                overlap=overlap,
                most_pending=1e9,
                weight_overlap=overlap,
                forward_delay_s=0.0,
                lead_s=np.inf,
            )


def decoded_schedule(order: Numbers, arrays: ScheduleArrays, shape: PipelineShape) -> Schedule:
    """The schedule with these actions, coded as in `list_order`, group after group."""
    rows_and_places, numbers = np.divmod(order, arrays.indices)
    rows, places = np.divmod(rows_and_places, len(arrays.group))
    codes = np.array((F, I, W) if arrays.split else (F, B))
    directions, stages = np.divmod(places, shape.stages)
    per_group = np.bincount(arrays.group[places], minlength=shape.groups)
    micro_batches = numbers * arrays.directions + directions
    ends = np.cumsum(per_group).tolist()
    return schedule_of_groups(codes[rows], stages, micro_batches, ends, shape)
