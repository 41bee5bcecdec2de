"""One rank's part of asynchronous training.

Each batch runs as its part of the asynchronous order (`AsynchronousOrder`). All numbers of a batch
are known only when the last rank has finished it. So they are exchanged while the next batch runs,
and read one batch later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import nan, sqrt
from typing import TypeAlias

from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.batch.part import Leaf
from penstock.errors import BadInput, LossNotFinite
from penstock.runtime.asynchronous.order import asynchronous_order, cut_for
from penstock.runtime.asynchronous.versioned_stage import VersionedStage, with_updates
from penstock.runtime.asynchronous.weight_versions import WeightVersions
from penstock.runtime.engine import Engine
from penstock.runtime.gradients.buckets import stages_of_parameters
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.program import (
    SIZES_KEPT,
    DeviceCopies,
    Program,
    StagePart,
    prepared_steps,
)
from penstock.runtime.transport.messages import (
    Message,
    RankMessages,
    messages_between_actions,
    messages_of_rank,
)
from penstock.runtime.update.steps import Steps
from penstock.runtime.update.training import Training, Updated, metrics_of
from penstock.runtime.user_metrics import Means
from penstock.schedule.action import Action
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.message_order import in_planned_order, unit_times

Orders: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of every stage in one part of the asynchronous order."""

Rows: TypeAlias = list[list[float]]

MEASURED = 5
"""The number of values that a stage adds to a batch's: see `VersionedStage.measurements`."""


@dataclass(frozen=True)
class PreparedSize:
    """All that is fixed for batches of one size.

    ``ring`` has the messages of all micro-batches of the ring, and no steps. ``parts`` are the
    programs of single parts, by the orders of all stages, which are lowered once.
    """

    ring: Program
    parts: dict[Orders, Program] = field(default_factory=dict[Orders, Program])


@dataclass(frozen=True)
class RunningBatch:
    """A batch whose metrics were not read yet; ``rows`` waits for the numbers of all ranks."""

    samples: int
    learning_rate: float
    rows: Callable[[], Rows]


