"""The compiled core: C++ in the files beside this one, bound in `bind.cpp`."""

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

version: str
"""The version of the package that it was built for."""

sources: str
"""The digest of the C++ files that it was built from (`penstock.core.digest_of_sources`)."""

class StageMemory:
    """Bytes of one replica of one stage."""

    def __init__(
        self,
        fixed_bytes: float,
        saved_bytes: float,
        input_bytes: float,
        workspace_bytes: float,
    ) -> None: ...
    fixed_bytes: float
    saved_bytes: float
    input_bytes: float
    workspace_bytes: float
    def at(self, saved: int, inputs: int) -> float:
        """Bytes while nothing runs; micro-batches held with everything saved, and inputs only."""

class Holding:
    """Micro-batches of each instance on a device while an action of the instance ``running`` runs.

    ``held``: the numbers of micro-batches with everything saved, and with inputs only.
    """

    def __init__(self, running: int, held: Sequence[tuple[int, int]]) -> None: ...

def most_bytes(memories: Sequence[StageMemory], holdings: Sequence[Holding]) -> float:
    """Peak bytes of a device with replicas of these memories, while an action runs."""

class ReplicaWork:
    """Seconds of one replica for each micro-batch, and its memory (`work.hpp`)."""

    forward_s: float
    backward_s: float
    step_s: float
    segments_s: list[float]
    memory: StageMemory
    def seconds(self, kind: str) -> float:
        """Seconds of one action at full speed; R is the forward of the recomputed layers."""

class GradientShare:
    """Gradients in equal buckets; ``seconds`` and ``bytes`` are those of one (`work.hpp`)."""

    segment: int
    buckets: int
    seconds: float
    bytes: float

class Ports:
    """The hosts whose outgoing and incoming ports an all-reduce or a message uses."""

    def __init__(self, outgoing: Sequence[int] = (), incoming: Sequence[int] = ()) -> None: ...
    outgoing: list[int]
    incoming: list[int]

class StageWork:
    """One instance of a stage on its devices (`work.hpp`).

    ``shares`` are the gradients that the replicas reduce among themselves through ``ports``.
    """

    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    overlaps: tuple[bool, ...]
    streams_messages: tuple[bool, ...]
    size: int
    """The number of replicas."""
    replicas: list[ReplicaWork]
    segment_layers: list[int]
    shares: list[GradientShare]
    ports: Ports
    def summed_last(self) -> StageWork:
        """The same work where all gradients wait for the end of the last backward."""

class Pair:
    """The messages of a micro-batch between two replicas (`work.hpp`)."""

    sender: int
    receiver: int
    forward_s: float
    forward_bytes: float
    returns: bool
    backward_s: float
    backward_bytes: float
    port_down: bool
    port_up: bool

class Boundary:
    """All pairs of a producer and a consumer stage, sorted."""

    pairs: list[Pair]

class TiedGroup:
    """Parameters that several instances hold (`work.hpp`)."""

    stages: list[int]
    shares: list[GradientShare]
    ports: Ports

class Layers:
    """The costs of the layers of a profile (`penstock.costs.run_tables.layers_in_core`)."""

    def __init__(
        self,
        layers: npt.NDArray[np.float64],
        edges: npt.NDArray[np.int64],
        edge_bytes: npt.NDArray[np.float64],
        shared: Sequence[tuple[float, Sequence[int]]],
        stage: tuple[float, float, float],
        again: bool,
        rules: ReduceRules,
    ) -> None:
        """``layers`` has two rows, the fixed part and that of a sample, for each of forward, the
        halves of the backward, saved bytes, batch normalisations and their channels, workspace; and
        one for each of parameters, buffers, casts. ``stage``: seconds of any forward and backward
        of a stage beside its layers, and of the optimizer for each byte. ``again``: backwards begin
        with the forward."""
    def forward_s(self, run: tuple[int, int], rows: float) -> float:
        """Seconds of a forward of layers ``run[0]`` to ``run[1] - 1`` at speed 1."""
    def backward_s(self, run: tuple[int, int], rows: float) -> float:
        """The same of a whole backward."""
    def own_bytes(self, run: tuple[int, int]) -> float:
        """Bytes of the parameters that only one layer uses."""
    def first_bucket(self, run: tuple[int, int]) -> int:
        """The layer at which the first bucket of gradients is complete; -1 if there is none."""
    def crossing_bytes(self, rows: float) -> list[float]:
        """The bytes of all tensors that cross each cut and of their gradients."""

