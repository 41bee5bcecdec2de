"""Reasons why no plan fits, and the smallest changes with which one would."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, floor, log10

from penstock.cluster.cluster import Device
from penstock.costs.leanest import device_orders, leanest
from penstock.costs.stage_costs import device_memory_bytes, plan_peaks_bytes
from penstock.costs.tables import ChainCosts, whole_chain
from penstock.errors import Infeasible
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.schedule.registry import FAMILIES

ONE_STAGE_PLANNERS = ("single-device", "data-parallel")

MOST_DEVICES = 4096
"""More devices than that are not proposed."""


def infeasible(problem: PlanningProblem, planner: str) -> Infeasible:
    """The error for a problem without a plan: the memory needed, the memory there is, and remedies.

    Every remedy is enough on its own, and the smallest of its kind: micro-batches, stages, a
    smaller memory reserve, memory of each device (to within a hundredth), devices (in whole hosts
    like the last).
    """
    chain = whole_chain(problem)
    known = tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    wanted, problem = problem.schedules, replace(problem, schedules=known or ("1f1b",))
    if fitting := first_fitting(problem, chain):
        if known:
            return planner_too_narrow(problem, planner, fitting)
        return Infeasible(
            f"planner '{planner}' finds no plan that fits under schedule {', '.join(wanted)}, "
            f"though {len(fitting.stages)} stages with micro-batches of "
            f"{fitting.micro_batch_size} would under '1f1b'; allow schedule '1f1b'"
        )
    remedies: dict[str, str] = {}
    for kind, text, changed in relaxations(problem):
        if kind not in remedies and first_fitting(changed, chain):
            remedies[kind] = text
    if devices := least_devices(problem, chain):
        remedies["devices"] = f"use >= {devices} devices"
    needed = least_memory_bytes(problem, chain)
    enough = leanest(problem, chain, with_memory(problem, needed))
    if not enough:
        return Infeasible(
            f"no plan is possible for {len(problem.profile.layers)} layers on "
            f"{len(problem.cluster.devices)} devices with micro-batches of "
            f"{list(problem.micro_batch_sizes)}; allow other micro-batch sizes"
        )
    whole_bytes = needed / (1 - problem.memory_reserve)
    remedies["memory"] = f"use devices with {rounded_up_text(whole_bytes)}"
    return Infeasible(
        f"no plan fits: {fullest_stage(problem, enough)}; {' or '.join(remedies.values())}"
    )


def planner_too_narrow(problem: PlanningProblem, planner: str, fitting: Plan) -> Infeasible:
    """The error of a planner that found nothing, where ``fitting`` would fit."""
    if planner not in ONE_STAGE_PLANNERS:
        other = "dynamic-program" if planner == "search" else "search"
        return Infeasible(
            f"planner '{planner}' finds no plan that fits, though {len(fitting.stages)} stages "
            f"with micro-batches of {fitting.micro_batch_size} would; use planner '{other}'"
        )
    layers, devices = range(len(problem.profile.layers)), problem.cluster.devices
    largest = max(devices, key=lambda device: device.memory_bytes)
    rows = ceil(min(problem.micro_batch_sizes) / len(devices))
    devices_used = tuple(range(len(devices)))
    needed = min(
        device_memory_bytes(
            problem, Stage(layers, devices_used, (rows,) * len(devices), by_block=again), rows, 1
        )
        for again in {False, problem.allows_blocks}
    )
    return Infeasible(
        f"planner '{planner}' finds no plan that fits: all layers on one device need "
        f"{rounded_up_text(needed)} even for {rows} samples, and {room_text(largest)}; use planner "
        f"'search', which cuts the model into stages"
    )


def relaxations(problem: PlanningProblem) -> Iterator[tuple[str, str, PlanningProblem]]:
    """Each single change that a user could allow, the smallest of its kind first.

    Its kind, its words, and the changed problem.
    """
    freer = replace(problem, recompute="auto", blocks="allowed")
    if problem.recompute == "off":
        yield ("recompute", "allow recompute", freer)
    elif freer != problem:
        yield ("recompute", "allow recompute by block (--recompute auto)", freer)
    if "1f1b" not in problem.schedules:
        yield ("schedule", "allow schedule '1f1b'", replace(problem, schedules=("1f1b",)))
    most_stages = min(len(problem.cluster.devices), len(problem.profile.layers))
    if problem.max_stages:
        for stages in range(problem.max_stages + 1, most_stages + 1):
            deeper = replace(problem, max_stages=stages)
            yield ("stages", f"use >= {stages} stages", deeper)
    for size in range(min(problem.micro_batch_sizes) - 1, 0, -1):
        if problem.global_batch % size == 0:
            leaner = replace(problem, micro_batch_sizes=(size,))
            yield ("size", f"use micro-batches of {size}", leaner)
    for percent in range(ceil(100 * problem.memory_reserve) - 1, -1, -1):
        text = f"keep only {percent} % of each device's memory free (--memory-reserve)"
        fuller = replace(problem, memory_reserve=percent / 100)
        yield ("reserve", text, fuller)


def first_fitting(problem: PlanningProblem, chain: ChainCosts) -> Plan | None:
    """A plan that fits on some device order, by positions in that order; or none."""
    devices = problem.cluster.devices
    for order in device_orders(problem):
        if plan := leanest(problem, chain, [devices[device] for device in order]):
            return plan
    return None


def with_memory(problem: PlanningProblem, memory_bytes: float) -> list[Device]:
    """The cluster's devices, all given so much memory."""
    return [replace(device, memory_bytes=memory_bytes) for device in problem.cluster.devices]


