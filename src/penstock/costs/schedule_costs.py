"""The costs of a plan's stages and the memory left, for schedules that adapt to both."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.native import RunBytes
from penstock.costs.stage_costs import run_bytes, stage_seconds, state_bytes, transfer
from penstock.plan.plan import Plan, Stage, with_order
from penstock.plan.problem import PlanningProblem
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import StageCost


def priced(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with the costs that its schedule needs; the planners' own schedules need none."""
    if FAMILIES[plan.schedule].is_planned:
        return with_order(plan, plan.schedule, plan.in_flight_limit)
    return with_costs(problem, plan)


def with_costs(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with the costs of its stages and the memory that its devices have left.

    Times are those of the slowest replica. A transfer counts with the mean of its two directions,
    and where devices stream with what is left of it after the pass beside it.
    Bytes are those of the replica that can hold the fewest micro-batches. A stage that recomputes
    keeps its inputs of each micro-batch, and memory is reserved for all that it saves of one.
    """
    rooms: list[float] = []
    replica_of: dict[tuple[int, ...], int] = {}
    for devices, stages in stages_of_groups(plan).items():
        left, kept, replica_of[devices] = least_room(problem, devices, stages)
        # At most as many bytes as all micro-batches of the plan need.
        rooms.append(min(left, plan.micro_batches * kept))
    costs = tuple(
        cost_of_stage(problem, plan, index, replica_of[stage.devices])
        for index, stage in enumerate(plan.stages)
    )
    return with_order(plan, plan.schedule, plan.in_flight_limit, costs, tuple(rooms))


def cost_of_stage(problem: PlanningProblem, plan: Plan, index: int, replica: int) -> StageCost:
    """The costs of a micro-batch on stage ``index``; its bytes are those on one replica."""
    stage = plan.stages[index]
    seconds = stage_seconds(problem, stage)
    transfer_s = 0.0
    if index + 1 < len(plan.stages) and plan.stages[index + 1].devices != stage.devices:
        after = plan.stages[index + 1]
        down_s, up_s = transfer(problem, stage, after)
        after_s = stage_seconds(problem, after).backward_s
        down_s = seconds_after(problem, stage, seconds.forward_s, down_s)
        transfer_s = (down_s + seconds_after(problem, after, after_s, up_s)) / 2
    return StageCost(
        forward_s=seconds.forward_s,
        input_backward_s=max(0.0, seconds.backward_s - seconds.weight_s),
        weight_backward_s=seconds.weight_s,
        transfer_s=transfer_s,
        saved_bytes=kept_bytes(run_bytes(problem, stage, stage.slices[replica]), stage.recompute),
    )


def seconds_after(
    problem: PlanningProblem, sender: Stage, pass_s: float, message_s: float
) -> float:
    """Seconds from the end of a pass to the arrival of its message.

    Devices that stream send it beside the pass (`core/play.hpp`).
    """
    devices = problem.cluster.devices
    streams = any(devices[device].concurrent_passes for device in sender.devices)
    return max(0.0, message_s - pass_s) if streams else message_s


def least_room(
    problem: PlanningProblem, devices: tuple[int, ...], stages: Sequence[Stage]
) -> tuple[float, float, int]:
    """The replica that can hold the fewest micro-batches: bytes left, bytes of one, its number.

    The bytes of a micro-batch are those that all ``stages`` of the group save of it.
    """
    state = sum(state_bytes(problem, stage) for stage in stages)
    # Replicas with as much memory and as many rows have as much room.
    kinds: dict[tuple[float, tuple[int, ...]], int] = {}
    for replica, device in enumerate(devices):
        memory_bytes = problem.cluster.devices[device].memory_bytes
        kinds.setdefault((memory_bytes, tuple(s.slices[replica] for s in stages)), replica)
    rooms: list[tuple[float, float, float, int]] = []
    for (memory_bytes, rows), replica in kinds.items():
        runs = [run_bytes(problem, stage, own) for stage, own in zip(stages, rows, strict=True)]
        again = [stage.recompute for stage in stages]
        left = memory_bytes - state
        left -= max(
            run.workspace + (run.saved if recomputes else 0.0)
            for run, recomputes in zip(runs, again, strict=True)
        )
        kept = sum(kept_bytes(run, recomputes) for run, recomputes in zip(runs, again, strict=True))
        rooms.append((left / kept if kept else left, left, kept, replica))
    return min(rooms)[1:]


def stages_of_groups(plan: Plan) -> dict[tuple[int, ...], list[Stage]]:
    """The stages that each set of devices holds; of a mirrored schedule also the opposite ones."""
    found: dict[tuple[int, ...], list[Stage]] = {}
    for stage in plan.stages:
        found.setdefault(stage.devices, []).append(stage)
    if plan.mirrored:
        for stage, twin in zip(plan.stages, reversed(plan.stages), strict=True):
            found[stage.devices].append(replace(twin, devices=stage.devices, slices=stage.slices))
    return found


def kept_bytes(run: RunBytes, recomputes: bool) -> float:
    """Bytes that a replica keeps of each micro-batch in flight."""
    return run.inputs if recomputes else run.saved
