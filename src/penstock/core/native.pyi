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

class LayerCosts:
    """The costs of layers and of runs of them (`penstock.plan.run_tables.RunTables`)."""

    def __init__(
        self,
        sums: Sequence[npt.NDArray[np.float64]],
        workspace: npt.NDArray[np.float64],
        parameters: npt.NDArray[np.float64],
        run_parameters: npt.NDArray[np.float64],
        held: npt.NDArray[np.float64],
        inputs: npt.NDArray[np.float64],
        step_s_per_byte: float,
    ) -> None:
        """``sums`` are those of forward, backward, saved bytes and norms, up to each cut.

        Affine costs have two rows: the fixed part, and the part for each sample. ``workspace`` and
        ``parameters`` are those of each layer.
        """

class Machine:
    """A device (`penstock.cluster.cluster.Device`)."""

    def __init__(self, speed: float, memory_bytes: float, host: int) -> None: ...

class Links:
    """The links from each device (row) to each device (column)."""

    def __init__(
        self,
        bytes_per_s: npt.NDArray[np.float64],
        both_ways_bytes_per_s: npt.NDArray[np.float64],
        latency_s: npt.NDArray[np.float64],
        uses_port: npt.NDArray[np.uint8],
    ) -> None: ...

class ReduceRules:
    """Sizes that `penstock.cluster.collectives` defines."""

    def __init__(
        self, bucket_bytes: float, statistic_bytes: float, statistics_s: float
    ) -> None: ...

class SearchCosts:
    """A profile on a cluster (`penstock.search.even_loads.search_costs`)."""

    def __init__(
        self,
        layers: LayerCosts,
        edges: npt.NDArray[np.int64],
        edge_bytes: npt.NDArray[np.float64],
        devices: Sequence[Machine],
        hosts: Sequence[HostRules],
        links: Links,
        rules: ReduceRules,
    ) -> None: ...

class StageCost:
    """Seconds of a stage for a micro-batch on its slowest replica, and its memory."""

    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...
    @property
    def after_s(self) -> float:
        """After the last backward: the rest of the all-reduce, and the optimizer step."""
    @property
    def kept(self) -> int:
        """The most micro-batches in flight that fit without recompute; 0 for none."""
    @property
    def leaner(self) -> int:
        """The same with recompute."""

class Layout:
    """The layers and devices of stages, as cuts of the layers and of an order of devices.

    cuts    0        c1            c2      layers       layers c1..c2-1 are stage 1
    starts  0        p1            p2                   on devices order[p1] .. order[p2 - 1]
    """

    def __init__(
        self, order: Sequence[int], cuts: Sequence[int], starts: Sequence[int], stages: int
    ) -> None:
        """``cuts`` and ``starts`` have one entry more than the most stages that there may be."""
    @property
    def order(self) -> list[int]: ...
    @property
    def cuts(self) -> list[int]: ...
    @property
    def starts(self) -> list[int]: ...
    @property
    def stages(self) -> int: ...

class LoadQuestion:
    """What the load of a plan is asked for (`plan_load.hpp`)."""

    def __init__(self, batch: int, recompute: int, power: float, steady: bool) -> None:
        """``batch``: samples of an iteration; recompute 0 never, 1 where it is faster, 2 always."""

class WalkPlan:
    """A random walk of ``steps`` plans.

    ``sizes`` are those of micro-batches, and ``first`` is the index of the start's. At first, plans
    that are slower by about the share ``heat`` are accepted.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        first: int,
        asked: LoadQuestion,
        heat: float,
        steps: int,
        seed: int,
    ) -> None: ...

class Found:
    """The best plan with one size of micro-batches and one number of stages."""

    @property
    def seconds(self) -> float: ...
    @property
    def size(self) -> int: ...
    @property
    def layout(self) -> Layout: ...

def stage_cost(
    costs: SearchCosts, devices: Sequence[int], lo: int, hi: int, size: int, micro_batches: int
) -> StageCost:
    """The cost of layers ``lo`` to ``hi - 1`` on some devices."""

def rows_of(costs: SearchCosts, devices: Sequence[int], size: int) -> list[int]:
    """Rows of each replica in proportion to speed."""

def load_s(costs: SearchCosts, layout: Layout, size: int, asked: LoadQuestion) -> float:
    """Seconds of a plan if work never waited for a busy resource; infinite if it does not fit."""

def random_walk(costs: SearchCosts, start: Layout, walk: WalkPlan) -> list[Found]:
    """The best plans on a random walk by simulated annealing, without Python's lock.

    They are sorted by size of micro-batches and number of stages.
    """
