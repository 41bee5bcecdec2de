"""NaN and infinity are traced to layer and micro-batch, and left out where that is asked for."""

import pytest
import torch
from runtime.update.bad_number_cases import (
    BACKWARD,
    FORWARD,
    BadCase,
    all_left_out,
    messages,
    never_ending,
    sums_of_replicas,
)

from penstock.errors import BadInput, LossNotFinite
from penstock.runtime.processes.launch import launch_workers

IN_FORWARD = (
    BadCase(FORWARD),
    BadCase(FORWARD, traced=True),
    BadCase(FORWARD, schedule="zb-h1", recompute=True),
    BadCase(FORWARD, schedule="gpipe", autocast=torch.bfloat16),
    BadCase(FORWARD, autocast=torch.float16),
    BadCase(FORWARD, batches=2),
)
IN_BACKWARD = (
    BadCase(BACKWARD),
    BadCase(BACKWARD, traced=True, schedule="zb-h1"),
    BadCase(BACKWARD, recompute=True),
)
OTHERS = (BadCase("weight"), BadCase("batch"), BadCase("batch", (2,)), BadCase(FORWARD, (2,)))


def test_the_place_is_that_of_the_fault_on_every_rank() -> None:
    cases = (*IN_FORWARD, *IN_BACKWARD, *OTHERS)
    found, other = launch_workers(messages, (cases,), workers=2, threads=1)
    assert found == other
    for case in IN_FORWARD:
        assert found[case].startswith("LossNotFinite: loss is "), found[case]
        assert "at step 3" in found[case]
        assert "it appeared first in the forward of layer '1" in found[case], (case, found[case])
        assert "(stage 0, rank 0, micro-batch 2)" in found[case], (case, found[case])
        assert found[case].endswith("lower the learning rate, clip the gradients or check the data")
    for case in IN_BACKWARD:
        assert found[case].startswith("LossNotFinite: gradient norm is nan at step 3"), found[case]
        assert "it appeared first in the backward of layer '4" in found[case], (case, found[case])
        assert "(stage 1, rank 1, micro-batch 2" in found[case], (case, found[case])
    assert "micro-batch 2, gradient of '4.linear.weight')" in found[IN_BACKWARD[0]]
    weight, batch, replica, forward = (found[case] for case in OTHERS)
    assert "; parameter '4.linear.weight' of layer '4' (stage 1, rank 1) was not finite " in weight
    assert "forward of layer '0' (stage 0, rank 0, micro-batch 2); tensor 0 of the batch" in batch
    assert "has NaN in row 11;" in batch
    # Replicas share statistics, so the first layer is bad on both.
    assert "forward of layer '0' (stage 0, rank 0, micro-batch 2)" in replica
    assert "forward of layer '1' (stage 0, rank 1, micro-batch 2)" in forward


def test_steps_that_are_left_out_leave_no_trace() -> None:
    """Weights, buffers, optimizer's state and random numbers are as if the batches were not."""
    split = BadCase(BACKWARD, schedule="zb-h1", traced=True, policy="skip")
    cases = BadCase(FORWARD, policy="skip"), BadCase(BACKWARD, (2,), policy="skip"), split
    for rank in launch_workers(all_left_out, (cases,), workers=2, threads=1):
        for case, found in rank.items():
            assert not found["different"], (case, found)
            assert found["skipped"] == [3, 4]
            assert found["steps"] == [1, 2, 3, 4, 5, 6]
            assert "it appeared first in the" in found["where"]


def test_a_run_that_does_not_learn_any_more_ends() -> None:
    steps, message = never_ending(BadCase(FORWARD, (1,), policy="skip"))
    assert steps == 10
    assert "the 10 steps before were left out for the same reason" in message


def test_a_number_that_does_not_come_again_is_said_to_be_so() -> None:
    for message in launch_workers(sums_of_replicas, workers=2, threads=1):
        assert "carried out again, the step made no such number" in message


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match='on_non_finite is "ignore"; it must be "stop" or "skip"'):
        never_ending(BadCase(FORWARD, (1,), policy="ignore"))


def test_a_place_stands_before_the_remedy_whatever_that_says() -> None:
    failure = LossNotFinite("loss is nan", "lower the rate; or clip", 3).at("first in layer a")
    assert str(failure) == "loss is nan; first in layer a; lower the rate; or clip"
    assert (failure.step, str(failure.at("of stage 1")).count("lower")) == (3, 1)
