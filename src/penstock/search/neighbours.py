"""Plans one move away from a plan, and the climb from neighbour to faster neighbour."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from penstock.cluster.cluster import Cluster
from penstock.plan.choices import choice_refusal
from penstock.plan.cost import depths_of, rows_by_speed
from penstock.plan.ordering import blocks_refusal
from penstock.plan.plan import Plan, Stage, in_order, with_cut, with_recompute
from penstock.plan.problem import PlanningProblem
from penstock.plan.schedule_costs import priced
from penstock.schedule.registry import FAMILIES
from penstock.search.judge import Judge, actions_of


def climb(judge: Judge, plan: Plan, seconds: float, actions: float) -> tuple[Plan, float]:
    """Move on to each faster neighbour until there is none, or ``actions`` are spent.

    Cuts move under the order that was made for the plan before, so most orders need not be made. An
    order for the last plan's own costs is tried at the end.
    """
    improved = True
    while improved and actions > 0:
        improved = False
        for other in moves(judge.problem, plan):
            if other in judge.seconds or not judge.may_be_faster(other, seconds):
                continue
            actions -= actions_of(other)
            other_s = judge.simulate(other)
            if other_s < seconds:
                plan, seconds, improved = other, other_s, True
                break
            if actions <= 0:
                break
    last = priced(judge.problem, plan)
    return min([(plan, seconds), (last, judge.simulate(last))], key=lambda one: one[1])


def moves(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Plans one move away, with the costs that their schedules need.

    When a cut moves, the plan keeps its costs, and so its order. Under schedules that search for
    orders only cuts move. Depths, the schedule and rows move under the planners' own schedules, and
    the number of stages where a device has one of them.
    """
    family = FAMILIES[plan.schedule]
    if family.is_planned:
        yield from other_schedules(problem, plan)
        yield from other_depths(problem, plan)
    yield from moved_cuts(plan)
    if family.is_searched:
        return
    one_stage_each = not plan.placement and not plan.mirrored
    for other in chain(
        other_memory(problem, plan),
        shifted_devices(problem, plan),
        swapped_devices(problem, plan),
        joined_stages(problem, plan) if one_stage_each else (),
        moved_rows(plan) if family.is_planned else (),
        other_micro_batches(problem, plan),
        on_unused_devices(problem, plan),
        freed_devices(problem, plan) if one_stage_each else (),
        split_stages(problem, plan) if one_stage_each else (),
    ):
        yield priced(problem, other)


