"""Training over several ranks goes as on one device."""

from runtime.training_cases import bad_batches

from penstock.runtime.processes.launch import launch_workers


def test_bad_batches_are_refused_on_every_rank_and_training_goes_on() -> None:
    for not_finite, shape, different, after in launch_workers(bad_batches, workers=2):
        assert not_finite.startswith("LossNotFinite: loss is nan at step 1 (learning rate 0.02)")
        assert shape.startswith("BadInput: ") and "5" in shape and "6" in shape
        assert different.startswith("BadInput: rank 1 was given another batch than rank 0")
        assert after == "weights kept: True, then step 1"
