"""Candidate plans of a problem as points of the core (`core/point.hpp`)."""

from collections.abc import Sequence
from itertools import pairwise

from penstock.core.native import Point, PointRules, QuickPlay
from penstock.costs.schedule_costs import priced
from penstock.costs.stage_costs import rows_by_speed
from penstock.costs.tables import costs_with
from penstock.plan.choices import choice_refusal
from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.schedule.shape import PlacementStyle, placement_of_style

STYLES: tuple[PlacementStyle, ...] = ("straight", "looped", "folded", "mirrored")
"""Placements, in the order of the core's numbers."""

WAYS = ((False, False), (True, False), (False, True))
"""Recompute of the whole stage, and by block, in the order of the core's numbers."""

DEEPEST = 7
"""The index of a depth without a limit, the last of the core's ``kDepths``."""

MOST_MICRO_BATCHES = 1024
"""Points with more micro-batches are left out where there are others: orders take long to make."""


def micro_batch_sizes(problem: PlanningProblem) -> list[int]:
    """Return the sizes of micro-batches that points have, in order."""
    sizes = sorted(problem.micro_batch_sizes)
    few = [size for size in sizes if problem.global_batch // size <= MOST_MICRO_BATCHES]
    return few or sizes[-1:]


def rules_of(
    problem: PlanningProblem,
    names: Sequence[str],
    style: PlacementStyle,
    rounds: int,
    split: bool,
    depths: tuple[int, int] = (0, DEEPEST),
) -> PointRules:
    """Return what points may be whose orders are made by schedules of these names."""
    layers, devices = len(problem.profile.layers), len(problem.cluster.devices)
    most = min(layers // rounds, (problem.max_stages or layers) // rounds, devices)
    counts = {pin.stages for pin in problem.pins if pin.stages}
    # The number of stages that is pinned, if they can be placed so; else none.
    least = max(counts) // rounds if counts else 1
    most = min(most, least) if counts else most

    def may(choice: str) -> bool:
        return not choice or not all(choice_refusal(choice, name) for name in names)

    recomputes = [
        number
        for number, way in enumerate(WAYS)
        if way in problem.recompute_ways and may("blocks" * way[1])
    ]
    shardings = [SHARDINGS.index(sharding) for sharding in problem.shardings if may(sharding)]
    return PointRules(
        style=STYLES.index(style),
        rounds=rounds,
        split=split,
        batch=problem.global_batch,
        sizes=micro_batch_sizes(problem),
        groups=(least, most),
        depths=depths,
        savings=(recomputes, shardings),
        cut=cut_mask(problem),
    )


def cut_mask(problem: PlanningProblem) -> list[int]:
    """Return for each cut whether pins forbid it (0), allow it (1) or require it (2)."""
    layers = len(problem.profile.layers)
    mask = [1] * (layers + 1)
    for pin in problem.pins:
        if not pin.layers:
            continue
        for inner in range(pin.layers.start + 1, pin.layers.stop):
            mask[inner] = 0
        for end in (pin.layers.start, pin.layers.stop) if pin.alone else ():
            mask[end] = 2
    mask[0] = mask[layers] = 1
    return mask


def quick_play(problem: PlanningProblem, rules: PointRules) -> QuickPlay:
    """Return the quick simulation of a problem's points."""
    blocks = 2 in rules.recomputes
    costs = [
        costs_with(problem, sharding, by_block=by_block)
        if sharding in (0, *rules.shardings) and (blocks or not by_block)
        else None
        for sharding in range(len(SHARDINGS))
        for by_block in (False, True)
    ]
    return QuickPlay(costs, rules)


def plan_of_point(
    problem: PlanningProblem, rules: PointRules, point: Point, name: str, depths: Sequence[int]
) -> Plan:
    """Return the plan of a point under a schedule; ``depths`` are those of the quick simulation."""
    size = rules.sizes[point.size]
    groups = [tuple(point.order[a:b]) for a, b in pairwise(point.starts)]
    rows = [rows_by_speed(problem.cluster, devices, size) for devices in groups]
    placement = placement_of_style(STYLES[rules.style], len(groups), rules.rounds)
    stages: list[Stage] = []
    for (lo, hi), g in zip(pairwise(point.cuts), placement, strict=True):
        whole, by_block = WAYS[point.recompute[g]]
        sharding = SHARDINGS[point.sharding[g]]
        stage = Stage(
            range(lo, hi), groups[g], rows[g], whole, by_block=by_block, sharding=sharding
        )
        stages.append(stage)
    limits = tuple(depths) if name == "early-backward" else ()
    made = Plan(tuple(stages), problem.global_batch // size, size, name, in_flight_limit=limits)
    return priced(problem, made)


def point_of(problem: PlanningProblem, rules: PointRules, plan: Plan) -> Point | None:
    """Return a plan as a point; None where its stages are placed otherwise, or its sizes differ."""
    groups, size = plan.device_groups, plan.micro_batch_size
    rounds, left = divmod(len(plan.stages), len(groups))
    style = STYLES[rules.style]
    placed = plan.placement or tuple(range(len(groups)))
    if left or rounds != rules.rounds or size not in rules.sizes:
        return None
    if placed != placement_of_style(style, len(groups), rounds):
        return None
    first = plan.stages[: len(groups)]
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group))
    return Point(
        order=list(dict.fromkeys((*plan.devices, *range(len(problem.cluster.devices))))),
        starts=starts,
        cuts=[0, *(stage.layers.stop for stage in plan.stages)],
        recompute=[WAYS.index((stage.recompute, stage.by_block)) for stage in first],
        sharding=[SHARDINGS.index(stage.sharding) for stage in first],
        limits=list(plan.in_flight_limit),
        size=rules.sizes.index(size),
        depth=2,
    )
