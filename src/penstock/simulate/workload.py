"""All that the engines need to know of one iteration: seconds, messages, reductions, resources."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.schedule.action import ActionKind
from penstock.schedule.schedule import Schedule

__all__ = ["Bucket", "DeviceWork", "Direction", "Message", "Reduction", "Segment", "Workload"]

Direction: TypeAlias = Literal["F", "B"]
"""Activations flow with the forwards, gradients with the backwards."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stage's last backward, and the gradient buckets that are complete at its end."""

    seconds: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """One replica of one stage: its device in the cluster, and its seconds.

    ``last_backward`` replaces the last action that makes gradients (B or W) by its segments.
    """

    device: int
    stage: int
    host: int
    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    last_backward: tuple[Segment, ...]
    step_s: float

    def seconds(self, kind: ActionKind) -> float:
        """Seconds of one action at full speed; a recompute is another forward."""
        match kind:
            case "F" | "R":
                return self.forward_s
            case "B":
                return self.backward_s
            case "I":
                return self.backward_input_s
            case "W":
                return self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Message:
    """All tensors that one replica sends another for each micro-batch, in one direction.

    ``sender`` and ``receiver`` are positions in `Workload.devices`. A message of no seconds only
    orders the two stages; it occupies nothing.
    """

    sender: int
    receiver: int
    direction: Direction
    seconds: float
    bytes: float
    resources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed over the members of a reduction in one go."""

    stage: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradient all-reduces among one set of replicas, bucket after bucket."""

    members: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    resources: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """One iteration of one plan, ready to play.

    Devices are in order of stage and replica. Buckets are numbered through over ``reductions``.
    ``host_slots[host]`` is how many devices of the host compute at full speed at once (0: all).
    ``resources`` counts what messages and reductions occupy one at a time, numbered

        0 .. D-1          send engine of device position d
        D .. 2D-1         receive engine of d
        2D .. 2D+H-1      outgoing port of host h
        2D+H .. 2D+2H-1   incoming port of h
    """

    schedule: Schedule
    micro_batches: int
    devices: tuple[DeviceWork, ...]
    messages: tuple[Message, ...]
    reductions: tuple[Reduction, ...]
    host_slots: tuple[int, ...]
    last_backward: tuple[int, ...]

    @property
    def resources(self) -> int:
        """The number of engines and ports."""
        return 2 * len(self.devices) + 2 * len(self.host_slots)

    @property
    def actions(self) -> int:
        """Compute actions of all devices together."""
        return sum(len(self.schedule.of(work.stage)) for work in self.devices)
