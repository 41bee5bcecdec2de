"""Plans that differ from a plan by one move, for the search that the simulator judges."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.plan.cost import depths_of, rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem

__all__ = ["neighbours"]


def neighbours(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Plans one move away: depths, cuts, replicas, rows, recompute, micro-batches, the schedule."""
    yield from other_schedules(problem, plan)
    yield from other_depths(problem, plan)
    yield from moved_cuts(plan)
    yield from toggled_recompute(problem, plan)
    yield from shifted_replicas(problem, plan)
    yield from moved_rows(plan)
    yield from other_micro_batches(problem, plan)


def other_schedules(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The same stages under each other allowed schedule, without limits of its own."""
    for schedule in problem.schedules:
        if (schedule, ()) != (plan.schedule, plan.in_flight_limit):
            yield replace(plan, schedule=schedule, in_flight_limit=())


def other_depths(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Each stage one micro-batch deeper or shallower in flight; all stages one deeper."""
    if "early-backward" not in problem.schedules:
        return
    depths = list(depths_of(plan))
    changes = [(s, change) for s in range(len(depths)) for change in (1, -1)]
    trials: list[list[int]] = [[*depths[:s], depths[s] + c, *depths[s + 1 :]] for s, c in changes]
    trials.append([depth + 1 for depth in depths])
    trials.append([min(2 * depth, plan.micro_batches) for depth in depths])
    for trial in trials:
        falling = all(before >= after for before, after in pairwise(trial))
        if falling and trial != depths and trial[-1] >= 1 and trial[0] <= plan.micro_batches:
            yield replace(plan, schedule="early-backward", in_flight_limit=tuple(trial))


def moved_cuts(plan: Plan) -> Iterator[Plan]:
    """Each cut by one, two or four layers."""
    for s in range(1, len(plan.stages)):
        before, after = plan.stages[s - 1].layers, plan.stages[s].layers
        for step in (1, -1, 2, -2, 4, -4):
            cut = after.start + step
            if before.start < cut < after.stop:
                yield with_stages(
                    plan,
                    {
                        s - 1: replace(plan.stages[s - 1], layers=range(before.start, cut)),
                        s: replace(plan.stages[s], layers=range(cut, after.stop)),
                    },
                )


def with_stages(plan: Plan, changed: dict[int, Stage]) -> Plan:
    """The plan with some stages replaced."""
    stages = tuple(changed.get(s, stage) for s, stage in enumerate(plan.stages))
    return replace(plan, stages=stages)


def toggled_recompute(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Recompute switched on one stage, and off on all; with the depths that 1F1B would have."""
    if problem.recompute != "auto":
        return
    for s, stage in enumerate(plan.stages):
        yield with_stages(plan, {s: replace(stage, recompute=not stage.recompute)})
    if any(stage.recompute for stage in plan.stages):
        kept = tuple(replace(stage, recompute=False) for stage in plan.stages)
        yield replace(plan, stages=kept)


def shifted_replicas(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """A device of one stage given to another, or an unused one taken, the order of others kept."""
    sizes = [stage.replicas for stage in plan.stages]
    unused = sorted(set(range(len(problem.cluster.devices))) - set(plan.devices))
    order = [*plan.devices, *unused]
    for giver in range(-1, len(sizes)):
        for taker in range(-1, len(sizes)):
            if giver == taker or (giver < 0 and not unused) or (giver >= 0 and sizes[giver] < 2):
                continue
            widths = [w + (s == taker) - (s == giver) for s, w in enumerate(sizes)]
            if max(widths) <= plan.micro_batch_size:
                yield placed(problem, plan, order, widths)


def placed(
    problem: PlanningProblem, plan: Plan, order: Sequence[int], widths: Sequence[int]
) -> Plan:
    """The plan's layers on consecutive devices of ``order``."""
    stages: list[Stage] = []
    position = 0
    for stage, width in zip(plan.stages, widths, strict=True):
        devices = tuple(order[position : position + width])
        position += width
        rows = rows_by_speed(problem.cluster, devices, plan.micro_batch_size)
        stages.append(replace(stage, devices=devices, slices=rows))
    return replace(plan, stages=tuple(stages))


def moved_rows(plan: Plan) -> Iterator[Plan]:
    """A row of a stage's replica given to another of them; few, because slices rarely matter."""
    for s, stage in enumerate(plan.stages):
        if not 1 < stage.replicas <= 8:
            continue
        for giver in range(stage.replicas):
            for taker in range(stage.replicas):
                if giver != taker and stage.slices[giver] > 1:
                    rows = list(stage.slices)
                    rows[giver] -= 1
                    rows[taker] += 1
                    yield with_stages(plan, {s: replace(stage, slices=tuple(rows))})


def other_micro_batches(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The next larger and the next smaller micro-batch."""
    sizes = sorted(problem.micro_batch_sizes)
    at = sizes.index(plan.micro_batch_size)
    widest = max(stage.replicas for stage in plan.stages)
    for size in sizes[max(0, at - 1) : at + 2]:
        if size != plan.micro_batch_size and size >= widest:
            other = replace(
                plan,
                micro_batches=problem.global_batch // size,
                micro_batch_size=size,
                stages=tuple(
                    replace(stage, slices=rows_by_speed(problem.cluster, stage.devices, size))
                    for stage in plan.stages
                ),
            )
            yield replace(other, in_flight_limit=limits_within(plan, other.micro_batches))


def limits_within(plan: Plan, micro_batches: int) -> tuple[int, ...]:
    """The limits of a plan, none above the micro-batches there are."""
    return tuple(min(limit, micro_batches) for limit in plan.in_flight_limit)
