"""An independent model of one iteration in SimPy: processes instead of events on arrays.

It reads plan, profile, cluster and schedule itself and shares no code with the simulator. Hosts
have all the cores they need here; no two things may happen at the same instant by chance (give
every device its own speed).
"""

from collections import defaultdict
from collections.abc import Generator, Iterable

import simpy

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_s
from penstock.plan.plan import Plan
from penstock.profile.model_profile import Affine, Edge, ModelProfile
from penstock.schedule.schedule import Schedule

__all__ = ["iteration_s"]

BUCKET_BYTES = 25 * 2**20

Process = Generator[simpy.Event, object, None]
Output = tuple[tuple[object, ...], list[object], float]
"""A message's name, what it occupies, and its seconds."""


class Wires:
    """Engines and ports: a transfer takes all that it needs or waits; urgent and old ones first."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.taken: set[object] = set()
        self.waiting: list[tuple[bool, int, frozenset[object], simpy.Event]] = []
        self.asked = 0

    def carry(self, needs: Iterable[object], seconds: float, late: bool) -> Process:
        """Hold ``needs`` for ``seconds``, once all are free."""
        wanted = frozenset(needs)
        granted = self.env.event()
        self.asked += 1
        self.waiting.append((late, self.asked, wanted, granted))
        self.grant()
        yield granted
        yield self.env.timeout(seconds)
        self.taken -= wanted
        self.grant()

    def grant(self) -> None:
        """Start, in order, whatever finds all it needs."""
        for request in sorted(self.waiting, key=lambda request: request[:2]):
            if not request[2] & self.taken:
                self.waiting.remove(request)
                self.taken |= request[2]
                request[3].succeed()


class Model:
    """The processes of one iteration."""

    def __init__(
        self, plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule
    ) -> None:
        self.plan, self.profile, self.cluster, self.schedule = plan, profile, cluster, schedule
        self.env = simpy.Environment()
        self.wires = Wires(self.env)
        self.done: dict[object, simpy.Event] = defaultdict(self.env.event)
        self.reductions: dict[int, list[simpy.Process]] = defaultdict(list)
        self.complete: dict[object, int] = defaultdict(int)
        self.begun: dict[int, list[object]] = defaultdict(list)
        self.inputs: dict[tuple[int, int, str], list[tuple[object, ...]]] = defaultdict(list)
        self.outputs: dict[tuple[int, int, str], list[Output]] = defaultdict(list)

    def run(self) -> float:
        """Seconds until nothing is left to do."""
        for s, stage in enumerate(self.plan.stages):
            for j in range(len(stage.devices)):
                self.env.process(self.replica(s, j))
        self.env.run()
        return self.env.now

    def replica(self, s: int, j: int) -> Process:
        """One device: its actions in order, its messages, its step."""
        stage = self.plan.stages[s]
        device, rows = stage.devices[j], stage.slices[j]
        speed = self.cluster.devices[device].speed
        order = self.schedule.of(s)
        last = [a for a in order if a.kind == "B"][-1]
        for action in order:
            m = action.micro_batch
            if action.kind == "F":
                yield from self.wait_for(s, j, "F", m)
            if action.kind == "B":
                yield from self.wait_for(s, j, "B", m)
            layers = list(stage.layers if action.kind in "FR" else reversed(stage.layers))
            waiting_bytes = 0
            for i in layers:
                cost = self.profile.layers[i]
                work = cost.forward_s if action.kind in "FR" else cost.backward_s
                yield self.env.timeout(work.at(rows) / speed)
                if i == layers[-1]:
                    self.send(s, j, action.kind, m)
                if action == last and len(stage.devices) > 1:
                    waiting_bytes += cost.parameter_bytes
                    rest = range(stage.layers.start, i)
                    more = any(self.profile.layers[k].parameter_bytes for k in rest)
                    if waiting_bytes >= BUCKET_BYTES or (waiting_bytes and not more):
                        self.gradients(stage.devices, (s, i), waiting_bytes, device)
                        waiting_bytes = 0
        for tie in self.profile.shared:
            users = [
                other.devices
                for other in self.plan.stages
                if any(i in other.layers for i in tie.layers)
            ]
            holders = tuple(d for devices in users for d in devices)
            if device in holders and len(holders) > 1:
                self.gradients(holders, tie.name, tie.bytes, device)
        for name in self.begun[device]:
            yield self.done["reduced", name]
        yield self.env.timeout(
            self.profile.step_s_per_byte * self.profile.parameter_bytes(stage.layers) / speed
        )

    def gradients(
        self, holders: tuple[int, ...], name: object, size_bytes: int, device: int
    ) -> None:
        """A device has its gradients of ``name``; the last one of the holders starts the sum."""
        self.begun[device].append(name)
        self.complete[name] += 1
        if self.complete[name] == len(holders):
            self.env.process(self.reduce(holders, name, size_bytes))

    def reduce(self, holders: tuple[int, ...], name: object, size_bytes: int) -> Process:
        """Sum in equal buckets, all asked for at once."""
        count = -(-size_bytes // BUCKET_BYTES)
        needs: set[object] = {(way, d) for way in ("send", "receive") for d in holders}
        for a in holders:
            for b in holders:
                if a != b and self.cluster.uses_port(a, b):
                    needs |= {("out", self.cluster.host_index[a])}
                    needs |= {("in", self.cluster.host_index[b])}
        seconds = all_reduce_s(self.cluster, holders, size_bytes / count)
        yield self.env.all_of(
            [self.env.process(self.wires.carry(needs, seconds, late=True)) for _ in range(count)]
        )
        self.done["reduced", name].succeed()

    def wait_for(self, s: int, j: int, way: str, m: int) -> Process:
        """Wait for every message that this replica receives before an action."""
        for key in self.inputs[s, j, way]:
            yield self.done[(*key, m)]

    def send(self, s: int, j: int, way: str, m: int) -> None:
        """Start all messages of an action."""
        for key, needs, seconds in self.outputs[s, j, way]:
            self.env.process(self.message((*key, m), needs, seconds))

    def message(self, key: tuple[object, ...], needs: list[object], seconds: float) -> Process:
        """One message."""
        if seconds:
            yield from self.wires.carry(needs, seconds, late=False)
        self.done[key].succeed()

    def prepare(self) -> None:
        """Find all messages: who sends whom how much."""
        plan, sizes = self.plan, self.message_sizes()
        for (s, i, way, t, j), tensors in sorted(sizes.items()):
            source, target = plan.stages[s].devices[i], plan.stages[t].devices[j]
            seconds = sum(self.cluster.transfer_s(source, target, size) for size in tensors)
            needs: list[object] = [("send", source), ("receive", target)]
            if self.cluster.uses_port(source, target):
                needs.append(("out", self.cluster.host_index[source]))
                needs.append(("in", self.cluster.host_index[target]))
            key = (s, i, way, t, j)
            self.outputs[s, i, way].append((key, needs, seconds))
            self.inputs[t, j, way].append(key)

    def message_sizes(self) -> dict[tuple[int, int, str, int, int], list[float]]:
        """Bytes of every tensor from one replica to another, by direction."""
        plan = self.plan
        sizes: dict[tuple[int, int, str, int, int], list[float]] = defaultdict(list)
        for s in range(len(plan.stages) - 1):
            for i, j, _ in common_rows(plan.stages[s].slices, plan.stages[s + 1].slices):
                sizes[s, i, "F", s + 1, j] += []
                sizes[s + 1, j, "B", s, i] += []
        seen: set[tuple[str, int]] = set()
        for edge in self.profile.edges:
            s, t = plan.stage_of_layer(edge.producer), plan.stage_of_layer(edge.consumer)
            if s == t or (edge.tensor, t) in seen:
                continue
            seen.add((edge.tensor, t))
            for i, j, rows in self.paths(edge, s, t):
                sizes[s, i, "F", t, j].append(bytes_of(edge.bytes, rows))
                if edge.gradient_bytes != Affine():
                    sizes[t, j, "B", s, i].append(bytes_of(edge.gradient_bytes, rows))
        return sizes

    def paths(self, edge: Edge, s: int, t: int) -> list[tuple[int, int, int]]:
        """Which replicas exchange a tensor, and how many rows of it."""
        senders, receivers = self.plan.stages[s].slices, self.plan.stages[t].slices
        if edge.bytes.fixed and not edge.bytes.per_sample:
            return [(j % len(senders), j, 1) for j in range(len(receivers))]
        return common_rows(senders, receivers)


def bytes_of(size: Affine, rows: int) -> float:
    """Bytes of some rows."""
    return size.fixed + rows * size.per_sample


def common_rows(senders: tuple[int, ...], receivers: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Sender, receiver and number of rows that both hold, counted row by row."""
    have = [i for i, rows in enumerate(senders) for _ in range(rows)]
    need = [j for j, rows in enumerate(receivers) for _ in range(rows)]
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for i, j in zip(have, need, strict=True):
        counts[i, j] += 1
    return [(i, j, count) for (i, j), count in sorted(counts.items())]


def iteration_s(plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule) -> float:
    """Seconds of one iteration by the SimPy model."""
    model = Model(plan, profile, cluster, schedule)
    model.prepare()
    return model.run()
