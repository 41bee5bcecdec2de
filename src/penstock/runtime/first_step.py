"""The first step of a training, compared with the user's own module before it changes anything."""

from collections.abc import Callable, Sequence

import torch

from penstock.errors import RunFailed
from penstock.runtime.flushed_step import flushed_step
from penstock.runtime.metrics import StepMetrics, Totals
from penstock.runtime.training import Training
from penstock.runtime.verify import (
    Reference,
    VerifyResult,
    compared,
    reference_of,
    verify_with,
)
from penstock.runtime.worker import Worker

__all__ = ["FirstStep"]

Batches = Sequence[Sequence[torch.Tensor]]


class FirstStep:
    """Compares the first step; ``result`` is there afterwards.

    A step without dropout is compared itself: it costs what the user's module takes. Where there is
    dropout, where gradients are scaled or weights change without a flush, the batch goes through
    the pipeline once more.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.result: VerifyResult | None = None

    def flushed(self, training: Training, batches: Batches) -> StepMetrics:
        """The step itself, in a schedule that runs empty after every batch.

        Raises:
            RunFailed: it is not that of the user's module; nothing was trained.
        """
        reference = reference_of(self._worker, batches)
        if reference.dropped or reference.skipped or training.scaler is not None:
            self._judge(verify_with(self._worker, reference, batches))
            return flushed_step(self._worker, training, batches)
        return flushed_step(self._worker, training, batches, before_update=self._inspect(reference))

    def beforehand(self, batches: Batches) -> None:
        """Compare without taking the step (RunFailed as `flushed`)."""
        self._judge(verify_with(self._worker, reference_of(self._worker, batches), batches))

    def _inspect(self, reference: Reference) -> Callable[[Totals, float], None]:
        def inspect(totals: Totals, seed: float) -> None:
            self._judge(compared(self._worker, reference, totals, seed))

        return inspect

    def _judge(self, result: VerifyResult) -> None:
        self.result = result
        if not result.equal and not result.skipped:
            raise RunFailed(
                f"the first step is not that of your module, and nothing was trained: {result}; "
                f'report it with the model, or train all the same with verify = "off" '
                f"(--no-verify)"
            )
