"""Plans for schedules of every family: the devices in equal groups, the layers in even runs.

A *skeleton* fixes the number of device groups, the placement of stages on them, the micro-batch
size, and which stages recompute. Schedules with the same placement share it. Its *load* is a time
that no order of its work beats: the compute of the fullest device group, from when a first
micro-batch can have reached it. Its *estimate* counts messages and all-reduces too.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

from penstock.cluster.cluster import Cluster
from penstock.plan.cost import rows_by_speed, stage_seconds
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.schedule_costs import with_costs
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PlacementStyle, placement_of_style

__all__ = ["Skeleton", "load_s", "placed_so", "recut", "skeletons", "skeletons_of_plans"]

IDLE_AT_MOST, FEW_DEVICES = 1 / 16, 32
"""Equal groups may leave such a share of up to so many devices idle, and none of more devices."""

ROUNDS: dict[PlacementStyle, tuple[int, ...]] = {
    "straight": (1,),
    "mirrored": (1,),
    "looped": (2, 3, 4),
    "folded": (2, 4),
}
"""Stages that a group holds, by placement."""

MOST_MICRO_BATCHES = 1024
"""Plans with more micro-batches are left out: their orders take long to make."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A plan with the costs of its stages, the schedules with its placement, and its seconds."""

    plan: Plan
    schedules: tuple[str, ...]
    load_s: float
    estimate_s: float


def skeletons(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Skeleton]:
    """Even plans for every placement of ``schedules``."""
    for groups in equal_groups(problem.cluster, len(problem.profile.layers)):
        yield from skeletons_on(problem, schedules, groups, problem.micro_batch_sizes)


