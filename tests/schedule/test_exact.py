"""The optimal schedule against all orders, against its bound, and against every other family."""

import os
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import solver_process
from reference.every_order import enumerated_makespan_s
from reference.exact import ExactAnswer, exact, find_exact
from schedule_strategies import STYLES, small_shapes

from penstock.errors import BadInput
from penstock.schedule.action import KIND_CODES
from penstock.schedule.bound import makespan_bound_s
from penstock.schedule.clock import makespan_s
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost, folded
from penstock.schedule.validate import validate
from penstock.schedule.weight_rule import SYNCHRONOUS

ROUNDING = 1e-5
"""Thirds are no decimal numbers; the solver has them to six digits."""

TINY = {
    "straight": {"stages": 2, "micro_batches": 2},
    "folded": {"stages": 4, "micro_batches": 1, "placement": (0, 1, 1, 0)},
    "looped": {"stages": 4, "micro_batches": 1, "placement": (0, 1, 0, 1)},
    "mirrored": {"stages": 2, "micro_batches": 2, "mirrored": True},
    "one group": {"stages": 2, "micro_batches": 1, "placement": (0, 0)},
    "in flight": {"stages": 2, "micro_batches": 2, "in_flight_limit": (2, 1)},
    "memory": {"stages": 2, "micro_batches": 2, "memory_bytes": (1.5, 2.0)},
}

ABORTS = PipelineShape(
    6,
    5,
    placement=folded(3, 2),
    costs=(
        StageCost(1, 42350001, 1, 12100000, saved_bytes=100, kept_bytes=100),
        StageCost(16133294, 121000001, 108900001, 0, saved_bytes=50, kept_bytes=25),
        StageCost(16133294, 54450001, 1, 16133293, saved_bytes=150, kept_bytes=75),
        StageCost(84700001, 18150001, 1, 24200000, saved_bytes=150, kept_bytes=150),
        StageCost(102850001, 16133294, 16133294, 114950000, saved_bytes=50, kept_bytes=50),
        StageCost(18150001, 66550001, 1, 36300000, saved_bytes=50, kept_bytes=50),
    ),
    memory_bytes=(300, 300, 300),
)
"""With cuts, OR-Tools 9.15 aborts its process while it solves this."""