class AsynchronousSteps(Steps):
    """Training of this rank's stages batch after batch, with the weight updates of the schedule.

    ``measure_every``: measure the error of predicted weights every that many updates (0: never).
    """

    flushes = False

    def __init__(self, engine: Engine, training: Training, measure_every: int) -> None:
        super().__init__(engine, training)
        check_not_shared(engine)
        self._order = order = asynchronous_order(engine.plan)
        self.stages = {
            place.stage: VersionedStage(
                engine, place, order, stepper, training.clip_norm, measure_every
            )
            for place, stepper in zip(engine.places, training.steppers, strict=False)
        }
        self._for_size = lru_cache(SIZES_KEPT)(self._prepare)
        self._prepared: PreparedSize | None = None
        self._batches = 0
        self._running: deque[RunningBatch] = deque()

    @property
    def weight_versions(self) -> Mapping[int, WeightVersions]:
        return {number: stage.versions for number, stage in self.stages.items()}

    def step(self, batches: Sequence[Sequence[Leaf]]) -> StepMetrics:
        """Train on one batch; the pipeline is empty before and after it."""
        if len(batches) > 1:
            raise BadInput(
                f"step() was given {len(batches)} batches, and schedule "
                f"'{self._engine.plan.schedule}' updates weights after every "
                f"{self._order.rule.micro_batches_per_update} micro-batches; give it one"
            )
        (metrics,) = self.stream(batches)
        return metrics

    def stream(self, batches: Iterable[Sequence[Leaf]]) -> Iterator[StepMetrics]:
        """Train on batches, given as their leaves; yields the metrics of each, one batch late.

        The pipeline drains after the last batch, and before a batch of another size.
        """
        self.drain()
        self._running.clear()
        for leaves in batches:
            self._feed(leaves)
            if len(self._running) > 1:
                yield self._take()
        self.drain()
        while self._running:
            yield self._take()

    def drain(self) -> None:
        """Run the backwards of the micro-batches in flight; the next batch warms up again."""
        if self._prepared is None:
            return
        with self._engine.failures.shared():
            self._play(self._prepared, lambda stage: self._order.drain(stage, self._batches))
            self._end_exchange()
            for stage in self.stages.values():
                stage.restart()
        self._prepared, self._batches = None, 0

    def _feed(self, leaves: Sequence[Leaf]) -> None:
        """Run the part of one batch; its last micro-batches stay in flight."""
        engine, training, samples = self._engine, self._training, leaves[0].shape[0]
        lengths = engine.graph.lengths_of(dict(enumerate(leaves)))
        prepared, rate = self._for_size(samples, lengths), training.learning_rate
        if engine.graph.layout.lengths:
            with engine.failures.shared():
                self._end_exchange()
            engine.agree_on_lengths([(samples, *prepared.ring.lengths)])
        if prepared is not self._prepared:
            self.drain()
        batch = self._batches
        engine.begin(engine.metrics)
        with engine.failures.shared():
            if prepared is not self._prepared:
                self._prepared = prepared
                prepared.ring.channels.begin()
                engine.buckets.zero()
            self._give_rows(prepared.ring, leaves, batch)
            self._play(prepared, lambda stage: self._order.part(stage, batch))
            self._batches = batch + 1
            training.steps += 1
            self._end_exchange()
            rows = cache(engine.numbers.announce(self._numbers(leaves), "the numbers of a batch"))
            self._running.append(RunningBatch(samples, rate, rows))

    def _end_exchange(self) -> None:
        """Wait for the numbers that are on their way: only one exchange may be."""
        if self._running:
            self._running[-1].rows()

    def _give_rows(self, ring: Program, leaves: Sequence[Leaf], batch: int) -> None:
        if not self.stages:
            return
        engine, cut, name = self._engine, ring.cut, self._engine.random.name(self._training.steps)
        own = engine.graph.as_own_steps(leaves, cut.micro_batches[: self._order.micro_batches])
        device, samples = DeviceCopies(engine.world.device), [*map(len, cut.micro_batches)]
        for number, stage in self.stages.items():
            inputs = stage.runner.program.batch_inputs
            stage.feed(batch, ring.work(number, own, inputs, device, name=name), samples)
        if engine.metrics is not None:
            part = ring.parts.get(len(self._order.depths) - 1)
            engine.metrics.take_batch(dict(enumerate(own)), part.rows if part is not None else ())

    def _play(
        self, prepared: PreparedSize, actions_of: Callable[[int], tuple[Action, ...]]
    ) -> None:
        """Run this rank's actions, and expect the messages that the peers send in theirs."""
        if not self.stages:
            return
        orders = tuple(map(actions_of, range(self._order.shape.stages)))
        if orders not in prepared.parts:
            prepared.parts[orders] = self._part(prepared.ring, orders)
        with self._engine.random.drawn():
            self._engine.stages.run(prepared.parts[orders])

    def _part(self, ring: Program, orders: Orders) -> Program:
        """The program of one part: its actions and messages, and the updates of this rank."""
        times = unit_times(orders, self._order.ring_shape)
        own = sorted((a for stage in self.stages for a in orders[stage]), key=times.__getitem__)
        steps = prepared_steps(own, self.stages, ring.channels)
        messages = replace(ring.messages, planned=planned_messages(ring.messages, own, times))
        updating = tuple(with_updates(steps, self.stages, self._order))
        return replace(ring, messages=messages, steps=updating, begins=False)

    def _prepare(self, samples: int, lengths: LengthsOf) -> PreparedSize:
        engine, order, plan = self._engine, self._order, self._engine.plan
        cut = cut_for(plan, samples)
        ringed = BatchCut(cut.micro_batches * order.ring, cut.slices * order.ring)
        sized = [boundary.at(lengths) for boundary in engine.stages.boundaries]
        schedule = one_f_one_b(order.ring_shape)
        passed = messages_between_actions(plan, sized, schedule, ringed)
        messages = messages_of_rank(engine.world.rank, schedule, order.ring_shape, passed)
        channels = engine.stages.channels(messages)
        numbers = range(len(ringed.micro_batches))
        parts = {
            place.stage: StagePart(
                tuple(ringed.rows(number, place.stage, place.replica) for number in numbers),
                frozenset(numbers if order.recomputes(place.stage) else ()),
                last_backward=-1,
                halved=frozenset(),
            )
            for place in engine.places
        }
        return PreparedSize(Program(ringed, True, lengths, parts, messages, channels, ()))

    def _numbers(self, leaves: Sequence[Leaf]) -> list[float]:
        """This rank's numbers of a batch: those of every step, and those of its stages."""
        engine = self._engine
        own = engine.numbers.own([leaves], engine.stages.loss_terms, None, engine.metrics)
        measured = [n for stage in self.stages.values() for n in stage.measurements()]
        return own + (measured or [0.0, nan, nan, nan, nan])

    def _take(self) -> StepMetrics:
        """The metrics of the oldest batch without metrics."""
        engine, batch = self._engine, self._running.popleft()
        with engine.failures.shared():
            rows = batch.rows()
        measured = MEASURED * max(1, len(self.stages))
        totals = engine.numbers.put_together([row[:-measured] for row in rows], engine.metrics)
        own = [row[-measured:] for row in rows]
        totals = replace(totals, gradient_norm=sqrt(sum(sum(row[::MEASURED]) for row in own)))
        step = self._training.steps - len(self._running)
        try:
            totals.check_finite(step, batch.learning_rate)
        except LossNotFinite as failure:
            raise failure.at(
                f"schedule '{engine.plan.schedule}' has changed weights since, so the layer cannot "
                f"be found; go back to the last checkpoint"
            ) from None
        totals = replace(totals, means={**totals.means, **self._staleness(own)})
        update = Updated(batch.learning_rate, loss_scale=1.0, skipped=False)
        return metrics_of(step, totals, update, batch.samples)

    def _staleness(self, own: Rows) -> Means:
        """The measurements of each stage's first replica, by name."""
        found: dict[str, tuple[float, float]] = {}
        for number, stage in enumerate(self._engine.plan.stages):
            row = own[stage.devices[0]]
            # Other ranks have one stage, or none, unless this one has all.
            start = MEASURED * number if len(self.stages) > 1 else 0
            _, copies, late, predicted, stale = row[start : start + MEASURED]
            found[f"weight_versions/stage_{number}"] = (copies, 1.0)
            if late == late:
                found[f"version_difference/stage_{number}"] = (late, 1.0)
            if stale > 0:
                found[f"prediction_error/stage_{number}"] = (predicted / stale, 1.0)
        return found


def planned_messages(
    messages: RankMessages, own: Sequence[Action], times: dict[Action, int]
) -> tuple[Message | Action, ...]:
    """The messages of the actions in ``times``, and a rank's ``own`` actions, as they are planned.

    ``times`` are those of the part that the actions make up.
    """
    planned: list[tuple[Action, int, Message | Action]] = [(action, -1, action) for action in own]
    for message in messages.planned:
        if isinstance(message, Message) and message.source in times:
            planned.append((message.source, message.sender, message))
    return in_planned_order(planned, times)


def check_not_shared(engine: Engine) -> None:
    """Raise `BadInput` if stages share a trained parameter."""
    trained = {use.name for use in engine.graph.parameter_uses if use.requires_grad}
    for name, stages in stages_of_parameters(engine.graph, engine.plan).items():
        if len(stages) > 1 and name in trained:
            raise BadInput(
                f"parameter '{name}' is used by stages {' and '.join(map(str, stages))}, which "
                f"update weights at other times under schedule '{engine.plan.schedule}'; put its "
                f"layers into one stage, untie it, or use a schedule that waits for a flush"
            )
