"""A lower bound on the makespan of every valid schedule.

The proofs rest on one lemma.

*Lemma (micro-batches in order).* Take a valid schedule without recomputation. For every stage and
every kind of action, reassign the micro-batches so that the ``k``-th such action in time works on
micro-batch ``k`` (on a mirrored pipeline: on the ``k``-th micro-batch of its direction). The
schedule stays valid, and its makespan does not change.

*Proof.* All micro-batches cost the same on a stage, so no action changes its duration. Memory and
micro-batches in flight count actions, not their numbers. Dependencies hold as well: if
``b_m >= a_m`` for all ``m``, the ``k``-th smallest ``b`` is at least the ``k``-th smallest ``a``.
So whenever each ``b`` follows its ``a`` by at least the transfer time, the sorted ones do too. ∎

Two more facts make the bound hold for other schedules. Recomputation only adds work: without it, a
schedule is valid for the pipeline that does not recompute, and takes no longer. A whole backward is
an I followed at once by its W, and sends its gradient later than the I alone. So a bound for split
backwards holds for all schedules.

The bound does not hold for schedules that run a forward and a backward on one device at once
(`Schedule.concurrent`), nor for those that do not flush the pipeline between iterations.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from penstock.schedule.action import Action, ActionKind
from penstock.schedule.clock import transfers_s
from penstock.schedule.fitting import check_room
from penstock.schedule.shape import ROUNDING, PipelineShape

SLACK = 2 * ROUNDING - 1
"""Memory counts as this much larger: twice the tolerance of `validate`, so that rounding never
makes the bound too high."""


KINDS: tuple[ActionKind, ...] = ("F", "I", "W")
"""The kinds of action of schedules with split backwards, in the order of a micro-batch."""


def makespan_bound_s(shape: PipelineShape) -> float:
    """Seconds below which no valid schedule of ``shape`` ends.

    Every action has a head and a tail (`heads_and_tails`), and actions of one device group do not
    overlap. So for any set of actions of a group, the makespan is at least the least head in the
    set, plus the seconds of all its actions, plus the least tail. Jackson's preemptive rule finds
    the largest such sum without listing the sets (`preemptive_end_s`; Carlier, The one-machine
    sequencing problem, EJOR 1982). The sets include all work of the busiest group, and any single
    action with the longest path through it. Where memory is short, heads and tails include the
    round trips that a micro-batch must wait for.

    >>> makespan_bound_s(PipelineShape(stages=3, micro_batches=4))
    14.0
    >>> makespan_bound_s(PipelineShape(stages=3, micro_batches=4, in_flight_limit=(1, 1, 1)))
    28.0
    """
    heads_s, tails_s = heads_and_tails(shape)
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(shape.groups)]
    for action, head_s in heads_s.items():
        group = shape.group_of(action.stage, action.micro_batch)
        jobs[group].append((head_s, shape.cost(action.stage).seconds(action.kind), tails_s[action]))
    return max(preemptive_end_s(of_group) for of_group in jobs)


def heads_and_tails(shape: PipelineShape) -> tuple[dict[Action, float], dict[Action, float]]:
    """Heads and tails: the longest paths to and from every action along `arcs_of`.

    A head is the least seconds from the start of the iteration to an action, a tail those from its
    end to the end of the iteration.

    The arcs hold in every valid schedule whose micro-batches are in order. By the lemma above one
    of these is fastest. In it no action starts before its head, or ends later than its tail before
    the makespan.
    """
    arcs = list(arcs_of(shape))
    actions = [
        Action(kind, stage, m)
        for m in range(shape.micro_batches)
        for kind in KINDS
        for stage in range(shape.stages)
    ]
    seconds = {action: shape.cost(action.stage).seconds(action.kind) for action in actions}
    head_s = dict.fromkeys(actions, 0.0)
    tail_s = dict.fromkeys(actions, 0.0)
    for before, after, transfer_s in arcs:
        head_s[after] = max(head_s[after], head_s[before] + seconds[before] + transfer_s)
    for before, after, transfer_s in reversed(arcs):
        tail_s[before] = max(tail_s[before], transfer_s + seconds[after] + tail_s[after])
    return head_s, tail_s


def arcs_of(shape: PipelineShape) -> Iterator[tuple[Action, Action, float]]:
    """Precedences in a schedule with micro-batches in order, in topological order.

    The second action starts at least the given seconds after the end of the first.

    There are three sorts: the path of a micro-batch through the stages, the order of the
    micro-batches, and waits for memory. The last follow from `waits_of`: if at most ``k``
    micro-batches can be between an action ``a`` and a later action ``z``, then ``a`` of micro-batch
    ``m + k`` waits for ``z`` of micro-batch ``m``. Otherwise ``k + 1`` would be between the two.
    """
    check_room(shape)
    step = 2 if shape.mirrored else 1
    transfer_s = [0.0, *transfers_s(shape).tolist(), 0.0]
    waits = [
        [waits_of(shape, stage, direction) for stage in range(shape.stages)]
        for direction in range(min(step, shape.micro_batches))
    ]
    for m in range(shape.micro_batches):
        for stage in range(shape.stages):
            forward = Action("F", stage, m)
            if stage > 0:
                yield (Action("F", stage - 1, m), forward, transfer_s[stage])
            if m >= step:
                yield (Action("F", stage, m - step), forward, 0.0)
            for end, of_stage, most in waits[m % step][stage]:
                if m >= step * most:
                    yield (Action(end, of_stage, m - step * most), forward, 0.0)
        for stage in reversed(range(shape.stages)):
            backward = Action("I", stage, m)
            yield (Action("F", stage, m), backward, 0.0)
            if stage + 1 < shape.stages:
                yield (Action("I", stage + 1, m), backward, transfer_s[stage + 1])
            if m >= step:
                yield (Action("I", stage, m - step), backward, 0.0)
        for stage in range(shape.stages):
            yield (Action("I", stage, m), Action("W", stage, m), 0.0)
            if m >= step:
                yield (Action("W", stage, m - step), Action("W", stage, m), 0.0)


def waits_of(shape: PipelineShape, stage: int, direction: int) -> list[tuple[ActionKind, int, int]]:
    """Events for which F of ``stage`` may wait until its memory is free, in one direction.

    A kind, a stage, and the most micro-batches between F and such an action there.

    ``direction`` is 0 for even micro-batches and 1 for the odd ones of a mirrored pipeline.

    - The in-flight limit holds from F to the end of the backward.
    - Between F and the end of W a micro-batch holds at least what W needs.
    - Let ``p(j)`` be what the stages of the group up to and including ``j`` save. A micro-batch
      between F and the end of I of stage ``j`` holds ``p(j)``, because the backwards of
      earlier stages come later. One between F and I of stage ``i <= j`` holds ``p(i)``. Suppose
      ``k`` micro-batches are between F of ``i`` and I of ``j``. They are in order, so the first of
      them passes F of ``j`` while the others are still there. So ``p(j) + (k - 1) p(i)`` must fit.
    """
    waits: list[tuple[ActionKind, int, int]] = [("W", stage, shape.limit(stage))]
    if shape.memory_bytes:
        group, cost = shape.group_of(stage, direction), shape.cost(stage)
        limit_bytes = shape.memory_bytes[group]
        kept_bytes = min(cost.saved_bytes, cost.bytes_until_weight_backward)
        waits.append(("W", stage, times_that_fit(kept_bytes, limit_bytes)))
        here = [s for s in range(shape.stages) if shape.group_of(s, direction) == group]
        up_to = dict(zip(here, accumulate(shape.cost(s).saved_bytes for s in here), strict=True))
        for later in here[here.index(stage) :]:
            others = times_that_fit(up_to[stage], max(0.0, limit_bytes * SLACK - up_to[later]))
            waits.append(("I", later, 1 + others))
    return [wait for wait in waits if wait[2] < shape.micro_batches]


def times_that_fit(each_bytes: float, limit_bytes: float) -> int:
    """The number of times ``each_bytes`` fits, rounded up where rounding errors could decide."""
    return int(min(limit_bytes / each_bytes * SLACK + 1e-9, 1e9)) if each_bytes > 0 else 10**9


def preemptive_end_s(jobs: list[tuple[float, float, float]]) -> float:
    """The end of the last of ``(head, seconds, tail)`` on one device with preemption.

    Jackson's rule: always run the available job with the longest tail.

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
