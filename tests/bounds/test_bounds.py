"""Lower bounds by hand; that no plan beats them is in test_bounds_hold."""

from dataclasses import replace

import pytest

from penstock.bounds.lower_bound import gap, lower_bound, lower_bound_s, plan_bound_s
from penstock.bounds.plans import relaxed_plans
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

MEGABYTE = 1_000_000


def problem(
    cost: Affine, devices: int, batch: int, sizes: tuple[int, ...], cores: int = 0
) -> PlanningProblem:
    layer = LayerCost("only", cost, Affine(), Affine())
    host = Host("h", (Device("d", 1e9),) * devices, 1e9, full_speed_devices=cores)
    profile = ModelProfile("one layer", (layer,), batch_size=8)
    return PlanningProblem(profile, Cluster("c", (host,)), batch, sizes)


def test_work_is_shared_by_all_devices():
    assert lower_bound_s(problem(Affine(0.0, 1.0), devices=4, batch=32, sizes=(8,))) == 8.0


def test_devices_that_share_cores_count_as_the_cores():
    shared = problem(Affine(0.0, 1.0), devices=4, batch=32, sizes=(8,), cores=2)
    assert lower_bound_s(shared) == 16.0


def test_a_micro_batch_is_cut_into_no_more_slices_than_it_has_samples():
    assert lower_bound_s(problem(Affine(0.0, 1.0), devices=4, batch=32, sizes=(2,))) == 16.0


def test_fixed_costs_are_paid_for_every_micro_batch():
    assert lower_bound_s(problem(Affine(2.0, 0.0), devices=1, batch=32, sizes=(8, 4))) == 8.0


def test_a_stage_waits_for_the_first_micro_batch_to_come_down_and_the_last_to_go_up():
    layers = tuple(LayerCost(n, Affine(0.0, 1.0), Affine(0.0, 2.0), Affine()) for n in "ab")
    host = Host("h", (Device("d", 1e9),) * 3, 1e9)
    asked = PlanningProblem(ModelProfile("two", layers), Cluster("c", (host,)), 8, (2,))
    first = Stage(range(0, 1), (0, 1), (1, 1))
    plan = Plan((first, Stage(range(1, 2), (2,), (2,))), 4, 2, "1f1b")
    assert plan_bound_s(asked, plan) == (1 + 2) + 4 * 2 * (1 + 2)
    assert make_score(asked)(plan) == plan_bound_s(asked, plan)


def test_the_all_reduce_of_an_earlier_stage_waits_for_the_drain():
    cost = Affine(0.0, 1.0)
    sizes = (20 * MEGABYTE, 0)
    layers = tuple(LayerCost(f"{size}", cost, cost, cost, size) for size in sizes)
    host = Host("h", (Device("d", 1e9),) * 3, 10.0 * MEGABYTE)
    asked = PlanningProblem(ModelProfile("two", layers), Cluster("c", (host,)), 8, (2,))
    stages = (Stage(range(0, 1), (0, 1), (1, 1)), Stage(range(1, 2), (2,), (2,)))
    plan = Plan(stages, 4, 2, "1f1b")
    # Fill, all micro-batches on the last stage, then a backward and a ring of two over 20 MB.
    seconds = 1 + 4 * 2 * 3 + 2 + 2
    assert plan_bound_s(asked, plan) == pytest.approx(seconds)
    assert make_score(asked)(plan) == pytest.approx(seconds)


def test_gap_is_relative_to_the_bound():
    assert gap(3.0, 2.0) == pytest.approx(0.5)
    assert gap(1.0, 0.0) == float("inf")


def chain(
    parameters: int, message: float, rate: float, *, memory: float = 1e15, sizes: tuple[int, ...]
) -> PlanningProblem:
    """Eight equal layers of 1 s forward and 2 s backward a sample on four hosts of one device."""
    cost = Affine(per_sample=1.0)
    layer = LayerCost("block", cost, cost, cost, parameters, saved_bytes=Affine(per_sample=1e6))
    size = Affine(per_sample=message)
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(7))
    hosts = tuple(Host(f"h{i}", (Device("d", memory),), 1e9, rate) for i in range(4))
    profile = ModelProfile("chain", (layer,) * 8, edges)
    return PlanningProblem(profile, Cluster("four", hosts), 16, sizes)


