"""Plans that keep the pins of a problem, where the search starts; and pins that none keeps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from penstock.costs.fit import with_needed_recompute
from penstock.costs.schedule_costs import priced
from penstock.costs.stage_costs import rows_by_speed
from penstock.errors import BadInput, Infeasible
from penstock.plan.pins import Pin, allowed_runs, pins_text
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.plan.row_split import split_rows
from penstock.planners.coarse_chain import few_sizes, likely_cuts
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import placement_of_style

MOST_CUTS = 100
"""Longer chains are cut at likely places, and where pins begin and end."""

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
"""Numbers of device groups to try, where no pin says how many stages there are."""

LEADING = 4
"""Number of the best plans, on different numbers of groups, tried under other schedules."""

REORDERED = 3
"""Number of the best of all plans that get an order that is searched for, which takes long."""

ROUNDS = (1, 2, 3, 4)
"""Stages on each group of devices to try, as far as a schedule allows them."""

MOST_SHIFTS, ROUNDING = 200, 1e-9
"""Steps of `evened`, each of which is an improvement by more than rounding."""

MOST_PLACES = 64
"""Ways to number the stages of pins that name layers and devices."""


def best_pinned(problem: PlanningProblem, score: Score) -> Plan:
    """The best of balanced plans that keep every pin, under each schedule that is allowed.

    For each number of device groups and each micro-batch size, the slowest stage is as fast as cuts
    that keep the pins allow (`cuts_that_keep`), with equal groups and with groups in proportion to
    the work of their stages. Messages do not count there; ``score`` judges.
    """
    found: dict[Plan, float] = {}
    planned = [name for name in problem.schedules if FAMILIES[name].is_planned] or ["1f1b"]
    for by_memory in (False, True):
        for size in few_sizes(problem):
            for groups in GROUPS:
                for plan in balanced_pinned(problem, planned[0], groups, 1, size, by_memory):
                    kept = with_needed_recompute(problem, plan)
                    found[kept] = score_of(kept, score)
        if min(found.values(), default=inf) < inf:
            break
    by_groups: dict[int, Plan] = {}
    for plan in sorted(found, key=found.__getitem__):
        by_groups.setdefault(len(plan.stages), plan)
    for made in under_every_schedule(problem, list(islice(by_groups.values(), LEADING))):
        # Without recompute first; with it, where that does not fit.
        for recompute in problem.recompute_choices:
            other = priced(problem, with_recompute(made, recompute))
            found[other] = score_of(other, score)
            if found[other] < inf:
                break
    searched = [name for name in problem.schedules if FAMILIES[name].is_searched]
    for plan in sorted(found, key=found.__getitem__)[:REORDERED] if searched else ():
        for name in searched:
            other = priced(problem, replace(plan, schedule=name, in_flight_limit=()))
            found[other] = score_of(other, score)
    allowed = [plan for plan in found if plan.schedule in problem.schedules]
    best = min(allowed, key=found.__getitem__, default=None)
    if best is None or found[best] == inf:
        raise Infeasible(f"no plan that keeps {pins_text(problem.pins)} fits in memory")
    return replace(best, planner="search")


def under_every_schedule(problem: PlanningProblem, leaders: Sequence[Plan]) -> Iterator[Plan]:
    """``leaders`` under each schedule that is not searched for.

    Where several stages are on a group of devices, balanced plans on as many groups as theirs, or
    on those that the pinned number of stages makes.
    """
    fixed = max(pin.stages for pin in problem.pins)
    for name, rounds in product(problem.schedules, ROUNDS):
        family = FAMILIES[name]
        fits = family.rounds in (0, rounds) and (rounds > 1) == (family.placement in FOLDS)
        if family.is_searched or not fits:
            continue
        if rounds == 1:
            yield from (replace(plan, schedule=name) for plan in leaders)
            continue
        ways = [(len(plan.stages), plan.micro_batch_size) for plan in leaders]
        for groups, size in product([fixed // rounds], few_sizes(problem)) if fixed else ways:
            yield from balanced_pinned(problem, name, groups, rounds, size, by_memory=False)


FOLDS = ("looped", "folded")
"""Styles of placement with several stages on a group."""


def balanced_pinned(
    problem: PlanningProblem, schedule: str, groups: int, rounds: int, size: int, by_memory: bool
) -> Iterator[Plan]:
    """Plans with balanced stages that keep the pins: on equal groups, and on groups to measure."""
    devices, stages = len(problem.cluster.devices), groups * rounds
    most = problem.max_stages or len(problem.profile.layers)
    if not 0 < groups <= devices or stages > min(most, len(problem.profile.layers)):
        return
    style = FAMILIES[schedule].placement
    placement = placement_of_style(style if style in FOLDS else "straight", groups, rounds)
    for numbered in numbered_pins(problem.pins, stages):
        weights = [1.0] * groups
        for _ in range(2):
            sets = device_sets(problem, numbered, placement, weights)
            if not sets or max(map(len, sets)) > size:
                break
            cuts = cuts_that_keep(problem, numbered, sets, size, by_memory)
            if not cuts:
                break
            if rounds > 1:
                cuts = evened(problem, numbered, sets, cuts, size)
            made = tuple(
                Stage(range(lo, hi), own, rows_by_speed(problem.cluster, own, size))
                for (lo, hi), own in zip(pairwise(cuts), sets, strict=True)
            )
            yield Plan(made, problem.global_batch // size, size, schedule)
            weights = [0.0] * groups
            for group, (lo, hi) in zip(placement, pairwise(cuts), strict=True):
                weights[group] += problem.profile.work_s(range(lo, hi), size)


def numbered_pins(pins: Sequence[Pin], stages: int) -> Iterator[tuple[Pin, ...]]:
    """The pins, with a number of a stage for each one that fixes the devices of some layers."""
    ways = [
        [replace(pin, stage=stage) for stage in range(stages)]
        if pin.devices and pin.stage < 0
        else [pin]
        for pin in pins
    ]
    yield from islice(product(*ways), MOST_PLACES)


def device_sets(
    problem: PlanningProblem,
    pins: Sequence[Pin],
    placement: Sequence[int],
    weights: Sequence[float],
) -> list[tuple[int, ...]]:
    """The devices of each stage: pinned ones, and of the others a number by the group's weight.

    Empty where pins require more than there is.
    """
    fixed: dict[int, tuple[int, ...]] = {}
    for pin in pins:
        if pin.devices:
            if pin.stage >= len(placement):
                return []
            if fixed.setdefault(placement[pin.stage], pin.devices) != pin.devices:
                return []
    taken = [device for own in fixed.values() for device in own]
    free = [device for device in range(len(problem.cluster.devices)) if device not in taken]
    others = [group for group in range(len(weights)) if group not in fixed]
    if len(set(taken)) < len(taken) or len(free) < len(others):
        return []
    shares = [max(weights[group], 1e-12) for group in others]
    first = 0
    for group, count in zip(others, split_rows(len(free), shares) if others else (), strict=True):
        fixed[group] = tuple(free[first : first + count])
        first += count
    return [fixed[group] for group in placement]


def cuts_that_keep(
    problem: PlanningProblem,
    pins: Sequence[Pin],
    sets: Sequence[tuple[int, ...]],
    size: int,
    by_memory: bool = False,
) -> tuple[int, ...]:
    """Cuts of stages whose largest is as small as pins allow; empty if none keep the pins.

    ``A(k + 1, j) = min over i < j of max(A(k, i), T(k, i, j))``, where ``T`` is the time of layers
    i..j-1 as stage k on its devices (or their bytes), and infinite where a pin forbids the run.
    """
    layers, stages = len(problem.profile.layers), len(sets)
    every = list(range(layers + 1))
    if not any(pin.equal for pin in pins):  # where there are many, likely ones and those of pins
        ends = {end for pin in pins if pin.layers for end in (pin.layers.start, pin.layers.stop)}
        every = sorted({*likely_cuts(problem, MOST_CUTS), *ends})
    places = np.array(every, dtype=np.int64)
    starts, stops = places[:, None], places[None, :]
    best = np.where(places == 0, 0.0, inf)
    chosen: list[NDArray[np.int64]] = []
    for stage, own in enumerate(sets):
        loads = loads_of(problem, own, size, by_memory)[places]
        number = np.array(stage)
        may = allowed_runs(pins, starts, stops, number, stages, layers)
        seconds = np.where(may, loads[None, :] - loads[:, None], inf)
        longest = np.maximum(best[:, None], seconds)
        chosen.append(longest.argmin(axis=0))
        best = longest.min(axis=0)
    if best[-1] == inf or any(pin.stages not in (0, stages) for pin in pins):
        return ()
    if any(pin.stage >= stages for pin in pins):
        return ()
    cuts = [len(places) - 1]
    for earlier in reversed(chosen):
        cuts.append(int(earlier[cuts[-1]]))
    return tuple(int(places[cut]) for cut in reversed(cuts))


def evened(
    problem: PlanningProblem,
    pins: Sequence[Pin],
    sets: Sequence[tuple[int, ...]],
    cuts: Sequence[int],
    size: int,
) -> tuple[int, ...]:
    """The cuts, moved as long as groups with several stages have more equal sums of work.

    In each step a stage of the fullest group gives a layer at one end, and all cuts between it and
    another stage move by one layer, so that the latter has a layer more.
    """
    count, of_stage = len(sets), {own: loads_of(problem, own, size, False) for own in set(sets)}
    loads = np.array([of_stage[own] for own in sets])
    member = np.array([[own == group for group in of_stage] for own in sets], dtype=float)
    stage, place = np.arange(count), np.arange(count + 1)
    now = np.array(cuts)
    for _ in range(MOST_SHIFTS):
        sums = (loads[stage, now[1:]] - loads[stage, now[:-1]]) @ member
        fullest = np.flatnonzero(member[:, sums.argmax()])
        pairs = [(int(i), j) for i in fullest for j in range(count) if i != j]
        moves = [
            np.where((min(i, j) < place) & (place <= max(i, j)), 1 if i > j else -1, 0)
            for i, j in pairs
        ]
        every = now + np.array([np.zeros_like(now), *moves])
        starts, stops = every[:, :-1], every[:, 1:]
        may = allowed_runs(pins, starts, stops, stage, count, loads.shape[1] - 1).all(axis=1)
        squares = (((loads[stage, stops] - loads[stage, starts]) @ member) ** 2).sum(axis=1)
        best = np.where(may, squares, inf).argmin()
        if squares[best] > squares[0] * (1 - ROUNDING):
            break
        now = every[best]
    return tuple(map(int, now))


def loads_of(
    problem: PlanningProblem, devices: Sequence[int], size: int, by_memory: bool
) -> NDArray[np.float64]:
    """Seconds (or bytes) of the layers before each cut on one of ``devices``."""
    rows = size / len(devices)
    speeds = [problem.cluster.devices[device].speed for device in devices]
    state = 2 + problem.optimizer_bytes_per_parameter_byte
    loads = [
        state * layer.parameter_bytes + layer.saved_bytes.at(rows)
        if by_memory
        else layer.work_s.at(rows) * len(speeds) / sum(speeds)
        for layer in problem.profile.layers
    ]
    return np.cumsum([0.0, *loads])


def check_pins(problem: PlanningProblem) -> None:
    """Raise `BadInput` for pins that no division of the layers and devices into stages keeps.

    The message names one such pin, or else two that contradict each other, or else all.
    """
    if can_keep(problem, problem.pins):
        return
    most = f" in at most {problem.max_stages} stages" if problem.max_stages else ""
    for count in (1, 2):
        for some in combinations(problem.pins, count):
            if not can_keep(problem, some):
                no_plan = "cannot be kept" if count == 1 else "contradict each other"
                raise BadInput(
                    f"{pins_text(some)} {no_plan} with {len(problem.profile.layers)} layers on "
                    f"{len(problem.cluster.devices)} devices{most}; change or "
                    f"leave out {'it' if count == 1 else 'one'}"
                )
    raise BadInput(f"{pins_text(problem.pins)} contradict one another; leave one out")


def can_keep(problem: PlanningProblem, pins: Sequence[Pin]) -> bool:
    """Return whether some division into stages keeps all pins."""
    sizes = {pin.micro_batch_size for pin in pins if pin.micro_batch_size}
    devices, layers = range(len(problem.cluster.devices)), len(problem.profile.layers)
    counts = [pin.stages for pin in pins if pin.stages] or range(1, min(layers, GROUPS[-1]) + 1)
    most = problem.max_stages or layers
    for stages in counts if len(sizes) < 2 else ():
        placement = [stage % len(devices) for stage in range(stages)]
        for numbered in numbered_pins(pins, stages) if stages <= most else ():
            weights = [1.0] * min(stages, len(devices))
            sets = device_sets(problem, numbered, placement, weights)
            if sets and cuts_that_keep(problem, numbered, sets, 1):
                return True
    return False
