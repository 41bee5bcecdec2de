"""Training over several ranks goes as on one device, and goes on from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from runtime.training_cases import (
    evaluate_and_verify,
    on_two_ranks,
    one_after_another,
    resume_elsewhere,
    train_tied,
)

from penstock.runtime.processes.launch import launch_workers

TRAINED_STEPS = 20


def test_a_process_may_train_several_pipelines_one_after_another() -> None:
    for losses in launch_workers(one_after_another, (4,), workers=2, threads=1):
        assert len(losses) == 4 and len(set(losses)) == 1


def test_tied_weights_clipping_and_schedule_follow_one_device_for_twenty_steps() -> None:
    for rank, wrong in enumerate(launch_workers(train_tied, (TRAINED_STEPS,), workers=4)):
        assert not wrong, f"rank {rank}: {wrong}"


def test_a_checkpoint_continues_the_loss_curve_under_another_plan(tmp_path: Path) -> None:
    for through, resumed in launch_workers(resume_elsewhere, (tmp_path,), workers=4):
        assert resumed == pytest.approx(through, rel=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_evaluation_and_verification_are_right_and_change_nothing() -> None:
    for found in launch_workers(evaluate_and_verify, workers=3):
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["equal"], found["text"]
        assert 0 < found["largest"] < 1e-9
        assert found["unchanged"]
        assert found["start_s"] == pytest.approx(0, abs=1)
        assert {(0, "B", 2), (1, "F", 0), (2, "RECV", 1), (1, "SEND", 0), (0, "REDUCE", -1)} <= set(
            found["events"]
        )


@pytest.fixture(scope="module")
def two_ranks() -> tuple[dict[str, Any], ...]:
    """What `on_two_ranks` gave on each rank."""
    return launch_workers(on_two_ranks, workers=2)


def test_verification_names_the_first_wrong_gradient(two_ranks: tuple[dict[str, Any], ...]) -> None:
    for found in two_ranks:
        assert found["wrong gradient"].startswith("gradient of '3.0.weight' on stage 1 is ")


def test_bad_batches_are_refused_on_every_rank_and_training_goes_on(
    two_ranks: tuple[dict[str, Any], ...],
) -> None:
    for found in two_ranks:
        not_finite, shape, different, after = found["bad batches"]
        assert not_finite.startswith("LossNotFinite: loss is nan at step 1 (learning rate 0.02)")
        assert shape.startswith("BadInput: ") and "5" in shape and "6" in shape
        assert different.startswith("BadInput: rank 1 was given another batch than rank 0")
        assert after == "weights kept: True, then step 1"


def test_a_tied_qwen2_trains_in_bfloat16(two_ranks: tuple[dict[str, Any], ...]) -> None:
    first, second = (found["qwen2"] for found in two_ranks)
    assert first == second
    assert first[-1] < 0.7 * first[0]


def test_seven_rows_in_four_micro_batches_count_once_each(
    two_ranks: tuple[dict[str, Any], ...],
) -> None:
    """Loss, gradients and BatchNorm's buffers; two steps of four make eight updates, not nine."""
    for found in two_ranks:
        result = dict(found["seven rows"])
        assert result.pop("cut") == ["2 rows", "2 rows", "2 rows", "1 rows"]
        assert len(result) == 5
        assert not any(result.values()), result
