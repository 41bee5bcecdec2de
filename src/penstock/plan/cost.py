"""The costs of a stage: the formulas that all planners, the bounds and the messages share.

All times are of one micro-batch, all sizes of one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_s, norm_sums_s, split_concat_s
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, recalled, remembered
from penstock.plan.row_split import split_rows
from penstock.profile.model_profile import Affine, Edge, ModelProfile, first_of_each_tensor
from penstock.schedule.family import DepthFunction
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape
from penstock.schedule.warm_up import warm_up_depths

__all__ = [
    "Transfer",
    "backward_s",
    "crossing_bytes",
    "crowding",
    "depth_function",
    "depths_of",
    "device_memory_bytes",
    "estimate_s",
    "forward_s",
    "input_bytes",
    "leanest_schedule",
    "memory_of_rows",
    "micro_batch_s",
    "norms_s",
    "peak_memory_bytes",
    "rows_by_speed",
    "slowest_s",
    "state_bytes",
    "tail_s",
    "transfer",
]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds to send a micro-batch's tensors to the next stage, and their gradients back."""

    forward_s: float
    backward_s: float

    @property
    def round_trip_s(self) -> float:
        """There and back."""
        return self.forward_s + self.backward_s

    @property
    def busier_s(self) -> float:
        """The busier direction: links carry both at once."""
        return max(self.forward_s, self.backward_s)


def depth_function(schedule: str) -> DepthFunction:
    """How many micro-batches a stage of ``schedule`` keeps in flight.

    >>> depth_function("1f1b")(3, 8)
    3

    Raises:
        BadInput: planners do not know the schedule.
    """
    family = FAMILIES.get(schedule)
    if family is None or family.depth is None:
        planned = [name for name, family in FAMILIES.items() if family.is_planned]
        raise BadInput(
            f"schedule '{schedule}' is not one that plans are made for; use one of "
            f"{', '.join(planned)}"
        )
    return family.depth


def leanest_schedule(problem: PlanningProblem) -> str:
    """The allowed schedule with the fewest micro-batches in flight; the first of equal ones."""
    return min(problem.schedules, key=lambda name: depth_function(name)(2, 4))


def rows_by_speed(cluster: Cluster, devices: Sequence[int], rows: int) -> tuple[int, ...]:
    """Rows of a micro-batch in proportion to the devices' speeds."""
    return split_rows(rows, [cluster.devices[device].speed for device in devices])


def crowding(cluster: Cluster, devices: Sequence[int]) -> float:
    """By how much ``devices`` slow one another down when all compute at once, 1 for not at all."""
    factor = 1.0
    for index, host in enumerate(cluster.hosts):
        if host.full_speed_devices:
            busy = sum(cluster.host_index[device] == index for device in devices)
            factor = max(factor, busy / host.full_speed_devices)
    return factor


def forward_s(problem: PlanningProblem, stage: Stage) -> float:
    """Seconds of one forward on the slowest replica."""
    shared_s, _ = norms_s(problem, stage)
    seconds = partial(problem.profile.forward_s, stage.layers)
    return slowest_s(problem, stage, seconds, shared_s)


def backward_s(problem: PlanningProblem, stage: Stage) -> float:
    """Seconds of one full backward on the slowest replica, with recompute only if by block."""
    _, shared_s = norms_s(problem, stage)
    seconds = partial(problem.profile_of(stage).backward_s, stage.layers)
    return slowest_s(problem, stage, seconds, shared_s)


def micro_batch_s(problem: PlanningProblem, stage: Stage) -> float:
    """Seconds of a forward and a full backward on the slowest replica, as `backward_s`.

    It may be less than the slowest forward plus the slowest backward, because different replicas
    may be slowest in the two.
    """
    profile, run = problem.profile_of(stage), stage.layers
    return slowest_s(
        problem,
        stage,
        lambda rows: profile.forward_s(run, rows) + profile.backward_s(run, rows),
        sum(norms_s(problem, stage)),
    )


def norms_s(problem: PlanningProblem, stage: Stage) -> tuple[float, float]:
    """Seconds that replicas wait for batch norm's statistics, in a forward and in a backward."""
    if len(stage.devices) < 2 or not problem.profile.has_norms:
        return 0.0, 0.0
    layers = problem.profile.layers[stage.layers.start : stage.layers.stop]
    norms = sum(layer.norms for layer in layers)
    channels = sum(layer.norm_channels for layer in layers)
    there_s, back_s = norm_sums_s(problem.cluster, stage.devices, norms, channels)
    return there_s, back_s + (there_s if stage.by_block else 0.0)


def slowest_s(
    problem: PlanningProblem,
    stage: Stage,
    seconds_of_rows: Callable[[int], float],
    shared_s: float = 0.0,
) -> float:
    """The longest of the replicas' times, slowed down where they share cores.

    ``shared_s`` comes on top: what all replicas wait for together.
    """
    devices = problem.cluster.devices
    kinds = {
        (rows, devices[device].speed)
        for device, rows in zip(stage.devices, stage.slices, strict=True)
    }
    longest = max(seconds_of_rows(rows) / speed for rows, speed in kinds)
    return (longest + shared_s) * crowding(problem.cluster, stage.devices)


def tail_s(problem: PlanningProblem, stage: Stage) -> float:
    """Seconds after a stage's last backward: gradient all-reduce and optimizer step."""
    size_bytes = problem.profile.parameter_bytes(stage.layers)
    slowest = min(problem.cluster.devices[device].speed for device in stage.devices)
    crowded = crowding(problem.cluster, stage.devices)
    step_s = size_bytes * problem.profile.step_s_per_byte * crowded / slowest
    return all_reduce_s(problem.cluster, stage.devices, size_bytes) + step_s


