"""Why nothing fits, and the smallest thing that would do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, floor, log10

from penstock.cluster.cluster import Cluster
from penstock.errors import Infeasible
from penstock.plan.chain_table import fill
from penstock.plan.cost import device_memory_bytes, peak_memory_bytes
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import run_tables
from penstock.plan.window_costs import CostSource

__all__ = ["infeasible", "size_text"]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Something a user could allow: its kind, in words, and the problem with it allowed."""

    kind: str
    text: str
    problem: PlanningProblem


def infeasible(problem: PlanningProblem, planner: str) -> Infeasible:
    """The error for a problem without a plan: what needs how much, what there is, what would do."""
    if leanest(problem):
        return whole_model_too_large(problem, planner)
    remedies: dict[str, str] = {}
    for relaxation in relaxations(problem):
        if relaxation.kind not in remedies and leanest(relaxation.problem):
            remedies[relaxation.kind] = relaxation.text
    needed = least_memory_bytes(problem)
    enough = leanest(with_memory(problem, needed))
    if not enough:
        return Infeasible(
            f"no plan is possible for {len(problem.profile.layers)} layers on "
            f"{len(problem.cluster.devices)} devices with micro-batches of "
            f"{list(problem.micro_batch_sizes)}; allow other micro-batch sizes"
        )
    remedies["memory"] = f"use devices with {size_text(needed)}"
    return Infeasible(
        f"no plan fits: {fullest_stage(problem, enough[0])}; {' or '.join(remedies.values())}"
    )


def whole_model_too_large(problem: PlanningProblem, planner: str) -> Infeasible:
    """The error of a planner that makes one stage, where several stages would fit."""
    layers, devices = range(len(problem.profile.layers)), problem.cluster.devices
    largest = max(devices, key=lambda device: device.memory_bytes)
    rows = ceil(min(problem.micro_batch_sizes) / len(devices))
    needed = device_memory_bytes(problem, layers, rows, in_flight=1, recompute=False)
    return Infeasible(
        f"planner '{planner}' finds no plan that fits: all layers on one device need "
        f"{size_text(needed)} even for {rows} samples, and {largest.kind} has "
        f"{size_text(largest.memory_bytes)}; use planner 'search', which cuts the model into stages"
    )


def relaxations(problem: PlanningProblem) -> Iterator[Relaxation]:
    """Each single thing that a user could allow, the mildest of its kind first."""
    if problem.recompute == "off":
        yield Relaxation("recompute", "allow recompute", replace(problem, recompute="auto"))
    if "1f1b" not in problem.schedules:
        yield Relaxation("schedule", "allow schedule '1f1b'", replace(problem, schedules=("1f1b",)))
    most_stages = min(len(problem.cluster.devices), len(problem.profile.layers))
    if problem.max_stages:
        for stages in range(problem.max_stages + 1, most_stages + 1):
            deeper = replace(problem, max_stages=stages)
            yield Relaxation("stages", f"use >= {stages} stages", deeper)
    for size in range(min(problem.micro_batch_sizes) - 1, 0, -1):
        if problem.global_batch % size == 0:
            leaner = replace(problem, micro_batch_sizes=(size,))
            yield Relaxation("size", f"use micro-batches of {size}", leaner)


def leanest(problem: PlanningProblem) -> tuple[Plan, ...]:
    """A plan that fits, or none: with the smallest micro-batches and fewest of them in flight."""
    order = tuple(range(len(problem.cluster.devices)))
    source = CostSource(problem, run_tables(problem), min(problem.micro_batch_sizes))
    schedule = "1f1b" if "1f1b" in problem.schedules else problem.schedules[0]
    fitting = fill(source, order, schedule).candidates()
    return tuple(candidate.plan for candidate in islice(fitting, 1))


def with_memory(problem: PlanningProblem, memory_bytes: float) -> PlanningProblem:
    """The problem with all devices given so much memory."""
    hosts = tuple(
        replace(
            host,
            devices=tuple(replace(device, memory_bytes=memory_bytes) for device in host.devices),
        )
        for host in problem.cluster.hosts
    )
    cluster = Cluster(problem.cluster.name, hosts, problem.cluster.links)
    return replace(problem, cluster=cluster)


def least_memory_bytes(problem: PlanningProblem) -> float:
    """The least memory of every device with which a plan fits, to within a hundredth of itself."""
    layers, rows = range(len(problem.profile.layers)), min(problem.micro_batch_sizes)
    least, most = 0.0, 1.0
    most += device_memory_bytes(
        problem, layers, rows, in_flight=problem.global_batch, recompute=False
    )
    while most - least > most / 100:
        middle = (least + most) / 2
        least, most = (least, middle) if leanest(with_memory(problem, middle)) else (middle, most)
    return most


def fullest_stage(problem: PlanningProblem, plan: Plan) -> str:
    """The stage of a plan that exceeds its device's memory most, as a sentence."""
    peaks = peak_memory_bytes(problem, plan)
    excess = [
        peak - problem.cluster.devices[device].memory_bytes
        for peak, device in zip(peaks, plan.devices, strict=True)
    ]
    index = excess.index(max(excess))
    device = plan.devices[index]
    stage = next(s for s, stage in enumerate(plan.stages) if device in stage.devices)
    has = problem.cluster.devices[device]
    return (
        f"even in the leanest plan stage {stage} needs {size_text(peaks[index])} on device "
        f"{device}, and {has.kind} has {size_text(has.memory_bytes)}"
    )


def size_text(size_bytes: float) -> str:
    """Bytes for people, rounded up to four digits.

    >>> size_text(16e9), size_text(1234567)
    ('16 GB', '1.235 MB')
    """
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
        if size_bytes >= scale or scale == 1.0
    )
    figure = size_bytes / scale
    digits = max(0, 3 - floor(log10(max(figure, 1.0))))
    return f"{ceil(figure * 10**digits) / 10**digits:g} {unit}"
