"""The state of streams, devices, lanes and hosts while `penstock.simulate.plain` plays."""

from dataclasses import dataclass, field

from penstock.simulate.pieces import Piece
from penstock.simulate.trace import Span

__all__ = ["DeviceState", "Lane", "Processor", "Stream"]


@dataclass(slots=True)
class DeviceState:
    """The state that the streams of a device share.

    ``buckets_left``: buckets that the next step waits for. ``unsent``: messages waiting to be sent.
    """

    buckets: int
    buckets_left: int
    steps_done: int = 0
    unsent: int = 0


@dataclass(slots=True)
class Stream:
    """A compute stream and its pieces of work."""

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
    """The messages of one pair or the buckets of one reduction, which pass one after the other."""

    resources: tuple[int, ...]
    seconds: list[float]
    spans: list[Span]
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    current: int = -1


@dataclass(slots=True)
class Processor:
    """The compute slots of a host, with the virtual time that all its running devices share."""

    slots: int
    running: set[int] = field(default_factory=set[int])
    progress: float = 0.0
    since_s: float = 0.0
