"""Stages whose devices take whole micro-batches in turn (PipeDream's 1F1B-RR)."""

from dataclasses import replace

import pytest
from reference import plain_simulator as plain
from reference.plain_workload import PlainWorkload
from reference.same_spans import assert_engine_plays

from penstock.advice.assessment import Baselines, assess_plan
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.lower_bound import lower_bound_s
from penstock.errors import BadInput
from penstock.plan.json_file import plan_from_json, plan_to_json
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.catalogue import workload_of
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan

LINK_BYTES_PER_S = 1e9


def inputs(
    replicas: tuple[int, ...],
    micro_batches: int,
    *,
    in_turn: bool,
    rows: int = 2,
    transfer_s: float = 0.0,
    parameter_bytes: int = 0,
) -> tuple[Plan, ModelProfile, Cluster]:
    """Stages of one layer; a row takes 1 s forward and 2 s back on each device there is."""
    size = Affine(0.0, transfer_s * LINK_BYTES_PER_S)
    layers = tuple(
        LayerCost(
            f"l{s}",
            Affine(0.0, count / rows),
            Affine(0.0, count / rows),
            Affine(0.0, count / rows),
            parameter_bytes,
            saved_bytes=Affine(0.0, 1.0),
        )
        for s, count in enumerate(replicas)
    )
    edges = tuple(Edge(s, s + 1, f"t{s}", size, size) for s in range(len(replicas) - 1))
    cluster = Cluster("c", (Host("h", (Device("d", 1e15),) * sum(replicas), LINK_BYTES_PER_S),))
    stages: list[Stage] = []
    for s, count in enumerate(replicas):
        first = sum(replicas[:s])
        turns = in_turn and count > 1
        slices = (rows,) * count if turns else (rows // count,) * count
        devices = tuple(range(first, first + count))
        stages.append(Stage(range(s, s + 1), devices, slices, in_turn=turns))
    plan = Plan(tuple(stages), micro_batches, rows, "gpipe")
    return plan, ModelProfile("m", layers, edges), cluster


def played(*args: object, **kwargs: object) -> Prediction:
    return simulate_plan(*inputs(*args, **kwargs))  # type: ignore[arg-type]


def test_each_device_works_on_every_second_micro_batch() -> None:
    events = played((2, 1), 5, in_turn=True).timeline.events
    worked = {
        device: [e.micro_batch for e in events if e.kind == "F" and e.device == device]
        for device in range(3)
    }
    assert worked == {0: [0, 2, 4], 1: [1, 3], 2: [0, 1, 2, 3, 4]}


@pytest.mark.parametrize("micro_batches", [2, 4, 8, 32])
def test_whole_micro_batches_have_the_tail_that_split_ones_have_not(micro_batches: int) -> None:
    """DAPPLE's argument for splitting. Every stage has one forward of 1 s for each micro-batch if
    it is split over two devices, and a device one of 2 s for every second one if not. The pace is
    the same; a micro-batch takes twice as long through each stage, there and back."""
    split_s = played((2, 2), micro_batches, in_turn=False).iteration_s
    whole_s = played((2, 2), micro_batches, in_turn=True).iteration_s
    assert split_s == pytest.approx(3.0 * (micro_batches + 1))
    assert whole_s == pytest.approx(6.0 * (micro_batches / 2 + 1))
    assert whole_s - split_s == pytest.approx(3.0)


def test_a_single_sample_can_be_replicated() -> None:
    """Two devices share a stage of micro-batches of one sample, which cannot be split."""
    alone = simulate_plan(*inputs((1,), 8, in_turn=False, rows=1)).iteration_s
    shared = inputs((2,), 8, in_turn=True, rows=1)
    # The layer takes twice as long there, as if it were as much work for two devices.
    assert simulate_plan(*shared).iteration_s == pytest.approx(alone)


def test_memory_is_that_of_the_own_micro_batches() -> None:
    assert played((2, 1), 8, in_turn=True).peak_memory_bytes == (8.0, 8.0, 16.0)


def test_gradients_of_all_devices_are_summed() -> None:
    without_s = played((2, 1), 4, in_turn=True).iteration_s
    parameters = {"parameter_bytes": 100_000_000}
    summed = played((2, 1), 4, in_turn=True, **parameters)
    reduced = {e.device for e in summed.timeline.events if e.kind == "REDUCE"}
    assert reduced == {0, 1}
    assert summed.iteration_s == pytest.approx(without_s + 0.1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "early-backward", "zb-h1"])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 3), (2, 3), (2, 2), (3, 1, 2)])
@pytest.mark.parametrize("iterations", [1, 2])
def test_both_engines_and_the_score_agree(
    schedule: str, replicas: tuple[int, ...], iterations: int
) -> None:
    plan, profile, cluster = inputs(
        replicas, 7, in_turn=True, transfer_s=0.3, parameter_bytes=30_000_000
    )
    plan = replace(plan, schedule=schedule)
    order = order_of(plan)
    workload = workload_of(plan, profile, cluster, order, iterations=iterations)
    trace = plain.play(PlainWorkload.of(workload))
    assert_engine_plays(workload, trace)
    if iterations == 1:
        problem = PlanningProblem(profile, cluster, plan.global_batch, (plan.micro_batch_size,))
        assert make_score(problem)(plan) == pytest.approx(trace.iteration_s)


def test_no_bound_of_split_micro_batches_is_claimed() -> None:
    """A layer of one sample cannot be split; in turn it is done on both devices at once."""
    plan, profile, cluster = inputs((2,), 8, in_turn=True, rows=1)
    problem = PlanningProblem(profile, cluster, 8, (1,))
    assert simulate_plan(plan, profile, cluster).iteration_s < lower_bound_s(problem)
    planned = assess_plan(plan, problem, Baselines(1.0))
    assert planned.lower_bound_s == 0.0 and planned.to_json(0.0)["gap"] is None
    assert planned.to_json(0.0)["spp_bound_s"] is None


def test_a_plan_file_keeps_it() -> None:
    plan, _, _ = inputs((2, 1), 4, in_turn=True)
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slices": (1, 1)}, "each must be a whole micro-batch of 2 samples"),
        ({"sharding": "optimizer"}, "divide nothing"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    plan, _, _ = inputs((2, 1), 4, in_turn=True)
    with pytest.raises(BadInput, match=words):
        replace(plan, stages=(replace(plan.stages[0], **change), plan.stages[1]))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="at most as many devices"):
        replace(plan, micro_batches=1)
    with pytest.raises(BadInput, match="no other stage, nor a mirrored one"):
        replace(plan, schedule="chimera")


def test_devices_that_take_micro_batches_in_turn_hold_one_stage() -> None:
    first, turns = Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1, 2), (1, 1), in_turn=True)
    assert Plan((first, turns, Stage(range(2, 3), (3,), (1,))), 4, 1, "1f1b").devices == (
        0,
        1,
        2,
        3,
    )
    again = Stage(range(2, 3), (1, 2), (1, 1), in_turn=True)
    for last, micro_batches, said in (
        (again, 4, "its devices can hold no other stage"),
        (Stage(range(2, 3), (3, 4), (1, 2), in_turn=True), 4, "has slices .1, 2."),
        (
            Stage(range(2, 3), (3, 4, 5), (1, 1, 1), in_turn=True),
            2,
            "on 3 devices, and there are 2",
        ),
    ):
        with pytest.raises(BadInput, match=said):
            Plan((first, turns, last), micro_batches, 1, "1f1b")
