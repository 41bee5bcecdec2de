"""The fastest plan over the schedule families: skeletons, then climbs that the simulator judges.

The best cuts, replicas and micro-batches depend on the family, so each family gets plans of its
own. A *skeleton* fixes the number of device groups, the placement of stages on them, the
micro-batch size, and which stages recompute: even plans on equal groups of devices, and plans with
the family's placement on the groups of the best plans with whole backwards. Schedules with the same
placement share it. Its *load* is a time that no order of its work beats (`load_s`). Its *estimate*
counts messages and all-reduces too.

The simulator judges skeletons in the order of their estimate. Plans whose load shows that they
cannot win are left out. Moves then improve the best plans of different placements: cuts,
micro-batches, recompute, devices between groups. An order that is searched for takes long to make.
So such schedules are tried only on the best plans, and on those with the least load.
"""

from bisect import bisect_right
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

from penstock.cluster.cluster import Cluster
from penstock.plan.cost import rows_by_speed, stage_seconds, transfer
from penstock.plan.plan import Plan, Stage, in_order
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.schedule_costs import load_s, priced, with_costs
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PlacementStyle, placement_of_style
from penstock.search.judge import NEAR, Judge, SearchStep, actions_of, judge_of
from penstock.search.neighbours import climb

EQUIVALENT = frozenset({"1f1b-as", "1f1b-sno", "1f1b-so"})
"""Families that are not tried where faster or leaner ones are allowed."""

ACTIONS_FOR_SKELETONS = 600_000
"""Actions whose orders are made and simulated for skeletons; about half a second."""

ACTIONS_FOR_MOVES = 600_000
"""The same for the moves from each start."""

FIRST_STARTS, ACTIONS_FOR_FIRST_MOVES, FAR = 12, 60_000, 1.5
"""How many plans of different placements are improved by few moves, with so many actions each; and
how many times as long as the best plan they may take before."""

STARTS = 3
"""How many of them are then improved by more."""

ADAPTED = 6
"""How many of the fastest plans, and of those with the least load, get an order that is searched
for."""


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


def family_steps(judge: Judge, starts: Iterable[Skeleton]) -> Iterator[SearchStep]:
    """Ever better plans under the schedules that planners do not know, from ``starts``."""
    yield judge.step("schedule families")
    leaders = yield from simulated_skeletons(judge, starts)
    # Where stages recompute, memory is short, and a search for orders takes long and finds little.
    keeping = [one for one in leaders if not any(s.recompute for s in one[1].stages)]
    promising = [*keeping[:ADAPTED], *sorted(keeping, key=load_of)[:ADAPTED]]
    for name in judge.allowed:
        if FAMILIES[name].is_searched:
            for plan in dict.fromkeys(plan for _, plan in promising):
                yield judge.step(f"schedule {name}")
                adapted = adapted_to(judge.problem, plan, name)
                if load_s(adapted) < judge.best_s:
                    leaders.append((judge.simulate(adapted), adapted))
    leaders.sort(key=lambda one: one[0])
    for most, actions in ((FIRST_STARTS, ACTIONS_FOR_FIRST_MOVES), (STARTS, ACTIONS_FOR_MOVES)):
        near = dict[object, tuple[float, Plan]]()
        for seconds, plan in leaders:
            if seconds < FAR * judge.best_s:
                near.setdefault(
                    (plan.device_groups, plan.placement, plan.mirrored), (seconds, plan)
                )
        leaders = list[tuple[float, Plan]]()
        for seconds, plan in [*near.values()][:most]:
            yield judge.step(f"moves under {plan.schedule}")
            end, end_s = climb(judge, plan, seconds, actions)
            leaders.append((end_s, end))
        leaders.sort(key=lambda one: one[0])
    yield judge.step("schedule families")


def simulated_skeletons(
    judge: Judge, starts: Iterable[Skeleton]
) -> Generator[SearchStep, None, list[tuple[float, Plan]]]:
    """Simulate skeletons in the order of their estimate; the best of each placement, in order."""
    leaders: dict[object, tuple[float, Plan]] = {}
    actions = ACTIONS_FOR_SKELETONS
    for skeleton in sorted(starts, key=lambda one: one.estimate_s):
        if skeleton.load_s >= NEAR * judge.best_s:
            continue
        if actions <= 0:
            break
        for name in skeleton.schedules:
            plan = under_schedule(skeleton.plan, name)
            seconds = judge.simulate(plan)
            # A plan that is refused, or does not fit, is not judge.
            actions -= actions_of(plan) if seconds < inf else actions_of(plan) // 10
            key = (plan.device_groups, plan.placement, plan.mirrored)
            if seconds < leaders.get(key, (inf,))[0]:
                leaders[key] = seconds, plan
        yield judge.step("schedule families")
    return sorted(leaders.values(), key=lambda one: one[0])


def plain_families(schedules: Iterable[str]) -> tuple[str, ...]:
    """The schedules whose orders are not searched for, or substitutes where all are."""
    plain = [name for name in schedules if not FAMILIES[name].is_searched]
    worth = [name for name in plain if name not in EQUIVALENT]
    stand_ins = [one for name in schedules for one in FAMILIES[name].stand_ins.values()]
    return tuple(dict.fromkeys(worth or plain or stand_ins))


def load_of(leader: tuple[float, Plan]) -> float:
    """The load of a plan that was simulated; infinite where the plan has no costs."""
    return load_s(leader[1]) if leader[1].costs else inf


def under_schedule(plan: Plan, schedule: str) -> Plan:
    """The plan under a schedule, without costs where its order does not depend on them."""
    if FAMILIES[schedule].is_planned:
        return in_order(plan, schedule, plan.in_flight_limit)
    return in_order(plan, schedule, plan.in_flight_limit, plan.costs, plan.memory_bytes)


def adapted_to(problem: PlanningProblem, plan: Plan, schedule: str) -> Plan:
    """The plan under a schedule that makes its order for the costs of the stages."""
    return priced(problem, in_order(plan, schedule))


def rescheduled(problem: PlanningProblem, plan: Plan, schedule: str, score: Score) -> Plan | None:
    """The best plan found under ``schedule`` on the device sets of ``plan``; None if none fits."""
    groups = set(plan.device_groups)

    def on_its_devices(other: Plan) -> float:
        return score(other) if groups == set(other.device_groups) else inf

    judge = judge_of(problem.under((schedule,)), on_its_devices)
    starts = skeletons_of_plans(problem, plain_families([schedule]), [plan])
    *_, last = family_steps(judge, starts)
    return replace(last.plan, planner=plan.planner) if last.plan else None


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


def messages_s(problem: PlanningProblem, plan: Plan) -> float:
    """An estimate of how long the busiest group sends, or receives, messages and all-reduces."""
    moved = [
        transfer(problem, one, other).round_trip_s / 2 if one.devices != other.devices else 0.0
        for one, other in pairwise(plan.stages)
    ]
    seconds: dict[tuple[int, ...], float] = {}
    for stage, before_s, onward_s in zip(plan.stages, [0.0, *moved], [*moved, 0.0], strict=True):
        known = seconds.get(stage.devices, 0.0)
        known += plan.micro_batches * (before_s + onward_s) + stage_seconds(problem, stage).after_s
        seconds[stage.devices] = known
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
