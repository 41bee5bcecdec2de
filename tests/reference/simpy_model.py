"""An independent model of iterations in SimPy: processes instead of events on arrays.

It reads plan, profile, cluster and schedule itself and shares no code with the simulator. Hosts
have all the cores they need here; no two things may happen at the same instant by chance (give
every device its own speed).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import simpy
from reference.all_reduce import all_reduced_s
from reference.simpy_gathers import gathered_pass_s
from reference.simpy_wires import (
    COMPUTE,
    MESSAGE,
    REDUCTION,
    Process,
    Standstill,
    Turn,
    Wires,
)

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.profile.model_profile import Affine, Edge, ModelProfile, SharedParameter
from penstock.schedule.action import Action
from penstock.schedule.schedule import Schedule

BUCKET_BYTES = 25 * 2**20

Output = tuple[tuple[object, ...], list[object], list[object], float]
"""A message's name, what it occupies, what waits till it has left, and its seconds."""


class SharedDevice:
    """Work that runs at once on a device, each at a rate in proportion to its claim."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.claims: dict[str, float] = {}
        self.changed = env.event()

    def change(self) -> None:
        """Tell all work that its rate is another now."""
        before, self.changed = self.changed, self.env.event()
        before.succeed()

    def work(self, kinds: str, seconds: float, claim_s: float) -> Process:
        """Do ``seconds`` of work."""
        self.claims[kinds] = claim_s
        self.change()
        left, finished = 1.0, self.env.event()
        while not finished.processed and left > 0 and claim_s:
            whole_s = seconds / claim_s * sum(self.claims.values())
            since_s, finished = self.env.now, self.env.timeout(left * whole_s)
            yield finished | self.changed
            left -= (self.env.now - since_s) / whole_s if whole_s else 1.0
        if "F" not in kinds:
            # Of a forward and a backward that end at the same instant, the forward goes first.
            yield self.env.timeout(0)
        del self.claims[kinds]
        self.change()


@dataclass(frozen=True)
class Copy:
    """A stage where it is held: mirrored pipelines hold each a second time, the other way round."""

    stage: int
    way: int
    layers: range
    devices: tuple[int, ...]
    slices: tuple[int, ...]
    gathers: bool = False


class Model:
    """The processes of some iterations."""

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        cluster: Cluster,
        schedule: Schedule,
        iterations: int,
        together: bool,
    ) -> None:
        self.plan, self.profile, self.cluster, self.schedule = plan, profile, cluster, schedule
        self.iterations, self.together = iterations, together
        self.env = simpy.Environment()
        self.wires = Wires(self.env)
        self.shared: dict[int, SharedDevice] = defaultdict(lambda: SharedDevice(self.env))
        self.done: dict[object, simpy.Event] = defaultdict(self.env.event)
        self.complete: dict[object, int] = defaultdict(int)
        self.half: set[object] = set()
        self.awaited: dict[tuple[int, int], set[object]] = defaultdict(set)
        self.inputs: dict[tuple[int, int, int, str], list[tuple[object, ...]]] = defaultdict(list)
        self.outputs: dict[tuple[int, int, int, str], list[Output]] = defaultdict(list)
        self.turns: dict[object, list[Turn]] = {}
        self.copies = {
            (s, 0): Copy(
                s,
                0,
                stage.layers,
                stage.devices,
                stage.slices,
                stage.sharding == "parameters",
            )
            for s, stage in enumerate(plan.stages)
        }
        if plan.mirrored:
            for s, stage in enumerate(plan.stages):
                other = plan.stages[len(plan.stages) - 1 - s]
                self.copies[s, 1] = Copy(s, 1, stage.layers, other.devices, other.slices)
        self.working = {self.copy_of(action) for order in schedule.orders for action in order}

    def copy_of(self, action: Action) -> Copy:
        """The copy that does an action."""
        return self.copies[action.stage, action.micro_batch % 2 if self.plan.mirrored else 0]

    def run(self) -> float:
        """Seconds until nothing is left to do."""
        for g, devices in enumerate(self.plan.device_groups):
            for j in range(len(devices)):
                if self.schedule.concurrent:
                    self.env.process(self.stream(g, j, "F"))
                    self.env.process(self.stream(g, j, "BIWR"))
                else:
                    self.env.process(self.stream(g, j, "FBIWR"))
        self.env.run()
        return self.env.now

    def stream(self, g: int, j: int, kinds: str) -> Process:
        """What one device does one after the other: its actions of some kinds, and its steps."""
        device = self.plan.device_groups[g][j]
        order = [action for action in self.schedule.of(g) if action.kind in kinds]
        before: dict[Action, Action] = {}
        if kinds == "F":
            latest: Action | None = None
            for action in self.schedule.of(g):
                if action.kind != "F":
                    latest = action
                elif latest:
                    before[action] = latest
        per_update = self.schedule.weights.micro_batches_per_update
        made: dict[Copy, int] = defaultdict(int)
        total = {
            copy: sum(a.kind in "BW" and self.copy_of(a) == copy for a in order)
            for copy in set(map(self.copy_of, order))
        }
        steps = 0
        for iteration in range(self.iterations):
            if kinds == "F" and iteration:
                yield self.done["step", device, iteration - 1]
            for action in order:
                copy = self.copy_of(action)
                m = action.micro_batch + iteration * self.plan.micro_batches
                if action in before:
                    yield self.done["ended", device, iteration, before[action]]
                update = -1
                if action.kind in "BW":
                    made[copy] += 1
                    number, rest = divmod(made[copy], per_update or total[copy])
                    update = -1 if rest else number - 1
                yield from self.wait(copy, j, action.kind, m)
                yield from self.act(copy, j, action.kind, m, update, kinds)
                self.done["ended", device, iteration, action].succeed()
                if update >= 0 and per_update:
                    yield from self.step(g, j, steps, kinds)
                    steps += 1
            if "B" in kinds and not per_update:
                yield from self.step(g, j, iteration, kinds)

    def wait(self, copy: Copy, j: int, kind: str, m: int) -> Process:
        """Wait for every message that an action needs, and for its own forward."""
        way = {"F": "F", "B": "B", "I": "B"}.get(kind, "")
        for key in self.inputs[copy.stage, copy.way, j, way]:
            yield self.done[(*key, m)]
        if kind in "BIR" and self.schedule.concurrent:
            yield self.done["own", copy, j, m]

    def act(self, copy: Copy, j: int, kind: str, m: int, update: int, kinds: str) -> Process:
        """One action, layer after layer, in as many parts as it completes gradients."""
        device = copy.devices[j]
        layers = list(copy.layers if kind in "FR" else reversed(copy.layers))
        seconds = self.layer_seconds(copy, j, kind)
        waiting_bytes, part_s = 0, 0.0
        streamed = self.begin_streaming(copy, j, kind, m)
        for i, layer_s in zip(layers, seconds, strict=True):
            part_s += layer_s
            full = False
            if update >= 0 and self.sums_buckets(copy):
                waiting_bytes += self.profile.layers[i].parameter_bytes
                rest = range(copy.layers.start, i)
                more = any(self.profile.layers[k].parameter_bytes for k in rest)
                full = waiting_bytes >= BUCKET_BYTES or (waiting_bytes > 0 and not more)
            if not full and i != layers[-1]:
                continue
            yield from self.compute(device, part_s, kinds, self.claim_s(copy, j, kind))
            part_s = 0.0
            if i == layers[-1]:
                for output in self.outputs[copy.stage, copy.way, j, kind_way(kind)]:
                    if output[0] in streamed:
                        self.half_done((*output[0], m))
                    else:
                        self.env.process(self.message(output, m))
                if streamed:
                    # What they start sends its messages before gradients are summed.
                    yield self.env.timeout(0)
                if kind == "F":
                    self.done["own", copy, j, m].succeed()
            if update >= 0 and i == layers[-1]:
                self.whole_gradients(copy, update, earlier=True)
            if full:
                name = ("bucket", copy.stage, i)
                self.gradients([copy], name, waiting_bytes, update)
                waiting_bytes = 0
                if i != layers[-1]:
                    yield self.env.timeout(0)
        if update >= 0:
            self.whole_gradients(copy, update, earlier=False)
        yield self.env.timeout(0)

    def begin_streaming(self, copy: Copy, j: int, kind: str, m: int) -> set[object]:
        """An action begins: send its messages if the device streams them; returns their names."""
        outputs = self.outputs[copy.stage, copy.way, j, kind_way(kind)]
        if not self.cluster.devices[copy.devices[j]].concurrent_passes:
            return set()
        sent = [output for output in outputs if output[3] > 0]
        for output in sent:
            self.env.process(self.stream_message(output, m))
        return {output[0] for output in sent}

    def stream_message(self, output: Output, m: int) -> Process:
        """One message beside the action that makes it."""
        key, needs, first, seconds = output
        yield from self.wires.carry(needs, seconds, MESSAGE, first)
        self.half_done((*key, m))

    def half_done(self, key: tuple[object, ...]) -> None:
        """One of two ends that a streamed message waits for."""
        if key in self.half:
            self.done[key].succeed()
        self.half.add(key)

    def sums_buckets(self, copy: Copy) -> bool:
        """Whether the devices of a copy sum gradients after the last backward, in buckets."""
        return len(copy.devices) > 1 and not self.plan.mirrored and not copy.gathers

    def claim_s(self, copy: Copy, j: int, kind: str) -> float:
        """What counts when two streams share a device: the seconds of a forward or a backward."""
        return sum(self.layer_seconds(copy, j, "F" if kind in "FR" else "B"))

    def compute(self, device: int, seconds: float, kinds: str, claim_s: float) -> Process:
        """Compute; where communication does not overlap, while the device is free of it."""
        overlaps = self.cluster.devices[device].overlaps_communication
        mine: frozenset[object] = frozenset({("compute", device, kinds)})
        if self.schedule.concurrent:
            if not overlaps:
                yield self.wires.take(mine, COMPUTE)
            yield from self.shared[device].work(kinds, seconds, claim_s)
            if not overlaps:
                self.wires.give(mine)
        elif overlaps:
            yield self.env.timeout(seconds)
        else:
            yield from self.wires.carry(mine, seconds, COMPUTE)

    def layer_seconds(self, copy: Copy, j: int, kind: str) -> list[float]:
        """Seconds of each layer of an action, in the order in which they run."""
        rows, kind_of = copy.slices[j], self.cluster.devices[copy.devices[j]]
        held_bytes = self.profile.parameter_bytes(copy.layers)
        streams = kind_of.off_chip_bytes_per_s > 0 and held_bytes > kind_of.on_chip_bytes
        least_s = held_bytes / kind_of.off_chip_bytes_per_s if streams else 0.0

        def of(kind: str) -> list[float]:
            costs = [self.profile.layers[i] for i in copy.layers]
            work = {
                "F": [cost.forward_s for cost in costs],
                "B": [cost.backward_input_s + cost.backward_weight_s for cost in costs],
                "I": [cost.backward_input_s for cost in costs],
                "W": [cost.backward_weight_s for cost in costs],
            }[kind]
            seconds = [cost.at(rows) / kind_of.speed for cost in work]
            factor = max(1.0, least_s / sum(seconds))
            return [factor * s for s in seconds]

        seconds = of("F" if kind == "R" else kind)
        if copy.gathers:
            passed_s = max(least_s, self.gathered_s(copy, forward=kind in "FR"))
            seconds = [passed_s] + [0.0] * (len(seconds) - 1)
        if kind != "W":
            waits_s = [self.statistics_s(copy, i, kind) for i in copy.layers]
            seconds = [own_s + wait_s for own_s, wait_s in zip(seconds, waits_s, strict=True)]
        if kind in "BIW":
            seconds = seconds[::-1]
        if kind in "FBI":
            first_s, last_s = self.message_seconds(copy, j, kind)
            seconds = [seconds[0] + first_s, *seconds[1:]]
            seconds[-1] += last_s
        if kind != "W":
            forward = kind in "FR"
            begin_s = self.profile.stage_forward_s if forward else self.profile.stage_backward_s
            seconds[0] += begin_s / kind_of.speed
        return seconds

    def gathered_s(self, copy: Copy, *, forward: bool) -> float:
        """A whole forward or backward: of every layer all devices wait for the slowest."""
        speeds = [self.cluster.devices[device].speed for device in copy.devices]
        work_s: list[float] = []
        messages_s: list[float] = []
        seen: set[str] = set()
        for i in copy.layers:
            layer = self.profile.layers[i]
            costs = [layer.forward_s] if forward else [layer.backward_input_s]
            costs += [] if forward else [layer.backward_weight_s]
            size_bytes = layer.parameter_bytes
            for tie in self.profile.shared:
                if i in tie.layers and tie.name not in seen:
                    seen.add(tie.name)
                    size_bytes += tie.bytes
            own = zip(copy.slices, speeds, strict=True)
            work_s.append(max(sum(cost.at(n) for cost in costs) / speed for n, speed in own))
            messages_s.append(all_reduced_s(self.cluster, copy.devices, size_bytes) / 2)
        step = 1 if forward else -1
        return gathered_pass_s(messages_s[::step], work_s[::step], not forward)

    def statistics_s(self, copy: Copy, layer: int, kind: str) -> float:
        """Seconds of a layer's batch normalisations, each of which sums four-byte numbers.

        Forward: mean, variance and a count of every replica, each in a row of its own. Backward:
        two sums for each channel. The profile has the seconds of the operators around each.
        """
        cost = self.profile.layers[layer]
        if len(copy.devices) == 1 or not cost.norms:
            return 0.0
        channels = cost.norm_channels // cost.norms
        numbers = len(copy.devices) * (2 * channels + 1) if kind in "FR" else 2 * channels
        message_s = all_reduced_s(self.cluster, copy.devices, 4 * numbers)
        return cost.norms * (self.profile.statistics_s + message_s)

    def message_seconds(self, copy: Copy, j: int, kind: str) -> tuple[float, float]:
        """Seconds in which a device passes on what an action receives, and what it sends."""
        device, rows = self.cluster.devices[copy.devices[j]], copy.slices[j]
        read: dict[object, float] = {}
        made: dict[object, float] = {}
        for edge in self.profile.edges:
            size = edge.bytes if kind == "F" else edge.gradient_bytes
            if edge.consumer in copy.layers and self.receives(edge, copy):
                read[edge.made] = size.at(rows)
            if edge.producer in copy.layers and edge.consumer >= copy.layers.stop:
                made[edge.made] = size.at(rows)

        def seconds(sizes: dict[object, float]) -> float:
            if not sum(sizes.values()):
                return 0.0
            rate = device.message_bytes_per_s or inf
            return device.message_s + sum(sizes.values()) / rate

        ends = seconds(read), seconds(made)
        return ends if kind == "F" else ends[::-1]

    def receives(self, edge: Edge, copy: Copy) -> bool:
        """Whether a tensor from before a copy comes to it: no earlier one of its home reads it."""
        if edge.producer >= copy.layers.start:
            return False
        readers = {other.consumer for other in self.profile.edges if other.made == edge.made}
        earlier = (
            other
            for other in self.copies.values()
            if (other.way, other.devices, other.slices) == (copy.way, copy.devices, copy.slices)
            and edge.producer < other.layers.start < copy.layers.start
        )
        return not any(readers.intersection(other.layers) for other in earlier)

    def step(self, g: int, j: int, number: int, kinds: str) -> Process:
        """The optimizer's step of a device, once all gradients that it holds are summed."""
        device = self.plan.device_groups[g][j]
        mine = [copy for copy in self.copies.values() if device in copy.devices]
        for name in self.reductions_of(mine, device):
            yield self.done["reduced", name, number]
        if self.together:
            self.complete["sums", number] += 1
            if self.complete["sums", number] == sum(map(len, self.plan.device_groups)):
                self.done["sums", number].succeed()
            yield self.done["sums", number]
        speed = self.cluster.devices[device].speed
        seconds = 0.0
        for copy in mine:
            # Predicted weights are written for forwards and backwards, or for both at once; each
            # time takes a third of a step.
            rule = self.schedule.weights
            leads = [lead[copy.stage] for lead in (rule.forward_lead, rule.backward_lead) if lead]
            written = (1 if rule.version == "forward" else 2) if max(leads, default=0) else 0
            passes = 1 + written / 3
            step_s = self.profile.step_s_per_byte * self.profile.parameter_bytes(copy.layers)
            seconds += passes * step_s / speed / (len(copy.devices) if copy.gathers else 1)
        yield from self.compute(device, seconds, kinds, seconds)
        self.done["step", device, number].succeed()

    def reductions_of(self, mine: list[Copy], device: int) -> list[object]:
        """The names of all sums that a device takes part in."""
        names: list[object] = []
        for copy in mine:
            if self.plan.mirrored:
                names.append(("copies", copy.stage))
            elif self.sums_buckets(copy):
                waiting_bytes = 0
                for i in reversed(copy.layers):
                    waiting_bytes += self.profile.layers[i].parameter_bytes
                    rest = range(copy.layers.start, i)
                    more = any(self.profile.layers[k].parameter_bytes for k in rest)
                    if waiting_bytes >= BUCKET_BYTES or (waiting_bytes > 0 and not more):
                        names.append(("bucket", copy.stage, i))
                        waiting_bytes = 0
            names += [("tie", tie.name) for tie, _ in self.ties_of(copy)]
        names = [name for name in dict.fromkeys(names) if self.is_summed(name)]
        return names

    def ties_of(self, copy: Copy) -> list[tuple[SharedParameter, list[Copy]]]:
        """The tied parameters of a copy, with all copies that hold them."""
        found: list[tuple[SharedParameter, list[Copy]]] = []
        for tie in self.profile.shared:
            users = [c for c in self.copies.values() if any(i in c.layers for i in tie.layers)]
            within = self.plan.mirrored and len({c.stage for c in users}) == 1
            if copy in users and not within:
                found.append((tie, users))
        return found

    def is_summed(self, name: object) -> bool:
        """Whether a sum is over several devices, and of anything."""
        holders, size_bytes = self.sum_named(name)
        return len({d for copy in holders for d in copy.devices}) > 1 and size_bytes > 0

    def sum_named(self, name: object) -> tuple[list[Copy], int]:
        """The copies and the bytes of a sum of whole stages or tied parameters."""
        kind, which = name[0], name[1]  # type: ignore[index]
        if kind == "bucket":
            return [self.copies[which, 0]], 1
        if kind == "tie":
            tie = next(tie for tie in self.profile.shared if tie.name == which)
            users = [c for c in self.copies.values() if any(i in c.layers for i in tie.layers)]
            return users, tie.bytes
        both = [self.copies[which, 0], self.copies[which, 1]]
        size_bytes = sum(self.profile.layers[i].parameter_bytes for i in both[0].layers)
        for tie in self.profile.shared:
            if all(i in both[0].layers for i in tie.layers):
                size_bytes += tie.bytes
        return both, size_bytes

    def whole_gradients(self, copy: Copy, update: int, *, earlier: bool) -> None:
        """A replica has all its gradients: those that are summed when a stage is done.

        Of what is complete at the same instant, what an ``earlier`` stage holds too goes first,
        then the stage's own last bucket, then the rest.
        """
        names: list[object] = [
            ("tie", tie.name)
            for tie, users in self.ties_of(copy)
            if (min(user.stage for user in users) < copy.stage) == earlier
        ]
        names += [("copies", copy.stage)] if self.plan.mirrored and not earlier else []
        for name in names:
            if self.is_summed(name):
                holders, size_bytes = self.sum_named(name)
                self.gradients(holders, name, size_bytes, update)

    def gradients(self, holders: list[Copy], name: object, size_bytes: int, update: int) -> None:
        """A replica has its gradients of ``name``; the last one starts the sum."""
        self.complete[name, update] += 1
        working = sum(len(copy.devices) for copy in holders if copy in self.working)
        if self.complete[name, update] == working:
            devices = tuple(dict.fromkeys(d for copy in holders for d in copy.devices))
            self.env.process(self.reduce(devices, (name, update), size_bytes))

    def reduce(self, devices: tuple[int, ...], key: tuple[object, int], size_bytes: int) -> Process:
        """Sum in equal buckets, all asked for at once."""
        count = -(-size_bytes // BUCKET_BYTES)
        needs: set[object] = set()
        for a in devices:
            needs |= {self.engine("send", a), self.engine("receive", a), *self.standing_still(a)}
            for b in devices:
                if a != b and self.cluster.uses_port(a, b):
                    needs |= {self.port("out", a), self.port("in", b)}
        seconds = all_reduced_s(self.cluster, devices, size_bytes / count)
        carried = [self.wires.carry(needs, seconds, REDUCTION) for _ in range(count)]
        yield self.env.all_of([self.env.process(each) for each in carried])
        self.done[("reduced", *key)].succeed()

    def engine(self, way: str, device: int) -> object:
        """The send or receive engine of a device; both are one where messages take turns."""
        half = self.cluster.hosts[self.cluster.host_index[device]].half_duplex
        return ("both" if half else way, device)

    def port(self, way: str, device: int) -> object:
        """The outgoing or incoming port of a device's host."""
        host = self.cluster.host_index[device]
        return ("port" if self.cluster.hosts[host].half_duplex else way, host)

    def standing_still(self, device: int) -> list[object]:
        """What of a device computes nothing while it communicates."""
        if self.cluster.devices[device].overlaps_communication:
            return []
        separate = self.cluster.hosts[self.cluster.host_index[device]].separate_links
        streams = self.streams_of(device)
        return [Standstill(each) for each in streams] if separate else streams

    def streams_of(self, device: int) -> list[object]:
        """What a device computes on."""
        streams = ("F", "BIWR") if self.schedule.concurrent else ("FBIWR",)
        return [("compute", device, kinds) for kinds in streams]

    def needs_of_message(self, source: int, target: int) -> list[object]:
        """What a message occupies: a link of its own, or engines and ports; devices stand still."""
        hosts = self.cluster.host_index[source], self.cluster.host_index[target]
        host = self.cluster.hosts[hosts[0]]
        if hosts[0] == hosts[1] and host.separate_links:
            ends = (source, target)
            needs: list[object] = [("link", frozenset(ends) if host.half_duplex else ends)]
        else:
            needs = [self.engine("send", source), self.engine("receive", target)]
        if self.cluster.uses_port(source, target):
            needs += [self.port("out", source), self.port("in", target)]
        return needs + self.standing_still(source) + self.standing_still(target)

    def message(self, output: Output, m: int) -> Process:
        """One message."""
        key, needs, first, seconds = output
        if seconds:
            needs = [*needs, *self.turns.get((*key, m), ())]
            yield from self.wires.carry(needs, seconds, MESSAGE, first)
        self.done[(*key, m)].succeed()

    def prepare(self) -> None:
        """Find all messages: who sends whom how much."""
        for way in {copy.way for copy in self.copies.values()}:
            for (s, i, kind, t, j), tensors in sorted(self.message_sizes(way).items()):
                source = self.copies[s, way].devices[i]
                target = self.copies[t, way].devices[j]
                seconds = sum(self.cluster.transfer_s(source, target, size) for size in tensors)
                needs = self.needs_of_message(source, target)
                first = self.streams_of(source) if self.standing_still(source) else []
                key = (way, s, i, kind, t, j)
                self.outputs[s, way, i, kind].append((key, needs, first, seconds))
                self.inputs[t, way, j, kind].append(key)
        if self.cluster.messages_in_order:
            self.take_turns()

    def take_turns(self) -> None:
        """Plan the order of messages: by iteration, unit time, sender, and receiver."""
        times = self.unit_times()
        planned: list[tuple[tuple[int, ...], object, tuple[int, int]]] = []
        for action in times:
            copy, kind = self.copy_of(action), kind_way(action.kind)
            for i, device in enumerate(copy.devices):
                for key, _, _, seconds in self.outputs[copy.stage, copy.way, i, kind]:
                    way, t, j = key[0], key[4], key[5]
                    to = self.copies[t, way].devices[j]  # type: ignore[index]
                    for iteration in range(self.iterations if seconds else 0):
                        m = action.micro_batch + iteration * self.plan.micro_batches
                        place = (iteration, times[action], device, t, j)
                        planned.append((place, (*key, m), (device, to)))  # type: ignore[arg-type]
        passed: dict[int, int] = defaultdict(int)
        for _, name, ends in sorted(planned, key=lambda message: message[0]):
            self.turns[name] = [Turn(device, passed[device]) for device in ends]
            for device in ends:
                passed[device] += 1

    def unit_times(self) -> dict[Action, int]:
        """When each action starts if all last one unit: moved back till nothing is too early."""
        orders = [list(order) for order in self.schedule.orders]
        times = {action: 0 for order in orders for action in order}
        pairs = [pair for order in orders for pair in pairwise(order)]
        for after in times:
            s, m = after.stage, after.micro_batch
            if after.kind == "F":
                pairs.append((Action("F", s - 1, m), after))
            elif after.kind in "BI":
                pairs += [(Action("B", s + 1, m), after), (Action("I", s + 1, m), after)]
        pairs = [pair for pair in pairs if pair[0] in times]
        moved = True
        while moved:
            moved = False
            for before, after in pairs:
                if times[after] <= times[before]:
                    times[after], moved = times[before] + 1, True
        return times

    def message_sizes(self, way: int) -> dict[tuple[int, int, str, int, int], list[float]]:
        """Bytes of every tensor from one replica to another, by direction."""
        plan = self.plan
        sizes: dict[tuple[int, int, str, int, int], list[float]] = defaultdict(list)
        for s in range(len(plan.stages) - 1):
            here, there = self.copies[s, way].slices, self.copies[s + 1, way].slices
            for i, j, _ in common_rows(here, there):
                sizes[s, i, "F", s + 1, j] += []
                sizes[s + 1, j, "B", s, i] += []
        seen: set[tuple[object, int]] = set()
        for edge in self.profile.edges:
            s, t = plan.stage_of_layer(edge.producer), plan.stage_of_layer(edge.consumer)
            if (edge.made, t) in seen or not self.receives(edge, self.copies[t, way]):
                continue
            seen.add((edge.made, t))
            for i, j, rows in self.paths(edge, self.copies[s, way], self.copies[t, way]):
                sizes[s, i, "F", t, j].append(bytes_of(edge.bytes, rows))
                if edge.gradient_bytes != Affine():
                    sizes[t, j, "B", s, i].append(bytes_of(edge.gradient_bytes, rows))
        return sizes

    def paths(self, edge: Edge, here: Copy, there: Copy) -> list[tuple[int, int, int]]:
        """Which replicas exchange a tensor, and how many rows of it."""
        if edge.bytes.fixed and not edge.bytes.per_sample:
            return [(j % len(here.slices), j, 1) for j in range(len(there.slices))]
        return common_rows(here.slices, there.slices)


def kind_way(kind: str) -> str:
    """The direction in which an action of a kind sends: none for those that send nothing."""
    return {"F": "F", "B": "B", "I": "B"}.get(kind, "")


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


def iteration_s(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    schedule: Schedule,
    iterations: int = 1,
    *,
    together: bool = False,
) -> float:
    """Seconds of ``iterations`` by the SimPy model; ``together``: no step before all sums."""
    model = Model(plan, profile, cluster, schedule, iterations, together)
    model.prepare()
    return model.run()
