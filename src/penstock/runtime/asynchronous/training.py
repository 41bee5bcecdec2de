"""One rank's part of training without a flush.

Each batch runs as its part of the asynchronous order (`AsynchronousOrder`). All numbers of a batch
are known only when the last rank has finished it. So they are exchanged while the next batch runs,
and read one batch later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import nan, sqrt
from typing import TypeAlias

import torch
import torch.distributed as dist

from penstock.capture.batch_part import Leaf
from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput, LossNotFinite
from penstock.plan.ordering import order_of
from penstock.runtime.asynchronous.order import AsynchronousOrder, asynchronous_order, cut_for
from penstock.runtime.asynchronous.versioned_stage import (
    VersionedStage,
    clip_gradients,
    with_updates,
)
from penstock.runtime.engine import Engine
from penstock.runtime.execute import PreparedAction, execute, steps_of
from penstock.runtime.gradients.buckets import stages_of_parameters
from penstock.runtime.iteration import SizeCache
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.stages.runner import LossTerm
from penstock.runtime.steps.training import Training
from penstock.runtime.transport.channels import PipelineChannels
from penstock.runtime.transport.messages import (
    Message,
    RankMessages,
    messages_between_actions,
    messages_of_rank,
)
from penstock.runtime.user_metrics import Means
from penstock.schedule.action import Action
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.message_order import in_planned_order, unit_times
from penstock.schedule.shape import PipelineShape

__all__ = ["AsynchronousTraining", "asynchronous_training"]

Orders: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of every stage in one part of the asynchronous order."""


@dataclass(frozen=True)
class PreparedSize:
    """All that is fixed for batches of one size: their cut and their messages.

    ``passing`` are the messages to and from this rank by the action that sends them. ``shape`` has
    the micro-batches of the whole ring. ``parts`` caches, for the orders of all stages, the
    messages of a part in the planned order and this rank's prepared actions.
    """

    cut: BatchCut
    shape: PipelineShape
    passing: dict[Action, list[Message]]
    channels: PipelineChannels
    lengths: LengthsOf
    parts: dict[Orders, tuple[tuple[Message, ...], tuple[PreparedAction, ...]]] = field(
        default_factory=dict
    )

    def planned(self, orders: Orders) -> tuple[Message, ...]:
        """The messages of one part, in the planned order."""
        sent = (
            (action, message.sender, message)
            for order in orders
            for action in order
            for message in self.passing.get(action, ())
        )
        return in_planned_order(sent, unit_times(orders, self.shape))


class NoStage:
    """A rank that the plan does not use: it only takes part in exchanges."""

    loss_terms: Sequence[LossTerm] = ()

    def begin(self, prepared: PreparedSize) -> None:
        """Nothing arrives."""

    def feed(self, prepared: PreparedSize, batch: int, leaves: Sequence[Leaf]) -> None:
        """Nothing of the batch is read."""

    def play(self, prepared: PreparedSize, actions_of: Callable[[int], tuple[Action, ...]]) -> None:
        """Nothing is done."""

    def restart(self) -> None:
        """Nothing to reset."""

    def numbers(self) -> list[float]:
        """A norm of 0, and no measurements."""
        return [0.0, nan, nan, nan, nan]


