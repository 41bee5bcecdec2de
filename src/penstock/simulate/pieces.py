"""The uninterrupted pieces of work that a compute stream of the plain engine runs."""

from dataclasses import dataclass
from typing import Literal

from penstock.schedule.action import ActionKind
from penstock.simulate.workload import Replica

__all__ = ["Piece", "pieces_of_action"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Uninterrupted work of a stream: an action, a segment of one, or an optimizer step.

    A piece without a replica is a step. A piece without a kind makes a stream of forwards wait for
    step ``micro_batch``. Two streams share a device in proportion to ``claim_s``. A forward waits
    until ``after`` pieces of the other stream have ended.
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
    """An action as one piece or, if it completes gradients, as its segments."""
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
