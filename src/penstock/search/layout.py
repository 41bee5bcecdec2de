"""Plans as lists that random moves change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from numpy.random import Generator

from penstock.plan.cost import depths_of, rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem

__all__ = ["Layout", "Move", "layout_of", "moved", "moved_in_flight", "plan_of"]

Devices = tuple[int, ...]

AGAIN = 0.3
"""Probability that a move is followed by another one before the plan is judged."""


RECOMPUTE_AMONG_DEPTHS, AGAIN_IN_FLIGHT, MOST_OF_A_DEPTH = 0.1, 0.5, 0.5
"""Probabilities of the two where only depths and recompute change, and by how much at most."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan without its rows; ``depths`` are empty where the schedule has its own."""

    cuts: tuple[int, ...]
    groups: tuple[Devices, ...]
    recompute: tuple[bool, ...]
    size: int
    schedule: str
    depths: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.groups)


Move = Callable[[PlanningProblem, Layout, Generator], Layout | None]
"""Draws a layout near another; none where what it draws is not possible."""


def layout_of(plan: Plan) -> Layout:
    """The layout of a plan."""
    return Layout(
        (0, *(stage.layers.stop for stage in plan.stages)),
        tuple(stage.devices for stage in plan.stages),
        tuple(stage.recompute for stage in plan.stages),
        plan.micro_batch_size,
        plan.schedule,
        depths_of(plan) if plan.schedule == "early-backward" else (),
    )


def plan_of(problem: PlanningProblem, layout: Layout) -> Plan | None:
    """The plan of a layout; none where a stage has more replicas than a micro-batch rows."""
    if max(map(len, layout.groups)) > layout.size:
        return None
    if problem.max_stages and layout.stages > problem.max_stages:
        return None
    stages = tuple(
        Stage(
            range(*ends),
            devices,
            rows_by_speed(problem.cluster, devices, layout.size),
            again,
        )
        for ends, devices, again in zip(
            pairwise(layout.cuts), layout.groups, layout.recompute, strict=True
        )
    )
    batches = problem.global_batch // layout.size
    limit: list[int] = []
    for depth in layout.depths:
        limit.append(max(1, min(depth, batches, *limit[-1:])))
    return Plan(stages, batches, layout.size, layout.schedule, in_flight_limit=tuple(limit))