class HostRules:
    """Rules by which the devices of a host share it (`penstock.cluster.cluster.Host`)."""

    def __init__(
        self, full_speed_devices: int, half_duplex: bool, separate_links: bool
    ) -> None: ...
    full_speed_devices: int
    """The number that compute at full speed at once; 0: all."""
    half_duplex: bool
    separate_links: bool

class Hardware:
    """The devices of a cluster (`penstock.costs.tables.hardware_in_core`)."""

    def __init__(
        self, devices: Sequence[Machine], hosts: Sequence[HostRules], links: Links
    ) -> None: ...
    hosts: list[HostRules]

class PartCosts:
    """The work of the parts of plans (`part_costs.hpp`).

    ``state`` are the optimizer's bytes for each byte of parameters.
    """

    def __init__(self, layers: Layers, hardware: Hardware, state: float) -> None: ...
    def stage(
        self,
        run: tuple[int, int],
        earlier: Sequence[tuple[int, int]],
        devices: Sequence[int],
        rows: Sequence[int],
        sharding: int,
        use: tuple[bool, int, bool, int],
        all_reduces: Sequence[AllReduceCost],
    ) -> StageWork:
        """The work of a stage; ``use`` is a `penstock.simulate.instances.StageUse`.

        ``earlier`` are the layers of the stages before it that share its home (`Plan.homes`).
        """
    def boundary(self, producer: StageWork, consumer: StageWork) -> Boundary:
        """The messages between two stages for each micro-batch."""
    def tie(
        self,
        instances: Sequence[int],
        sizes: Sequence[float],
        devices: Sequence[int],
        all_reduces: Sequence[AllReduceCost],
    ) -> TiedGroup:
        """Parameters of these sizes, summed over all devices of some instances."""
    def connected(self, cuts: Sequence[int], homes: Sequence[int]) -> list[tuple[int, int]]:
        """All stages between which messages pass: neighbours, and ends of skipping tensors."""
    def whole_bytes(self, stage: StageWork) -> float:
        """Bytes of the parameters that only the layers of a stage use."""

class PlanParts:
    """The work of a plan without its order (`penstock.simulate.workload.Parts`)."""

    def __init__(
        self,
        stages: Sequence[StageWork],
        connections: Sequence[tuple[int, int, Boundary]],
        ties: Sequence[TiedGroup],
        hosts: Sequence[HostRules],
        in_order: bool,
    ) -> None: ...

class Orders:
    """The orders of all streams (`penstock.simulate.orders.FlatOrders`).

    ``rounds`` are those of all iterations together; ``repeated`` are their micro-batches, and how
    many iterations there are. ``held`` are the states of memory of each group.
    """

    def __init__(
        self,
        start: npt.NDArray[np.int64],
        words: npt.NDArray[np.int64],
        streams_each: int,
        groups: Sequence[int],
        rounds: Sequence[int],
        repeated: tuple[int, int],
        held: Sequence[Sequence[Holding]],
    ) -> None:
        """Raises ValueError if an action has no instance or micro-batch that exists."""

class Spans:
    """Start and end of everything of a play: rows of two times in seconds."""

    actions: npt.NDArray[np.float64]
    """Those of every word, stream after stream."""
    items: npt.NDArray[np.float64]
    """Every micro-batch of each message, then the buckets of each reduction in each round."""
    end_s: float

