"""Messages in order: one communicator a device, which takes them in the planned order."""

from dataclasses import replace

import pytest
import torch
from reproduction.balanced_stages import balanced_stages
from runtime.matrix_plans import SYNCHRONOUS, Case, layouts

from penstock.capture.contract import TensorSpec
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.planners.problem import planning_problem
from penstock.planners.spp.bound import spp_bound_s
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    Message,
    messages_between_actions,
    messages_of_rank,
)
from penstock.simulate.simulation import Prediction, simulate_plan

LAYERS = 12


def played_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[float, float]:
    """Seconds of an iteration as messages are ready, and in order."""
    in_order = replace(cluster, messages_in_order=True)
    ready_s, in_order_s = (
        simulate_plan(plan, profile, one).iteration_s for one in (cluster, in_order)
    )
    return ready_s, in_order_s


def test_a_receive_planned_before_a_send_holds_it_up() -> None:
    """Stage 0 takes 10 s forward, all else 1 s, a message too.

    Planned are F0 and F1 to device 1, then F0 from there: it leaves at 21, when F1 has come, and
    not at 12. With it device 2 has all its work before 26 and not 25, and the message with B1 finds
    device 1 busy with B0's until 27. The last one leaves at 29, and device 0 ends at 31, not 29.
    """
    plan, profile, cluster = balanced_stages("1f1b", 3, 2, backward_s=1.0, transfer_s=1.0)
    slow = replace(profile.layers[0], forward_s=Affine(10.0))
    profile = replace(profile, layers=(slow, *profile.layers[1:]))
    assert played_s(plan, profile, cluster) == (29.0, 31.0)


def test_a_device_sends_and_receives_one_message_at_a_time() -> None:
    """Two stages, forwards of 1 s, backwards of 2 s, messages of 4 s.

    B0 is ready at 8, while F1 passes until 9. On engines of its own it would pass from 8 to 12; in
    order it passes from 9 to 13 and B1 from 13 to 17, and the last backward ends at 19, not 18.
    """
    assert played_s(*balanced_stages("1f1b", 2, 2, transfer_s=4.0)) == (18.0, 19.0)


def test_messages_that_never_meet_go_as_before() -> None:
    assert played_s(*balanced_stages("gpipe", 2, 8, transfer_s=0.25)) == (27.5, 27.5)


def profile_of(plan: Plan) -> ModelProfile:
    """A layer for each of the plan's, a tensor with a gradient after each."""
    layer = LayerCost("layer", Affine(1.0, 0.1), Affine(0.7, 0.1), Affine(0.5, 0.1))
    size = Affine(0.0, 0.37)
    edges = (Edge(i, i + 1, f"tensor{i}", size, size) for i in range(LAYERS - 1))
    return ModelProfile("model", (layer,) * LAYERS, tuple(edges))


def cluster_for(plan: Plan) -> Cluster:
    """Unequal devices on one host."""
    speeds = (1.0, 0.6, 1.7, 1.1, 0.8, 1.3, 0.9, 1.2)
    devices = (Device("d", 1e15, speed) for speed in speeds[: len(plan.devices)])
    return Cluster("unequal", (Host("h", tuple(devices), 1.0, 0.0, 0.01),), (), True)


def carried(prediction: Prediction, device: int) -> list[tuple[str, int, int, int]]:
    """What passes at a device: whether it sends, the micro-batch, the stage there, the peer."""
    return [
        (event.kind, event.micro_batch, event.stage, event.peer)
        for event in sorted(prediction.timeline.events, key=lambda event: event.start_s)
        if event.device == device and event.kind in ("SEND", "RECV")
    ]


def issued(plan: Plan, device: int) -> list[tuple[str, int, int, int]]:
    """The same, as the runtime plans what a rank issues."""
    hidden = TensorSpec("hidden", (plan.micro_batch_size, 3), torch.float32, 0, requires_grad=True)
    boundaries = [BoundaryTensors(s, s + 1, (hidden,)) for s in range(len(plan.stages) - 1)]
    cut, schedule = cut_batch(plan, plan.global_batch), order_of(plan)
    passed = messages_between_actions(plan, boundaries, schedule, cut)
    planned = messages_of_rank(device, schedule, plan.shape(), passed).planned
    messages = (message for message in planned if isinstance(message, Message))
    return [
        ("SEND", one.micro_batch, one.sender_stage, one.receiver)
        if one.sender == device
        else ("RECV", one.micro_batch, one.receiver_stage, one.sender)
        for one in messages
    ]


@pytest.mark.parametrize("schedule", [name for name in SYNCHRONOUS if name != "fbp-as"])
def test_a_device_carries_what_its_rank_issues_in_the_same_order(schedule: str) -> None:
    """Of a play, the messages of each device; of the runtime, those that its rank posts."""
    for style, rounds in layouts(schedule, (1, 2)):
        groups = (1, 2) if style == "mirrored" else (1, 2, 1)
        for turned in (False, True):
            plan = Case(schedule, groups, 4, rounds, style, turned=turned).plan(LAYERS)
            prediction = simulate_plan(plan, profile_of(plan), cluster_for(plan), iterations=2)
            for device in plan.devices:
                expected = issued(plan, device)
                again = [(kind, m + 4, *ends) for kind, m, *ends in expected]
                assert carried(prediction, device) == [*expected, *again], (plan, device)


def test_forwards_beside_backwards_are_refused() -> None:
    plan, profile, cluster = balanced_stages("fbp-as", 2, 4)
    in_order = replace(cluster, messages_in_order=True)
    with pytest.raises(BadInput, match=r"'fbp-as' runs forwards beside backwards.*\"as ready\""):
        simulate_plan(plan, profile, in_order)
    _, _, streaming = balanced_stages("fbp-as", 2, 4, streams=True)
    with pytest.raises(BadInput, match=r"device 'device' has concurrent_passes.* one of them"):
        replace(streaming, messages_in_order=True)


def test_no_bound_of_spp_is_claimed() -> None:
    plan, profile, cluster = balanced_stages("wavefront", 3, 4, transfer_s=0.5)
    problem = planning_problem(profile, cluster, 4, micro_batch_size=1)
    in_order = replace(problem, cluster=replace(problem.cluster, messages_in_order=True))
    assert spp_bound_s(problem, plan) < spp_bound_s(in_order, plan) == float("inf")
