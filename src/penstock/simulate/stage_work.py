"""What one stage of a plan does in an iteration: seconds and bytes of its replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.cluster.cluster import Cluster
from penstock.schedule.action import ActionKind
from penstock.simulate.gradients import Ports, Share, group_ports, shares_of_stage
from penstock.simulate.layer_sums import LayerSums
from penstock.simulate.layout import KIND_CODES
from penstock.simulate.stage_memory import StageMemory, stage_memory

__all__ = ["ReplicaWork", "StageWork", "stage_work"]


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """Seconds of one replica for each micro-batch, and its memory.

    ``segments_s`` are the parts of its last action that makes gradients (B, or W where the
    backward is split), cut where gradients are complete.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    step_s: float
    segments_s: tuple[float, ...]
    memory: StageMemory

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


@dataclass(frozen=True, eq=False)
class StageWork:
    """One stage on its devices. ``number`` tells it from all others of one `Catalogue`.

    Segment ``k`` of the last backward ends at the first layer ``segment_layers[k]``; ``shares``
    are the gradients that the replicas reduce among themselves, through ``ports``.
    ``memory_limits`` pairs what a replica needs with what its device has, without repetition.
    """

    number: int
    layers: range
    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    slices: tuple[int, ...]
    replicas: tuple[ReplicaWork, ...]
    memory_limits: tuple[tuple[StageMemory, float], ...]
    segment_layers: tuple[int, ...]
    shares: tuple[Share, ...]
    ports: Ports

    @cached_property
    def whole(self) -> npt.NDArray[np.int64]:
        """The whole numbers, for `penstock.simulate.assembly`."""
        buckets = [0] * len(self.segment_layers)
        for share in self.shares:
            buckets[share.segment] += share.buckets
        outgoing, incoming = self.ports.outgoing, self.ports.incoming
        counts = (len(self.devices), len(buckets), sum(buckets), len(outgoing), len(incoming))
        return np.array([*counts, *self.hosts, *buckets, *outgoing, *incoming], dtype=np.int64)

    @cached_property
    def real(self) -> npt.NDArray[np.float64]:
        """The seconds, for `penstock.simulate.assembly`."""
        actions = [
            seconds for r in self.replicas for seconds in (*map(r.seconds, KIND_CODES), r.step_s)
        ]
        segments = [seconds for r in self.replicas for seconds in r.segments_s]
        buckets = [share.seconds for share in self.shares for _ in range(share.buckets)]
        return np.array([*actions, *segments, *buckets], dtype=np.float64)


def stage_work(
    number: int,
    layers: range,
    devices: tuple[int, ...],
    slices: tuple[int, ...],
    sums: LayerSums,
    cluster: Cluster,
    *,
    split: bool,
    optimizer_bytes_per_parameter_byte: float,
) -> StageWork:
    """The work of a stage; ``split`` says that its gradients come with W instead of B."""
    stops, shares = shares_of_stage(layers, devices, sums, cluster)
    made: dict[tuple[int, float], ReplicaWork] = {}
    replicas: list[ReplicaWork] = []
    for device, rows in zip(devices, slices, strict=True):
        speed = cluster.devices[device].speed
        if (rows, speed) not in made:
            memory = stage_memory(layers, rows, sums, optimizer_bytes_per_parameter_byte)
            made[rows, speed] = replica_work(layers, stops, rows, speed, sums, memory, split)
        replicas.append(made[rows, speed])
    limits = (
        (replica.memory, cluster.devices[device].memory_bytes)
        for replica, device in zip(replicas, devices, strict=True)
    )
    return StageWork(
        number=number,
        layers=layers,
        devices=devices,
        hosts=tuple(cluster.host_index[device] for device in devices),
        slices=slices,
        replicas=tuple(replicas),
        memory_limits=tuple(dict.fromkeys(limits)),
        segment_layers=stops,
        shares=shares,
        ports=group_ports(cluster, devices) if shares else Ports(),
    )


def replica_work(
    layers: range,
    stops: Sequence[int],
    rows: int,
    speed: float,
    sums: LayerSums,
    memory: StageMemory,
    split: bool,
) -> ReplicaWork:
    """The work of a replica with ``rows`` rows of a micro-batch; its speed divides all seconds."""
    gradients_s = sums.backward_weight_s if split else sums.backward_s
    parameter_bytes = sums.parameter_bytes(layers)
    return ReplicaWork(
        forward_s=sums.forward_s.of(layers, rows) / speed,
        backward_s=sums.backward_s.of(layers, rows) / speed,
        backward_input_s=sums.backward_input_s.of(layers, rows) / speed,
        backward_weight_s=sums.backward_weight_s.of(layers, rows) / speed,
        step_s=sums.profile.step_s_per_byte * parameter_bytes / speed,
        segments_s=tuple(
            gradients_s.of(range(lower, upper), rows) / speed
            for upper, lower in pairwise((layers.stop, *stops))
        ),
        memory=memory,
    )
