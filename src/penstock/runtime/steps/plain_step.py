"""A training step that updates the weights after the pipeline has drained."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.capture.batch_part import Leaf
from penstock.errors import LossNotFinite
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import StepMetrics, Totals
from penstock.runtime.steps.bad_step import after_bad_step, begin_of_step
from penstock.runtime.steps.training import Training, Updated

__all__ = ["flushed_step", "metrics_of", "timed_step"]


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
    samples = sum(leaves[0].shape[0] for leaves in batches)
    seed = training.seed(samples)
    engine.check_replicas(training.steps + 1)
    begin = begin_of_step(engine, training)
    totals = engine.run(*batches, seed=seed, step=training.steps)
    if before_update is not None:
        before_update(totals, seed)
    with timed_step(engine), engine.without_idle_gradients():
        try:
            update = training.update(totals, seed, engine.buckets)
        except LossNotFinite as failure:
            update = after_bad_step(engine, training, begin, batches, seed, failure)
        if not update.skipped:
            engine.share_values()
    return metrics_of(training.steps, totals, update, samples)


@contextmanager
def timed_step(engine: Engine) -> Iterator[None]:
    """Within, an optimizer step: its duration is added to the timeline and the rank's numbers."""
    begun, start = time.perf_counter(), engine.clock.now()
    yield
    if engine.places:
        engine.clock.add("STEP", engine.places[0].stage, -1, start, engine.clock.now())
    engine.numbers.optimizer_s = time.perf_counter() - begun


def metrics_of(step: int, totals: Totals, update: Updated, samples: int) -> StepMetrics:
    """The metrics that a step returns."""
    return StepMetrics(
        step,
        totals.loss,
        totals.gradient_norm,
        update.learning_rate,
        samples,
        totals.seconds,
        totals.bubble,
        update.skipped,
        update.loss_scale,
        {name: value for name, (value, _) in totals.means.items()},
        update.non_finite,
    )
