"""A stage that updates its weights while micro-batches are in flight."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from penstock.capture.batch_part import Leaf, sliced
from penstock.capture.lengths import LengthsOf
from penstock.runtime.asynchronous.order import AsynchronousOrder
from penstock.runtime.asynchronous.weight_versions import make_weight_versions
from penstock.runtime.execute import PreparedAction
from penstock.runtime.metrics import clip_factor
from penstock.runtime.stages.runner import ModuleRunner, StageInputs, Tensors, Work
from penstock.schedule.action import ActionKind

__all__ = ["VersionedStage", "clip_gradients", "with_updates"]


class VersionedStage:
    """Stage ``number`` with the weights that its schedule prescribes for each pass.

    The runner's numbers of micro-batches repeat, so this class counts micro-batches itself; they
    come in order. ``change_weights`` sums gradients, updates the weights and zeroes the gradients;
    `update` calls it. ``total_weight`` sums the loss terms of a micro-batch over all replicas.
    """

    def __init__(
        self,
        number: int,
        runner: ModuleRunner,
        order: AsynchronousOrder,
        optimizer: Optimizer,
        change_weights: Callable[[], object],
        *,
        measure_every: int = 0,
        total_weight: Callable[[float], float] = float,
    ) -> None:
        self.number, self.runner = number, runner
        self.versions = make_weight_versions(
            runner.program.module,
            order.rule,
            number,
            optimizer,
            first_stage_depth=order.depths[0],
        )
        self.versions.log.measure_every = measure_every
        self._order = order
        self._change_weights, self._total_weight = change_weights, total_weight
        self._forwarded = self._ended = 0
        self._fed: dict[int, tuple[tuple[torch.Tensor, ...], range, range]] = {}
        self._names: dict[int, tuple[int, ...]] = {}

    def restart(self) -> None:
        """Count from 0 again; nothing may be in flight."""
        self.versions.restart()
        self._forwarded = self._ended = 0
        self._fed.clear()

    def feed(
        self,
        batch: int,
        leaves: Sequence[Leaf],
        rows: Sequence[range],
        micro_batches: Sequence[range],
        lengths: LengthsOf = (),
        step: int = 0,
    ) -> None:
        """Take this rank's ``rows`` of each micro-batch; they replace those of a finished batch.

        ``step`` is the number of the batch among all of the run.
        """
        runner = self.runner
        wanted = [leaves[index].to(runner.device) for index in runner.program.batch_inputs]
        numbers = self._order.numbers(batch)
        for number, own, whole in zip(numbers, rows, micro_batches, strict=True):
            # A replica without rows runs the first row, which does not count.
            self._fed[number] = tuple(sliced(leaf, own, whole) for leaf in wanted), own, whole
            self._names[number] = step, number
        count = self._order.ring * self._order.micro_batches
        fed = [self._fed.get(number, ((), range(0), range(0))) for number in range(count)]
        recomputed = range(count) if self._order.recomputes(self.number) else ()
        work = StageInputs(
            tuple(slices for slices, _, _ in fed),
            tuple(len(own) for _, own, _ in fed),
            frozenset(recomputed),
            lengths=lengths,
            names=tuple(self._names.get(number, ()) for number in range(count)),
        )
        if batch == 0:
            runner.begin(work)
        else:
            runner.proceed(work)

    @property
    def rows(self) -> list[range]:
        """The rows of every micro-batch in flight, by its number."""
        count = self._order.ring * self._order.micro_batches
        return [self._fed[n][1] if n in self._fed else range(0) for n in range(count)]

    def work(self, kind: ActionKind) -> Work:
        """The function that runs actions of one kind; only whole backwards occur here."""
        match kind:
            case "F":
                return self._forward
            case "B":
                return self._backward
            case "R":
                return self._recompute
            case "I" | "W":
                raise AssertionError("an order without a flush has whole backwards")

    def _forward(self, micro_batch: int, received: Tensors) -> Tensors:
        number = self._forwarded
        self._forwarded += 1
        with self.versions.forward(number):
            sent = self.runner.forward(micro_batch, received)
        if self.runner.program.is_last:
            self._weigh(micro_batch)
        return sent

    def _recompute(self, micro_batch: int, _: Tensors) -> Tensors:
        with self.versions.recompute(self._ended):
            return self.runner.recompute(micro_batch)

    def _backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        number = self._ended
        self._ended += 1
        with self.versions.backward(number):
            return self.runner.backward(micro_batch, gradients)

    def _weigh(self, micro_batch: int) -> None:
        """Weight a micro-batch in its update by its share of the update's samples."""
        _, own, whole = self._fed[micro_batch]
        weight = float(self.runner.loss_terms[-1].weight) if own else 0.0
        weight = self._total_weight(weight)
        samples = sum(len(self._fed[n][2]) for n in self._order.update_with(micro_batch))
        share = len(whole) / samples
        self.runner.reseed(micro_batch, share / weight if weight else 0.0)

    def update(self, _: int, nothing: Tensors) -> Tensors:
        """Update the weights, in the form of a `PreparedAction`'s work."""
        self.versions.update(self._change_weights)
        return nothing


def with_updates(
    steps: Sequence[PreparedAction], stage: VersionedStage, order: AsynchronousOrder
) -> Iterator[PreparedAction]:
    """``steps`` with an update after the last backward of each, once its gradients are sent."""
    for step in steps:
        yield step
        if step.kind == "B" and step.micro_batch + 1 == order.update_with(step.micro_batch).stop:
            yield PreparedAction("STEP", stage.number, -1, tuple, stage.update, None)


def clip_gradients(gradients: Sequence[torch.Tensor], limit: float | None) -> float:
    """Scale ``gradients`` to a norm of at most ``limit`` (if given); returns the norm before."""
    if not gradients:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(g).double() for g in gradients])
    norm = float(torch.linalg.vector_norm(norms))
    factor = clip_factor(norm, limit)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