def least_gap(asked: PlanningProblem) -> float:
    score = make_score(asked)
    return gap(min(map(score, relaxed_plans(asked))), lower_bound_s(asked))


def test_fill_and_drain_with_their_messages_are_counted_to_the_end():
    asked = chain(10**12, 0.5 * MEGABYTE, MEGABYTE, sizes=(1,))
    bound = lower_bound(asked)
    # 16 micro-batches of 6 s after three stages down and up, and their six messages.
    assert bound.seconds == pytest.approx(16 * 6 + 3 * (6 + 2 * 0.5), rel=1e-3)
    assert "compute for 16 micro-batches of 1 between fill and drain" in bound.argument
    assert least_gap(asked) < 1e-3


def test_an_all_reduce_that_nothing_hides_binds():
    asked = chain(20 * MEGABYTE, 1e12, MEGABYTE * 10.0, sizes=(16,))
    bound = lower_bound(asked)
    assert "the all-reduce and step" in bound.argument and "0.01 GB/s" in bound.argument
    assert least_gap(asked) < 1e-3


def test_layers_that_fit_no_device_are_an_infinite_bound():
    asked = chain(0, 1.0, 1e9, memory=1e5, sizes=(1,))
    assert lower_bound_s(asked) == float("inf")
    assert "memory" in lower_bound(asked).argument


def test_memory_for_one_micro_batch_binds():
    asked = chain(10**12, 1.0, 1e12, memory=8e12 + 2.5e6, sizes=(1,))
    roomy = chain(10**12, 1.0, 1e12, sizes=(1,))
    tight = replace(asked, recompute="off")
    assert lower_bound_s(tight) > 1.5 * lower_bound_s(replace(roomy, recompute="off"))
    assert "memory" in lower_bound(tight).argument


def test_schedules_without_a_flush_leave_only_the_work():
    asked = chain(10**12, 0.5 * MEGABYTE, MEGABYTE, sizes=(1,))
    assert lower_bound(replace(asked, schedules=("2bw",))).argument.startswith("all work")


def test_on_separate_links_a_device_receives_from_several_at_once() -> None:
    layer = LayerCost("layer", Affine(), Affine(), Affine())
    edges = (Edge(0, 1, "tensor", Affine(0.0, 100.0), Affine()),)
    profile = ModelProfile("two", (layer, layer), edges)
    host = Host("host", (Device("device", 1e9),) * 3, link_bytes_per_s=100.0, separate_links=True)
    problem = PlanningProblem(profile, Cluster("three", (host,)), 4, (4,))
    plan = Plan((Stage(range(1), (0, 1), (2, 2)), Stage(range(1, 2), (2,), (4,))), 1, 4, "1f1b")
    # Two messages of two rows, side by side.
    assert make_score(problem)(plan) == pytest.approx(2.0)
    assert plan_bound_s(problem, plan) <= 2.0


def test_until_the_first_gradient_a_device_has_only_the_forwards_that_reach_it() -> None:
    def layer(forward_s: float, backward_s: float) -> LayerCost:
        whole = Affine(per_sample=backward_s)
        return LayerCost("layer", Affine(per_sample=forward_s), whole, Affine(), 10**12)

    layers = (layer(4.0, 1.0), layer(1.0, 5.0), layer(1.0, 1.0))
    edges = tuple(Edge(i, i + 1, f"tensor{i}", Affine(0.0, 1.0), Affine(0.0, 1.0)) for i in (0, 1))
    hosts = tuple(Host(f"h{i}", (Device("d", 4e12),), 1e12, 1.0) for i in range(3))
    profile = ModelProfile("slow start", layers, edges)
    asked = PlanningProblem(profile, Cluster("three", hosts), 8, (1,))
    # Forwards reach the middle one every 4 s, its first gradient 1 + 2 + 1 s after its first
    # forward; what is left then follows, with a message and the first one's backward at the end.
    forwards = 1 + (1 + 2 + 1) / 4
    seconds = (4 + 1) + 1 + (1 + 2 + 1) + 8 * 6 - forwards * 1 + (1 + 1)
    assert lower_bound_s(asked) == pytest.approx(seconds, rel=1e-3)
    assert least_gap(asked) >= 0