def iteration_s(parts: PlanParts, orders: Orders) -> float:
    """Seconds of all iterations, by the rules in `play.hpp`; it ends at a deadlock."""

def play(parts: PlanParts, orders: Orders, steps_together: bool) -> Spans:
    """The same with all spans; steps may wait for the gradients of all devices."""

def fits(parts: PlanParts, orders: Orders) -> bool:
    """Return whether every device has enough memory for all its replicas."""

class ReduceRules:
    """Sizes that `penstock.cluster.collectives` defines."""

    def __init__(
        self, bucket_bytes: float, statistic_bytes: float, statistics_s: float
    ) -> None: ...

class RunCosts:
    """The costs of all runs of layers that begin and end at some cuts of a chain (`costs.hpp`).

    Costs that depend on samples have two rows: the fixed part, and the part for each sample.
    ``forward``, ``backward`` and ``saved`` are sums up to each cut; in ``inputs``, ``parameters``
    and ``held`` the run between two cuts is row ``lo``, column ``hi``.
    """

    def __init__(
        self, layers: Layers, cuts: Sequence[int], sharding: int, state: float
    ) -> None: ...
    forward: npt.NDArray[np.float64]
    backward: npt.NDArray[np.float64]
    saved: npt.NDArray[np.float64]
    down: npt.NDArray[np.float64]
    up: npt.NDArray[np.float64]
    inputs: npt.NDArray[np.float64]
    parameters: npt.NDArray[np.float64]
    held: npt.NDArray[np.float64]
    def held_by(self, devices: int) -> npt.NDArray[np.float64]:
        """The bytes that each of ``devices`` devices keeps all the time."""

class Machine:
    """A device (`penstock.cluster.cluster.Device`)."""

    def __init__(
        self,
        speed: float,
        memory_bytes: float,
        host: int,
        chip: ChipMemory,
        overlaps: bool,
        streams_messages: bool,
        message_s: float,
        message_bytes_per_s: float,
    ) -> None: ...

class Links:
    """The links from each device (row) to each device (column)."""

    def __init__(
        self,
        bytes_per_s: npt.NDArray[np.float64],
        latency_s: npt.NDArray[np.float64],
        uses_port: npt.NDArray[np.uint8],
        sum_step_s: float,
    ) -> None: ...

class SearchCosts:
    """A profile on a cluster, with tables (`penstock.costs.tables.search_costs`)."""

    def __init__(self, runs: RunCosts, layers: Layers, hardware: Hardware) -> None: ...

class StageCost:
    """Seconds of a stage for a micro-batch on its slowest replica, and its memory."""

    forward_s: float
    backward_s: float
    after_s: float
    """After the last backward: the rest of the all-reduce, and the optimizer step."""
    kept: int
    """The most micro-batches in flight that fit without recompute; 0 for none."""
    leaner: int
    """The same with recompute."""

class StageSeconds:
    """Seconds of a stage for a micro-batch on its slowest replica (`stage_costs.hpp`)."""

    forward_s: float
    backward_s: float
    weight_s: float
    whole_s: float
    after_s: float

class RunBytes:
    """Bytes that a replica keeps of a micro-batch, without recompute and with it; workspace."""

    saved: float
    inputs: float
    workspace: float

class Point:
    """Devices, layers and micro-batches of a plan, and how its groups save memory (`point.hpp`).

    ``recompute`` of a group is 0 for none, 1 for whole stages, 2 by block; ``sharding`` a place in
    `penstock.plan.plan.SHARDINGS`.
    """

    @overload
    def __init__(
        self,
        order: Sequence[int],
        starts: Sequence[int],
        cuts: Sequence[int],
        recompute: Sequence[int],
        sharding: Sequence[int],
        limits: Sequence[int] = (),
        size: int = 0,
        depth: int = 0,
    ) -> None: ...
    @overload
    def __init__(self, other: Point) -> None: ...
    order: list[int]
    starts: list[int]
    cuts: list[int]
    recompute: list[int]
    sharding: list[int]
    limits: list[int]
    """Micro-batches in flight of each stage; empty: by ``depth``."""
    size: int
    depth: int
    groups: int