HARD = PipelineShape(
    8,
    8,
    placement=folded(4, 2),
    costs=tuple(StageCost(1 + s % 3, 2, 1.5 + s % 2, 0.25) for s in range(8)),
    memory_bytes=(5.0,) * 4,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", TINY)
def test_no_order_at_all_is_quicker(name: str, split: bool, seed: int) -> None:
    """Every stage and every kind of action takes another time, drawn for each case."""
    random = Random(f"{name} {split} {seed}")
    costs = (StageCost(*(float(random.randint(1, 9)) for _ in range(4)), 1.0, 0.5) for _ in "1234")
    fields = TINY[name]
    stages = fields["stages"]
    assert isinstance(stages, int)
    shape = PipelineShape(**fields, costs=tuple(costs)[:stages])  # pyright: ignore
    answer = find_exact(shape, split=split)
    assert answer.optimal
    assert answer.makespan_s == enumerated_makespan_s(shape, split=split)


@settings(max_examples=8, deadline=None)
@given(shape=small_shapes(most_micro_batches=3), split=st.booleans())
def test_it_is_valid_and_between_its_bounds(shape: PipelineShape, split: bool) -> None:
    answer = find_exact(shape, split=split, work_limit=0.2)
    validate(answer.schedule, shape)
    assert answer.makespan_s == makespan_s(answer.schedule, shape)
    assert makespan_bound_s(shape, split=split) <= answer.makespan_s * (1 + 1e-9)
    assert answer.bound_s <= answer.makespan_s
    unused = KIND_CODES["B" if split else "I"]
    assert all(unused not in order.kinds for order in answer.schedule.orders)


def families_are_no_quicker(shape: PipelineShape, work_limit: float) -> None:
    """Compare every family that takes the shape with what is proven to be the least makespan."""
    answers: dict[bool, ExactAnswer] = {}
    for name, family in FAMILIES.items():
        try:
            schedule = family.make(shape)
            validate(schedule, shape)
        except BadInput:
            continue
        if schedule.concurrent or schedule.weights != SYNCHRONOUS:
            continue
        split = any(KIND_CODES["I"] in order.kinds for order in schedule.orders)
        if split not in answers:
            answers[split] = find_exact(shape, split=split, work_limit=work_limit)
        answer, taken_s = answers[split], makespan_s(schedule, shape)
        assert answer.bound_s <= taken_s * (1 + 1e-9), name
        assert makespan_bound_s(shape, split=split) <= taken_s * (1 + 1e-9), name
        assert answer.makespan_s <= taken_s * (1 + ROUNDING), name


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_no_family_is_quicker(style: PlacementStyle, data: st.DataObject) -> None:
    shape = data.draw(small_shapes(style=style, most_micro_batches=3))
    families_are_no_quicker(shape, work_limit=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_family_is_quicker_on_many_pipelines(style: PlacementStyle, data: st.DataObject) -> None:
    shape = data.draw(small_shapes(style=style, most_micro_batches=5))
    families_are_no_quicker(shape, work_limit=1.0)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("costs", [(1, 1.2, 0.9), (1, 0.6, 0.5)])
def test_it_is_proven_optimal_on_straight_pipelines(
    groups: int, costs: tuple[float, float, float], split: bool
) -> None:
    shape = PipelineShape(
        groups,
        6,
        costs=tuple(StageCost(*costs, transfer_s=0.05 * (s % 3)) for s in range(groups)),
        memory_bytes=(groups,) * groups,
    )
    answer = find_exact(shape, split=split, work_limit=10.0)
    assert answer.optimal


def test_the_start_does_not_change_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PipelineShape(3, 4, costs=(StageCost(2, 1, 3), StageCost(1, 2, 1), StageCost(1, 3, 2)))
    informed = find_exact(shape)
    monkeypatch.setattr("penstock.schedule.registry.FAMILIES", {})
    from_scratch = find_exact(shape)
    assert informed.optimal and from_scratch.optimal
    assert informed.makespan_s == from_scratch.makespan_s


@settings(max_examples=5, deadline=None)
@given(data=st.data(), split=st.booleans())
def test_recomputing_families_in_order_are_no_quicker(data: st.DataObject, split: bool) -> None:
    plain = data.draw(small_shapes(style="straight", limited=False))
    flags = data.draw(st.lists(st.booleans(), min_size=plain.stages, max_size=plain.stages))
    shape = PipelineShape(
        plain.stages, plain.micro_batches, recompute=tuple(flags), costs=plain.costs
    )
    answer = find_exact(shape, split=split, work_limit=0.2)
    validate(answer.schedule, shape)
    for name in ("1f1b", "gpipe", "early-backward"):
        assert answer.bound_s <= makespan_s(FAMILIES[name].make(shape), shape) * (1 + 1e-9)


def test_a_search_that_is_cut_short_gives_the_best_so_far_with_its_bound() -> None:
    answer = find_exact(HARD, work_limit=0.01)
    validate(answer.schedule, HARD)
    assert not answer.optimal
    assert makespan_bound_s(HARD) * (1 - 1e-9) <= answer.bound_s < answer.makespan_s
    timed = find_exact(HARD, time_limit_s=0.05)
    assert timed.bound_s <= timed.makespan_s


def test_an_abort_of_the_solver_is_survived() -> None:
    answer = find_exact(ABORTS, split=False, work_limit=0.02)
    validate(answer.schedule, ABORTS)
    assert makespan_bound_s(ABORTS, split=False) <= answer.bound_s <= answer.makespan_s


def test_without_any_answer_the_best_known_schedule_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abort = [sys.executable, "-c", "import os; input(); os.abort()"]
    solver_process.end_child(solver_process.started_child(os.getpid()))
    monkeypatch.setattr(solver_process, "COMMAND", abort)
    answer = find_exact(HARD, work_limit=0.01)
    validate(answer.schedule, HARD)
    assert makespan_bound_s(HARD) * (1 - 1e-9) <= answer.bound_s < answer.makespan_s


def test_a_solver_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    solver_process.end_child(solver_process.started_child(os.getpid()))
    monkeypatch.setattr(solver_process, "COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=r"exit code 3; try: .*SystemExit"):
        find_exact(HARD, work_limit=0.01)


def test_it_gives_the_same_schedule_every_time() -> None:
    shape = PipelineShape(4, 5, costs=tuple(StageCost(1 + s % 2, 1.25, 1.5) for s in range(4)))
    assert exact(shape) == exact(shape)
    assert find_exact(HARD, work_limit=0.1) == find_exact(HARD, work_limit=0.1)


def test_memory_that_holds_no_micro_batch_is_refused() -> None:
    shape = PipelineShape(4, 2, placement=folded(2, 2), memory_bytes=(2.0, 1.5))
    with pytest.raises(BadInput, match=r"saves 2 bytes.*group 1.*room for 1\.5.*recompute"):
        exact(shape)