def apart(*sizes: tuple[int, int, float, float], batch: int, layers: int) -> PlanningProblem:
    """Layers of 1 s forward and backward, each on a device of its own, with tensors between them.

    Tensors: maker, reader, seconds of the activation and of its gradient.
    """
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(), 10**12)
    edges = tuple(
        Edge(i, j, f"tensor{i}", Affine(0.0, down), Affine(0.0, up)) for i, j, down, up in sizes
    )
    hosts = tuple(Host(f"h{i}", (Device("d", 4e12),), 1.0, 1.0) for i in range(layers))
    profile = ModelProfile("apart", (layer,) * layers, edges)
    return PlanningProblem(profile, Cluster("hosts", hosts), batch, (1,))


def test_gradients_come_in_after_the_first_micro_batch_has_been_down_and_back() -> None:
    asked = apart((0, 1, 0.5, 10.0), batch=4, layers=2)
    # Forward, message, forward, backward; then four gradients, and the last backward.
    assert lower_bound_s(asked) == pytest.approx(1 + 0.5 + 1 + 1 + 4 * 10 + 1, rel=1e-3)
    assert "take in the gradients of 4 micro-batches" in lower_bound(asked).argument
    assert least_gap(asked) < 1e-3


def test_the_last_activation_to_leave_still_goes_down_and_back() -> None:
    asked = apart((0, 1, 10.0, 0.5), batch=4, layers=2)
    assert lower_bound_s(asked) == pytest.approx(1 + 4 * 10 + 1 + 1 + 0.5 + 1, rel=1e-3)
    argument = lower_bound(asked).argument
    assert "activations of 4 micro-batches of 1; the last then go down and back" in argument
    assert least_gap(asked) < 1e-3


def test_a_tensor_that_many_stages_read_is_sent_to_all_before_the_last_can_work() -> None:
    asked = apart(*((0, reader, 5.0, 0.0) for reader in (1, 2, 3)), batch=2, layers=4)
    # Six messages of one engine, then the last stage's forward, and four backwards.
    assert lower_bound_s(asked) == pytest.approx(1 + 2 * 3 * 5 + 1 + 4, rel=1e-3)
    assert least_gap(asked) < 1e-3


def test_with_memory_for_few_the_last_forward_waits_for_others_to_come_back() -> None:
    # Two micro-batches fit at the first stage; the second ends with a step of 100 s.
    first = LayerCost("first", Affine(1.0), Affine(9.0), Affine(), 0, saved_bytes=Affine(2e12))
    last = LayerCost("last", Affine(1.0), Affine(1.0), Affine(), 10**12)
    edge = Edge(0, 1, "tensor", Affine(0.0, 1.0), Affine(0.0, 1.0))
    hosts = tuple(Host(f"h{i}", (Device("d", 5e12),), 1e12, 1e12) for i in range(2))
    profile = ModelProfile("two", (first, last), (edge,), step_s_per_byte=1e-10)
    asked = PlanningProblem(profile, Cluster("two", hosts), 4, (1,), recompute="off")
    unsaved = (replace(first, saved_bytes=Affine()), last)
    lean = replace(asked, profile=replace(profile, layers=unsaved))
    assert lower_bound_s(lean) == pytest.approx(1 + 4 * 2 + 100, rel=1e-3)
    assert lower_bound_s(asked) == pytest.approx(4 * 1 + 2 * 9 + 1 + 1 + 100, rel=1e-3)
    assert "too few of 4 micro-batches of 1 in flight before its last forward" in (
        lower_bound(asked).argument
    )
    # The first backward has to wait for its gradient, which the bound does not see.
    assert 0 <= least_gap(asked) < 2 / 124
