"""Training over several ranks goes as on one device."""

from runtime.training_cases import (
    bad_batches,
    one_after_another,
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


def test_bad_batches_are_refused_on_every_rank_and_training_goes_on() -> None:
    for not_finite, shape, different, after in launch_workers(bad_batches, workers=2):
        assert not_finite.startswith("LossNotFinite: loss is nan at step 1 (learning rate 0.02)")
        assert shape.startswith("BadInput: ") and "5" in shape and "6" in shape
        assert different.startswith("BadInput: rank 1 was given another batch than rank 0")
        assert after == "weights kept: True, then step 1"