class OwnStage:
    """This rank's stage: its part of each batch, and the updates of its weights."""

    def __init__(
        self,
        engine: Engine,
        training: Training,
        order: AsynchronousOrder,
        measure_every: int,
    ) -> None:
        assert training.optimizer is not None
        self._engine, self._training, self._order = engine, training, order
        self._optimizer, self._buckets = training.optimizer, engine.buckets
        self._place = place = engine.places[0]
        self._replicas = engine.plan.device_groups[place.group]
        self._gradient_norm = 0.0
        self._stage = VersionedStage(
            place.stage,
            engine.stages.runners[place.stage],
            order,
            self._optimizer,
            self._change_weights,
            measure_every=measure_every,
            total_weight=self._total_weight,
        )
        self.versions = self._stage.versions
        self.restart = self._stage.restart

    @property
    def loss_terms(self) -> Sequence[LossTerm]:
        """The loss terms of the latest batch that this rank computed."""
        return self._stage.runner.loss_terms

    def begin(self, prepared: PreparedSize) -> None:
        """Open the channels for batches of another size."""
        prepared.channels.begin(announced=False)
        self._buckets.zero()

    def feed(self, prepared: PreparedSize, batch: int, leaves: Sequence[Leaf]) -> None:
        """Take this rank's rows of a batch."""
        engine, place, cut = self._engine, self._place, prepared.cut
        leaves = engine.graph.as_own_steps(leaves, cut.micro_batches)
        rows = [
            cut.rows(number, place.stage, place.replica) for number in range(len(cut.micro_batches))
        ]
        self._stage.feed(
            batch, leaves, rows, cut.micro_batches, prepared.lengths, self._training.steps
        )
        if engine.metrics is not None:
            is_last = place.stage == len(self._order.depths) - 1
            engine.metrics.take_batch(dict(enumerate(leaves)), self._stage.rows if is_last else ())

    def play(self, prepared: PreparedSize, actions_of: Callable[[int], tuple[Action, ...]]) -> None:
        """Run this rank's actions, and expect the messages that the peers send in theirs."""
        engine, stage = self._engine, self._place.stage
        orders = tuple(map(actions_of, range(prepared.shape.stages)))
        if orders not in prepared.parts:
            steps = steps_of(orders[stage], {stage: self._stage}, prepared.channels)
            updating = tuple(with_updates(steps, self._stage, self._order))
            prepared.parts[orders] = prepared.planned(orders), updating
        planned, steps = prepared.parts[orders]
        prepared.channels.proceed(planned)
        with engine.random.drawn():
            execute(steps, prepared.channels, engine.clock)

    def _total_weight(self, weight: float) -> float:
        """The number of loss terms of a micro-batch over all replicas."""
        group = self._engine.groups.get(self._replicas)
        if group is None:
            return weight
        total = torch.tensor([weight], dtype=torch.float64, device=self._engine.world.device)
        dist.all_reduce(total, group=group)
        return float(total)

    def _change_weights(self) -> None:
        """Sum the gradients over the replicas, clip, step, and zero the gradients."""
        self._buckets.finish()
        gradients = [bucket.flat for bucket in self._buckets.buckets]
        self._gradient_norm = clip_gradients(gradients, self._training.clip_norm)
        self._training.step(self._buckets)
        self._buckets.zero()

    def numbers(self) -> list[float]:
        """The measurements of this rank that are sent to the others.

        They are the square of the gradient's norm, the most copies of weights, the mean difference
        of weight versions, the error of predictions, and the error without prediction.
        """
        versions = self.versions
        passes, errors = versions.log.take_passes(), versions.log.take_errors()
        square = self._gradient_norm**2 if self._place.replica == 0 else 0.0
        late = sum(p.difference for p in passes) / len(passes) if passes else nan
        missed = [sqrt(sum(e.predicted**2 for e in errors)), sqrt(sum(e.stale**2 for e in errors))]
        return [square, float(versions.most_copies), late, *(missed if errors else [nan, nan])]


def by_action(messages: RankMessages) -> dict[Action, list[Message]]:
    """The messages to and from a rank, by the action that sends them."""
    found: dict[Action, list[Message]] = {}
    for message in messages.planned:
        action = Action(message.kind, message.sender_stage, message.micro_batch)
        found.setdefault(action, []).append(message)
    return found


Rows = list[list[float]]

OWN_NUMBERS = 5
"""How many numbers a rank adds to those of a batch: see `OwnStage.numbers`."""


@dataclass(frozen=True)
class Fed:
    """A batch that is running: its samples, its learning rate, and a function for its numbers."""

    samples: int
    learning_rate: float
    rows: Callable[[], Rows]


