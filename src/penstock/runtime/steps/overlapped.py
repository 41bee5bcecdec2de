"""Training in which iterations overlap: the optimizer step does not wait for other stages.

Clipping needs the norm of all gradients, and a step is skipped if any gradient is not finite. A
stage that waits for these numbers is idle. So it takes its step without them, and the numbers of
all ranks are checked afterwards (post-validation: Qi et al., Zero Bubble Pipeline Parallelism, ICLR
2024, section 4 and appendix C).

    rank 0   ... I2 W2 I3 W3 | step | F0 F1 F2 . check | I0 ...
    rank 1   ...  I2 W2 I3 W3 | step  |  F0 F1  . check | I0 ...
    rank 2   ...   I2 I3 W2 W3 | step  |  . check | F0 I0 ...

Until the check only forwards run that depend on no other actions than such forwards
(`warm_up_of`). A failed check fails on every rank. Then the step is undone from copies and taken
correctly, and the forwards run again with the same random numbers and buffers. So weights, states
and losses are bit by bit those of the plain step.

In the paper a stage also learns the norm of the stages before it, and inverts the update. Here all
ranks assume that gradients are not clipped if those of the previous step were not; otherwise they
wait as usual. Undoing from a copy is exact for every optimizer, but takes memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from penstock.capture.batch_part import Leaf
from penstock.errors import BadInput, LossNotFinite, ReplicasDiffer
from penstock.runtime.engine import Engine, Iteration
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.program import PreparedAction
from penstock.runtime.steps.bad_step import after_bad_step
from penstock.runtime.steps.training import (
    StepBegin,
    StreamedSteps,
    Training,
    mean_factor,
    metrics_of,
    timed_step,
)

__all__ = ["KeptStep", "OverlappedSteps"]

Leaves: TypeAlias = Sequence[Leaf]


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A step that has not been checked yet, and the function that waits for its numbers.

    ``leaves`` are those of its batch, ``begin`` is what was kept before it.
    """

    leaves: Leaves
    begin: StepBegin
    seed: float
    learning_rate: float
    rows: Callable[[], list[list[float]]]
    taken: bool


class OverlappedSteps(StreamedSteps):
    """Trains this rank batch after batch; the numbers of each batch are checked in the next.

    ``undone`` counts the steps that were undone.
    """

    def __init__(self, engine: Engine, training: Training) -> None:
        super().__init__(engine, training)
        self.undone = 0
        self._keeper = KeptStep(training)
        self._unchecked: Unchecked | None = None
        self._expects_no_clipping = not training.clips
        self._terms = 0.0
        self._done: deque[StepMetrics] = deque()

    @property
    def copies(self) -> Sequence[torch.Tensor]:
        """The tensors kept to undo a step."""
        return self._keeper.copies

    def stream(self, batches: Iterable[Leaves]) -> Iterator[StepMetrics]:
        """Train on batches, given as their leaves; most metrics arrive one batch late.

        Raises:
            BadInput: the ranks were given different batches; nothing was changed.
            LossNotFinite: as `Training.update`; the steps of that batch and the next are undone.
        """
        self.drain()
        self._done.clear()
        for leaves in batches:
            self._train_on(leaves)
            while self._done:
                yield self._done.popleft()
        self.drain()
        while self._done:
            yield self._done.popleft()

    def drain(self) -> None:
        """Check the latest step; all ranks must call this. Raises the same errors as `stream`."""
        self._check()

    def _train_on(self, leaves: Leaves) -> None:
        """Run forwards, check the previous step, run the rest of the batch, and take its step."""
        engine, training = self._engine, self._training
        # The step before is counted when it is checked.
        step = training.steps + (self._unchecked is not None)
        iteration = Iteration(engine, [leaves], step=step)
        begin = StepBegin.of(engine, step, copies=True)
        if self._unchecked is not None:
            iteration.warm_up()
            if not self._check(partial(self._forget, iteration, begin)):
                # The step before may have been left out, which restored its buffers.
                begin = StepBegin.of(engine, step, copies=True)
        seed, rate = training.seed(leaves[0].shape[0]), training.learning_rate
        self._terms = 0.0
        with engine.failures.shared():
            rows = cache(iteration.finish(seed, through=self._counting_terms))
            if not self._terms:
                rows()
        self._unchecked = Unchecked(leaves, begin, seed, rate, rows, taken=self._terms > 0)
        self._step(self._terms, seed)

    def _counting_terms(self, steps: Sequence[PreparedAction]) -> Iterator[PreparedAction]:
        """``steps``; beside them the ranks count the terms of the loss, if a step needs no more."""
        engine = self._engine
        with_loss = (number for number, step in enumerate(steps, 1) if self._has_loss(step))
        forwards = max(with_loss, default=0)
        yield from steps[:forwards]
        if not self._expects_no_clipping:
            yield from steps[forwards:]
            return
        weights = [term.weight for term in engine.stages.loss_terms]
        own = float(torch.stack(weights).sum()) if weights else 0.0
        of_all = engine.numbers.announce([own], "the number of terms in the loss")
        yield from steps[forwards:]
        self._terms = sum(row[0] for row in of_all())

    def _forget(self, iteration: Iteration, begin: StepBegin) -> None:
        """Discard the forwards that have used the weights of a wrong step."""
        iteration.forget()
        self._engine.random.state = begin.random
        begin.restore_buffers()

    def _step(self, weight: float, seed: float) -> None:
        """Take the step without clipping; or with, if its numbers have been waited for."""
        engine, training = self._engine, self._training
        with timed_step(engine):
            if weight:
                self._keeper.keep()
                engine.buckets.scale(mean_factor(weight, seed))
                training.step(engine.buckets)
            else:
                self._check()

    def _check(self, forget: Callable[[], None] = lambda: None) -> bool:
        """Wait for the numbers of the latest step, and correct the step if it was wrong.

        Returns whether it was right. If it was not, ``forget`` is called first: it discards the
        forwards that have used its weights.

        Raises:
            BadInput, LossNotFinite, ReplicasDiffer: see `stream`; the step was undone.
        """
        engine, training = self._engine, self._training
        step, self._unchecked = self._unchecked, None
        if step is None:
            return True
        samples = step.leaves[0].shape[0]
        with engine.failures.shared():
            rows = step.rows()
        try:
            engine.check_replicas(training.steps + 1)
            totals = engine.numbers.put_together(rows, engine.metrics, step.seed)
        except (BadInput, ReplicasDiffer):
            self._undo(step, forget)
            raise
        try:
            update = training.judge(totals, step.learning_rate)
        except LossNotFinite as failure:
            self._undo(step, forget)
            update = after_bad_step(engine, training, step.begin, [step.leaves], step.seed, failure)
            self._expects_no_clipping = False
            self._done.append(metrics_of(training.steps, totals, update, samples))
            return False
        factor = training.clip_factor(totals)
        self._expects_no_clipping = not update.skipped and factor == 1.0
        right = step.taken and self._expects_no_clipping
        if not right:
            self._undo(step, forget)
            if not step.taken and not update.skipped:
                engine.buckets.scale(mean_factor(totals.weight, step.seed))
            if not update.skipped:
                training.step(engine.buckets, factor)
        self._done.append(metrics_of(training.steps, totals, update, samples))
        return right

    def _undo(self, step: Unchecked, forget: Callable[[], None]) -> None:
        forget()
        if step.taken:
            self._keeper.undo()
            self.undone += 1

    def _has_loss(self, step: PreparedAction) -> bool:
        return step.kind == "F" and self._engine.stages.runners[step.stage].program.is_last