def moved(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """A layout after one random move, or several; none where the move drawn is not possible."""
    return repeated(any_move, AGAIN, problem, layout, generator)


def repeated(
    move: Move, again: float, problem: PlanningProblem, layout: Layout, generator: Generator
) -> Layout | None:
    """A layout after a random move, and further ones each with probability ``again``."""
    while True:
        changed = move(problem, layout, generator)
        if changed is None or generator.random() >= again:
            return changed
        layout = changed


def any_move(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """A layout after one move, drawn by weight."""
    number = MOVES_BY_WEIGHT[int(generator.integers(len(MOVES_BY_WEIGHT)))]
    return MOVES[number](problem, layout, generator)


def move_cut(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """One cut by some layers, few more often than many."""
    if layout.stages < 2:
        return None
    place = int(generator.integers(1, layout.stages))
    step = int(2 ** (generator.random() * 3.6)) * (1 if generator.random() < 0.5 else -1)
    cut = layout.cuts[place] + step
    if not layout.cuts[place - 1] < cut < layout.cuts[place + 1]:
        return None
    return replace(layout, cuts=(*layout.cuts[:place], cut, *layout.cuts[place + 1 :]))


def swap_devices(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """Two devices of different stages."""
    if layout.stages < 2:
        return None
    one, other = (int(s) for s in generator.permutation(layout.stages)[:2])
    groups = [list(group) for group in layout.groups]
    i, j = int(generator.integers(len(groups[one]))), int(generator.integers(len(groups[other])))
    groups[one][i], groups[other][j] = groups[other][j], groups[one][i]
    return replace(layout, groups=tuple(map(tuple, groups)))


def move_device(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """A device from a stage to another, to none, or from none."""
    groups = [list(group) for group in layout.groups]
    free = unused(problem, layout)
    place = int(generator.integers(layout.stages))
    if free and generator.random() < 0.5:
        groups[place].append(free[int(generator.integers(len(free)))])
    elif len(groups[place]) > 1:
        device = groups[place].pop(int(generator.integers(len(groups[place]))))
        if generator.random() < 0.8:
            groups[int(generator.integers(layout.stages))].append(device)
    else:
        return None
    return replace(layout, groups=tuple(map(tuple, groups)))


def unused(problem: PlanningProblem, layout: Layout) -> Devices:
    """Devices in no stage."""
    used = {device for group in layout.groups for device in group}
    return tuple(d for d in range(len(problem.cluster.devices)) if d not in used)


def join_stages(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """Two neighbouring stages, at times with fewer devices."""
    if layout.stages < 2:
        return None
    place = int(generator.integers(layout.stages - 1))
    devices = layout.groups[place] + layout.groups[place + 1]
    if generator.random() < 0.35:
        devices = devices[: int(generator.integers(1, len(devices) + 1))]
    return Layout(
        (*layout.cuts[: place + 1], *layout.cuts[place + 2 :]),
        (*layout.groups[:place], devices, *layout.groups[place + 2 :]),
        (*layout.recompute[: place + 1], *layout.recompute[place + 2 :]),
        layout.size,
        layout.schedule,
        (*layout.depths[: place + 1], *layout.depths[place + 2 :]),
    )


def split_stage(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """A stage in two, that share its devices or take a further one."""
    place = int(generator.integers(layout.stages))
    first, last = layout.cuts[place], layout.cuts[place + 1]
    if last - first < 2:
        return None
    cut = int(generator.integers(first + 1, last))
    group, free = layout.groups[place], unused(problem, layout)
    if len(group) > 1 and (not free or generator.random() < 0.7):
        order = [int(d) for d in generator.permutation(group)]
        width = int(generator.integers(1, len(order)))
        parts = tuple(order[:width]), tuple(order[width:])
    elif free:
        parts = group, (free[int(generator.integers(len(free)))],)
    else:
        return None
    deeper = (layout.depths[place] + 1,) if layout.depths else ()
    return Layout(
        (*layout.cuts[: place + 1], cut, *layout.cuts[place + 1 :]),
        (*layout.groups[:place], *parts, *layout.groups[place + 1 :]),
        (*layout.recompute[: place + 1], *layout.recompute[place:]),
        layout.size,
        layout.schedule,
        (*layout.depths[:place], *deeper, *layout.depths[place:]),
    )


def other_size(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """The next larger or smaller micro-batch size."""
    sizes = sorted(problem.micro_batch_sizes)
    place = sizes.index(layout.size) + (1 if generator.random() < 0.5 else -1)
    return replace(layout, size=sizes[place]) if 0 <= place < len(sizes) else None


def other_schedule(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout:
    """Any schedule, early backward mostly with depths that fall evenly."""
    schedule = problem.schedules[int(generator.integers(len(problem.schedules)))]
    depths: Devices = ()
    if schedule == "early-backward" and generator.random() < 0.7:
        each, more = int(generator.integers(1, 4)), int(generator.integers(3))
        depths = tuple(each * (layout.stages - s) + more for s in range(layout.stages))
    return replace(layout, schedule=schedule, depths=depths)


def other_depths(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """One stage deeper or shallower in flight, or all of them."""
    if not layout.depths:
        return None
    change = (-1, 1, 2)[int(generator.integers(3))]
    depths = list(layout.depths)
    if generator.random() < 0.5:
        depths = [depth + change for depth in depths]
    else:
        depths[int(generator.integers(layout.stages))] += change
    return replace(layout, depths=tuple(max(1, depth) for depth in depths))


def other_recompute(
    problem: PlanningProblem, layout: Layout, generator: Generator
) -> Layout | None:
    """One stage with recompute, or without."""
    if problem.recompute != "auto":
        return None
    place = int(generator.integers(layout.stages))
    flags = list(layout.recompute)
    flags[place] = not flags[place]
    return replace(layout, recompute=tuple(flags))


def moved_in_flight(
    problem: PlanningProblem, layout: Layout, generator: Generator
) -> Layout | None:
    """The same stages with other depths, or recompute, of one of them or several."""
    return repeated(in_flight_move, AGAIN_IN_FLIGHT, problem, layout, generator)


def in_flight_move(problem: PlanningProblem, layout: Layout, generator: Generator) -> Layout | None:
    """One stage with recompute or without, or at another depth."""
    if generator.random() < RECOMPUTE_AMONG_DEPTHS:
        return other_recompute(problem, layout, generator)
    return one_other_depth(layout, generator)


def one_other_depth(layout: Layout, generator: Generator) -> Layout | None:
    """One stage deeper or shallower, by little more often than by much; others make way for it."""
    if not layout.depths:
        return None
    place = int(generator.integers(layout.stages))
    furthest = 1 + layout.depths[place] * MOST_OF_A_DEPTH * float(generator.random()) ** 2
    change = int(furthest * generator.random() + 1) * (1 if generator.random() < 0.5 else -1)
    depth = max(1, layout.depths[place] + change)
    # Depths never grow along the pipeline.
    before = (max(other, depth) for other in layout.depths[:place])
    after = (min(other, depth) for other in layout.depths[place + 1 :])
    return replace(layout, depths=(*before, depth, *after))


WEIGHTED_MOVES: tuple[tuple[Move, int], ...] = (
    (move_cut, 30),
    (swap_devices, 10),
    (move_device, 15),
    (join_stages, 7),
    (split_stage, 10),
    (other_size, 5),
    (other_schedule, 5),
    (other_depths, 12),
    (other_recompute, 6),
)
"""How often each move is drawn, in percent."""

MOVES = tuple(move for move, _ in WEIGHTED_MOVES)

MOVES_BY_WEIGHT = tuple(
    number for number, (_, weight) in enumerate(WEIGHTED_MOVES) for _ in range(weight)
)