class AsynchronousTraining:
    """Trains this rank's stage batch after batch, with the weight updates of the schedule.

    Clipping limits the norm of one stage's gradients in one update. ``measure_every``: measure the
    error of predicted weights every that many updates (0: never).

    Raises:
        BadInput: the schedule predicts weights and the optimizer does not support it.
    """

    def __init__(
        self,
        engine: Engine,
        training: Training,
        measure_every: int = 0,
    ) -> None:
        self._engine, self._training = engine, training
        self._order = order = asynchronous_order(engine.plan)
        self._sizes = SizeCache[PreparedSize]()
        self._prepared: PreparedSize | None = None
        self._batches = 0
        self._fed: deque[Fed] = deque()
        self._sums = engine.world.new_group(range(engine.world.size), "gloo")
        engine.disconnect.callback(delattr, self, "_sums")
        self.own: OwnStage | NoStage = NoStage()
        if engine.places:
            self.own = OwnStage(engine, training, order, measure_every)

    def step(self, batches: Sequence[Sequence[Leaf]]) -> StepMetrics:
        """Train on one batch; the pipeline is empty before and after it.

        Raises:
            BadInput: there are several batches.
        """
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
        self._fed.clear()
        for leaves in batches:
            self._feed(leaves)
            if len(self._fed) > 1:
                yield self._take()
        self.drain()
        while self._fed:
            yield self._take()

    def drain(self) -> None:
        """Run the backwards of the micro-batches in flight; the next batch warms up again."""
        if self._prepared is None:
            return
        with self._engine.failures.shared():
            self.own.play(self._prepared, lambda stage: self._order.drain(stage, self._batches))
            self.own.restart()
        self._prepared, self._batches = None, 0

    def _feed(self, leaves: Sequence[Leaf]) -> None:
        """Run the part of one batch; its last micro-batches stay in flight."""
        engine, training, batch = self._engine, self._training, self._batches
        prepared, rate = self._prepared_for(leaves), training.learning_rate
        engine.agree_on_lengths([(leaves[0].shape[0], *prepared.lengths)])
        if prepared is not self._prepared:
            self.drain()
            batch = 0
        engine.begin()
        with engine.failures.shared():
            if prepared is not self._prepared:
                self._prepared = prepared
                self.own.begin(prepared)
            self.own.feed(prepared, batch, leaves)
            self.own.play(prepared, lambda stage: self._order.part(stage, batch))
            self._batches = batch + 1
            training.steps += 1
            self._fed.append(Fed(leaves[0].shape[0], rate, self._exchanged(leaves)))

    def _prepared_for(self, leaves: Sequence[Leaf]) -> PreparedSize:
        """The prepared work for batches of this size.

        Raises:
            BadInput: the batch cannot be cut into the plan's micro-batches, or the captured model
                does not accept its lengths.
        """
        samples = leaves[0].shape[0]
        lengths = self._engine.graph.lengths_of(dict(enumerate(leaves)))
        return self._sizes.find((samples, lengths, True), lambda: self._prepare(samples, lengths))

    def _prepare(self, samples: int, lengths: LengthsOf) -> PreparedSize:
        engine, order = self._engine, self._order
        plan, world = engine.plan, engine.world
        cut = cut_for(plan, order, samples)
        ringed = BatchCut(cut.micro_batches * order.ring, cut.slices * order.ring)
        shape = replace(plan.shape(), micro_batches=len(ringed.micro_batches))
        sized = [boundary.at(lengths) for boundary in engine.stages.boundaries]
        schedule = one_f_one_b(shape)
        passed = messages_between_actions(plan, sized, schedule, ringed)
        messages = messages_of_rank(world.rank, schedule, shape, passed)
        channels = engine.stages.channels(messages)
        return PreparedSize(cut, shape, by_action(messages), channels, lengths)

    def _exchanged(self, leaves: Sequence[Leaf]) -> Callable[[], Rows]:
        """Start to exchange a batch's numbers; the returned function waits for them."""
        engine = self._engine
        own = engine.numbers.own([leaves], self.own.loss_terms, None, engine.metrics)
        own += self.own.numbers()
        if self._sums is None:
            return lambda: [own]
        values = torch.tensor(own, dtype=torch.float64)
        rows = [torch.empty_like(values) for _ in range(engine.world.size)]
        work = dist.all_gather(rows, values, group=self._sums, async_op=True)
        assert work is not None

        def wait() -> Rows:
            await_work(work, engine.world, "the numbers of a batch from all ranks", "gloo")
            return [row.tolist() for row in rows]

        return wait

    def _take(self) -> StepMetrics:
        """The metrics of the oldest batch without metrics."""
        engine, fed = self._engine, self._fed.popleft()
        with engine.failures.shared():
            rows = fed.rows()
        totals, means = engine.numbers.put_together(
            [row[:-OWN_NUMBERS] for row in rows], engine.metrics
        )
        own = [row[-OWN_NUMBERS:] for row in rows]
        totals = replace(totals, gradient_norm=sqrt(sum(row[0] for row in own)))
        step = self._training.steps - len(self._fed)
        try:
            totals.check_finite(step, fed.learning_rate)
        except LossNotFinite as failure:
            raise failure.at(
                f"schedule '{engine.plan.schedule}' has changed weights since, so the layer cannot "
                f"be found; go back to the last checkpoint"
            ) from None
        means = {**means, **self._staleness(own)}
        return StepMetrics(
            step,
            totals.loss,
            totals.gradient_norm,
            fed.learning_rate,
            fed.samples,
            totals.seconds,
            totals.bubble,
            metrics={name: value for name, (value, _) in means.items()},
        )

    def _staleness(self, own: Rows) -> Means:
        """The measurements of each stage's first replica, by name."""
        found: dict[str, tuple[float, float]] = {}
        for number, stage in enumerate(self._engine.plan.stages):
            _, copies, late, predicted, stale = own[stage.devices[0]]
            found[f"weight_versions/stage_{number}"] = (copies, 1.0)
            if late == late:
                found[f"version_difference/stage_{number}"] = (late, 1.0)
            if stale > 0:
                found[f"prediction_error/stage_{number}"] = (predicted / stale, 1.0)
        return found


def asynchronous_training(
    engine: Engine,
    training: Training,
    measure_every: int,
) -> AsynchronousTraining | None:
    """The training of an engine whose schedule updates without a flush; ``None`` for others.

    Raises:
        BadInput: stages share a parameter, or the optimizer does not support prediction.
    """
    if not order_of(engine.plan).weights.micro_batches_per_update:
        return None
    check_own_parameters(engine)
    return AsynchronousTraining(engine, training, measure_every)


def check_own_parameters(engine: Engine) -> None:
    """Raise `BadInput` if several stages use a trained parameter, which each would update."""
    trained = {use.name for use in engine.graph.parameter_uses if use.requires_grad}
    for name, stages in stages_of_parameters(engine.graph, engine.plan).items():
        if len(stages) > 1 and name in trained:
            raise BadInput(
                f"parameter '{name}' is used by stages {' and '.join(map(str, stages))}, which "
                f"update weights at other times under schedule '{engine.plan.schedule}'; put its "
                f"layers into one stage, untie it, or use a schedule that waits for a flush"
            )
