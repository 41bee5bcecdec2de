"""A run of the user's whole program that finds values of a step, by its batch alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from penstock.capture.forward.kept_state import KeptState
from penstock.capture.forward.partial_forward import ProgramPart, StageRun, StageTask
from penstock.capture.forward.program_stage import ProgramStage
from penstock.capture.loss.loss_parts import LossAction, value_in
from penstock.capture.loss.loss_path import LossPath
from penstock.capture.record.absent import Absent
from penstock.capture.record.calls import Address, ProgramRecord
from penstock.capture.record.example import Recorded
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.sizes import BatchSize
from penstock.torch_internals import pytree

Probe: TypeAlias = Callable[[Mapping[int, torch.Tensor], BatchSize], dict[Address, list[Any]]]
"""A run on the leaves of a batch of this size; gives what actions of the loss need, by address."""


def probe(
    program: UserProgram,
    recorded: Recorded,
    state: KeptState,
    end: int,
    actions: Mapping[int, Sequence[LossAction]],
    path: LossPath,
) -> Probe:
    """The program up to event ``end``, of whose tensors only the batch's have values.

    A call raises `OtherPath` if the loss does not take the ``path``.
    """
    task = StageTask(program, recorded, ProgramPart(0, end), actions, path, "probing")
    stage = ProgramStage(task, state)

    def run(leaves: Mapping[int, torch.Tensor], size: BatchSize) -> dict[Address, list[Any]]:
        Absent.claim(recorded.device)
        with torch.no_grad(), program.without_caches():
            stage.run(partial(program.run, leaves), StageRun(size))
        return dict(stage.now.found)

    return run


def adds_up(record: ProgramRecord, number: int, action: LossAction) -> bool:
    """Return whether the value of two batches together is the sum of theirs."""
    if action.kind != "whole":
        return action.kind != "result"
    value = value_in(pytree.tree_leaves(record.events[number].args)[action.position])
    if value < 0:
        return False
    maker = record.events[record.values[value].maker]
    return maker.address[1] in ("sum", "count_nonzero")
