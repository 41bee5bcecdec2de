"""The price of pipelines that meet seldom: a pipeline alone, and a share of an exchange."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.planners.problem import planning_problem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.local_sgd import meeting_price
from penstock.simulate.score import predict_plan

PORT, MODEL_BYTES = 1e6, (3_000_000, 1_000_000)
LAYERS = tuple(
    LayerCost("", Affine(0, 0.1), Affine(0, 0.2), Affine(), size) for size in MODEL_BYTES
)
DEVICE = Device("one", 1e12)


def hosts(*devices: int) -> Cluster:
    """Hosts of these numbers of devices, with slow ports and fast links."""
    made = tuple(
        Host(f"h{n}", (DEVICE,) * count, link_bytes_per_s=1e12, port_bytes_per_s=PORT)
        for n, count in enumerate(devices)
    )
    return Cluster("hosts", made)


def plan(first: tuple[int, ...], second: tuple[int, ...]) -> Plan:
    stages = Stage(range(1), first, (1, 1)), Stage(range(1, 2), second, (1, 1))
    return Plan(stages, 4, 2, "1f1b")


def test_a_step_is_that_of_a_pipeline_alone_and_its_share_of_a_meeting() -> None:
    # A pipeline on each host, so a meeting sends the whole model through each port.
    problem = planning_problem(ModelProfile("two", LAYERS), hosts(2, 2), 8)
    both = plan((0, 2), (1, 3))
    found = meeting_price(problem, both, 10)
    one = Plan((Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))), 4, 1, "1f1b")
    # The first stage fills the pipeline and drains it, and the last is always busy.
    assert found.alone_s == pytest.approx(0.1 + 4 * 0.3 + 0.2, rel=1e-3)
    assert found.alone_s == predict_plan(problem, one).iteration_s
    assert found.meeting_s == pytest.approx(sum(MODEL_BYTES) / PORT)
    assert found.step_s == pytest.approx(found.alone_s + found.meeting_s / 10)
    summed_s = predict_plan(problem, both).iteration_s
    assert found.alone_s < summed_s <= found.alone_s + found.meeting_s + 1e-9


def test_stages_that_share_no_port_meet_side_by_side() -> None:
    problem = planning_problem(ModelProfile("two", LAYERS), hosts(1, 1, 1, 1), 8)
    found = meeting_price(problem, plan((0, 1), (2, 3)), 1)
    assert found.meeting_s == pytest.approx(max(MODEL_BYTES) / PORT)


def test_a_plan_that_is_no_pipelines_side_by_side_has_no_price() -> None:
    problem = planning_problem(ModelProfile("two", LAYERS), hosts(2, 2), 8)
    both = plan((0, 2), (1, 3))
    uneven = replace(
        both, stages=(both.stages[0], replace(both.stages[1], devices=(1,), slices=(2,)))
    )
    with pytest.raises(BadInput, match="not several pipelines side by side"):
        meeting_price(problem, uneven, 10)