class PointRules:
    """Properties that the points of an arm share, and the choices that they have."""

    def __init__(
        self,
        style: int,
        rounds: int,
        split: bool,
        batch: int,
        sizes: Sequence[int],
        groups: tuple[int, int],
        depths: tuple[int, int],
        savings: tuple[Sequence[int], Sequence[int]],
        cut: Sequence[int],
    ) -> None:
        """``groups`` and ``depths``: the least and the most. ``savings``: choices of recompute and
        sharding. ``cut``: of each cut, whether it is forbidden (0), allowed (1) or required (2)."""
    style: int
    rounds: int
    split: bool
    sizes: list[int]
    least_groups: int
    most_groups: int
    recomputes: list[int]
    shardings: list[int]
    def allows(self, point: Point) -> bool:
        """Return whether the number of groups and all cuts are allowed."""

class LoadQuestion:
    """Parameters of the load of a point (`plan_load.hpp`)."""

    def __init__(self, recompute: int, power: float, steady: bool) -> None:
        """``recompute``: 0 never, 1 where it is faster, 2 always."""

class Found:
    """A point with its seconds, and micro-batches in flight of its stages where it was played."""

    seconds: float
    point: Point
    depths: list[int]

class QuickPlay:
    """The quick simulation of points (`quick_play.hpp`)."""

    def __init__(self, costs: Sequence[SearchCosts | None], rules: PointRules) -> None:
        """``costs`` are those of each sharding, without and with recompute by block."""
    rules: PointRules
    spent: int
    """Simulated actions so far."""
    depths: list[int]
    """Micro-batches in flight of each stage of the last point."""
    simulates_all: bool
    """True if all micro-batches are simulated, however many."""
    def seconds(self, point: Point, limit_s: float) -> float:
        """Return seconds of a point, or a bound above ``limit_s``; infinite if it does not fit."""
    def even_cuts(self, point: Point) -> None:
        """Cut the layers so that stages take about equally long."""
    def best_variant(self, point: Point, limit_s: float) -> Found:
        """Return the quickest of a point with every recompute, sharding and depth."""
    def neighbours(self, point: Point, limit_s: float, most: int) -> list[Found]:
        """Return the quickest points one move away, at most ``most``, below ``limit_s``."""

def gathered_pass_s(
    gathers_s: Sequence[float], computes_s: Sequence[float], scatters: bool
) -> float:
    """Seconds of a pass over layers whose devices divide their parameters (`GatheredPass`).

    If ``scatters``, a layer's gradients are sent after it, for as long as it was gathered.
    """

def stage_cost(
    costs: SearchCosts, devices: Sequence[int], lo: int, hi: int, size: int, micro_batches: int
) -> StageCost:
    """The cost of layers ``lo`` to ``hi - 1`` on some devices."""

def stage_seconds(
    costs: SearchCosts,
    devices: Sequence[int],
    rows: Sequence[int],
    run: tuple[int, int],
    all_reduces: Sequence[AllReduceCost],
) -> StageSeconds:
    """The seconds of layers ``run[0]`` to ``run[1] - 1`` on devices with these rows each."""

def run_bytes(costs: SearchCosts, run: tuple[int, int], rows: float) -> RunBytes:
    """The bytes of layers for ``rows`` rows of a micro-batch."""

def held_bytes(
    sharding: int,
    devices: float,
    parameters: float,
    two_layers: float,
    copies: float,
    state: float,
) -> float:
    """Bytes that each of some devices holds all the time (`costs.hpp`)."""

def state_bytes(costs: SearchCosts, run: tuple[int, int], replicas: int) -> float:
    """Bytes that each of ``replicas`` devices holds all the time, buffers too."""

