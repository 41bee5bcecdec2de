"""One rank's part of training without a flush.

Each batch runs as its part of the endless order (`EndlessOrder`). All numbers of a batch are known
only when the last rank has finished it. So they are exchanged while the next batch runs, and read
one batch later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
import torch.distributed as dist

from penstock.capture.batch_part import Leaf
from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput, LossNotFinite
from penstock.plan.ordering import order_of
from penstock.runtime.gradients.buckets import stages_of_parameters
from penstock.runtime.iteration import SizeCache
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.rank import Worker
from penstock.runtime.steps.training import Training
from penstock.runtime.transport.messages import messages_of_rank
from penstock.runtime.transport.send_window import least_window
from penstock.runtime.user_metrics import Means
from penstock.runtime.without_flush.order import cut_for, endless_order
from penstock.runtime.without_flush.stage_of_rank import NoStage, OwnStage, PreparedSize, by_action
from penstock.schedule.families.early_backward import one_f_one_b

__all__ = ["EndlessTraining", "endless_training"]

Rows = list[list[float]]

OWN_NUMBERS = 5
"""How many numbers a rank adds to those of a batch: see `OwnStage.numbers`."""


@dataclass(frozen=True)
class Fed:
    """A batch that is running: its samples, its learning rate, and a function for its numbers."""

    samples: int
    learning_rate: float
    rows: Callable[[], Rows]


class EndlessTraining:
    """Trains this rank's stage batch after batch, with the weight updates of the schedule.

    ``clip_norm`` limits the norm of one stage's gradients in one update. ``measure_every``: measure
    the error of predicted weights every that many updates (0: never).

    Raises:
        BadInput: the schedule predicts weights and the optimizer does not support it.
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
        self._sizes = SizeCache[PreparedSize]()
        self._prepared: PreparedSize | None = None
        self._batches = 0
        self._fed: deque[Fed] = deque()
        self._sums = worker.world.new_group(range(worker.world.size), "gloo")
        self.own: OwnStage | NoStage = NoStage()
        if worker.places:
            self.own = OwnStage(worker, training, order, clip_norm, measure_every)

    def step(self, batches: Sequence[Sequence[Leaf]]) -> StepMetrics:
        """Train on one batch; the pipeline is empty before and after it.

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
        with self._worker.failures.shared():
            self.own.play(self._prepared, lambda stage: self._order.drain(stage, self._batches))
            self.own.restart()
        self._prepared, self._batches = None, 0

    def _feed(self, leaves: Sequence[Leaf]) -> None:
        """Run the part of one batch; its last micro-batches stay in flight."""
        worker, training, batch = self._worker, self._training, self._batches
        prepared, rate = self._prepared_for(leaves), training.learning_rate
        if prepared is not self._prepared:
            self.drain()
            batch = 0
        worker.begin()
        with worker.failures.shared():
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
        lengths = self._worker.graph.lengths_of(dict(enumerate(leaves)))
        return self._sizes.find((samples, lengths, True), lambda: self._prepare(samples, lengths))

    def _prepare(self, samples: int, lengths: LengthsOf) -> PreparedSize:
        worker, order = self._worker, self._order
        plan, world = worker.plan, worker.world
        cut = cut_for(plan, order, samples)
        ringed = BatchCut(cut.micro_batches * order.ring, cut.slices * order.ring)
        shape = replace(plan.shape(), micro_batches=len(ringed.micro_batches))
        sized = [boundary.at(lengths) for boundary in worker.stages.boundaries]
        messages = messages_of_rank(world.rank, plan, sized, one_f_one_b(shape), shape, ringed)
        # No stage has more under way: it has taken the gradient of the micro-batch before these.
        window = max(least_window(shape.stages), *order.depths)
        channels = worker.stages.channels(messages, window)
        return PreparedSize(cut, by_action(messages), channels, lengths, {})

    def _exchanged(self, leaves: Sequence[Leaf]) -> Callable[[], Rows]:
        """Start to exchange a batch's numbers; the returned function waits for them."""
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
        """The metrics of the oldest batch without metrics."""
        worker, fed = self._worker, self._fed.popleft()
        with worker.failures.shared():
            rows = fed.rows()
        totals, means = worker.numbers.put_together(
            [row[:-OWN_NUMBERS] for row in rows], worker.metrics
        )
        own = [row[-OWN_NUMBERS:] for row in rows]
        totals = replace(totals, gradient_norm=sqrt(sum(row[0] for row in own)))
        step = self._training.steps - len(self._fed)
        try:
            totals.check_finite(step, fed.learning_rate)
        except LossNotFinite as failure:
            raise failure.at(
                f"schedule '{worker.plan.schedule}' has changed weights since, so the layer cannot "
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
        for number, stage in enumerate(self._worker.plan.stages):
            _, copies, late, predicted, stale = own[stage.devices[0]]
            found[f"weight_versions/stage_{number}"] = (copies, 1.0)
            if late == late:
                found[f"version_difference/stage_{number}"] = (late, 1.0)
            if stale > 0:
                found[f"prediction_error/stage_{number}"] = (predicted / stale, 1.0)
        return found


def endless_training(
    worker: Worker,
    training: Training,
    *,
    clip_norm: float | None,
    measure_every: int,
    compiled: bool = False,
) -> EndlessTraining | None:
    """The training of a worker whose schedule updates without a flush; ``None`` for others.

    Raises:
        BadInput: a setting needs a flush, or the optimizer does not support prediction.
    """
    if not order_of(worker.plan).weights.micro_batches_per_update:
        return None
    check_asynchronous(worker, training, compiled=compiled)
    return EndlessTraining(worker, training, clip_norm=clip_norm, measure_every=measure_every)


def check_asynchronous(worker: Worker, training: Training, *, compiled: bool) -> None:
    """Raise `BadInput` for settings that do not work with updates without a flush."""
    plan, graph = worker.plan, worker.graph
    what = f"schedule '{plan.schedule}' updates weights while micro-batches are in flight"
    if training.optimizer is None:
        raise BadInput(f"{what}, so it needs an optimizer; give Pipeline one")
    if training.scaler is not None:
        raise BadInput(f"{what}, and loss scaling needs one update of all stages; use bfloat16")
    if worker.held.owners:
        raise BadInput(f"{what}, and shard_optimizer needs one update of all stages; leave it out")
    if training.on_non_finite == "skip":
        raise BadInput(
            f'{what}, so a step cannot be left out afterwards; set on_non_finite to "stop" (or to '
            f'"roll-back" in a job)'
        )
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