@dataclass
class KeptStep:
    """Copies of the parameters that a rank steps, of their optimizer state and its settings.

    They take as many bytes as parameters and state together: with AdamW three times the parameters.
    Their memory is reused in every step. State that an optimizer keeps outside ``state`` and
    ``param_groups`` is not copied; checkpoints do not contain it either.
    """

    training: Training
    copies: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _state: dict[Any, dict[Any, Any]] = field(default_factory=dict[Any, dict[Any, Any]])
    _groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _schedule: dict[str, Any] | None = None

    @torch.no_grad()
    def keep(self) -> None:
        """Copy all that the next step may change."""
        optimizer, schedule = self.training.optimizer, self.training.schedule
        assert optimizer is not None
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: contents(state, tensors) for p, state in optimizer.state.items()}
        self._groups = [
            contents({k: v for k, v in group.items() if k != "params"}, tensors)
            for group in optimizer.param_groups
        ]
        self._schedule = deepcopy(schedule.state_dict()) if schedule is not None else None
        if not same_layout(tensors, self.copies):
            self.copies = [torch.empty_like(tensor) for tensor in tensors]
        self._kept = tensors
        for tensor, copy in zip(tensors, self.copies, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore everything as it was at the latest `keep`; may be called more than once."""
        optimizer, schedule = self.training.optimizer, self.training.schedule
        assert optimizer is not None
        for tensor, copy in zip(self._kept, self.copies, strict=True):
            tensor.copy_(copy)
        # In place: the parts of a combined optimizer share its state.
        optimizer.state.clear()
        optimizer.state.update({p: deepcopy_but_tensors(s) for p, s in self._state.items()})
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(deepcopy_but_tensors(settings), params=parameters)
        if schedule is not None and self._schedule is not None:
            schedule.load_state_dict(deepcopy(self._schedule))


def contents(values: dict[Any, Any], tensors: list[torch.Tensor]) -> dict[Any, Any]:
    """A copy of ``values`` without copying tensors; these are appended to ``tensors``."""
    tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return deepcopy_but_tensors(values)


def deepcopy_but_tensors(values: dict[Any, Any]) -> dict[Any, Any]:
    """A deep copy with the same tensors."""
    return {k: v if isinstance(v, torch.Tensor) else deepcopy(v) for k, v in values.items()}


def same_layout(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> bool:
    """Whether each of ``copies`` has the shape, type and device of its tensor."""
    return len(tensors) == len(copies) and all(
        tensor.shape == copy.shape and tensor.dtype == copy.dtype and tensor.device == copy.device
        for tensor, copy in zip(tensors, copies, strict=True)
    )
