"""What follows a step whose loss or gradients are not finite: an error, or the step is left out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.errors import LossNotFinite
from penstock.runtime.metrics import NoTerms
from penstock.runtime.rank import Worker
from penstock.runtime.stages.random_stream import RandomState
from penstock.runtime.steps.bad_number import Batches, inspect_step
from penstock.runtime.steps.training import Training, Update

__all__ = ["MOST_IN_A_ROW", "StepBegin", "after_bad_step", "begin_of_step"]

MOST_IN_A_ROW = 10
"""A run ends if so many steps are left out one after another: then it does not learn any more."""


@dataclass(frozen=True, slots=True)
class StepBegin:
    """What a rank had before a step: the state of its random numbers, and copies of buffers.

    Buffers are copied only where steps may be left out.
    """

    random: RandomState
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]


def begin_of_step(worker: Worker, training: Training) -> StepBegin:
    """What is kept before a step, in case that it is bad."""
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    if training.on_non_finite == "skip":
        buffers = [(buffer, buffer.clone()) for _, buffer in worker.held.named_buffers()]
    return StepBegin(worker.random.state, buffers)


def after_bad_step(
    worker: Worker,
    training: Training,
    begin: StepBegin,
    batches: Batches,
    seed: float,
    failure: LossNotFinite,
) -> Update:
    """Find the place of a bad step whose weights are unchanged, then raise or leave the step out.

    All ranks must call this, with equal arguments.

    Raises:
        LossNotFinite: ``failure`` with the place, unless steps are left out.
    """
    place = ""
    # Layer by layer, a stage cannot be run on the shards of a tensor group.
    if not isinstance(failure, NoTerms) and not worker.plan.tensor_groups:
        place, is_parameter = inspect_step(worker, batches, seed, begin.random)
        failure = failure.at(place)
        if is_parameter:
            raise failure
    if training.on_non_finite == "stop":
        raise failure
    if training.left_out == MOST_IN_A_ROW:
        raise failure.at(f"the {MOST_IN_A_ROW} steps before were left out for the same reason")
    with torch.no_grad():
        for buffer, value in begin.buffers:
            buffer.copy_(value)
    return training.leave_out(place or str(failure))