def rows_of(costs: SearchCosts, devices: Sequence[int], size: int) -> list[int]:
    """Rows of each replica in proportion to speed."""

def load_s(costs: SearchCosts, rules: PointRules, point: Point, question: LoadQuestion) -> float:
    """Return seconds if work never waited for a busy resource; infinite if it does not fit."""

def random_walk(
    costs: SearchCosts,
    rules: PointRules,
    start: Point,
    question: LoadQuestion,
    heat: float,
    steps: int,
    seed: int,
) -> list[Found]:
    """Return the best points on a random walk by simulated annealing, without Python's lock.

    There is one for each size of micro-batches and number of groups, the best first. At first,
    points that are slower by about the share ``heat`` are accepted.
    """

class ChipMemory:
    """Memory on a chip, and the rate of that beyond; with a rate of 0 there is none beyond."""

    def __init__(self, bytes: float, off_chip_bytes_per_s: float) -> None: ...
    def read_s(self, parameter_bytes: float) -> float:
        """The least seconds of an action of a stage with ``parameter_bytes``."""

class AllReduceCost:
    """The cost of one all-reduce algorithm: ``latency_s + s_per_byte * bytes``."""

    def __init__(self, latency_s: float, s_per_byte: float) -> None: ...
    latency_s: float
    s_per_byte: float
    def of(self, bytes: float) -> float:
        """Seconds to sum ``bytes``."""

def multiply_all_reduces(factor: float) -> None:
    """Multiply the time of every later all-reduce by ``factor``; for tests."""

class GroupCosts:
    """The costs of runs of layers, between cuts ``lo`` and ``hi``, on groups of devices."""

    def __init__(
        self,
        runs: RunCosts,
        hardware: Hardware,
        step_s_per_byte: float,
        workspaces: Sequence[tuple[int, npt.NDArray[np.float64]]],
        groups: Sequence[Sequence[tuple[int, int]]],
        all_reduces: Sequence[Sequence[AllReduceCost]],
    ) -> None:
        """``workspaces`` has a table for each number of rows; ``groups`` have devices and rows.
        ``all_reduces`` has the cost of each algorithm, for each group."""
    cuts: int
    def forward_s(self, group: int, lo: int, hi: int) -> float:
        """Seconds of one forward on the slowest replica."""
    def backward_s(self, group: int, lo: int, hi: int) -> float:
        """Seconds of one full backward on the slowest replica, without recompute."""
    def micro_batch_s(self, group: int, lo: int, hi: int) -> float:
        """Seconds of both on the slowest replica."""
    def after_s(self, group: int, lo: int, hi: int) -> float:
        """Seconds after a stage's last backward: gradient all-reduce and optimizer step."""
    def fit(self, group: int, lo: int, hi: int, depth: int, recompute: int) -> int:
        """-1 if a stage does not fit, 0 if it keeps its activations, 1 if it recomputes them.

        ``recompute``: 0 where memory requires it, 1 always, 2 never.
        """
    def needed_bytes(self, group: int, lo: int, hi: int, depth: int, recompute: bool) -> float:
        """Peak bytes of the replica that needs most, with ``depth`` micro-batches in flight."""

class LinkNetwork:
    """Devices and rows of each group, and the links between them."""

    def __init__(self, hardware: Hardware, groups: Sequence[Sequence[tuple[int, int]]]) -> None: ...

