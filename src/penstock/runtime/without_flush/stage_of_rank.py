"""What a rank does in training without a flush: the part of its stage, if it has one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan, sqrt

import torch
import torch.distributed as dist

from penstock.capture.batch_part import Leaf
from penstock.capture.lengths import LengthsOf
from penstock.runtime.execute import PreparedAction, execute, steps_of
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.rank import Worker
from penstock.runtime.stages.runner import LossTerm
from penstock.runtime.steps.training import Training
from penstock.runtime.transport.channels import PipelineChannels
from penstock.runtime.transport.messages import Message, RankMessages
from penstock.runtime.without_flush.order import EndlessOrder
from penstock.runtime.without_flush.versioned_stage import (
    VersionedStage,
    clip_gradients,
    with_updates,
)
from penstock.schedule.action import Action

__all__ = ["NoStage", "OwnStage", "PreparedSize", "by_action"]


@dataclass(frozen=True)
class PreparedSize:
    """All that is fixed for batches of one size: their cut and their messages.

    ``arriving[peer]`` are the messages from a peer by the action that sends them. ``steps`` caches
    the prepared actions.
    """

    cut: BatchCut
    arriving: dict[int, dict[Action, list[Message]]]
    channels: PipelineChannels
    lengths: LengthsOf
    steps: dict[tuple[Action, ...], tuple[PreparedAction, ...]]


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
        worker: Worker,
        training: Training,
        order: EndlessOrder,
        measure_every: int,
    ) -> None:
        assert training.optimizer is not None
        self._worker, self._training, self._order = worker, training, order
        self._optimizer, self._buckets = training.optimizer, worker.buckets
        self._place = place = worker.places[0]
        self._group = worker.groups.get(worker.plan.device_groups[place.group])
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
        """The loss terms of the latest batch that this rank computed."""
        return self._stage.runner.loss_terms

    def begin(self, prepared: PreparedSize) -> None:
        """Open the channels for batches of another size."""
        prepared.channels.begin(announced=False)
        self._buckets.zero()

    def feed(self, prepared: PreparedSize, batch: int, leaves: Sequence[Leaf]) -> None:
        """Take this rank's rows of a batch."""
        worker, place, cut = self._worker, self._place, prepared.cut
        leaves = worker.graph.as_own_steps(leaves, cut.micro_batches)
        rows = [
            cut.rows(number, place.stage, place.replica) for number in range(len(cut.micro_batches))
        ]
        self._stage.feed(batch, leaves, rows, cut.micro_batches, prepared.lengths)
        if worker.metrics is not None:
            is_last = place.stage == len(self._order.depths) - 1
            worker.metrics.take_batch(dict(enumerate(leaves)), self._stage.rows if is_last else ())

    def play(self, prepared: PreparedSize, actions_of: Callable[[int], tuple[Action, ...]]) -> None:
        """Run this rank's actions, and expect the messages that the peers send in theirs."""
        worker, own = self._worker, actions_of(self._place.stage)
        streams: dict[int, list[Message]] = {}
        for peer, arriving in prepared.arriving.items():
            stage = next(iter(arriving)).stage
            streams[peer] = [m for action in actions_of(stage) for m in arriving.get(action, ())]
        prepared.channels.proceed(streams)
        if own not in prepared.steps:
            steps = steps_of(own, {self._place.stage: self._stage}, prepared.channels)
            prepared.steps[own] = tuple(with_updates(steps, self._stage, self._order))
        with worker.random.drawn():
            execute(prepared.steps[own], prepared.channels, worker.clock)

    def _total_weight(self, weight: float) -> float:
        """The number of loss terms of a micro-batch over all replicas."""
        if self._group is None:
            return weight
        total = torch.tensor([weight], dtype=torch.float64, device=self._worker.world.device)
        dist.all_reduce(total, group=self._group)
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


def by_action(messages: RankMessages) -> dict[int, dict[Action, list[Message]]]:
    """The messages from every peer, by the peer's action that sends them."""
    found: dict[int, dict[Action, list[Message]]] = {}
    for peer, stream in messages.streams.items():
        own = found.setdefault(peer, {})
        for message in stream:
            action = Action(message.kind, message.sender_stage, message.micro_batch)
            own.setdefault(action, []).append(message)
    return found
