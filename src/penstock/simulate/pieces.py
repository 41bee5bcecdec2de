"""What a compute stream of the plain engine does without a pause."""

from dataclasses import dataclass
from typing import Literal

from penstock.schedule.action import ActionKind
from penstock.simulate.workload import Replica

__all__ = ["Piece", "pieces_of_action"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Uninterrupted work of a stream.

    An action, a segment of one that completes gradients, or a step. A piece without a replica is a
    step or, without a kind, the wait of a stream of forwards for step ``micro_batch``. Two streams
    share a device by their ``claim_s``; a forward waits for the pieces of the other stream that
    stand before it, ``after`` in number.
    """

    kind: ActionKind | Literal["STEP", ""]
    seconds: float
    replica: int = -1
    micro_batch: int = 0
    starts: bool = True
    ends: bool = True
    buckets: tuple[int, ...] = ()
    claim_s: float = 0.0
    after: int = 0


def pieces_of_action(
    kind: ActionKind, replica: Replica, number: int, micro_batch: int, updates: bool
) -> list[Piece]:
    """An action as one piece; where it completes gradients, as its segments."""
    work = replica.work
    claim_s = work.forward_s if kind in ("F", "R") else work.backward_s
    if not updates:
        return [Piece(kind, work.seconds(kind), number, micro_batch, claim_s=claim_s)]
    last = len(replica.last_backward) - 1
    return [
        Piece(
            kind,
            segment.seconds,
            number,
            micro_batch,
            k == 0,
            k == last,
            segment.buckets,
            claim_s,
        )
        for k, segment in enumerate(replica.last_backward)
    ]