class SppTable:
    """The best plan of each state: stages, first cut, first block and number of the first width.

    A window of the line is ``position * widths + number``, its group in ``groups``, -1 where the
    line ends before it does; ``depths[k]`` are the micro-batches in flight of a stage with ``k``
    stages from itself to the end, 0 for none.
    """

    def __init__(
        self,
        costs: GroupCosts,
        network: LinkNetwork,
        groups: Sequence[int],
        width: Sequence[int],
        depths: Sequence[int],
        micro_batches: int,
        recompute: int,
        drains: bool,
    ) -> None: ...
    seconds: npt.NDArray[np.float64]
    """The least objective; infinite where there is no plan. Then the others say nothing."""
    passed_s: npt.NDArray[np.float64]
    """Until one micro-batch has passed all stages and channels."""
    slowest_s: npt.NDArray[np.float64]
    """The slowest stage or channel."""
    end: npt.NDArray[np.int64]
    """The cut where the first stage ends."""
    next_number: npt.NDArray[np.int64]
    """The number of the width of the window behind it."""
    recompute: npt.NDArray[np.int64]
    """True if the first stage recomputes."""

class WindowLoad:
    """The load of a stage on a window (`penstock.planners.slowest_stage.Loads`); group -1: none."""

    def __init__(
        self,
        group: int,
        depth: int,
        replicas: int,
        before_s_per_byte: float,
        after_s_per_byte: float,
        parameter_s_per_byte: float,
    ) -> None: ...

class SlowestStageTable:
    """The least slowest stage, the first stage's end and width, by first block and first cut.

    ``windows`` are those of a line, position after position. Of equally good ends, the most
    ``balanced`` one is taken, or else the first.
    """

    def __init__(
        self,
        costs: GroupCosts,
        width: Sequence[int],
        windows: Sequence[WindowLoad],
        crossing_bytes: npt.NDArray[np.float64],
        recompute: int,
        balanced: bool,
    ) -> None: ...
    seconds: npt.NDArray[np.float64]
    end: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]

class DappleStep:
    """A step to another set of devices in use; group -1: it takes more than there are rows."""

    def __init__(self, target: int, group: int) -> None: ...

class Occupancy:
    """A set of devices in use: its first step, and the last stage on the devices left."""

    def __init__(
        self, first_step: int, rest_group: int, speed_left: float, idle: float
    ) -> None: ...
    rest_group: int

class DappleQuestion:
    """The inputs of DAPPLE's search (`penstock.planners.dapple.dapple.Search`)."""

    def __init__(
        self,
        micro_batches: int,
        size: int,
        recompute: int,
        most_stages: int,
        depths: Sequence[int],
        least_s: npt.NDArray[np.float64],
        steps: Sequence[DappleStep],
        places: Sequence[Occupancy],
    ) -> None: ...

def dapple_plan(
    costs: GroupCosts, network: LinkNetwork, question: DappleQuestion, limit_s: float
) -> tuple[float, list[list[int]]]:
    """The best plan of several stages whose closed form is below ``limit_s``, without the lock.

    Its seconds, and the cuts of each stage but the last with the step that it takes; none where
    there is no plan.

    The devices of step ``n`` send as group ``n`` and receive as group ``steps + n``. The last stage
    behind occupancy ``n`` is group ``2 * steps + n``.
    """

