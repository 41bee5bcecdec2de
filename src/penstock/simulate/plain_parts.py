"""What `penstock.simulate.plain` remembers of streams, devices, lanes and hosts while it plays."""

from dataclasses import dataclass, field

from penstock.simulate.pieces import Piece
from penstock.simulate.trace import Span

__all__ = ["Device", "Lane", "Processor", "Stream"]


@dataclass(slots=True)
class Device:
    """What the streams of a device share.

    ``buckets_left`` are those of the next step; ``unsent`` messages wait to leave.
    """

    buckets: int
    buckets_left: int
    steps_done: int = 0
    unsent: int = 0


@dataclass(slots=True)
class Stream:
    """A compute stream while it plays its pieces."""

    device: int
    host: int
    pieces: list[Piece]
    next_piece: int = 0
    computes: bool = False
    ending: bool = False
    finish: float = 0.0
    left: float = 0.0
    since_s: float = 0.0
    work_s: float = 0.0
    claim_s: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])


@dataclass(slots=True)
class Lane:
    """Messages of one pair, or buckets of one group: one after the other on the same resources."""

    resources: tuple[int, ...]
    seconds: list[float]
    spans: list[Span]
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    current: int = -1


@dataclass(slots=True)
class Processor:
    """The compute slots of one host: virtual time that all its running devices share."""

    slots: int
    running: set[int] = field(default_factory=set[int])
    progress: float = 0.0
    since_s: float = 0.0