def other_schedules(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The same stages under each other of the planners' own schedules, without depth limits."""
    for schedule in problem.schedules:
        planned = FAMILIES[schedule].is_planned
        if planned and (schedule, ()) != (plan.schedule, plan.in_flight_limit):
            yield in_order(plan, schedule)


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
            yield in_order(plan, "early-backward", tuple(trial))


def moved_cuts(plan: Plan) -> Iterator[Plan]:
    """Each cut by one, two or four layers."""
    for s in range(1, len(plan.stages)):
        before, after = plan.stages[s - 1].layers, plan.stages[s].layers
        for step in (1, -1, 2, -2, 4, -4):
            if before.start < after.start + step < after.stop:
                yield with_cut(plan, s, after.start + step)


def with_stages(plan: Plan, changed: dict[int, Stage]) -> Plan:
    stages = tuple(changed.get(s, stage) for s, stage in enumerate(plan.stages))
    return replace(plan, stages=stages)


def other_memory(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Other recompute, and division, on all stages of one set of devices; and no recompute."""
    refused = bool(blocks_refusal(plan.schedule))
    ways = [way for way in problem.recompute_ways if way != (False, True) or not refused]
    for devices in plan.device_groups:
        mine = {s: stage for s, stage in enumerate(plan.stages) if stage.devices == devices}
        shardings = {stage.sharding: None for stage in mine.values()}
        if problem.sharding == "auto":
            allowed = (one for one in problem.shardings if not choice_refusal(one, plan.schedule))
            shardings |= dict.fromkeys(allowed)
        choices = [(*way, sharding) for sharding in shardings for way in ways]
        for whole, by_block, sharding in choices if len(choices) > 1 else ():
            changed = {
                s: replace(stage, recompute=whole, by_block=by_block, sharding=sharding)
                for s, stage in mine.items()
            }
            if changed != mine:
                yield with_stages(plan, changed)
    if len(ways) > 1 and sum(stage.recompute or stage.by_block for stage in plan.stages) > 1:
        yield with_recompute(plan, False)


def shifted_devices(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """A device moved from one set to another, or to or from the unused; the order is kept."""
    groups = plan.device_groups
    unused = unused_devices(problem, plan)
    order = (*plan.devices, *unused)
    for giver in range(-1, len(groups)):
        for taker in range(-1, len(groups)):
            if giver == taker or len(groups[giver] if giver >= 0 else (0, *unused)) < 2:
                continue
            widths = [len(g) + (i == taker) - (i == giver) for i, g in enumerate(groups)]
            if max(widths) <= plan.micro_batch_size:
                new = [order[a:b] for a, b in pairwise(accumulate(widths, initial=0))]
                yield on_groups(problem, plan, dict(zip(groups, new, strict=True)))


def swapped_devices(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Two neighbouring sets of devices exchanged, unless they are alike and on one host.

    Unless stages go round after round, also together with their numbers of layers.
    """
    cluster, same = problem.cluster, {devices: devices for devices in plan.device_groups}
    for s, (before, after) in enumerate(pairwise(plan.device_groups)):
        kinds = {kind_of(cluster, device) for device in (*before, *after)}
        if len(before) == len(after) and len(kinds) == 1:
            continue
        swapped = on_groups(problem, plan, same | {before: after, after: before})
        yield swapped
        first, last = plan.stages[s : s + 2]
        cut = first.layers.start + len(last.layers)
        if not plan.placement and cut != first.layers.stop:
            yield with_cut(swapped, s + 1, cut)


def joined_stages(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Two neighbouring stages as one on the devices of both."""
    for s, (before, after) in enumerate(pairwise(plan.stages)):
        yield from joined_on(problem, plan, s, (*before.devices, *after.devices))


def freed_devices(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Two neighbouring stages as one on the devices of one."""
    for s, pair in enumerate(pairwise(plan.stages)):
        for stage in pair:
            yield from joined_on(problem, plan, s, stage.devices)


def joined_on(
    problem: PlanningProblem, plan: Plan, at: int, devices: tuple[int, ...]
) -> Iterator[Plan]:
    """The plan with a stage and the next as one on these devices, if each gets a sample."""
    if len(devices) <= plan.micro_batch_size:
        before, after = plan.stages[at : at + 2]
        joined = Stage(
            range(before.layers.start, after.layers.stop),
            devices,
            rows_by_speed(problem.cluster, devices, plan.micro_batch_size),
            before.recompute and after.recompute,
            by_block=before.by_block and after.by_block,
            sharding=before.sharding and after.sharding,
        )
        yield with_stage_count(plan, at, 2, (joined,))


def split_stages(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """A stage as two halves, one of them on unused devices."""
    if len(plan.stages) == problem.max_stages:
        return
    unused = unused_devices(problem, plan)
    for s, stage in enumerate(plan.stages):
        middle = (stage.layers.start + stage.layers.stop) // 2
        if middle == stage.layers.start:
            continue
        first = range(stage.layers.start, middle)
        second = range(middle, stage.layers.stop)
        for devices in sets_of(problem.cluster, unused, len(stage.devices)):
            other = on_devices(problem, plan, stage, devices)
            for pair in ((stage, other), (other, stage)):
                halves = (replace(pair[0], layers=first), replace(pair[1], layers=second))
                yield with_stage_count(plan, s, 1, halves)


def on_unused_devices(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """A set of devices replaced by as many that are unused."""
    same = {devices: devices for devices in plan.device_groups}
    unused = unused_devices(problem, plan)
    for before in plan.device_groups:
        for devices in sets_of(problem.cluster, unused, len(before)):
            yield on_groups(problem, plan, same | {before: devices})


def unused_devices(problem: PlanningProblem, plan: Plan) -> list[int]:
    """The devices that no stage has."""
    return sorted(set(range(len(problem.cluster.devices))) - set(plan.devices))


def kind_of(cluster: Cluster, device: int) -> object:
    """Equal for devices that are alike and on one host; none is like one with its own links."""
    own = device if device in cluster.linked_devices else None
    return cluster.host_index[device], cluster.devices[device], own


def sets_of(cluster: Cluster, devices: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """So many of the devices in a row, once from the first of each kind on."""
    found = dict[object, tuple[int, ...]]()
    for at in range(len(devices) - count + 1):
        found.setdefault(kind_of(cluster, devices[at]), tuple(devices[at : at + count]))
    return list(found.values())


def with_stage_count(plan: Plan, at: int, removed: int, added: tuple[Stage, ...]) -> Plan:
    """The plan with so many stages from ``at`` on replaced by others, as deep as the last was."""
    limits, end = plan.in_flight_limit, at + removed
    depths = (*limits[:at], *limits[end - 1 : end] * len(added), *limits[end:])
    stages = (*plan.stages[:at], *added, *plan.stages[end:])
    return replace(plan, stages=stages, in_flight_limit=depths, costs=(), memory_bytes=())


def on_devices(
    problem: PlanningProblem, plan: Plan, stage: Stage, devices: tuple[int, ...]
) -> Stage:
    """A stage on other devices."""
    slices = rows_by_speed(problem.cluster, devices, plan.micro_batch_size)
    return replace(stage, devices=devices, slices=slices)


def on_groups(
    problem: PlanningProblem, plan: Plan, new: dict[tuple[int, ...], tuple[int, ...]]
) -> Plan:
    """The plan with its sets of devices replaced."""
    stages = tuple(on_devices(problem, plan, stage, new[stage.devices]) for stage in plan.stages)
    return replace(plan, stages=stages)


def moved_rows(plan: Plan) -> Iterator[Plan]:
    """A row of a stage's replica given to another, on few replicas only: it rarely helps."""
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
            count = problem.global_batch // size
            yield replace(
                plan,
                stages=tuple(
                    replace(stage, slices=rows_by_speed(problem.cluster, stage.devices, size))
                    for stage in plan.stages
                ),
                micro_batches=count,
                micro_batch_size=size,
                in_flight_limit=tuple(min(limit, count) for limit in plan.in_flight_limit),
            )