def dapple_latency_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    after_s: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds of one iteration of a pipeline whose transfers are stages of their own.

        L   = T_w + T_g + T_s + T_e               Q: the pivot of `dapple_pivot`
        T_w = sum over s <= Q of F_s              until the first micro-batch has passed the pivot
        T_g = max(0, sum over s > Q of (F_s + B_s) - (min(S - Q, M) - 1) F_Q)
        T_s = (M - 1) (F_Q + B_Q)                 the pivot works without a gap
        T_e = max over s of (A_s + E_s)           last backwards, then all-reduce and step
        E_s = sum over a = s..Q of B_a            for s <= Q
        E_s = - sum over a = Q+1..s-1 of B_a      for s > Q

    ``E_s`` is the time from the start of the pivot's last backward to the end of that of stage
    ``s``. This form agrees with the authors' slides: the all-reduce of a late stage is hidden in
    the drain of the stages before it. ``T_g`` is the slides' longer form: how long the pivot waits
    for the first backward beyond its own warm-up forwards. Without it, a plan of few micro-batches
    seems to cost little more than its first stages. The latency is neither a lower nor an upper
    bound of the iteration time.

    Source: DAPPLE (PPoPP 2021), pipeline latency of the planner; slides of its released planner.
    """

def dapple_pivot(
    forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int
) -> int:
    """The stage with the fewest bubbles in the steady phase."""

def transfer_s(
    network: LinkNetwork, sender: int, receiver: int, fixed: float, each: float
) -> float:
    """Seconds of a transfer of ``fixed`` bytes and ``each`` bytes for each row."""

class IdealPipe:
    """A pipeline whose transfers never wait; ``seconds`` by kind of action and stage."""

    def __init__(
        self,
        stages: int,
        micro_batches: int,
        seconds: npt.NDArray[np.float64],
        transfer_s: npt.NDArray[np.float64],
    ) -> None: ...

class HeldLimits:
    """Limits of the groups of a pipeline (`ideal_play.hpp`)."""

    def __init__(
        self,
        most: int,
        group: Sequence[int],
        in_flight: Sequence[int],
        saved: Sequence[float],
        kept: Sequence[float],
        memory: Sequence[float],
    ) -> None: ...

class ListPipe:
    """A pipeline over places (`penstock.schedule.searched.list_arrays.ScheduleArrays`).

    ``counts`` has rows of the group, the micro-batches and the in-flight limit of each place;
    ``costs`` the seconds of F, I and W, of F again and of a transfer, then the bytes of a
    micro-batch from F on and between I and W. By group: ``limit_bytes`` and ``work_s``.
    """

    def __init__(
        self,
        stages: int,
        indices: int,
        is_split: bool,
        counts: npt.NDArray[np.int64],
        costs: npt.NDArray[np.float64],
        limit_bytes: npt.NDArray[np.float64],
        work_s: npt.NDArray[np.float64],
    ) -> None: ...

def play_orders(
    pipe: IdealPipe,
    first: Sequence[int],
    actions: npt.NDArray[np.int64],
    start_s: npt.NDArray[np.float64],
) -> list[int]:
    """Write the start of every action that can be played; return where each order stops.

    Order ``k`` is ``actions[first[k] : first[k + 1]]``. An action is ``(kind * stages + stage) *
    micro_batches + micro_batch``, with kinds as `penstock.schedule.action` codes them.
    """

def fill_gaps(
    pipe: IdealPipe,
    limits: HeldLimits,
    first: Sequence[int],
    actions: npt.NDArray[np.int64],
    slack_s: float,
    out: npt.NDArray[np.int64],
) -> float:
    """Write orders of F and I with W where these delay nothing; the makespan, or infinity."""

def rearrange(
    pipe: IdealPipe,
    limits: HeldLimits,
    ranks: npt.NDArray[np.int64],
    deepest: Sequence[int],
    patient: bool,
    slack_s: float,
    out: npt.NDArray[np.int64],
) -> None:
    """Write orders of F and I of a V in which no group waits while it can run another action."""

def list_order(
    pipe: ListPipe,
    keys: npt.NDArray[np.float64],
    depth: npt.NDArray[np.int64],
    prices: Sequence[float],
    best_s: float,
    order: npt.NDArray[np.int64],
) -> float:
    """Write the order of a policy; its makespan, infinite if it is certain to reach ``best_s``."""

def divide_level(
    seconds: npt.NDArray[np.float64],
    choice: npt.NDArray[np.int64],
    unit_s: npt.NDArray[np.float64],
    unit: npt.NDArray[np.int64],
    least_s: npt.NDArray[np.float64],
    parameter_bytes: npt.NDArray[np.float64],
    reduce_each: npt.NDArray[np.float64],
    move_s: npt.NDArray[np.float64],
) -> None:
    """Fill ``seconds[lo, hi, m]``: the slowest stage of these layers on the first ``m`` workers.

    The arguments are those of `levels.hpp`; ``choice`` is -1 for one worker less, else the last
    stage's first layer and workers, as ``cut * (workers + 1) + m``.
    """
