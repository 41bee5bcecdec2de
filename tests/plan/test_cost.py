"""What planners assume of schedules and problems."""

import pytest

from penstock.cluster.toml_file import CLUSTERS, local_cluster
from penstock.costs.stage_costs import depth_function
from penstock.costs.tables import crowding
from penstock.errors import BadInput
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import in_flight_peaks

PROFILE = ModelProfile("two", (LayerCost("a", Affine(), Affine(), Affine()),) * 2)


@pytest.mark.parametrize("schedule", [n for n, made in FAMILIES.items() if made.is_planned])
def test_assumed_depths_are_those_of_the_schedule(schedule: str):
    for stages in range(1, 5):
        for micro_batches in range(1, 7):
            shape = PipelineShape(stages, micro_batches)
            peaks = in_flight_peaks(FAMILIES[schedule].make(shape), shape)
            depth = depth_function(schedule)
            assert peaks == tuple(depth(stages - s, micro_batches) for s in range(stages))


def test_an_unknown_schedule_is_answered_with_those_planners_know():
    with pytest.raises(BadInput, match=r"'zigzag' .* gpipe, 1f1b"):
        depth_function("zigzag")


def test_workers_beyond_the_cores_slow_one_another_down():
    cluster = local_cluster(4, cores=2, memory_bytes=8e9)
    assert crowding(cluster, (0, 1)) == 1.0
    assert crowding(cluster, (0, 1, 2)) == 1.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_stages": 3}, ["max_stages is 3", "2 layers", "1 to 2"]),
        ({"global_batch": 7, "micro_batch_sizes": (2,)}, ["size 2", "batch 7", "[1, 7]"]),
        ({"micro_batch_sizes": ()}, ["[]", "at least one"]),
        ({"schedules": ()}, ["no schedule", "1f1b"]),
        ({"optimizer_bytes_per_parameter_byte": -1.0}, ["-1.0", ">= 0"]),
    ],
)
def test_impossible_questions_are_refused(changes: dict[str, object], words: list[str]):
    question = {"global_batch": 8, "micro_batch_sizes": (2,), **changes}
    with pytest.raises(BadInput) as caught:
        PlanningProblem(PROFILE, CLUSTERS["dapple-b"](), **question)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_cost_that_turns_negative_beyond_what_was_measured_is_refused():
    falling = LayerCost("falling", Affine(4.0, -1.0), Affine(), Affine())
    profile = ModelProfile("p", (falling,), batch_size=4)
    with pytest.raises(BadInput, match=r"'falling'.* 8 samples .*-4.0.*smaller micro-batches"):
        PlanningProblem(profile, CLUSTERS["dapple-b"](), 8, (8,))
