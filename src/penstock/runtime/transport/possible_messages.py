"""Which ranks may have to send each other anything, for any size of a batch."""

from collections.abc import Iterator, Sequence
from itertools import product

from penstock.capture.lengths import LengthsOf
from penstock.capture.stage_program import TensorSpec
from penstock.plan.plan import Plan, Stage, rank_pairs
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    Message,
    MessagePart,
    messages_across,
)

__all__ = ["messages_by_rank"]


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
    by_rank: list[list[Message]] = [[] for _ in range(ranks)]
    for message in usual:
        by_rank[message.sender].append(message)
    crossed = [boundary.at(lengths) for boundary in (*boundaries, *also_crossed)]
    for message in rare_messages(plan, crossed, usual):
        by_rank[message.sender].append(message)
    return by_rank


def rare_messages(
    plan: Plan, boundaries: Sequence[BoundaryTensors], usual: Sequence[Message]
) -> Iterator[Message]:
    """One message for every connection that only batches of other sizes need.

    Another number of rows is divided in proportion to the slices. Rounding may then move a row to a
    replica that exchanges no rows with the same peer in a full micro-batch. Between stages with
    equal slices this cannot happen, since both divide alike. A tensor without a batch dimension may
    come from any replica. The messages are as large as rows of both ends allow in a full
    micro-batch.
    """
    known = {(message.sender, message.receiver) for message in usual}
    for boundary, direction in product(boundaries, (0, 1) if plan.mirrored else (0,)):
        stages = (boundary.producer, boundary.consumer)
        here, there = (plan.holder(stage, direction) for stage in stages)
        for i, j in product(range(here.replicas), range(there.replicas)):
            if i != j and not may_cross(boundary, here, there):
                continue
            rows = min(here.slices[i], there.slices[j])
            parts = tuple(part_of(spec, rows) for spec in boundary.tensors)
            ends, turned = (here.devices[i], there.devices[j]), (stages[1], stages[0])
            for (sender, receiver), passed in ((ends, stages), ((ends[1], ends[0]), turned)):
                kind = "F" if passed == stages else "B"
                for pair in rank_pairs(plan.ranks_of(sender), plan.ranks_of(receiver)):
                    if pair[0] != pair[1] and pair not in known:
                        known.add(pair)
                        yield Message(kind, direction, *pair, *passed, parts)


def may_cross(boundary: BoundaryTensors, here: Stage, there: Stage) -> bool:
    """Whether a replica may ever need data of a replica of the other stage with another number."""
    return here.slices != there.slices or any(spec.batch_dim < 0 for spec in boundary.tensors)


def part_of(spec: TensorSpec, rows: int) -> MessagePart:
    """A part with ``rows`` samples of a tensor."""
    shape = spec.shape_for(rows)
    return MessagePart(spec, shape, spec.batch_dim, range(rows), range(rows), shape)
