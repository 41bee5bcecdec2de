"""The costs for which schedules adapt their order: reads of off-chip memory, streamed messages."""

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.schedule_costs import with_costs
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.shape import StageCost


def costs_on(device: Device, *, message_bytes: float = 0.0) -> StageCost:
    """The costs of the first of two stages: F = 1 s, I = 1.5 s, W = 0.5 s, and 8 parameters."""
    layer = LayerCost("l", Affine(1.0), Affine(1.5), Affine(0.5), parameter_bytes=8)
    size = Affine(message_bytes)
    profile = ModelProfile("m", (layer, layer), (Edge(0, 1, "t", size, size),))
    cluster = Cluster("c", (Host("h", (device, device), link_bytes_per_s=1.0),))
    plan = Plan((Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))), 2, 1, "list")
    return with_costs(PlanningProblem(profile, cluster, 2, (1,)), plan).costs[0]


@pytest.mark.parametrize(("rate", "backward_s"), [(8.0, 2.0), (4.0, 2.0), (2.0, 4.0)])
def test_reads_of_off_chip_memory_make_both_halves_of_a_backward_longer(
    rate: float, backward_s: float
) -> None:
    cost = costs_on(Device("board", 1e9, on_chip_bytes=4.0, off_chip_bytes_per_s=rate))
    assert cost.forward_s == max(1.0, 8 / rate)
    assert cost.input_backward_s == pytest.approx(0.75 * backward_s)
    assert cost.weight_backward_s == pytest.approx(0.25 * backward_s)


@pytest.mark.parametrize(
    ("message_s", "streamed_s"), [(0.5, 0.0), (1.5, (0.5 + 0.0) / 2), (3.0, (2.0 + 1.0) / 2)]
)
def test_of_a_streamed_message_counts_what_is_left_after_its_pass(
    message_s: float, streamed_s: float
) -> None:
    """Down after a forward of 1 s, up after a backward of 2 s; the mean of both counts."""
    streaming = Device("board", 1e9, concurrent_passes=True)
    assert costs_on(Device("gpu", 1e9), message_bytes=message_s).transfer_s == message_s
    assert costs_on(streaming, message_bytes=message_s).transfer_s == streamed_s
