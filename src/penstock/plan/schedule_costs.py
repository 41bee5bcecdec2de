"""The costs of a plan's stages and the memory left, for schedules that adapt to both."""

from dataclasses import replace

from penstock.plan.cost import run_costs, stage_seconds, transfer
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import StageCost

__all__ = ["least_room", "priced", "with_costs"]


def priced(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with the costs that its schedule needs; the planners' own schedules need none."""
    if FAMILIES[plan.schedule].is_planned:
        return replace(plan, costs=(), memory_bytes=())
    return with_costs(problem, plan)


def with_costs(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with the costs of its stages and the memory that its devices have left.

    Times are those of the slowest replica. A transfer counts with the mean of its two directions.
    Bytes are those of the replica that can hold the fewest micro-batches. A stage that recomputes
    keeps its inputs of each micro-batch, and memory is reserved for all that it saves of one.
    """
    rooms = [room_of_group(problem, plan, devices) for devices in plan.device_groups]
    replica_of = {
        devices: replica for devices, (_, replica) in zip(plan.device_groups, rooms, strict=True)
    }
    costs = tuple(
        cost_of_stage(problem, plan, index, replica_of[stage.devices])
        for index, stage in enumerate(plan.stages)
    )
    return replace(plan, costs=costs, memory_bytes=tuple(room for room, _ in rooms))


def cost_of_stage(problem: PlanningProblem, plan: Plan, index: int, replica: int) -> StageCost:
    """The costs of a micro-batch on stage ``index``; its bytes are those on one replica."""
    stage = plan.stages[index]
    seconds = stage_seconds(problem, stage)
    transfer_s = 0.0
    if index + 1 < len(plan.stages) and plan.stages[index + 1].devices != stage.devices:
        transfer_s = transfer(problem, stage, plan.stages[index + 1]).round_trip_s / 2
    return StageCost(
        forward_s=seconds.forward_s,
        input_backward_s=max(0.0, seconds.backward_s - seconds.weight_s),
        weight_backward_s=seconds.weight_s,
        transfer_s=transfer_s,
        saved_bytes=kept_bytes(problem, stage, replica),
    )


def room_of_group(
    problem: PlanningProblem, plan: Plan, devices: tuple[int, ...]
) -> tuple[float, int]:
    """Bytes left for saved activations on the replica with the least, and its number.

    At most as many bytes as all micro-batches of the plan need.
    """
    left, kept, replica = least_room(problem, plan, devices)
    return min(left, plan.micro_batches * kept), replica


def least_room(
    problem: PlanningProblem, plan: Plan, devices: tuple[int, ...]
) -> tuple[float, float, int]:
    """The replica that can hold the fewest micro-batches: bytes left, bytes of one, its number.

    The bytes of a micro-batch are those that all stages of the group save of it.
    """
    stages = stages_on(plan, devices)
    state = sum(run_costs(problem, s.layers, s.slices[0]).state_bytes for s in stages)
    # Replicas with as much memory and as many rows have as much room.
    kinds: dict[tuple[float, tuple[int, ...]], int] = {}
    for replica, device in enumerate(devices):
        memory_bytes = problem.cluster.devices[device].memory_bytes
        kinds.setdefault((memory_bytes, tuple(s.slices[replica] for s in stages)), replica)
    rooms: list[tuple[float, float, float, int]] = []
    for (memory_bytes, _), replica in kinds.items():
        left = memory_bytes - state
        left -= max(working_bytes(problem, stage, replica) for stage in stages)
        kept = sum(kept_bytes(problem, stage, replica) for stage in stages)
        rooms.append((left / kept if kept else left, left, kept, replica))
    return min(rooms)[1:]


def stages_on(plan: Plan, devices: tuple[int, ...]) -> list[Stage]:
    """The stages that a set of devices holds; of a mirrored schedule also the opposite one."""
    found = [stage for stage in plan.stages if stage.devices == devices]
    if not plan.mirrored:
        return found
    opposite = len(plan.stages) - 1 - plan.stages.index(found[0])
    twin = plan.stages[opposite]
    return [*found, replace(twin, devices=devices, slices=found[0].slices)]


def working_bytes(problem: PlanningProblem, stage: Stage, replica: int) -> float:
    """Bytes that a replica needs while it computes, beside those kept of each micro-batch."""
    run = run_costs(problem, stage.layers, stage.slices[replica])
    return run.workspace_bytes + (run.saved_bytes if stage.recompute else 0.0)


def kept_bytes(problem: PlanningProblem, stage: Stage, replica: int) -> float:
    """Bytes that a replica keeps of each micro-batch in flight."""
    run = run_costs(problem, stage.layers, stage.slices[replica])
    return run.input_bytes if stage.recompute else run.saved_bytes