def least_memory_bytes(problem: PlanningProblem, chain: ChainCosts) -> float:
    """The least memory of every device with which a plan fits, to within a hundredth of itself."""
    layers, rows = range(len(problem.profile.layers)), min(problem.micro_batch_sizes)
    least, most = 0.0, 1.0
    most += device_memory_bytes(problem, Stage(layers, (0,), (rows,)), rows, problem.global_batch)
    while most - least > most / 100:
        middle = (least + most) / 2
        fits = leanest(problem, chain, with_memory(problem, middle))
        least, most = (least, middle) if fits else (middle, most)
    return most


def least_devices(problem: PlanningProblem, chain: ChainCosts) -> int:
    """The least device count that fits, with more hosts like the last one; 0 where none does."""
    own, host = problem.cluster.devices, problem.cluster.hosts[-1].devices
    if not host:
        return 0
    useful = len(problem.profile.layers) * min(problem.micro_batch_sizes)
    most_hosts = ceil(max(0, min(useful, MOST_DEVICES) - len(own)) / len(host))

    def fits(hosts: int) -> bool:
        return leanest(problem, chain, [*own, *host * hosts]) is not None

    return len(own) + len(host) * found if (found := least_that(fits, most_hosts)) else 0


def least_that(holds: Callable[[int], bool], most: int) -> int:
    """The least number of ``1..most`` from which ``holds`` is true on, 0 where it never is.

    >>> least_that(lambda n: n >= 5, 100), least_that(lambda n: False, 100)
    (5, 0)
    """
    high = 1
    while high < most and not holds(high):
        high *= 2
    low, high = high // 2, min(high, most)
    if high < 1 or not holds(high):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def fullest_stage(problem: PlanningProblem, plan: Plan) -> str:
    """The stage of a plan that exceeds its device's memory most, as a sentence."""
    peaks = plan_peaks_bytes(problem, plan)
    excess = [
        peak - problem.cluster.devices[device].memory_bytes
        for peak, device in zip(peaks, plan.devices, strict=True)
    ]
    index = excess.index(max(excess))
    device = plan.devices[index]
    stage = next(s for s, stage in enumerate(plan.stages) if device in stage.devices)
    room = room_text(problem.cluster.devices[device])
    return (
        f"even in the leanest plan stage {stage} needs {rounded_up_text(peaks[index])} on device "
        f"{device}, and {room}"
    )


def room_text(device: Device) -> str:
    """The memory of a device for a plan, in words.

    >>> room_text(Device("V100", 15.2e9, reserved_bytes=0.8e9))
    'V100 has 15.2 GB beside a memory reserve of 800 MB'
    """
    words = f"{device.kind} has {rounded_up_text(device.memory_bytes)}"
    reserve = device.reserved_bytes
    return f"{words} beside a memory reserve of {rounded_up_text(reserve)}" if reserve else words


def rounded_up_text(size_bytes: float) -> str:
    """Bytes in a readable form, rounded up to four digits, so that they are enough.

    >>> rounded_up_text(16e9), rounded_up_text(1234567)
    ('16 GB', '1.235 MB')
    """
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
        if size_bytes >= scale or scale == 1.0
    )
    value = size_bytes / scale
    digits = max(0, 3 - floor(log10(max(value, 1.0))))
    return f"{ceil(value * 10**digits) / 10**digits:g} {unit}"
