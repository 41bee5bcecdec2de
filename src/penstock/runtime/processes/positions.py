"""Where the ranks of a run are, and who waits for whom."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EXCHANGE", "Position", "chain", "circle"]

EXCHANGE = "exchange"
"""Begins the name of a meeting that a rank enters only when it has sent and received all before."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: ``phase`` and ``action`` say what it does, as a verb with its object.

    It waits for ``what`` (empty: it does not wait) from ``peer``, or (-1) from all ranks that are
    not in the same ``meeting``, a collective operation. ``since_s`` is when the wait began, on the
    rank's own clock. ``beat`` rises as long as the rank is alive.
    """

    beat: int
    phase: str
    action: str = ""
    what: str = ""
    peer: int = -1
    meeting: str = ""
    since_s: float = 0.0
    waited_s: float = 0.0

    @property
    def place(self) -> str:
        """What the rank does, for messages."""
        return f"{self.phase}, {self.action}" if self.action else self.phase


def awaited(rank: int, positions: Mapping[int, Position | None]) -> list[int]:
    """The ranks for which ``rank`` waits, as far as its position tells."""
    position = positions.get(rank)
    if position is None or not position.what:
        return []
    if position.peer >= 0:
        return [position.peer]
    if not position.meeting:
        return []
    others = {peer: found for peer, found in positions.items() if peer != rank}
    return [p for p, found in others.items() if found is None or found.meeting != position.meeting]


def circle(positions: Mapping[int, Position | None]) -> tuple[int, ...]:
    """Ranks that wait for one another, the first in an exchange; empty if there are none.

    Such ranks wait for ever: nothing that the first has sent can still be under way, because a rank
    enters an exchange only when it has sent and received all before. Ranks that wait for one
    another within a step may wait for a message that is under way, so they are not meant.
    """
    for start, position in positions.items():
        if position is None or not position.meeting.startswith(EXCHANGE):
            continue
        # Breadth first: the ranks for which ``start`` waits, each with the path to it.
        paths: dict[int, tuple[int, ...]] = {
            peer: (start, peer) for peer in awaited(start, positions)
        }
        queue = list(paths)
        for rank in queue:
            for peer in awaited(rank, positions):
                if peer == start:
                    return paths[rank]
                if peer not in paths:
                    paths[peer] = (*paths[rank], peer)
                    queue.append(peer)
    return ()


def chain(
    rank: int, positions: Mapping[int, Position | None], silent_s: Mapping[int, float]
) -> str:
    """Why ``rank`` waits, from rank to rank up to the one that keeps all waiting.

    ``silent_s`` are the ranks that do not answer, and for how long.
    """
    seen, text = [rank], ""
    while True:
        # A rank that does not answer explains more than one that waits itself.
        peers = sorted(awaited(seen[-1], positions), key=lambda peer: -silent_s.get(peer, 0.0))
        peer = next((peer for peer in peers if peer not in seen), None)
        if peer is None and peers:
            return f"{text}, which waits for rank {peers[0]}: none of them can go on"
        if peer is None:
            # It waits in a collective operation, which does not say for whom.
            peer = max(silent_s, key=lambda silent: silent_s[silent], default=None)
            if peer is None or peer in seen:
                return text
        end = final_link(positions.get(peer), silent_s.get(peer))
        if end:
            return (
                f"{text}, which waits for rank {peer}, which {end}"
                if text
                else f"rank {peer} {end}"
            )
        position = positions[peer]
        assert position is not None
        text = f"{text}, which waits for rank {peer}" if text else f"rank {peer}"
        text += f" ({position.place}; has waited {position.waited_s:.0f} s for {position.what})"
        seen.append(peer)


def final_link(position: Position | None, silent_s: float | None) -> str:
    """What to say of a rank at the end of a chain; empty if it waits for another."""
    if position is None:
        return "has not joined the run"
    if silent_s is not None:
        return (
            f"has not answered for {silent_s:.0f} s: its process is stopped, dead or hangs in a "
            f"call (last heard of: {position.place})"
        )
    return "" if position.what else f"does not wait: it {position.place}"
