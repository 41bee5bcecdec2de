"""No exact order of the most even plan of a small problem beats the bound for every order.

The exact orders are those of a constraint solver. The plan is the most even of all cuts of the
layers and choices of devices: whole and split backwards, one stage a device or two, round after
round or to and fro.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from reference.every_plan import device_groups
from reference.exact import find_exact

from penstock.bounds.lower_bound import lower_bound_s
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.schedule_costs import with_costs
from penstock.planning.planning_problem import schedules_named
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.shape import placement_of_style
from penstock.simulate.catalogue import workload_of
from penstock.simulate.compiled import play

ROUNDING = 1e-5
"""The solver has thirds to six digits."""

MEGABYTE = 1_000_000


@st.composite
def small_problems(draw: st.DrawFn) -> PlanningProblem:
    """Chains whose layers are alike more often than not, under every schedule of `search`.

    Gradients are dear to add up, or memory is scarce, so that a pipeline is often the answer.
    """
    devices, layers = draw(st.sampled_from([(2, 4), (2, 5), (3, 3), (3, 6)]))
    usual, batch = draw(st.sampled_from([1.0, 2.0])), draw(st.integers(2, 4))
    seconds = st.sampled_from([usual, usual, usual, 0.5, 3.0])
    parts = st.builds(Affine, st.sampled_from([0.0, 0.0, 0.25]), seconds)
    size = Affine(0.0, draw(st.sampled_from([0.0, 1.0, 2.0])) * MEGABYTE)
    costs = tuple(
        LayerCost(
            f"layer{i}",
            draw(parts),
            draw(parts),
            draw(parts),
            draw(st.sampled_from([0, 40, 40])) * MEGABYTE,
            saved_bytes=Affine(0.0, 10.0 * MEGABYTE),
        )
        for i in range(layers)
    )
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(layers - 1))
    memory_bytes = draw(st.sampled_from([1e12, 1e12, 160e6 * layers / devices + 60e6]))
    device = Device("drawn", memory_bytes, draw(st.sampled_from([1.0, 1.0, 0.5])))
    rate = draw(st.sampled_from([10.0, 40.0, 1e6])) * MEGABYTE
    host = Host("host", (device, *(replace(device, speed=1.0),) * (devices - 1)), rate)
    return PlanningProblem(
        ModelProfile("drawn", costs, edges),
        Cluster("drawn", (host,)),
        batch,
        (1,) if draw(st.booleans()) else tuple(n for n in range(1, batch + 1) if batch % n == 0),
        recompute="off",
        schedules=schedules_named("auto", "search"),
    )


def exact_plans(problem: PlanningProblem) -> Iterator[Plan]:
    """Every cut on any devices in any order, with one stage a device group or two."""
    devices, layers = tuple(range(len(problem.cluster.devices))), len(problem.profile.layers)
    for size in problem.micro_batch_sizes:
        for count in range(1, len(devices) + 1):
            for groups in device_groups(devices, count):
                if max(map(len, groups)) <= size:
                    for stages, placement in placements(count, layers):
                        for cuts in combinations(range(1, layers), stages - 1):
                            yield plan_of(problem, size, groups, cuts, placement)


def placements(groups: int, layers: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """How many stages there are, and the group of each."""
    yield groups, placement_of_style("straight", groups, 1)
    if groups > 1 and 2 * groups <= layers:
        yield 2 * groups, placement_of_style("looped", groups, 2)
        yield 2 * groups, placement_of_style("folded", groups, 2)


def plan_of(
    problem: PlanningProblem,
    size: int,
    groups: tuple[tuple[int, ...], ...],
    cuts: tuple[int, ...],
    placement: tuple[int, ...],
) -> Plan:
    """Stages on the groups in the order of the placement, in an exact order for their costs."""
    ends = (0, *cuts, len(problem.profile.layers))
    stages = tuple(
        Stage(range(*run), groups[g], rows_by_speed(problem.cluster, groups[g], size))
        for run, g in zip(pairwise(ends), placement, strict=True)
    )
    return with_costs(problem, Plan(stages, problem.global_batch // size, size, "list"))


def exact_s(problem: PlanningProblem, plan: Plan) -> float:
    """Simulated seconds of the plan in an exact order for its costs; infinite where none fits."""
    try:
        schedule = find_exact(plan.shape(), work_limit=2.0).schedule
    except BadInput:
        return inf
    return play(workload_of(plan, problem.profile, problem.cluster, schedule)).iteration_s


def busiest_s(plan: Plan) -> float:
    """Seconds that the busiest group of devices computes."""
    busy = dict.fromkeys(plan.device_groups, 0.0)
    for stage, cost in zip(plan.stages, plan.costs, strict=True):
        busy[stage.devices] += cost.forward_s + cost.backward_s
    return plan.micro_batches * max(busy.values())


def tried(
    bound_of: Callable[[PlanningProblem], float], examples: int, number: int | None = None
) -> int:
    """How many orders of drawn problems were compared with a bound, which none of them beats.

    Each is an exact order of the plan whose busiest devices compute least.

    With a ``number`` the problems are the same each time.
    """
    compared = 0

    @(seed(number) if number is not None else lambda test: test)
    @settings(max_examples=examples, deadline=None, phases=[Phase.generate])
    @given(problem=small_problems())
    def all_hold(problem: PlanningProblem) -> None:
        nonlocal compared
        plan = min(exact_plans(problem), key=busiest_s, default=None)
        if plan is not None:
            compared += 1
            assert exact_s(problem, plan) >= bound_of(problem) * (1 - ROUNDING), plan

    all_hold()
    return compared


def test_no_exact_order_beats_the_bound() -> None:
    tried(lower_bound_s, examples=15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_exact_order_beats_the_bound_of_many_problems() -> None:
    assert tried(lower_bound_s, examples=500) >= 400


def test_a_bound_that_promises_too_much_is_found_out() -> None:
    with pytest.raises(AssertionError, match="stages="):
        tried(lambda problem: 1.3 * lower_bound_s(problem), examples=100, number=4)
