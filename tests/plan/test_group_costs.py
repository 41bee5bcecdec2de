"""The cost model of planners in the core, against the plain one, figure by figure."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems

from penstock.core.native import transfer_s
from penstock.costs.stage_costs import (
    device_memory_bytes,
    rows_by_speed,
    stage_seconds,
    transfer,
)
from penstock.costs.tables import whole_chain
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem, ShardingChoice

ROUNDING = 1e-9


def groups_of(problem: PlanningProblem, most: int) -> list[tuple[int, ...]]:
    """All sets of so many devices at most."""
    devices = range(len(problem.cluster.devices))
    return [group for n in range(1, most + 1) for group in combinations(devices, n)]


@settings(max_examples=30, deadline=None)
@given(
    problem=problems(),
    depth=st.integers(1, 4),
    recompute=st.booleans(),
    sharding=st.sampled_from(["off", "optimizer", "parameters"]),
)
def test_a_stage_costs_what_the_plain_model_says(
    problem: PlanningProblem, depth: int, recompute: bool, sharding: ShardingChoice
):
    problem = replace(problem, sharding=sharding)
    size = max(problem.micro_batch_sizes)
    groups = groups_of(problem, size)
    slices = [rows_by_speed(problem.cluster, group, size) for group in groups]
    chain = whole_chain(problem)
    costs = chain.costs(groups, slices)
    for lo, hi in combinations(chain.cuts, 2):
        for number, (group, rows) in enumerate(zip(groups, slices, strict=True)):
            stage = Stage(range(lo, hi), group, rows, recompute)
            plain = stage_seconds(problem, stage)
            place = (number, lo, hi)
            found = [
                costs.forward_s(*place),
                costs.backward_s(*place),
                costs.micro_batch_s(*place),
                costs.after_s(*place),
            ]
            expected = [plain.forward_s, plain.backward_s, plain.whole_s, plain.after_s]
            assert found == pytest.approx(expected, rel=ROUNDING)
            needed = max(device_memory_bytes(problem, stage, n, depth) for n in rows)
            here = costs.needed_bytes(*place, depth, recompute)
            assert here == pytest.approx(needed, rel=ROUNDING)


@settings(max_examples=30, deadline=None)
@given(problem=problems(), data=st.data())
def test_a_transfer_takes_what_the_plain_model_says(problem: PlanningProblem, data: st.DataObject):
    count, size = len(problem.cluster.devices), max(problem.micro_batch_sizes)
    order = data.draw(st.permutations(range(count)))
    widths = data.draw(st.tuples(*[st.integers(1, count)] * 2))
    groups = [tuple(order[:width][:size]) for width in widths]
    slices = [rows_by_speed(problem.cluster, group, size) for group in groups]
    chain = whole_chain(problem)
    network = chain.network(groups, slices)
    for cut in range(1, chain.layers):
        sender, receiver = (
            Stage(layers, group, rows)
            for layers, group, rows in zip(
                (range(cut), range(cut, chain.layers)), groups, slices, strict=True
            )
        )
        moved = transfer(problem, sender, receiver)
        for one, other, sizes, expected in (
            (0, 1, chain.runs.down, moved[0]),
            (1, 0, chain.runs.up, moved[1]),
        ):
            found = transfer_s(network, one, other, *sizes[:, cut])
            assert found == pytest.approx(expected, rel=ROUNDING)
