"""Compares the first training step with the user's own module, before it changes anything."""

from collections.abc import Mapping, Sequence

import torch

from penstock.capture.batch_part import Leaf
from penstock.capture.kept_buffers import kept_buffers
from penstock.errors import BadInput, RunFailed
from penstock.runtime.metrics import StepMetrics, Totals
from penstock.runtime.rank import Worker
from penstock.runtime.steps.plain_step import flushed_step
from penstock.runtime.steps.training import Training
from penstock.runtime.verify.same_dropout import DropoutStates
from penstock.runtime.verify.verify import (
    Reference,
    VerifyResult,
    compared,
    compared_without_dropout,
    not_compared,
    obstacle,
    reference_of,
    verify_with,
)

__all__ = ["FirstStep"]

Batches = Sequence[Sequence[Leaf]]
WholeBatches = Sequence[Sequence[torch.Tensor]]


class FirstStep:
    """Compares the first step. ``result`` is set afterwards.

    The step itself is compared, so the only cost is a run of the user's module, which draws the
    same dropout. If that is not possible, because gradients are scaled or weights change without a
    flush, the batch runs through the pipeline a second time, without dropout.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.result: VerifyResult | None = None

    def flushed(self, training: Training, batches: Batches) -> StepMetrics:
        """Take the first step and compare it, with a schedule that drains after every batch.

        Raises:
            RunFailed: it differs from the step of the user's module; nothing was trained.
        """
        worker, whole = self._worker, whole_batches(batches)
        if training.scaler is not None:
            self.beforehand(batches)
            return flushed_step(worker, training, batches)
        why = obstacle(worker, whole)
        if why:
            self._judge(not_compared(why))
            return flushed_step(worker, training, batches)
        states = dropout_states(worker, whole[0]) if len(whole) == 1 else None
        buffers = {name: buffer.clone() for name, buffer in worker.held.named_buffers()}

        def inspect(totals: Totals, seed: float) -> None:
            slices = states.found if states is not None else {}
            reference = reference_of(worker, whole, before=buffers, slices=slices)
            result = None if reference.dropped else compared(worker, reference, totals, seed)
            if result is None or (reference.masked and not result.equal):
                result = self._without_dropout(reference, buffers, whole)
            self._judge(result)

        return flushed_step(worker, training, batches, within=states, before_update=inspect)

    def _without_dropout(
        self, reference: Reference, buffers: Mapping[str, torch.Tensor], batches: WholeBatches
    ) -> VerifyResult:
        """Compare the same batches again, starting with ``buffers``; new buffer values are kept."""
        worker = self._worker
        means, named = worker.means, dict(worker.held.named_buffers())
        with kept_buffers(named.values()):
            with torch.no_grad():
                for name, buffer in named.items():
                    buffer.copy_(buffers[name])
            if reference.masked:
                reference = reference_of(worker, batches)
            result = verify_with(worker, reference, batches)
        worker.means = means
        return result

    def beforehand(self, batches: Batches) -> None:
        """Compare without taking the step (raises RunFailed as `flushed`)."""
        self._judge(compared_without_dropout(self._worker, whole_batches(batches)))

    def _judge(self, result: VerifyResult) -> None:
        self.result = result
        if not result.equal and not result.skipped:
            raise RunFailed(
                f"the first step is not that of your module, and nothing was trained: {result}; "
                f'report it with the model, or train all the same with verify = "off" '
                f"(--no-verify)"
            )


def dropout_states(worker: Worker, leaves: Sequence[torch.Tensor]) -> DropoutStates:
    """A mode that records the dropout which this rank draws in a step on one batch."""
    lengths = worker.graph.lengths_of(dict(enumerate(leaves)))
    parts = worker.stages.prepared(leaves[0].shape[0], True, lengths).iteration.parts
    rows = {stage: part.rows for stage, part in parts.items()}
    return DropoutStates(worker.stages.runners, rows, worker.world.device)


def whole_batches(batches: Batches) -> list[list[torch.Tensor]]:
    """The leaves of the batches of the first step, which the user's module gets on rank 0.

    Raises:
        BadInput: they are parts of batches.
    """
    whole = [[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in batches]
    if list(map(len, whole)) != list(map(len, batches)):
        raise BadInput(
            'the first step was given a part of a batch, but verify = "first-step" runs your '
            "module on the whole; give every rank the whole batch in the first step, or set "
            'verify = "off"'
        )
    return whole
