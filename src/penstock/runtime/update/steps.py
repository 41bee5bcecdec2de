"""Steps of a pipeline: an iteration, then an update of the weights."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from penstock.capture.batch.part import Leaf
from penstock.errors import LossNotFinite
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import LossPathChanged, StepMetrics, Totals
from penstock.runtime.update.training import StepBegin, Training, metrics_of

if TYPE_CHECKING:
    # It imports this module.
    from penstock.runtime.asynchronous.weight_versions import WeightVersions


class Steps:
    """The steps of a pipeline: when weights are updated, and what is under way between two calls.

    Here the pipeline runs empty, the ranks agree on loss and norms, and then all update
    the weights; the other ways are subclasses. Unless ``flushes`` is false, gradients can be
    looked at before they are used.
    """

    flushes = True

    def __init__(self, engine: Engine, training: Training) -> None:
        self._engine, self._training = engine, training

    @property
    def copies(self) -> Iterable[torch.Tensor]:
        """The tensors that are kept between steps besides the state of the training."""
        return ()

    @property
    def weight_versions(self) -> "Mapping[int, WeightVersions]":
        """The weights of this rank's stages, where there are several versions of them."""
        return {}

    def step(self, batches: Sequence[Sequence[Leaf]]) -> StepMetrics:
        """One step on batches, given as their leaves; see `Pipeline.step`."""
        return flushed_step(self._engine, self._training, batches)

    def stream(self, batches: Iterable[Sequence[Leaf]]) -> Iterator[StepMetrics]:
        """A step on each batch, given as its leaves; see `Pipeline.stream`."""
        return (self.step([leaves]) for leaves in batches)

    def drain(self) -> None:
        """Finish what is under way; all ranks must call this."""


def flushed_step(
    engine: Engine,
    training: Training,
    batches: Sequence[Sequence[Leaf]],
    *,
    before_update: Callable[[Totals, float], None] | None = None,
) -> StepMetrics:
    """One step on batches, given as their leaves; see `Pipeline.step`.

    ``before_update`` is called when gradients are summed but neither divided nor used. It gets the
    totals and the factor on the loss.
    """
    sizes = [leaves[0].shape[0] for leaves in batches]
    samples = sum(sizes)
    meetings, alone = training.meetings, training.meetings is not None
    if meetings is not None:
        meetings.check_rows(sizes)
    seed = training.seed(samples)
    if engine.replicas.every:
        engine.replicas.run(training.steps + 1, engine.numbers, engine.failures)
    begin = StepBegin.of(engine, training.steps, copies=training.on_non_finite == "skip")
    check, put_back = training.loss_check, engine.graph.kept_state()
    compares = check is not None and check.begin(samples)
    try:
        totals = engine.run(*batches, seed=seed, sums=not alone, step=training.steps)
    except LossPathChanged:
        put_back()
        engine.random.state = begin.random
        engine.graph.state.again, engine.graph.state.ends = None, {}
        raise
    if check is not None and compares:
        check.compare(totals, samples, training.steps + 1)
    if before_update is not None:
        before_update(totals, seed)
    with timed_step(engine):
        try:
            update = training.update(totals.of_pipeline(engine.pipeline), seed, engine.buckets)
        except LossNotFinite as failure:
            # Imported here: only a bad step needs it.
            from penstock.runtime.update.bad_step import after_bad_step

            update = after_bad_step(engine, training, begin, batches, seed, failure)
        if not update.skipped:
            engine.share_values()
            if training.by_loss:
                training.follow(totals.loss)
    if meetings is not None:
        meetings.after(training.steps)
    return metrics_of(training.steps, totals, update, samples)


@contextmanager
def timed_step(engine: Engine) -> Iterator[None]:
    """Add the duration of an optimizer step to the timeline and the rank's numbers."""
    begun, start = time.perf_counter(), engine.clock.now()
    yield
    if engine.places:
        engine.clock.add("STEP", engine.places[0].stage, -1, start, engine.clock.now())
    engine.numbers.optimizer_s = time.perf_counter() - begun
