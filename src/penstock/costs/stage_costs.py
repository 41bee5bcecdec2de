"""The costs of a stage: the formulas that all planners, the bounds and the messages share.

All times are of one micro-batch, all sizes of one device.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_costs, message_resources
from penstock.core import native
from penstock.core.native import AllReduceCost, RunBytes, StageSeconds
from penstock.costs.tables import costs_with, whole_chain
from penstock.errors import BadInput
from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.plan.problem import PlanningProblem, recalled
from penstock.plan.row_split import row_overlaps, split_rows
from penstock.profile.model_profile import Affine
from penstock.schedule.registry import FAMILIES
from penstock.schedule.warm_up import DepthFunction


def depth_function(schedule: str) -> DepthFunction:
    """The function for the number of micro-batches that a stage of ``schedule`` keeps in flight.

    >>> depth_function("1f1b")(3, 8)
    3
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


def run_bytes(problem: PlanningProblem, stage: Stage, rows: int) -> RunBytes:
    """Return what a replica keeps of a micro-batch of which it has ``rows`` rows."""
    layers = stage.layers
    return recalled(
        problem,
        run_bytes,
        (layers.start, layers.stop, rows, stage.by_block),
        lambda: native.run_bytes(
            costs_with(problem, 0, by_block=stage.by_block), (layers.start, layers.stop), rows
        ),
    )


def state_bytes(problem: PlanningProblem, stage: Stage) -> float:
    """Return the bytes that each device of a stage holds all the time."""
    layers, sharding = stage.layers, SHARDINGS.index(problem.sharding_of(stage))
    costs = costs_with(problem, sharding, by_block=False)
    return native.state_bytes(costs, (layers.start, layers.stop), stage.replicas)


def stage_seconds(problem: PlanningProblem, stage: Stage) -> StageSeconds:
    """Return the seconds of a stage, with recompute only if it is by block.

    Its replicas slow one another down where they share cores.
    """
    cluster, layers = problem.cluster, stage.layers
    sharding = problem.sharding_of(stage)

    def computed() -> StageSeconds:
        all_reduces = [*all_reduce_costs(cluster, stage.devices)] or [AllReduceCost(0.0, 0.0)]
        costs = costs_with(problem, SHARDINGS.index(sharding), by_block=stage.by_block)
        run = layers.start, layers.stop
        return native.stage_seconds(costs, stage.devices, stage.slices, run, all_reduces)

    key = (layers.start, layers.stop, stage.devices, stage.slices, stage.by_block, sharding)
    return recalled(problem, stage_seconds, key, computed)


def transfer(problem: PlanningProblem, sender: Stage, receiver: Stage) -> tuple[float, float]:
    """Seconds to send a micro-batch's tensors to the next stage, and their gradients back.

    They are as if all that crosses the cut passed between the two.

    In fact a tensor for a later stage goes straight to it. Charging it to each cut that it crosses
    keeps the recurrence a chain. The simulator sends the tensor on its true path.
    """
    cut, cluster = receiver.layers.start, problem.cluster
    down = (sender.devices, sender.slices, receiver.devices, receiver.slices)
    up = (receiver.devices, receiver.slices, sender.devices, sender.slices)

    def computed() -> tuple[float, float]:
        runs = whole_chain(problem).runs
        activations, gradients = (Affine(*sizes[:, cut].tolist()) for sizes in (runs.down, runs.up))
        down_s = split_concat_s(cluster, *down, activations.at)
        return down_s, split_concat_s(cluster, *up, gradients.at)

    return recalled(problem, transfer, (cut, *down), computed)


def split_concat_s(
    cluster: Cluster,
    sender_devices: Sequence[int],
    sender_slices: Sequence[int],
    receiver_devices: Sequence[int],
    receiver_slices: Sequence[int],
    bytes_of_rows: Callable[[int], float],
) -> float:
    """Seconds to move the rows of one micro-batch from one stage's replicas to another's.

    Each sender sends each receiver the rows that both hold (split/concat of DAPPLE, PPoPP 2021):

        sender slices     |   0   |   1   |
        receiver slices   |  0 | 1  |  2  |        messages 0->0, 0->1, 1->1, 1->2

    A device sends its messages one after the other and receives them one after the other. Messages
    between hosts also take turns on the ports. The result is the time of the busiest resource.
    ``bytes_of_rows(n)`` are the bytes of ``n`` rows.
    """
    if len(sender_devices) == len(receiver_devices) == 1:
        size_bytes = bytes_of_rows(sender_slices[0])
        return cluster.transfer_s(sender_devices[0], receiver_devices[0], size_bytes)
    busy_s: dict[tuple[str, int], float] = defaultdict(float)
    for sender, receiver, rows in row_overlaps(sender_slices, receiver_slices):
        source, target = sender_devices[sender], receiver_devices[receiver]
        # Rows that stay on their device need no message.
        if source != target:
            seconds = cluster.transfer_s(source, target, bytes_of_rows(len(rows)))
            for resource in message_resources(cluster, source, target):
                busy_s[resource] += seconds
    return max(busy_s.values(), default=0.0)


def device_memory_bytes(problem: PlanningProblem, stage: Stage, rows: int, in_flight: int) -> float:
    """Peak bytes of a device that holds ``stage`` and computes ``rows`` rows of a micro-batch.

    parameters + gradients + optimizer state + buffers + workspace of the hungriest layer
      + in flight * saved                                     (all kept, or only one in flight)
      + (in flight - 1) * stage inputs + max(saved, inputs)   (recompute)

    By block a layer saves what it reads (`ModelProfile.by_block`). What devices divide counts as
    `held_bytes` of `core/costs.hpp` says.
    """
    run = run_bytes(problem, stage, rows)
    held = state_bytes(problem, stage) + run.workspace
    if stage.recompute and in_flight > 1:
        return held + (in_flight - 1) * run.inputs + max(run.saved, run.inputs)
    return held + in_flight * run.saved


def plan_peaks_bytes(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """Peak bytes of every device of ``plan``, in the order of ``plan.devices``."""
    return tuple(
        device_memory_bytes(problem, stage, rows, in_flight)
        for stage, in_flight in zip(plan.stages, depths_of(plan), strict=True)
        for rows in stage.slices
    )


def depths_of(plan: Plan) -> tuple[int, ...]:
    """The most micro-batches that each stage of ``plan`` has in flight."""
    # Raises for a schedule that plans are not made for.
    depth_function(plan.schedule)
    return FAMILIES[plan.schedule].depths(plan.shape())


def estimate_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds of an iteration by the recurrence of `penstock.planners.dynamic_program`.

    It is an estimate, not a bound: no all-reduce overlaps the drain of the stages before it, and
    unequal stages do not wait for one another.
    """
    depths = depths_of(plan)
    rest_s = 0.0
    for index in reversed(range(len(plan.stages))):
        stage = plan.stages[index]
        seconds = stage_seconds(problem, stage)
        busy_s = seconds.whole_s
        if stage.recompute and depths[index] > 1:
            busy_s += seconds.forward_s
        own_s = plan.micro_batches * busy_s + seconds.after_s
        if index + 1 < len(plan.stages):
            moved = transfer(problem, stage, plan.stages[index + 1])
            # Links carry both directions at once.
            own_s = max(own_s, plan.micro_batches * max(moved))
            rest_s += busy_s + sum(moved)
        rest_s = max(own_s, rest_s)
    return rest_s
