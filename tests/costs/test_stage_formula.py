"""The cost model of the core against its formula, on random stages under every option."""

from dataclasses import replace

import pytest
from bound_strategies import bound_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from reference.stage_formula import StageFormula

from penstock.costs.stage_costs import (
    device_memory_bytes,
    rows_by_speed,
    stage_seconds,
    state_bytes,
)
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem

ROUNDING = 1e-12


@settings(max_examples=100, deadline=None)
@given(problem=st.one_of(problems(), bound_problems()), data=st.data())
def test_seconds_and_bytes_are_those_of_the_formula(
    problem: PlanningProblem, data: st.DataObject
) -> None:
    sharding = data.draw(st.sampled_from(["off", "optimizer", "parameters"]))
    if sharding == "parameters":
        problem = replace(problem, profile=replace(problem.profile, shared=()))
    problem = replace(problem, sharding=sharding)
    size, layers = (
        data.draw(st.sampled_from(problem.micro_batch_sizes)),
        len(problem.profile.layers),
    )
    order = data.draw(st.permutations(range(len(problem.cluster.devices))))
    devices = tuple(order[: data.draw(st.integers(1, min(size, len(order))))])
    lo = data.draw(st.integers(0, layers - 1))
    hi = data.draw(st.integers(lo + 1, layers))
    recompute, by_block = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    rows = rows_by_speed(problem.cluster, devices, size)
    stage = Stage(range(lo, hi), devices, rows, recompute, by_block=by_block)
    found, formula = stage_seconds(problem, stage), StageFormula(problem, stage)
    assert (
        found.forward_s,
        found.backward_s,
        found.weight_s,
        found.whole_s,
        found.after_s,
        state_bytes(problem, stage),
        *(device_memory_bytes(problem, stage, n, 3) for n in rows),
    ) == pytest.approx(
        (
            formula.seconds_of(forward=True),
            formula.seconds_of(forward=False),
            formula.weight_s,
            formula.whole_s,
            formula.after_s,
            formula.state_bytes(),
            *(formula.needed_bytes(n, 3) for n in rows),
        ),
        rel=ROUNDING,
    )