def equal_groups(cluster: Cluster, most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The devices, as the cluster names them, in 1 to ``most`` groups of equal size."""
    devices = len(cluster.devices)
    most_idle = devices * IDLE_AT_MOST if devices <= FEW_DEVICES else 0
    for count in range(1, min(devices, most) + 1):
        width = devices // count
        if devices - width * count <= most_idle:
            yield tuple(tuple(range(g * width, (g + 1) * width)) for g in range(count))


def skeletons_of_plans(
    problem: PlanningProblem, schedules: Sequence[str], plans: Sequence[Plan]
) -> Iterator[Skeleton]:
    """The stages of ``plans`` as they are, and even ones on their groups of devices."""
    straight = placed_so(schedules, "straight", 1)
    seen: set[object] = set()
    for plan in plans:
        if straight:
            own = with_costs(problem, replace(plan, in_flight_limit=()))
            yield from skeleton_of(problem, own, straight)
        if plan.device_groups not in seen:
            seen.add(plan.device_groups)
            size = plan.micro_batch_size
            near = [s for s in problem.micro_batch_sizes if s in (size // 2, size, 2 * size)]
            yield from skeletons_on(problem, schedules, plan.device_groups, near)


def skeletons_on(
    problem: PlanningProblem,
    schedules: Sequence[str],
    groups: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
) -> Iterator[Skeleton]:
    """Even plans on the given groups of devices, for micro-batches of the given sizes."""
    layers, widest = len(problem.profile.layers), max(map(len, groups))
    most_stages = min(layers, problem.max_stages or layers)
    for size in sizes:
        micro_batches = problem.global_batch // size
        if size < widest or micro_batches > MOST_MICRO_BATCHES:
            continue
        for style, rounds in ROUNDS.items():
            for count in rounds:
                alike = placed_so(schedules, style, count)
                if not alike or count * len(groups) > most_stages:
                    continue
                plan = even_plan(problem, groups, size, alike[0], style, count)
                for recomputing in recomputed(problem, plan):
                    yield from skeleton_of(problem, recomputing, alike)


def recomputed(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with recompute on no stage; if memory is short, on those short of it; and on all.

    Each has its costs (`with_costs`).
    """
    every = set(plan.device_groups)
    if problem.recompute == "on":
        yield recomputing_on(problem, plan, every)
        return
    keeping = with_costs(problem, plan)
    yield keeping
    if problem.recompute == "auto":
        short = groups_short_of_memory(keeping)
        if 0 < len(short) < len(every):
            yield recomputing_on(problem, plan, short)
        if short:
            yield recomputing_on(problem, plan, every)


def recomputing_on(
    problem: PlanningProblem, plan: Plan, groups: Collection[tuple[int, ...]]
) -> Plan:
    """The plan with recompute on the stages of some groups of devices, and with its costs."""
    stages = tuple(replace(s, recompute=s.devices in groups) for s in plan.stages)
    return with_costs(problem, replace(plan, stages=stages))


def groups_short_of_memory(plan: Plan) -> set[tuple[int, ...]]:
    """The groups that cannot keep what 1F1B keeps: a micro-batch for each group from here on.

    Where groups hold several stages, each keeps about as many micro-batches as there are groups.
    The plan has its costs (`with_costs`).
    """
    groups = plan.device_groups
    kept = dict.fromkeys(groups, 0.0)
    for stage, cost in zip(plan.stages, plan.costs, strict=True):
        kept[stage.devices] += cost.saved_bytes
    short: set[tuple[int, ...]] = set()
    for index, (devices, room) in enumerate(zip(groups, plan.memory_bytes, strict=True)):
        held = len(groups) if plan.placement else len(groups) - index
        if min(held, plan.micro_batches) * kept[devices] > room:
            short.add(devices)
    return short


def skeleton_of(
    problem: PlanningProblem, plan: Plan, schedules: tuple[str, ...]
) -> Iterator[Skeleton]:
    """The skeleton of a plan that has its costs (`with_costs`), where a micro-batch fits."""
    seconds = load_s(plan)
    if seconds < inf:
        yield Skeleton(plan, schedules, seconds, max(seconds, messages_s(problem, plan)))


def placed_so(schedules: Sequence[str], style: PlacementStyle, rounds: int) -> tuple[str, ...]:
    """The schedules with a placement, and so many stages on a group."""
    return tuple(
        name
        for name in schedules
        if FAMILIES[name].placement == style and FAMILIES[name].rounds in (0, rounds)
    )


def even_plan(
    problem: PlanningProblem,
    groups: Sequence[tuple[int, ...]],
    size: int,
    schedule: str,
    style: PlacementStyle,
    rounds: int,
) -> Plan:
    """The layers in runs of about equal time on the groups."""
    layers = len(problem.profile.layers)
    ends = [layers * g // len(groups) for g in range(len(groups) + 1)]
    stages = tuple(
        Stage(range(*run), devices, rows_by_speed(problem.cluster, devices, size))
        for run, devices in zip(pairwise(ends), groups, strict=True)
    )
    plan = Plan(stages, problem.global_batch // size, size, schedule)
    return recut(problem, plan, "straight" if style == "mirrored" else style, rounds)


def load_s(plan: Plan) -> float:
    """Seconds that no order of the work of ``plan`` beats; infinite where no micro-batch fits.

    The plan has its costs (`with_costs`). A group computes all its stages for every micro-batch. It
    starts when a first micro-batch has passed the stages before its first. Here a stage with
    recompute recomputes every micro-batch. With never more than one in flight it would not, but
    then it does not need recompute either.
    """
    groups = plan.device_groups
    number = {devices: g for g, devices in enumerate(groups)}
    busy = [0.0] * len(groups)
    first = [inf] * len(groups)
    kept = [0.0] * len(groups)
    reached = 0.0
    for stage, cost in zip(plan.stages, plan.costs, strict=True):
        group = number[stage.devices]
        busy[group] += cost.forward_s * (1 + stage.recompute) + cost.backward_s
        first[group] = min(first[group], reached)
        kept[group] += cost.saved_bytes
        reached += cost.forward_s + cost.transfer_s
    if plan.mirrored:
        # The opposite group works on one of every two micro-batches.
        busy = [(own + other) / 2 for own, other in zip(busy, reversed(busy), strict=True)]
        first = [min(own, other) for own, other in zip(first, reversed(first), strict=True)]
    rooms = plan.memory_bytes
    if any(room < of_one for room, of_one in zip(rooms, kept, strict=True)):
        return inf
    return max(start + plan.micro_batches * each for start, each in zip(first, busy, strict=True))


def messages_s(problem: PlanningProblem, plan: Plan) -> float:
    """An estimate of how long the busiest group sends, or receives, messages and all-reduces."""
    before = 0.0
    seconds: dict[tuple[int, ...], float] = {}
    for stage, cost in zip(plan.stages, plan.costs, strict=True):
        known = seconds.get(stage.devices, 0.0)
        after_s = stage_seconds(problem, stage).after_s
        known += plan.micro_batches * (before + cost.transfer_s) + after_s
        seconds[stage.devices] = known
        before = cost.transfer_s
    return max(seconds.values())


def recut(problem: PlanningProblem, plan: Plan, style: PlacementStyle, rounds: int) -> Plan:
    """The same sets of devices, each with ``rounds`` stages of about equal time."""
    groups = plan.device_groups
    placement = placement_of_style(style, len(groups), rounds)
    slices = {stage.devices: stage.slices for stage in plan.stages}
    speeds = [
        plan.micro_batch_size
        * min(
            problem.cluster.devices[device].speed / rows
            for device, rows in zip(devices, slices[devices], strict=True)
        )
        for devices in groups
    ]
    seconds = [
        layer.forward_s.at(plan.micro_batch_size) + layer.backward_s.at(plan.micro_batch_size)
        for layer in problem.profile.layers
    ]
    cuts = even_cuts(seconds, [speeds[group] for group in placement])
    stages = tuple(
        Stage(range(lo, hi), groups[group], slices[groups[group]])
        for (lo, hi), group in zip(pairwise(cuts), placement, strict=True)
    )
    return replace(plan, stages=stages, in_flight_limit=(), costs=(), memory_bytes=())


def even_cuts(seconds: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Cuts between runs of layers whose shares of the work are nearest to the shares of the speeds.

    >>> even_cuts([1, 1, 1, 1, 1, 1], speeds=[1, 2])
    [0, 2, 6]
    """
    sums = list(accumulate(seconds, initial=0.0))
    shares = list(accumulate(speeds))
    cuts = [0]
    for index, share in enumerate(shares[:-1], start=1):
        wanted = sums[-1] * share / shares[-1]
        above = bisect_right(sums, wanted)
        cut = min((above - 1, above), key=lambda i: abs(sums[min(i, len(sums) - 1)] - wanted))
        cuts.append(min(max(cut, cuts[-1] + 1), len(seconds) - (len(speeds) - index)))
    return [*cuts, len(seconds)]
