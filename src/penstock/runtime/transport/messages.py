"""Messages between ranks: their tensors and order, and all that may ever be sent.

Both ends compute the parts of a message from the plan, the schedule and the captured tensors. So
only data is ever sent: no shapes, no sizes, no handshakes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Literal

import torch

from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.contract import TensorSpec
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan, rank_pairs
from penstock.plan.row_split import row_overlaps, row_ranges
from penstock.runtime.micro_batches import BatchCut, cut_batch
from penstock.schedule.action import Action
from penstock.schedule.message_order import in_planned_order, unit_times
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors that stage ``producer`` sends to stage ``consumer``, in a fixed order.

    Within a home the producer has made them, or received them from elsewhere.
    """

    producer: int
    consumer: int
    tensors: tuple[TensorSpec, ...]

    def at(self, lengths: LengthsOf) -> "BoundaryTensors":
        """The same tensors for batches of certain lengths."""
        return replace(self, tensors=tuple(spec.at(lengths) for spec in self.tensors))


@dataclass(frozen=True, slots=True)
class MessagePart:
    """Rows of one tensor in a message.

    ``source_rows`` and ``target_rows`` are its rows in the sender's and the receiver's tensor along
    ``dim`` (-1: the whole tensor). ``shape`` is the shape of the part. ``fills_target``: the part
    is the receiver's whole tensor.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    dim: int
    source_rows: range
    target_rows: range
    target_shape: tuple[int, ...]
    dtype: torch.dtype = field(init=False)
    bytes: int = field(init=False)
    fills_target: bool = field(init=False)

    def __post_init__(self) -> None:
        # Fields, not properties: they are read for every message.
        object.__setattr__(self, "dtype", self.spec.dtype)
        object.__setattr__(self, "bytes", prod(self.shape) * self.spec.dtype.itemsize)
        object.__setattr__(self, "fills_target", self.shape == self.target_shape)


@dataclass(frozen=True, slots=True)
class Message:
    """A message from rank to rank for one micro-batch: activations ("F") or gradients ("B").

    ``bytes`` is the total size of its parts.
    """

    kind: Literal["F", "B"]
    micro_batch: int
    sender: int
    receiver: int
    sender_stage: int
    receiver_stage: int
    parts: tuple[MessagePart, ...]
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", sum(part.bytes for part in self.parts))

    @property
    def source(self) -> Action:
        """The forward or backward that sends it; of a backward in two halves it is the first."""
        return Action(self.kind, self.sender_stage, self.micro_batch)

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} from stage {self.sender_stage} (rank {self.sender})"


@dataclass(frozen=True)
class RankMessages:
    """All that one rank sends and receives in one iteration.

    ``outgoing`` and ``incoming`` have this rank's actions as keys. ``planned`` are the messages to
    and from other ranks in the planned order (`penstock.schedule.message_order`), with this rank's
    actions among them. Messages between stages of this rank are outgoing and incoming only.
    """

    outgoing: Mapping[Action, Sequence[Message]]
    incoming: Mapping[Action, Sequence[Message]]
    planned: tuple[Message | Action, ...]


def boundaries_of(graph: LayerGraph, plan: Plan) -> tuple[BoundaryTensors, ...]:
    """The tensors that stages pass to one another, each as `Plan.senders` says."""
    crossing: dict[tuple[int, int], list[TensorSpec]] = {}
    for spec, producer_layer, consumer_layers in graph.crossings:
        producer = plan.stage_of_layer(producer_layer)
        consumers = sorted({plan.stage_of_layer(layer) for layer in consumer_layers} - {producer})
        for ends in plan.senders(producer, consumers):
            consumer = ends[1]
            replicas = [len(plan.devices_of(stage)) for stage in (producer, consumer)]
            if spec.reduced and max(replicas) > 1:
                raise BadInput(
                    f"tensor '{spec.name}' is computed from all samples of a micro-batch and "
                    f"crosses from stage {producer} ({replicas[0]} replicas) to stage {consumer} "
                    f"({replicas[1]} replicas), which see only their rows; give both stages one "
                    f"device or cut the model elsewhere"
                )
            crossing.setdefault(ends, []).append(spec)
    return tuple(
        BoundaryTensors(*ends, tuple(tensors)) for ends, tensors in sorted(crossing.items())
    )


def messages_of_rank(
    rank: int,
    schedule: Schedule,
    shape: PipelineShape,
    passed: Iterable[tuple[Action, Action, Message]],
    order: Sequence[Action] = (),
) -> RankMessages:
    """The messages of ``rank``, of all that are ``passed`` when ``schedule`` runs.

    ``order`` are the actions of this rank.
    """
    outgoing: dict[Action, list[Message]] = {}
    incoming: dict[Action, list[Message]] = {}
    passing: list[tuple[Action, int, Message | Action]] = [(own, -1, own) for own in order]
    for source, target, message in passed:
        if message.sender == rank:
            outgoing.setdefault(source, []).append(message)
        if message.receiver == rank:
            incoming.setdefault(target, []).append(message)
        if (message.sender == rank) != (message.receiver == rank):
            passing.append((source, message.sender, message))
    times = unit_times(schedule.orders, shape)
    return RankMessages(outgoing, incoming, in_planned_order(passing, times))


def messages_between_actions(
    plan: Plan, boundaries: Sequence[BoundaryTensors], schedule: Schedule, cut: BatchCut
) -> Iterator[tuple[Action, Action, Message]]:
    """Every message of an iteration, with the action that sends it and the one that needs it."""
    passing = {
        ("F" if action.kind == "F" else "B", action.stage, action.micro_batch): action
        for order in schedule.orders
        for action in order
        if action.kind in "FBI"
    }
    for micro_batch in range(len(cut.micro_batches)):
        for boundary in boundaries:
            for message in messages_across(boundary, plan, cut, micro_batch):
                source = passing.get((message.kind, message.sender_stage, micro_batch))
                if source is not None:  # else an evaluation has no backwards
                    yield (
                        source,
                        passing[message.kind, message.receiver_stage, micro_batch],
                        message,
                    )


def messages_across(
    boundary: BoundaryTensors, plan: Plan, cut: BatchCut, micro_batch: int
) -> Iterator[Message]:
    """The messages between two stages: rows that both ends need, and their gradients in return.

    A tensor without a batch dimension goes from one sender to each receiver, and its gradient back
    the same path, so that the sum over the replicas counts everything once.

    All ranks of a tensor group hold a stage's whole activations and whole gradients. So each rank
    of the receiving group gets them from one rank of the sending group (`rank_pairs`).
    """
    stages = (boundary.producer, boundary.consumer)
    senders, receivers = (plan.holder(stage, micro_batch).devices for stage in stages)
    have, need = (cut.slices[micro_batch][stage] for stage in stages)
    overlap = {(o.sender, o.receiver): o.rows for o in row_overlaps(have, need)}
    active, needy = ([i for i, rows in enumerate(own) if rows] for own in (have, need))
    shared = {(active[k % len(active)], j) for k, j in enumerate(needy)}
    for i, j in sorted(overlap.keys() | shared):
        parts: list[MessagePart] = []
        for spec in boundary.tensors:
            if spec.batch_dim < 0:
                if (i, j) in shared:
                    parts.append(whole_part(spec, 0))
            elif (i, j) in overlap:
                parts.append(row_part(spec, overlap[i, j], have, need, i, j))
        here, there = plan.ranks_of(senders[i]), plan.ranks_of(receivers[j])
        gradients = tuple(turned(part, have[i]) for part in parts if part.spec.requires_grad)
        if parts:
            for pair in rank_pairs(here, there):
                yield Message("F", micro_batch, *pair, *stages, tuple(parts))
        if gradients:
            for pair in rank_pairs(there, here):
                yield Message("B", micro_batch, *pair, stages[1], stages[0], gradients)


def row_part(
    spec: TensorSpec, rows: range, have: Sequence[int], need: Sequence[int], i: int, j: int
) -> MessagePart:
    """The rows that replica ``i`` of the producer has and replica ``j`` of the consumer needs."""

    def local(holder: range) -> range:
        factor = spec.rows_per_sample
        return range((rows.start - holder.start) * factor, (rows.stop - holder.start) * factor)

    return MessagePart(
        spec,
        spec.shape_for(len(rows)),
        spec.batch_dim,
        local(row_ranges(have)[i]),
        local(row_ranges(need)[j]),
        spec.shape_for(need[j]),
    )


def turned(part: MessagePart, producer_rows: int) -> MessagePart:
    """The same rows in the opposite direction, as a gradient."""
    shape = part.spec.shape_for(producer_rows)
    return MessagePart(part.spec, part.shape, part.dim, part.target_rows, part.source_rows, shape)


def messages_by_rank(
    plan: Plan,
    ranks: int,
    boundaries: Sequence[BoundaryTensors],
    also_crossed: Sequence[BoundaryTensors],
    lengths: LengthsOf,
) -> list[list[Message]]:
    """The messages that every rank may send, which determine the connections and their sizes."""
    cut = cut_batch(plan, plan.global_batch)
    usual = [
        message
        for micro_batch in range(len(cut.micro_batches))
        for boundary in boundaries
        for message in messages_across(boundary.at(lengths), plan, cut, micro_batch)
    ]
    crossed = [boundary.at(lengths) for boundary in (*boundaries, *also_crossed)]
    by_rank: list[list[Message]] = [[] for _ in range(ranks)]
    for message in (*usual, *rare_messages(plan, crossed, usual)):
        by_rank[message.sender].append(message)
    return by_rank


def rare_messages(
    plan: Plan, boundaries: Sequence[BoundaryTensors], usual: Sequence[Message]
) -> Iterator[Message]:
    """One message for every connection that only batches of other sizes need.

    Another number of rows is divided in proportion to the slices. Rounding may then move a row to a
    replica that exchanges no rows with the same peer in a full micro-batch. Between stages with
    equal slices this cannot happen, since both divide equally. A tensor without a batch dimension
    may come from any replica. The messages are as large as rows of both ends allow in a full
    micro-batch.
    """
    known = {(message.sender, message.receiver) for message in usual}
    for boundary, direction in product(boundaries, (0, 1) if plan.mirrored else (0,)):
        stages = (boundary.producer, boundary.consumer)
        here, there = (plan.holder(stage, direction) for stage in stages)
        from_any_replica = any(spec.batch_dim < 0 for spec in boundary.tensors)
        for i, j in product(range(here.replicas), range(there.replicas)):
            if i != j and here.slices == there.slices and not from_any_replica:
                continue
            rows = min(here.slices[i], there.slices[j])
            parts = tuple(whole_part(spec, rows) for spec in boundary.tensors)
            ends = plan.ranks_of(here.devices[i]), plan.ranks_of(there.devices[j])
            for ranks, (source, target) in ((ends, stages), (ends[::-1], stages[::-1])):
                kind = "F" if source == stages[0] else "B"
                for pair in rank_pairs(*ranks):
                    if pair[0] != pair[1] and pair not in known:
                        known.add(pair)
                        yield Message(kind, direction, *pair, source, target, parts)


def whole_part(spec: TensorSpec, rows: int) -> MessagePart:
    """A whole tensor of this number of rows; all of one without a batch dimension."""
    shape = spec.shape_for(rows)
    return MessagePart(spec, shape, spec.batch_dim, range(rows), range(rows), shape)
