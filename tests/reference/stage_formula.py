"""What a stage costs, written layer by layer: the formula of the core's cost model."""

from dataclasses import dataclass
from itertools import pairwise

from penstock.cluster.collectives import all_reduce_s
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile

from .crossing import crossing, first_of_each_tensor
from .simpy_gathers import gathered_pass_s

NUMBER_BYTES = 4


def crossing_bytes(profile: ModelProfile, cut: int, size: str = "bytes") -> Affine:
    """Bytes of all tensors from before ``cut`` to after it, or of gradients, each counted once."""
    edges = first_of_each_tensor(crossing(profile)[cut])
    return sum((getattr(edge, size) for edge in edges), Affine())


@dataclass(frozen=True)
class StageFormula:
    """A stage of a problem; all times are of one micro-batch on the slowest replica.

        pass    = (max(read, slowest replica's layers) + statistics) * crowding
        after   = all-reduce of all gradients + optimizer step
        bytes   = parameters + gradients + optimizer state + buffers + hungriest workspace
                  + in flight * saved                                    (all kept)
                  + (in flight - 1) * inputs + max(saved, inputs)        (recompute)

    Where replicas divide parameters, the layers of a pass wait for their gathers and scatters.
    """

    problem: PlanningProblem
    stage: Stage

    @property
    def sharding(self) -> str:
        return self.problem.sharding_of(self.stage)

    @property
    def profile(self) -> ModelProfile:
        """The costs of the layers; by block, backwards begin with the forward."""
        return self.problem.profile.by_block if self.stage.by_block else self.problem.profile

    @property
    def run(self) -> list[LayerCost]:
        return [self.profile.layers[layer] for layer in self.stage.layers]

    @property
    def parameter_bytes(self) -> float:
        return float(self.profile.parameter_bytes(self.stage.layers))

    @property
    def crowding(self) -> float:
        """How much slower devices are where more compute on a host than it has cores for."""
        cluster, factor = self.problem.cluster, 1.0
        for index, host in enumerate(cluster.hosts):
            busy = sum(cluster.host_index[device] == index for device in self.stage.devices)
            if host.full_speed_devices:
                factor = max(factor, busy / host.full_speed_devices)
        return factor

    @property
    def read_s(self) -> float:
        """Seconds in which a chip reads the parameters that it does not hold."""
        held, times = self.parameter_bytes, [0.0]
        for number in self.stage.devices:
            device = self.problem.cluster.devices[number]
            if device.off_chip_bytes_per_s and held > device.on_chip_bytes:
                times.append(held / device.off_chip_bytes_per_s)
        return max(times)

    def statistics_s(self, *, forward: bool) -> float:
        """Seconds of the sums of batch norm's statistics."""
        norms, replicas = sum(layer.norms for layer in self.run), self.stage.replicas
        if replicas < 2 or not norms:
            return 0.0
        row = 2 * sum(layer.norm_channels for layer in self.run) / norms
        there_bytes, back_bytes = replicas * (row + 1) * NUMBER_BYTES, row * NUMBER_BYTES
        there_s, back_s = (
            norms * (self.problem.profile.statistics_s + self.sum_s(size))
            for size in (there_bytes, back_bytes)
        )
        return there_s if forward else back_s + (there_s if self.stage.by_block else 0.0)

    def sum_s(self, size_bytes: float) -> float:
        return all_reduce_s(self.problem.cluster, self.stage.devices, size_bytes)

    def slowest_s(self, *names: str) -> float:
        """Seconds of some costs of all layers, on the replica that is slowest in them."""
        devices = self.problem.cluster.devices
        return max(
            sum(getattr(layer, name).at(rows) for layer in self.run for name in names)
            / devices[device].speed
            for device, rows in zip(self.stage.devices, self.stage.slices, strict=True)
        )

    @property
    def layer_bytes(self) -> list[float]:
        """Parameters of each layer; what layers share counts with the first of them."""
        sizes = [float(layer.parameter_bytes) for layer in self.run]
        for shared in self.profile.shared:
            if users := [layer for layer in shared.layers if layer in self.stage.layers]:
                sizes[min(users) - self.stage.layers.start] += shared.bytes
        return sizes

    @property
    def gathers(self) -> bool:
        return self.sharding == "parameters" and self.stage.replicas > 1

    def pass_s(self, *, forward: bool) -> float:
        """A pass at full speed, without statistics."""
        name = "forward_s" if forward else "backward_s"
        if not self.gathers:
            return max(self.read_s, self.slowest_s(name))
        devices = self.problem.cluster.devices
        works_s = [
            max(
                getattr(layer, name).at(rows) / devices[device].speed
                for device, rows in zip(self.stage.devices, self.stage.slices, strict=True)
            )
            for layer in self.run
        ]
        messages_s = [self.sum_s(size) / 2 for size in self.layer_bytes]
        step = 1 if forward else -1
        return max(self.read_s, gathered_pass_s(messages_s[::step], works_s[::step], not forward))

    def seconds_of(self, *, forward: bool) -> float:
        return (self.pass_s(forward=forward) + self.statistics_s(forward=forward)) * self.crowding

    @property
    def weight_s(self) -> float:
        """The weights' part of a backward: where reads make that longer, as much longer."""
        if self.gathers:
            return 0.0
        computed_s = self.slowest_s("backward_s")
        longer = self.pass_s(forward=False) / computed_s if computed_s else 1.0
        return self.slowest_s("backward_weight_s") * longer * self.crowding

    @property
    def whole_s(self) -> float:
        """A forward and a backward; different replicas may be slowest in the two."""
        if self.gathers or self.read_s:
            return self.seconds_of(forward=True) + self.seconds_of(forward=False)
        waits_s = self.statistics_s(forward=True) + self.statistics_s(forward=False)
        return (self.slowest_s("forward_s", "backward_s") + waits_s) * self.crowding

    @property
    def after_s(self) -> float:
        devices = self.problem.cluster.devices
        slowest = min(devices[device].speed for device in self.stage.devices)
        step_s = self.profile.step_s_per_byte * self.parameter_bytes * self.crowding / slowest
        if self.gathers:
            return step_s / self.stage.replicas
        return self.sum_s(self.parameter_bytes) + step_s

    def state_bytes(self) -> float:
        """Parameters, gradients, optimizer state and buffers; replicas divide some of them."""
        parts, state = self.stage.replicas, self.problem.optimizer_bytes_per_parameter_byte
        besides = sum(layer.buffer_bytes + layer.cast_bytes for layer in self.run)
        if self.sharding != "parameters":
            divided = state / parts if self.sharding else state
            return self.parameter_bytes * (2 + divided) + besides
        sizes = self.layer_bytes
        two = max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
        whole = 2 * two if parts > 1 else 0.0
        return self.parameter_bytes * (2 + state) / parts + whole + besides

    def needed_bytes(self, rows: int, in_flight: int) -> float:
        layers = self.stage.layers
        saved = sum(layer.saved_bytes.at(rows) for layer in self.run)
        edges = (edge for edge in crossing(self.profile)[layers.start] if edge.consumer in layers)
        inputs = sum(edge.bytes.at(rows) for edge in first_of_each_tensor(edges))
        held = self.state_bytes() + max(layer.workspace_bytes.at(rows) for layer in self.run)
        if self.stage.recompute and in_flight > 1:
            return held + (in_flight - 1) * inputs + max(saved, inputs)
        return held + in_flight * saved
