"""One rank's part of training that does not wait: batch follows batch without a flush.

Each batch is played as its part of the endless order (`EndlessOrder`). What is measured of a batch
is known everywhere only when the last rank is through with it, so its numbers are exchanged while
the next batch is under way and read one batch later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan, sqrt

import torch
import torch.distributed as dist

from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.runtime.execute import Step, execute, steps_of
from penstock.runtime.gradients.buckets import stages_of_parameters
from penstock.runtime.iteration import Prepared
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.rank import Worker
from penstock.runtime.stages.runner import LossTerm
from penstock.runtime.steps.training import Training
from penstock.runtime.transport.channels import PipelineChannels
from penstock.runtime.transport.messages import Message, RankMessages, messages_of_rank
from penstock.runtime.user_metrics import Means
from penstock.runtime.without_flush.order import EndlessOrder, cut_for, endless_order
from penstock.runtime.without_flush.versioned_stage import (
    VersionedStage,
    clip_gradients,
    with_updates,
)
from penstock.schedule.action import Action
from penstock.schedule.families.early_backward import one_f_one_b

__all__ = ["EndlessTraining", "endless_training"]

Rows = list[list[float]]

OWN_NUMBERS = 5
"""What a rank adds to the numbers of a batch: see `OwnStage.numbers`."""


@dataclass(frozen=True)
class Fed:
    """A batch under way: its number of samples, its learning rate, and its numbers to come."""

    samples: int
    learning_rate: float
    rows: Callable[[], Rows]


@dataclass(frozen=True)
class Ring:
    """All that is fixed for batches of one size: how they are cut, and what travels.

    ``arriving[peer]`` are the messages from a peer by its action; ``steps`` are those of actions
    that have been played.
    """

    cut: BatchCut
    arriving: dict[int, dict[Action, list[Message]]]
    channels: PipelineChannels
    lengths: LengthsOf
    steps: dict[tuple[Action, ...], tuple[Step, ...]]


class NoStage:
    """A rank that the plan does not use: it takes part in exchanges only."""

    loss_terms: Sequence[LossTerm] = ()

    def begin(self, ring: Ring) -> None:
        """Nothing arrives."""

    def feed(self, ring: Ring, batch: int, leaves: Sequence[torch.Tensor]) -> None:
        """Nothing of the batch is read."""

    def play(self, ring: Ring, actions_of: Callable[[int], tuple[Action, ...]]) -> None:
        """Nothing is done."""

    def restart(self) -> None:
        """Nothing is counted."""

    def numbers(self) -> list[float]:
        """No norm, and nothing else that was measured."""
        return [0.0, nan, nan, nan, nan]


class OwnStage:
    """This rank's stage: its part of each batch, and the updates of its weights."""

    def __init__(
        self,
        worker: Worker,
        training: Training,
        order: EndlessOrder,
        clip_norm: float | None,
        measure_every: int,
    ) -> None:
        assert training.optimizer is not None
        self._worker, self._training, self._order = worker, training, order
        self._optimizer, self._buckets = training.optimizer, worker.buckets
        self._place = place = worker.places[0]
        self._group = worker.groups.get(worker.plan.device_groups[place.group])
        self._clip_norm = clip_norm
        self._gradient_norm = 0.0
        self._stage = VersionedStage(
            place.stage,
            worker.stages.runners[place.stage],
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
        """Those of the latest batch that this rank computed."""
        return self._stage.runner.loss_terms

    def begin(self, ring: Ring) -> None:
        """Open the channels for batches of another size."""
        ring.channels.begin(announced=False)
        self._buckets.zero()

    def feed(self, ring: Ring, batch: int, leaves: Sequence[torch.Tensor]) -> None:
        """Take this rank's rows of a batch."""
        worker, place, cut = self._worker, self._place, ring.cut
        leaves = worker.graph.as_own_steps(leaves, cut.micro_batches)
        rows = [
            cut.rows(number, place.stage, place.replica) for number in range(len(cut.micro_batches))
        ]
        self._stage.feed(batch, leaves, rows, cut.micro_batches, ring.lengths)
        if worker.metrics is not None:
            is_last = place.stage == len(self._order.depths) - 1
            worker.metrics.take_batch(dict(enumerate(leaves)), self._stage.rows if is_last else ())

    def play(self, ring: Ring, actions_of: Callable[[int], tuple[Action, ...]]) -> None:
        """Run this rank's actions, and expect what the peers send in theirs."""
        worker, own = self._worker, actions_of(self._place.stage)
        streams: dict[int, list[Message]] = {}
        for peer, arriving in ring.arriving.items():
            stage = next(iter(arriving)).stage
            streams[peer] = [m for action in actions_of(stage) for m in arriving.get(action, ())]
        ring.channels.proceed(streams)
        if own not in ring.steps:
            steps = steps_of(own, {self._place.stage: self._stage}, ring.channels)
            ring.steps[own] = tuple(with_updates(steps, self._stage, self._order))
        with worker.random.drawn():
            execute(ring.steps[own], ring.channels, worker.clock)

    def _total_weight(self, weight: float) -> float:
        """The terms in the loss of a micro-batch, of all replicas."""
        if self._group is None:
            return weight
        total = torch.tensor([weight], dtype=torch.float64, device=self._worker.world.device)
        dist.all_reduce(total, group=self._group)
        return float(total)

    def _change_weights(self) -> None:
        """Sum the gradients over the replicas, clip, step, and start anew from zero."""
        self._buckets.finish()
        gradients = [bucket.flat for bucket in self._buckets.buckets]
        self._gradient_norm = clip_gradients(gradients, self._clip_norm)
        self._training.step(self._buckets)
        self._buckets.zero()

    def numbers(self) -> list[float]:
        """Square of the gradient's norm, copies of weights, what they were late by.

        Then how far a prediction missed, and how far no prediction would have.
        """
        versions = self.versions
        passes, errors = versions.log.take_passes(), versions.log.take_errors()
        square = self._gradient_norm**2 if self._place.replica == 0 else 0.0
        late = sum(p.difference for p in passes) / len(passes) if passes else nan
        missed = [sqrt(sum(e.predicted**2 for e in errors)), sqrt(sum(e.stale**2 for e in errors))]
        return [square, float(versions.most_copies), late, *(missed if errors else [nan, nan])]


class EndlessTraining:
    """Trains this rank's stage on batch after batch, updating its weights as the schedule says.

    ``clip_norm`` holds for the norm of one stage's gradients at one update. ``measure_every`` is
    how many updates apart predictions of weights are followed up (0: never).

    Raises:
        BadInput: the schedule predicts weights, and the optimizer cannot.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        *,
        clip_norm: float | None = None,
        measure_every: int = 0,
    ) -> None:
        self._worker, self._training = worker, training
        self._order = order = endless_order(worker.plan)
        self._rings = Prepared[Ring]()
        self._ring: Ring | None = None
        self._batches = 0
        self._fed: deque[Fed] = deque()
        self._sums = worker.world.new_group(range(worker.world.size), "gloo")
        self.own: OwnStage | NoStage = NoStage()
        if worker.places:
            self.own = OwnStage(worker, training, order, clip_norm, measure_every)

    def step(self, batches: Sequence[Sequence[torch.Tensor]]) -> StepMetrics:
        """Train on one batch, from an empty pipeline to an empty pipeline.

        Raises:
            BadInput: there are several batches.
        """
        if len(batches) > 1:
            raise BadInput(
                f"step() was given {len(batches)} batches, and schedule "
                f"'{self._worker.plan.schedule}' updates weights after every "
                f"{self._order.rule.micro_batches_per_update} micro-batches; give it one"
            )
        (metrics,) = self.stream(batches)
        return metrics

    def stream(self, batches: Iterable[Sequence[torch.Tensor]]) -> Iterator[StepMetrics]:
        """Train on batches, given as their leaves; the metrics of each, one batch late.

        The pipeline runs empty after the last one, and before the first one of another size.
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
        """Run the backwards of what is in flight; the next batch warms up again."""
        if self._ring is None:
            return
        with self._worker.failures.shared():
            self.own.play(self._ring, lambda stage: self._order.drain(stage, self._batches))
            self.own.restart()
        self._ring, self._batches = None, 0

    def _feed(self, leaves: Sequence[torch.Tensor]) -> None:
        """The part of one batch; the micro-batches of the newest stay in flight."""
        worker, training, batch = self._worker, self._training, self._batches
        ring, rate = self._ring_for(leaves), training.learning_rate
        if ring is not self._ring:
            self.drain()
            batch = 0
        worker.begin()
        with worker.failures.shared():
            if ring is not self._ring:
                self._ring = ring
                self.own.begin(ring)
            self.own.feed(ring, batch, leaves)
            self.own.play(ring, lambda stage: self._order.part(stage, batch))
            self._batches = batch + 1
            training.steps += 1
            self._fed.append(Fed(leaves[0].shape[0], rate, self._exchanged(leaves)))

    def _ring_for(self, leaves: Sequence[torch.Tensor]) -> Ring:
        """What is fixed for batches of the size of this one.

        Raises:
            BadInput: the batch cannot be cut into the plan's micro-batches, or the model as
                captured does not take its lengths.
        """
        samples = leaves[0].shape[0]
        lengths = self._worker.graph.lengths_of(dict(enumerate(leaves)))
        return self._rings.find((samples, lengths, True), lambda: self._make_ring(samples, lengths))

    def _make_ring(self, samples: int, lengths: LengthsOf) -> Ring:
        worker, order = self._worker, self._order
        plan, world = worker.plan, worker.world
        cut = cut_for(plan, order, samples)
        ringed = BatchCut(cut.micro_batches * order.ring, cut.slices * order.ring)
        shape = replace(plan.shape(), micro_batches=len(ringed.micro_batches))
        sized = [boundary.at(lengths) for boundary in worker.stages.boundaries]
        messages = messages_of_rank(world.rank, plan, sized, one_f_one_b(shape), shape, ringed)
        return Ring(cut, by_action(messages), worker.stages.channels(messages), lengths, {})

    def _exchanged(self, leaves: Sequence[torch.Tensor]) -> Callable[[], Rows]:
        """Start to exchange a batch's numbers; what is returned waits for them."""
        worker = self._worker
        own = worker.numbers.own([leaves], self.own.loss_terms, None, worker.metrics)
        own += self.own.numbers()
        if self._sums is None:
            return lambda: [own]
        values = torch.tensor(own, dtype=torch.float64)
        rows = [torch.empty_like(values) for _ in range(worker.world.size)]
        work = dist.all_gather(rows, values, group=self._sums, async_op=True)
        assert work is not None

        def wait() -> Rows:
            await_work(work, worker.world, "the numbers of a batch from all ranks", "gloo")
            return [row.tolist() for row in rows]

        return wait

    def _take(self) -> StepMetrics:
        """The metrics of the oldest batch that has none yet."""
        worker, fed = self._worker, self._fed.popleft()
        with worker.failures.shared():
            rows = fed.rows()
        totals, means = worker.numbers.put_together(
            [row[:-OWN_NUMBERS] for row in rows], worker.metrics
        )
        own = [row[-OWN_NUMBERS:] for row in rows]
        totals = replace(totals, gradient_norm=sqrt(sum(row[0] for row in own)))
        step = self._training.steps - len(self._fed)
        totals.check_finite(step, fed.learning_rate)
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
        """What each stage's first replica measured, by name."""
        found: dict[str, tuple[float, float]] = {}
        for number, stage in enumerate(self._worker.plan.stages):
            _, copies, late, predicted, stale = own[stage.devices[0]]
            found[f"weight_versions/stage_{number}"] = (copies, 1.0)
            if late == late:
                found[f"version_difference/stage_{number}"] = (late, 1.0)
            if stale > 0:
                found[f"prediction_error/stage_{number}"] = (predicted / stale, 1.0)
        return found


def by_action(messages: RankMessages) -> dict[int, dict[Action, list[Message]]]:
    """The messages from every peer, by the action of its that sends them."""
    found: dict[int, dict[Action, list[Message]]] = {}
    for peer, stream in messages.streams.items():
        own = found.setdefault(peer, {})
        for message in stream:
            action = Action(message.kind, message.sender_stage, message.micro_batch)
            own.setdefault(action, []).append(message)
    return found


def endless_training(
    worker: Worker,
    training: Training,
    *,
    clip_norm: float | None,
    measure_every: int,
    compiled: bool = False,
) -> EndlessTraining | None:
    """How a worker trains where the plan's schedule updates without a flush; ``None`` elsewhere.

    Raises:
        BadInput: something was asked for that needs a flush, or the optimizer cannot predict.
    """
    if not order_of(worker.plan).weights.micro_batches_per_update:
        return None
    check_asynchronous(worker, training, compiled=compiled)
    return EndlessTraining(worker, training, clip_norm=clip_norm, measure_every=measure_every)


def check_asynchronous(worker: Worker, training: Training, *, compiled: bool) -> None:
    """Raise `BadInput` for what does not go with updates while micro-batches are in flight."""
    plan, graph = worker.plan, worker.graph
    what = f"schedule '{plan.schedule}' updates weights while micro-batches are in flight"
    if training.optimizer is None:
        raise BadInput(f"{what}, so it needs an optimizer; give Pipeline one")
    if training.scaler is not None:
        raise BadInput(f"{what}, and loss scaling needs one update of all stages; use bfloat16")
    if worker.held.owners:
        raise BadInput(f"{what}, and shard_optimizer needs one update of all stages; leave it out")
    if worker.noise is not None:
        raise BadInput(f"{what}, and gradient_noise needs one update of all stages; leave it out")
    keeping = "autocast" if worker.autocast_dtype is not None else "compile" * compiled
    if keeping and order_of(plan).weights.version == "newest":
        raise BadInput(
            f"{what} and its backwards use other weights than their forwards, but {keeping} keeps "
            f"copies of the forward's; leave {keeping} out, or use a schedule whose backwards use "
            f"the same weights, such as 'pipedream' or '2bw'"
        )
    trained = {use.name for use in graph.parameter_uses if use.requires_grad}
    for name, stages in stages_of_parameters(graph, plan).items():
        if len(stages) > 1 and name in trained:
            raise BadInput(
                f"parameter '{name}' is used by stages {', '.join(map(str, stages))}, and {what}, "
                f"on each stage at other times; put its layers into one stage, untie it, or use a "
                f"schedule that waits for a flush"
            )
