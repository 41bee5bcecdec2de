"""The compiled core: C++ in the files beside this one, bound in `bind.cpp`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

version: str
"""The version of the package that it was built for."""

sources: str
"""The digest of the C++ files that it was built from (`penstock.core.digest`)."""

class ReplicaTimes:
    """The seconds of a replica of a stage (`penstock.simulate.stage_work.ReplicaWork`)."""

    def __init__(
        self, host: int, overlaps: bool, seconds: Sequence[float], segments_s: Sequence[float]
    ) -> None:
        """``seconds`` are those of each kind of action, then of the optimizer step."""

class StageTimes:
    """An instance of a stage (`penstock.simulate.stage_work.StageWork`)."""

    def __init__(
        self,
        replicas: Sequence[ReplicaTimes],
        buckets_of_segment: Sequence[int],
        buckets_s: Sequence[float],
        outgoing: Sequence[int],
        incoming: Sequence[int],
    ) -> None: ...

class PairTimes:
    """The messages between two replicas (`penstock.simulate.transfers.Pair`)."""

    def __init__(
        self,
        sender: int,
        receiver: int,
        forward_s: float,
        backward_s: float,
        returns: bool,
        forward_uses_port: bool,
        backward_uses_port: bool,
    ) -> None: ...

class BoundaryTimes:
    """The messages between two stages (`penstock.simulate.transfers.Boundary`)."""

    def __init__(self, pairs: Sequence[PairTimes]) -> None: ...

class TieTimes:
    """Parameters of several instances (`penstock.simulate.gradients.TiedGroup`)."""

    def __init__(
        self,
        instances: Sequence[int],
        buckets_s: Sequence[float],
        outgoing: Sequence[int],
        incoming: Sequence[int],
    ) -> None: ...

class HostRules:
    """How the devices of a host share it (`penstock.cluster.cluster.Host`)."""

    def __init__(
        self, full_speed_devices: int, half_duplex: bool, separate_links: bool
    ) -> None: ...
    @property
    def full_speed_devices(self) -> int:
        """How many compute at full speed at once; 0: all."""
    @property
    def half_duplex(self) -> bool: ...
    @property
    def separate_links(self) -> bool: ...

class PartTimes:
    """The work of a plan without its order (`penstock.simulate.workload.Parts`)."""

    def __init__(
        self,
        stages: tuple[StageTimes, ...],
        connections: tuple[tuple[int, int, BoundaryTimes], ...],
        ties: tuple[TieTimes, ...],
        hosts: tuple[HostRules, ...],
    ) -> None: ...

class Orders:
    """The orders of all streams (`penstock.simulate.orders.FlatOrders`).

    ``rounds`` and ``micro_batches`` are those of all iterations together.
    """

    def __init__(
        self,
        start: npt.NDArray[np.int64],
        words: npt.NDArray[np.int64],
        streams_each: int,
        groups: Sequence[int],
        rounds: Sequence[int],
        micro_batches: int,
    ) -> None:
        """Raises ValueError if an action has no instance or micro-batch that exists."""

class Spans:
    """When everything of a play started and ended: rows of two times in seconds."""

    @property
    def actions(self) -> npt.NDArray[np.float64]:
        """Those of every word, stream after stream."""
    @property
    def items(self) -> npt.NDArray[np.float64]:
        """Every micro-batch of each message, then the buckets of each reduction in each round."""
    @property
    def end_s(self) -> float: ...

def iteration_s(parts: PartTimes, orders: Orders) -> float:
    """Seconds of all iterations, by the rules in `play.hpp`; it ends at a deadlock."""

def play(parts: PartTimes, orders: Orders) -> Spans:
    """The same, with all spans."""
