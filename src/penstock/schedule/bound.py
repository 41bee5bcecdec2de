"""How fast any order can be: a lower bound on the makespan, proven for every valid schedule.

The proofs rest on one lemma, which also lets `penstock.schedule.searched.exact` look at few orders.

*Lemma (micro-batches in order).* Take a valid schedule without recomputes. On every stage and for
every kind of action, give the ``k``-th of its places in time to the ``k``-th micro-batch (where the
pipeline is mirrored: to the ``k``-th of those that pass the same way). The schedule stays valid
and takes as long as before. *Proof.* Micro-batches cost the same on a stage, so no place changes
its length, and memory and what is in flight count actions, not numbers. If ``b_m >= a_m`` for all
``m``, the ``k``-th smallest ``b`` is at least the ``k``-th smallest ``a``; so every "after" between
two actions of one micro-batch still holds when both are sorted, with the way between added. ∎

A recompute only adds work: without its recomputes a valid schedule is valid for the pipeline that
has none, and no slower. So every bound for the latter holds for the former. A whole backward is an
input half with the weight half right after it, and passes its gradient on later than the former
alone; so the bounds for split backwards hold for all schedules. Schedules whose forwards and
backwards share a device (`Schedule.concurrent`) and those that do not wait for one another between
iterations are outside of all this.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from penstock.errors import BadInput
from penstock.schedule.action import Action, ActionKind
from penstock.schedule.clock import transfers_s
from penstock.schedule.shape import ROUNDING, PipelineShape

__all__ = ["Arc", "Windows", "arcs_of", "kinds_of", "makespan_bound_s", "windows_of"]

SLACK = 2 * ROUNDING - 1
"""Twice what `penstock.schedule.validate` lets a group save above its memory."""


class Arc(NamedTuple):
    """``after`` starts no earlier than ``way_s`` seconds from the end of ``before``."""

    before: Action
    after: Action
    way_s: float


class Wait(NamedTuple):
    """At most ``most`` micro-batches are between F of a stage and ``end`` of ``of_stage``."""

    end: ActionKind
    of_stage: int
    most: int


@dataclass(frozen=True)
class Windows:
    """What must pass before an action starts, and from its end to that of the iteration."""

    head_s: dict[Action, float]
    tail_s: dict[Action, float]


def makespan_bound_s(shape: PipelineShape, *, split: bool = True) -> float:
    """Seconds below which no valid schedule of ``shape`` ends; with ``split`` false, of whole ones.

    Every action has a head and a tail (`windows_of`). On one device group actions do not overlap:
    of any set of them the first starts no earlier than the least head, all their seconds pass,
    and after the last one at least the least tail follows. The largest such sum over all sets of
    actions of a group is what Jackson's preemptive rule ends at (`preemptive_end_s`), found
    without naming the sets (Carlier, The one-machine sequencing problem, EJOR 1982). Among the
    sets are all work of the busiest group, a single action with the longest path through it, and,
    where memory is short, the round trips that a micro-batch must wait for.

    >>> makespan_bound_s(PipelineShape(stages=3, micro_batches=4), split=False)
    18.0
    >>> makespan_bound_s(PipelineShape(stages=3, micro_batches=4))
    14.0
    >>> makespan_bound_s(PipelineShape(stages=3, micro_batches=4, in_flight_limit=(1, 1, 1)))
    28.0

    Raises:
        BadInput: not even one micro-batch fits into the memory of a device group.
    """
    windows = windows_of(shape, split=split)
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(shape.groups)]
    for action, head_s in windows.head_s.items():
        group = shape.group_of(action.stage, action.micro_batch)
        jobs[group].append(
            (head_s, shape.cost(action.stage).seconds(action.kind), windows.tail_s[action])
        )
    return max(preemptive_end_s(of_group) for of_group in jobs)


def windows_of(shape: PipelineShape, *, split: bool) -> Windows:
    """Heads and tails: longest paths along the arcs from the start, and to the end.

    `arcs_of` lists what holds in every valid schedule whose micro-batches are in order, and by the
    lemma above there is a fastest one among those. So no action of that one starts before its head
    or ends later than its tail before the makespan.

    Raises:
        BadInput: not even one micro-batch fits into the memory of a device group.
    """
    arcs = list(arcs_of(shape, split=split))
    actions = [
        Action(kind, stage, m)
        for m in range(shape.micro_batches)
        for kind in kinds_of(split=split)
        for stage in range(shape.stages)
    ]
    seconds = {action: shape.cost(action.stage).seconds(action.kind) for action in actions}
    head_s = dict.fromkeys(actions, 0.0)
    tail_s = dict.fromkeys(actions, 0.0)
    for before, after, way_s in arcs:
        head_s[after] = max(head_s[after], head_s[before] + seconds[before] + way_s)
    for before, after, way_s in reversed(arcs):
        tail_s[before] = max(tail_s[before], way_s + seconds[after] + tail_s[after])
    return Windows(head_s, tail_s)


def kinds_of(*, split: bool) -> tuple[ActionKind, ...]:
    """The kinds of action of schedules with split or with whole backwards."""
    return ("F", "I", "W") if split else ("F", "B")


def arcs_of(shape: PipelineShape, *, split: bool) -> Iterator[Arc]:
    """What comes before what in a schedule with micro-batches in order, sorted topologically.

    Besides the way of a micro-batch and the order of the micro-batches these are the waits for
    memory: if at most ``k`` micro-batches can be between an action ``a`` and a later ``z`` of
    theirs, ``a`` of the ``k``-th next one waits for ``z``: else, both in order, all ``k + 1`` would
    be between the two (`waits_of` has the proofs).
    """
    step = 2 if shape.mirrored else 1
    way_s = [0.0, *transfers_s(shape).tolist(), 0.0]
    back: ActionKind = "I" if split else "B"
    waits = [
        [waits_of(shape, stage, way, split=split) for stage in range(shape.stages)]
        for way in range(min(step, shape.micro_batches))
    ]
    for m in range(shape.micro_batches):
        for stage in range(shape.stages):
            forward = Action("F", stage, m)
            if stage > 0:
                yield Arc(Action("F", stage - 1, m), forward, way_s[stage])
            if m >= step:
                yield Arc(Action("F", stage, m - step), forward, 0.0)
            for end, of_stage, most in waits[m % step][stage]:
                if m >= step * most:
                    yield Arc(Action(end, of_stage, m - step * most), forward, 0.0)
        for stage in reversed(range(shape.stages)):
            backward = Action(back, stage, m)
            yield Arc(Action("F", stage, m), backward, 0.0)
            if stage + 1 < shape.stages:
                yield Arc(Action(back, stage + 1, m), backward, way_s[stage + 1])
            if m >= step:
                yield Arc(Action(back, stage, m - step), backward, 0.0)
        for stage in range(shape.stages if split else 0):
            yield Arc(Action("I", stage, m), Action("W", stage, m), 0.0)
            if m >= step:
                yield Arc(Action("W", stage, m - step), Action("W", stage, m), 0.0)


def waits_of(shape: PipelineShape, stage: int, way: int, *, split: bool) -> list[Wait]:
    """What the memory that F of ``stage`` needs may have to wait for, on one way.

    - The in-flight limit holds from F to the end of the backward.
    - Between F and the end of W a micro-batch holds at least what W needs.
    - Let the stages on the group save ``p(j)`` up to and with ``j``. While a micro-batch is between
      F and the end of I (or B) of stage ``j`` it holds ``p(j)``, since the backwards of earlier
      stages come later; one that is between F of ``i <= j`` and I of ``i`` holds ``p(i)``. Let
      ``k`` be between F of ``i`` and I of ``j``. The first of them is past F of ``j``, or will be
      with the others still there, since they are in order. So ``p(j) + (k - 1) p(i)`` fits.

    Raises:
        BadInput: not one micro-batch may be there.
    """
    if shape.limit(stage) < 1:
        raise BadInput(
            f"stage {stage} has an in-flight limit of {shape.limit(stage)}; allow at least one "
            f"micro-batch"
        )
    back: ActionKind = "I" if split else "B"
    last: ActionKind = "W" if split else "B"
    waits = [Wait(last, stage, shape.limit(stage))]
    if shape.memory_bytes:
        group, cost = shape.group_of(stage, way), shape.cost(stage)
        room_bytes = shape.memory_bytes[group]
        kept_bytes = min(cost.saved_bytes, cost.bytes_until_weight_backward)
        waits.append(Wait(last, stage, fits(kept_bytes, room_bytes)))
        here = [s for s in range(shape.stages) if shape.group_of(s, way) == group]
        up_to = dict(zip(here, accumulate(shape.cost(s).saved_bytes for s in here), strict=True))
        for later in here[here.index(stage) :]:
            if fits(up_to[later], room_bytes) < 1:
                raise BadInput(
                    f"one micro-batch saves {up_to[later]:.6g} bytes on the stages of device group "
                    f"{group}, which has room for {room_bytes:.6g}; use smaller micro-batches, "
                    f"recompute, or more stages"
                )
            others = fits(up_to[stage], max(0.0, room_bytes * SLACK - up_to[later]))
            waits.append(Wait(back, later, 1 + others))
    return [wait for wait in waits if wait.most < shape.micro_batches]


def fits(each_bytes: float, room_bytes: float) -> int:
    """How many times something fits, rounded up where it may be a matter of floating point."""
    return int(min(room_bytes / each_bytes * SLACK + 1e-9, 1e9)) if each_bytes > 0 else 10**9


def preemptive_end_s(jobs: list[tuple[float, float, float]]) -> float:
    """When the last of ``(head, seconds, tail)`` is over on one device that may interrupt them.

    Jackson's rule: always work on what is there and has the longest tail.

    >>> preemptive_end_s([(0.0, 4.0, 0.0), (1.0, 2.0, 5.0)])
    8.0
    """
    coming = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []
    now_s = end_s = 0.0
    while coming or ready:
        if not ready:
            now_s = max(now_s, coming[-1][0])
        while coming and coming[-1][0] <= now_s:
            _, seconds, tail_s = coming.pop()
            heappush(ready, (-tail_s, seconds))
        tail_s, left_s = heappop(ready)
        next_s = coming[-1][0] if coming else inf
        if now_s + left_s <= next_s:
            now_s += left_s
            end_s = max(end_s, now_s - tail_s)
        else:
            heappush(ready, (tail_s, left_s - (next_s - now_s)))
            now_s = next_s
    return end_s
