"""A stage that updates its weights while micro-batches are in flight."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan, sqrt

import torch
import torch.distributed as dist

from penstock.runtime.asynchronous.order import AsynchronousOrder
from penstock.runtime.asynchronous.weight_versions import make_weight_versions
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import clip_factor
from penstock.runtime.program import Place, PreparedAction
from penstock.runtime.stage.runner import StageInputs, Tensors, Work
from penstock.runtime.update.training import Stepper
from penstock.schedule.action import ActionKind


class VersionedStage:
    """The stage at ``place`` of this rank, with the weights that its order has for each pass.

    ``stepper`` updates its weights. Clipping limits the norm of its gradients in one update.

    The runner's numbers of micro-batches repeat, so this class counts micro-batches itself; they
    come in order.
    """

    def __init__(
        self,
        engine: Engine,
        place: Place,
        order: AsynchronousOrder,
        stepper: Stepper,
        clip_norm: float | None,
        measure_every: int,
    ) -> None:
        self.place, self._engine, self._order = place, engine, order
        self._stepper, self._clip_norm = stepper, clip_norm
        self.runner = engine.stages.runners[place.stage]
        module, first_depth = self.runner.program.module, order.depths[0]
        self.versions = make_weight_versions(
            module, order.rule, place.stage, stepper.optimizer, first_stage_depth=first_depth
        )
        self.versions.log.measure_every = measure_every
        self._buckets = [b for b in engine.buckets.buckets if b.stage == place.stage]
        self._gradient_square = torch.zeros((), dtype=torch.float64, device=engine.world.device)
        self._forwarded = self._ended = 0
        self._fed = StageInputs((), ())
        self._samples: Sequence[int] = ()

    def restart(self) -> None:
        """Count from 0 again; nothing may be in flight."""
        self.versions.restart()
        self._forwarded = self._ended = 0

    def feed(self, batch: int, given: StageInputs, samples: Sequence[int]) -> None:
        """Take the inputs of a batch; they replace those of a finished one in the ring.

        ``samples`` are those of every micro-batch on all replicas.
        """
        self._samples = samples
        if batch == 0:
            self._fed = given
            self.runner.begin(given)
            return
        own, before = self._order.numbers(batch), self._fed
        leaves, names = (
            tuple(new if n in own else old for n, (new, old) in enumerate(zip(*both, strict=True)))
            for both in ((given.leaves, before.leaves), (given.names, before.names))
        )
        self._fed = replace(given, leaves=leaves, names=names)
        self.runner.proceed(self._fed)

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
                raise AssertionError("an asynchronous order has whole backwards")

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
        engine, whole = self._engine, self._samples
        # Read on the device: the host would wait for it in every micro-batch.
        weight = torch.zeros((), dtype=torch.float64, device=engine.world.device)
        if self._fed.rows[micro_batch]:
            weight += self.runner.loss_terms[-1].weight
        replicas = engine.groups.get(engine.plan.device_groups[self.place.group])
        if replicas is not None:
            dist.all_reduce(weight, group=replicas)
        share = whole[micro_batch] / sum(whole[n] for n in self._order.update_with(micro_batch))
        self.runner.reseed(micro_batch, torch.where(weight != 0, share / weight, 0.0))

    def update(self, _: int, nothing: Tensors) -> Tensors:
        """Update the weights, in the form of a `PreparedAction`'s work."""
        self.versions.update(self._step)
        return nothing

    def _step(self) -> None:
        """Sum the gradients over the replicas, clip, step, and zero the gradients."""
        # Several stages of a rank have no replicas, so all sums are those of this stage.
        self._engine.buckets.finish(self.place.stage)
        if self._buckets:
            self._gradient_square = torch.stack([b.square() for b in self._buckets]).sum()
        if self._clip_norm is not None:
            factor = clip_factor(self._gradient_square.sqrt(), self._clip_norm)
            for bucket in self._buckets:
                bucket.flat.mul_(factor)
        for bucket in self._buckets:
            bucket.narrow()
        self._stepper.step()
        self._engine.buckets.zero(self.place.stage)

    def measurements(self) -> list[float]:
        """Return this stage's measurements since the last call, to be sent to the other ranks.

        They are the square of the gradient's norm, the most copies of weights, the mean difference
        of weight versions, the error of predictions, and the error without prediction.
        """
        passes, errors = self.versions.log.take_new()
        square = float(self._gradient_square) if self.place.replica == 0 else 0.0
        late = sum(p.difference for p in passes) / len(passes) if passes else nan
        missed = [sqrt(sum(e.predicted**2 for e in errors)), sqrt(sum(e.stale**2 for e in errors))]
        return [square, float(self.versions.most_copies), late, *(missed if errors else (nan, nan))]


def with_updates(
    steps: Sequence[PreparedAction], stages: Mapping[int, VersionedStage], order: AsynchronousOrder
) -> Iterator[PreparedAction]:
    """``steps`` with an update after the last backward of each, once its gradients are sent."""
    for step in steps:
        yield step
        if step.kind == "B" and step.micro_batch + 1 == order.update_with(step.micro_batch).stop:
            update = stages[step.stage].update
            yield PreparedAction("STEP", step.stage, -1, tuple, update, None)
