"""Compare training steps with the user's own module, before they change anything."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

import torch

from penstock.capture.batch.part import Leaf
from penstock.capture.contract import Batch
from penstock.capture.forward.restored import kept_buffers
from penstock.device import without_tf32
from penstock.errors import RunFailed
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import StepMetrics, Totals
from penstock.runtime.options import Verification
from penstock.runtime.update.steps import Steps, flushed_step
from penstock.runtime.update.training import Training
from penstock.runtime.verify.loss_check import LossCheck
from penstock.runtime.verify.step_state import StepState, begin_of
from penstock.runtime.verify.verify import (
    Reference,
    VerifyResult,
    compared,
    counter_warning,
    mixing_warning,
    not_compared,
    obstacle,
    reference_of,
    verify,
    verify_with,
)
from penstock.waiting import say

Batches = Sequence[Sequence[Leaf]]
WholeBatches = Sequence[Sequence[torch.Tensor]]

IN_PART = (
    "a part of a batch was given, and your module runs on the whole; give every rank the whole "
    "batch in the step that is to be compared"
)


class VerifiedSteps:
    """Comparison of the first step unless ``which`` is "off", and every ``every``-th if not 0.

    Where there are several kinds of batches, the first step is that of each in this process.

    The step itself is compared, so the only cost is a run of the user's module. If that is not
    possible, because of dropout, because gradients are scaled, or not summed over pipelines that
    train alone, or because weights change without a flush, the batch runs through the pipeline a
    second time, without dropout. The losses of some steps are compared (`LossCheck`) if it
    ``checks_loss``. ``result`` is the latest. ``say`` gets each line to print, on
    rank 0.
    """

    def __init__(
        self,
        engine: Engine,
        training: Training,
        steps: Steps,
        which: Verification,
        every: int,
        *,
        checks_loss: bool,
    ) -> None:
        self.result: VerifyResult | None = None
        self.say: Callable[[str], None] = say
        self._engine, self._training, self._steps = engine, training, steps
        self._first, self._every = which == "first-step", every
        self._warned = False
        self._compared = set[int]()
        """The kinds of batches of which a step was compared."""
        self._loss_check = LossCheck(engine, lambda line: self.say(line)) if checks_loss else None

    def go_on_from(self, before: "VerifiedSteps") -> None:
        """Take over what was found and reported before the ranks were reconnected."""
        self.result, self.say, self._warned = before.result, before.say, before._warned
        self._compared = before._compared

    @property
    def due(self) -> bool:
        """True if the next step is compared."""
        taken, kind = self._training.steps, self._engine.kinds.number
        may_be_first = taken == 0 or len(self._engine.kinds.graphs) > 1
        if self._first and may_be_first and kind not in self._compared:
            return True
        return bool(self._every) and (taken + 1) % self._every == 0

    @property
    def loss_check(self) -> LossCheck | None:
        """The check that compares the loss of the next step alone, if that is due."""
        check, step = self._loss_check, self._training.steps + 1
        if check is None or not self._steps.flushes or self._training.meetings is not None:
            return None
        return None if self._engine.kinds.number in check.seen and step & (step - 1) else check

    def stretches(self, batches: Iterable[Batch]) -> Iterator[tuple[bool, Iterator[Batch]]]:
        """Cut a stream before each batch that is compared; with whether a part begins with one.

        A part must have been trained on before the next is taken.
        """
        left, every = iter(batches), self._every
        for batch in left:
            others = every - 1 - (self._training.steps + 1) % every if every else None
            yield self.due, chain([batch], islice(left, others))

    @without_tf32()
    def step(self, batches: Batches) -> StepMetrics:
        """Take a step and compare it."""
        engine, training, steps = self._engine, self._training, self._steps
        whole = whole_batches(batches)
        apart = training.meetings is not None or not steps.flushes
        if apart or training.scaler is not None or whole is None:
            self.beforehand(batches)
            return steps.step(batches)
        self._warn(batches)
        why = obstacle(engine, whole)
        if why:
            self._judge(not_compared(why))
            return steps.step(batches)
        before = begin_of(engine)

        def inspect(totals: Totals, seed: float) -> None:
            again = partial(reference_of, engine, whole, before)
            reference = again()
            if reference.dropped:
                result = self._without_dropout(reference, before, whole)
            else:
                result = compared(engine, reference, totals, again, seed)
            self._judge(result)

        return flushed_step(engine, training, batches, before_update=inspect)

    def beforehand(self, batches: Batches) -> None:
        """Compare without taking the step (raises RunFailed as `step`)."""
        self._warn(batches)
        whole = whole_batches(batches)
        self._judge(not_compared(IN_PART) if whole is None else verify(self._engine, whole))

    def _without_dropout(
        self, reference: Reference, before: StepState, batches: WholeBatches
    ) -> VerifyResult:
        """Compare the same batches again, starting with the state ``before``; the new is kept."""
        engine = self._engine
        named = engine.held.changed_by_forward()
        with engine.graph.untouched_state(), kept_buffers(named.values()):
            before.put_back()
            with torch.no_grad():
                for name, buffer in engine.held.changed_by_forward().items():
                    buffer.copy_(before.tensors[name])
            return verify_with(engine, reference, batches)

    def _warn(self, batches: Batches) -> None:
        if self._warned:
            return
        for text in (mixing_warning(self._engine, batches), counter_warning(self._engine, batches)):
            self._warned = self._warned or bool(text)
            if text and self._engine.world.rank == 0:
                self.say(text)

    def _judge(self, result: VerifyResult) -> None:
        self.result = result
        self._compared.add(self._engine.kinds.number)
        step = self._training.steps + 1
        if not result.equal and not result.skipped:
            which, done = f"step {step}", "it was not taken"
            if step == 1:
                which, done = "the first step", "nothing was trained"
            report = "" if result.cause else "report it with the model, "
            raise RunFailed(
                f"{which} is not that of your module, and {done}: {result}; {report}"
                f'or train all the same with verify = "off" (--no-verify)'
            )
        if self._engine.world.rank == 0:
            self.say(f"step {step}: {result}")


def whole_batches(batches: Batches) -> list[list[torch.Tensor]] | None:
    """The leaves of the batches of a step; ``None`` if they are parts of batches."""
    whole = [[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in batches]
    return whole if list(map(len, whole)) == list(map(len, batches)) else None