def crossing_bytes(profile: ModelProfile, cut: int, of: Callable[[Edge], Affine]) -> Affine:
    """Bytes of all tensors from before ``cut`` to after it, each counted once."""
    return sum((of(edge) for edge in first_of_each_tensor(profile.crossing(cut))), Affine())


def transfer(problem: PlanningProblem, sender: Stage, receiver: Stage) -> Transfer:
    """Seconds between two neighbouring stages, as if all that crosses the cut passed there.

    In fact a tensor for a later stage goes straight to it. Charging it to each cut that it crosses
    keeps the recurrence a chain. The simulator sends the tensor on its true path.
    """
    cut, cluster = receiver.layers.start, problem.cluster
    down = (sender.devices, sender.slices, receiver.devices, receiver.slices)
    up = (receiver.devices, receiver.slices, sender.devices, sender.slices)

    def computed() -> Transfer:
        activations = crossing_bytes(problem.profile, cut, lambda edge: edge.bytes)
        gradients = crossing_bytes(problem.profile, cut, lambda edge: edge.gradient_bytes)
        return Transfer(
            forward_s=split_concat_s(cluster, *down, activations.at),
            backward_s=split_concat_s(cluster, *up, gradients.at),
        )

    return recalled(known_transfers(problem), (cut, *down), computed)


@remembered
def known_transfers(_: PlanningProblem) -> dict[tuple[object, ...], Transfer]:
    """The transfers of a problem that were computed before, by cut, devices and rows."""
    return {}


def device_memory_bytes(
    problem: PlanningProblem,
    layers: range,
    rows: int,
    *,
    in_flight: int,
    recompute: bool = False,
    by_block: bool = False,
) -> float:
    """Peak bytes of a device that holds ``layers`` and computes ``rows`` rows of a micro-batch.

    parameters + gradients + optimizer state + buffers + workspace of the hungriest layer
      + in flight * saved                                     (all kept, or only one in flight)
      + (in flight - 1) * stage inputs + max(saved, inputs)   (recompute)

    With ``by_block`` a layer saves what it reads (`ModelProfile.by_block`).
    """
    profile = problem.profile.by_block if by_block else problem.profile
    held = state_bytes(problem, layers)
    held += max(profile.layers[i].workspace_bytes.at(rows) for i in layers)
    saved = profile.saved_bytes(layers, rows)
    if recompute and in_flight > 1:
        inputs = input_bytes(problem, layers, rows)
        return held + (in_flight - 1) * inputs + max(saved, inputs)
    return held + in_flight * saved


def state_bytes(problem: PlanningProblem, layers: range) -> float:
    """Bytes that a device holds of ``layers`` all the time, whatever the micro-batches."""
    state = problem.profile.parameter_bytes(layers)
    buffers = sum(problem.profile.layers[i].buffer_bytes for i in layers)
    return state * (2 + problem.optimizer_bytes_per_parameter_byte) + buffers


def input_bytes(problem: PlanningProblem, layers: range, rows: int) -> float:
    """Bytes of the tensors that ``layers`` read from earlier layers, for so many rows."""
    return sum(edge.bytes.at(rows) for edge in problem.profile.incoming(layers))


def peak_memory_bytes(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """Peak bytes of every device of ``plan``, in the order of ``plan.devices``."""
    return tuple(
        memory_of_rows(problem, stage, rows, in_flight)
        for stage, in_flight in zip(plan.stages, depths_of(plan), strict=True)
        for rows in stage.slices
    )


def memory_of_rows(problem: PlanningProblem, stage: Stage, rows: int, in_flight: int) -> float:
    """`device_memory_bytes` of a replica of ``stage`` that computes so many rows."""
    return device_memory_bytes(
        problem,
        stage.layers,
        rows,
        in_flight=in_flight,
        recompute=stage.recompute,
        by_block=stage.by_block,
    )


def depths_of(plan: Plan) -> tuple[int, ...]:
    """The most micro-batches that each stage of ``plan`` has in flight."""
    depth = depth_function(plan.schedule)
    exactly_as_limited = plan.schedule == "early-backward" and plan.in_flight_limit

    def in_flight(shape: PipelineShape, stage: int) -> int:
        if exactly_as_limited:
            return shape.limit(stage)
        return depth(shape.stages - stage, shape.micro_batches)

    return warm_up_depths(plan.shape(), in_flight)


def estimate_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds of an iteration by the recurrence of `penstock.planners.dynamic_program`.

    It is an estimate, not a bound: no all-reduce overlaps the drain of the stages before it, and
    unequal stages do not wait for one another.
    """
    depths = depths_of(plan)
    rest_s = 0.0
    for index in reversed(range(len(plan.stages))):
        stage = plan.stages[index]
        busy_s = micro_batch_s(problem, stage)
        if stage.recompute and depths[index] > 1:
            busy_s += forward_s(problem, stage)
        own_s = plan.micro_batches * busy_s + tail_s(problem, stage)
        if index + 1 < len(plan.stages):
            moved = transfer(problem, stage, plan.stages[index + 1])
            own_s = max(own_s, plan.micro_batches * moved.busier_s)
            rest_s += busy_s + moved.round_trip_s
        rest_s = max(own_s, rest_s)
    return rest_s
