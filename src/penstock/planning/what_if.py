"""The same plan with one thing changed: the cluster's links or devices, micro-batches, schedule."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import isfinite
from typing import Any, Literal

from penstock.cluster.cluster import Cluster, Host, Link
from penstock.cluster.tensor_groups import Groups
from penstock.cluster.toml_file import Dimension, parse_quantity
from penstock.document import Json
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.schedule_costs import priced
from penstock.planning.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.planning.explanation import Explanation, explain_plan
from penstock.planning.planning_problem import member_named, problem_of_plan
from penstock.planning.tensor_groups import on_groups
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import placement_of_style
from penstock.schedule.weight_rule import OptimizerSync
from penstock.search.families import recut
from penstock.simulate.score import make_score, predict_plan
from penstock.simulate.simulation import Prediction
from penstock.timeline.timeline import Timeline

__all__ = [
    "DeviceChange",
    "NumberChange",
    "PlayedPlan",
    "WhatIf",
    "changed_cluster",
    "changed_plan",
    "play",
    "play_changed",
    "read_bandwidth_change",
    "read_device_change",
    "read_latency_change",
    "read_what_if",
    "with_device_change",
    "with_link_bandwidth",
    "with_link_latency",
]

FACTOR = re.compile(r"\s*(?:[x\N{MULTIPLICATION SIGN}]\s*([\d.]+(?:e[-+]?\d+)?)|([\d.]+)\s*x)\s*")
DEVICE = re.compile(r"\s*(\d+)[\s:]+(slower|faster)[\s:]+([\d.]+)\s*%\s*")


@dataclass(frozen=True, slots=True)
class NumberChange:
    """A change of a rate (bytes per second) or a latency (seconds): a factor, or a new value."""

    figure: float
    is_factor: bool

    def of(self, before: float) -> float:
        """The changed number. With a factor, 0 (there is no such link) stays 0.

        >>> NumberChange(2.0, is_factor=True).of(5.0), NumberChange(2.0, is_factor=False).of(5.0)
        (10.0, 2.0)
        """
        return self.figure * before if self.is_factor else self.figure


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """A device that becomes slower or faster by ``part``: 0.2 for 20 %.

    20 % slower means that it takes 1.2 times as long, 20 % faster that it does 1.2 times as much.
    """

    device: int
    direction: Literal["slower", "faster"]
    part: float

    @property
    def speed_factor(self) -> float:
        return 1 + self.part if self.direction == "faster" else 1 / (1 + self.part)


def read_bandwidth_change(text: str) -> NumberChange:
    """Parse a change of rates: a factor, or a rate.

    >>> read_bandwidth_change("x2"), read_bandwidth_change("10 GB/s")
    (NumberChange(figure=2.0, is_factor=True), NumberChange(figure=10000000000.0, is_factor=False))

    Raises:
        BadInput: neither, or not above 0.
    """
    change = read_number_change(text, "bandwidth", "link bandwidth", "x2, x0.5 or 10GB/s")
    if not change.figure > 0:
        raise BadInput(f"link bandwidth '{text}' must be > 0; write x2, x0.5 or 10GB/s")
    return change


def read_latency_change(text: str) -> NumberChange:
    """Parse a change of latencies: a factor, or a time.

    >>> read_latency_change("x0.5"), read_latency_change("5us")
    (NumberChange(figure=0.5, is_factor=True), NumberChange(figure=5e-06, is_factor=False))

    Raises:
        BadInput: neither, or below 0.
    """
    return read_number_change(text, "time", "link latency", "x2, x0.5 or 5us")


def read_number_change(text: str, dimension: Dimension, thing: str, forms: str) -> NumberChange:
    """Parse a factor or a quantity; ``thing`` and ``forms`` are used in error messages."""
    try:
        if match := FACTOR.fullmatch(text):
            change = NumberChange(float(match[1] or match[2]), is_factor=True)
        else:
            change = NumberChange(parse_quantity(text, dimension), is_factor=False)
    except ValueError as error:
        raise BadInput(f"{thing} '{text}' is not a change: {error}; write {forms}") from None
    if not (change.figure >= 0 and isfinite(change.figure)):
        raise BadInput(f"{thing} '{text}' must be finite and >= 0; write {forms}")
    return change


def read_device_change(text: str) -> DeviceChange:
    """Parse a change of one device's speed.

    >>> read_device_change("3 slower 20 %")
    DeviceChange(device=3, direction='slower', part=0.2)
    >>> read_device_change("3:faster:50%").speed_factor
    1.5

    Raises:
        BadInput: the text has another form.
    """
    match = DEVICE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        part = float(match[3]) / 100
    except ValueError:
        raise BadInput(
            f"device change '{text}' cannot be read; write the device's number, slower or faster, "
            f"and percent: '3 slower 20 %' or 3:slower:20%"
        ) from None
    return DeviceChange(int(match[1]), "faster" if match[2] == "faster" else "slower", part)


def with_link_bandwidth(cluster: Cluster, change: NumberChange) -> Cluster:
    """The cluster with the rates of all links and ports changed; missing ones stay missing."""
    return with_links(cluster, "bytes_per_s", lambda before: before and change.of(before))


def with_link_latency(cluster: Cluster, change: NumberChange) -> Cluster:
    """The cluster with the latencies of all links and ports changed."""
    return with_links(cluster, "latency_s", change.of)


def with_links(cluster: Cluster, figure: str, change: Callable[[float], float]) -> Cluster:
    def changed(thing: Host | Link, *names: str) -> Any:
        return replace(thing, **{name: change(getattr(thing, name)) for name in names})

    hosts = (changed(host, f"link_{figure}", f"port_{figure}") for host in cluster.hosts)
    links = (changed(link, figure) for link in cluster.links)
    return replace(cluster, hosts=tuple(hosts), links=tuple(links))


def with_device_change(cluster: Cluster, change: DeviceChange) -> Cluster:
    """The cluster with one device slower or faster.

    Raises:
        BadInput: the cluster has no such device.
    """
    last = len(cluster.devices) - 1
    if change.device > last:
        raise BadInput(
            f"cluster '{cluster.name}' has no device {change.device}; its devices are 0..{last}"
        )
    devices = list(cluster.devices)
    changed = devices[change.device]
    devices[change.device] = replace(changed, speed=changed.speed * change.speed_factor)
    left = iter(devices)
    hosts = (replace(h, devices=tuple(islice(left, len(h.devices)))) for h in cluster.hosts)
    return replace(cluster, hosts=tuple(hosts))


@dataclass(frozen=True)
class WhatIf:
    """The changes; ``words`` names each as it was asked for."""

    bandwidth: NumberChange | None
    latency: NumberChange | None
    devices: tuple[DeviceChange, ...]
    micro_batches: int
    schedule: str
    words: tuple[str, ...]


def read_what_if(
    link_bandwidth: str = "",
    link_latency: str = "",
    devices: Sequence[str] = (),
    micro_batches: int = 0,
    schedule: str = "",
) -> WhatIf:
    """The changes that people ask for in words; an empty or 0 argument changes nothing.

    >>> read_what_if(link_bandwidth="x2", devices=["3 slower 20 %"]).words
    ('link bandwidth x2', 'device 3 slower 20 %')

    Raises:
        BadInput: a change that cannot be read, or an unknown schedule.
    """
    if schedule:
        member_named(FAMILIES, schedule, "schedule")
    words = [
        *([f"link bandwidth {link_bandwidth}"] if link_bandwidth else []),
        *([f"link latency {link_latency}"] if link_latency else []),
        *(f"device {text}" for text in devices),
        *([f"{micro_batches} micro-batches"] if micro_batches else []),
        *([f"schedule {schedule}"] if schedule else []),
    ]
    return WhatIf(
        read_bandwidth_change(link_bandwidth) if link_bandwidth else None,
        read_latency_change(link_latency) if link_latency else None,
        tuple(read_device_change(text) for text in devices),
        micro_batches,
        schedule,
        tuple(words),
    )


def changed_cluster(cluster: Cluster, changes: WhatIf) -> Cluster:
    """The cluster after the changes; the same object where there are none.

    Raises:
        BadInput: the cluster has no such device.
    """
    if changes.bandwidth:
        cluster = with_link_bandwidth(cluster, changes.bandwidth)
    if changes.latency:
        cluster = with_link_latency(cluster, changes.latency)
    for change in changes.devices:
        cluster = with_device_change(cluster, change)
    return cluster


def changed_plan(problem: PlanningProblem, plan: Plan, changes: WhatIf) -> Plan:
    """The plan after the changes; ``problem`` gives the costs for another schedule's order.

    Micro-batches keep their size, so more of them are a larger batch. Under another schedule the
    plan keeps its layers and devices, and loses its limit of micro-batches in flight. Where that
    schedule has another number of stages on a device, the layers are cut anew. Devices that
    recomputed activations then do so in all their stages.

    Raises:
        BadInput: there are too few layers for the stages that the schedule needs.
    """
    if changes.micro_batches:
        plan = replace(plan, micro_batches=changes.micro_batches)
    if not changes.schedule or changes.schedule == plan.schedule:
        return plan
    placed = placed_for(problem, plan, changes.schedule)
    return priced(problem, replace(placed, schedule=changes.schedule, in_flight_limit=()))


def placed_for(problem: PlanningProblem, plan: Plan, schedule: str) -> Plan:
    """The plan with as many stages on a device as ``schedule`` has; cut anew if it had others."""
    family = FAMILIES[schedule]
    style = family.placement
    groups, stages = len(plan.device_groups), len(plan.stages)
    if family.is_searched:
        return plan
    rounds = 1 if style in ("straight", "mirrored") else max(2, stages // groups)
    rounds = family.rounds or rounds
    needed, layers = rounds * groups, len(problem.profile.layers)
    if needed > layers:
        raise BadInput(
            f"schedule '{schedule}' holds {rounds} stages on each of {groups} devices, which needs "
            f"{needed} layers, and profile '{problem.profile.name}' has {layers}; ask for a "
            f"schedule with one stage a device, such as '1f1b'"
        )
    if plan.placement == placement_of_style(style, groups, rounds):
        return plan
    if rounds == 1 and not plan.placement:
        return plan
    recomputing = {stage.devices: (stage.recompute, stage.by_block) for stage in plan.stages}
    cut = recut(problem, plan, style, rounds)
    ways = [recomputing[stage.devices] for stage in cut.stages]
    stages = tuple(
        replace(stage, recompute=whole, by_block=by_block)
        for stage, (whole, by_block) in zip(cut.stages, ways, strict=True)
    )
    return replace(cut, stages=stages)


@dataclass(frozen=True)
class PlayedPlan:
    """A simulated plan with its problem.

    ``repeated`` is the prediction of several iterations in a row, where they are asked for.
    ``tensor_groups`` are the ranks of each device, if the plan had groups; the plan has none here.
    """

    problem: PlanningProblem
    planned: PlannedPipeline
    iterations: int = 1
    repeated: Prediction | None = None
    optimizer_sync: OptimizerSync = "before"
    tensor_groups: Groups = ()

    @property
    def timeline(self) -> Timeline:
        """That of all iterations."""
        return (self.repeated or self.planned.prediction).timeline

    @property
    def samples_per_s(self) -> float:
        """Samples of the batch over seconds of the iteration."""
        return self.planned.plan.global_batch / self.planned.prediction.iteration_s

    @property
    def peak_memory_bytes(self) -> float:
        """The highest peak of any device in one iteration."""
        return max(self.planned.prediction.peak_memory_bytes)

    @property
    def too_full(self) -> tuple[int, ...]:
        """The devices with too little memory, for one iteration or for several in a row."""
        several = self.repeated.too_full if self.repeated else ()
        return tuple(sorted({*self.planned.prediction.too_full, *several}))

    @cached_property
    def explanation(self) -> Explanation:
        """What limits the plan."""
        return explain_plan(self.planned, self.problem)

    def to_json(self, seconds: float, explained: bool) -> dict[str, Json]:
        """The keys of a plan, and of several iterations; what limits it where that is asked for."""
        values = self.planned.to_json(seconds) | {"fits": not self.too_full}
        if self.tensor_groups:
            values |= {"tensor_groups": [list(group) for group in self.tensor_groups]}
        if self.repeated:
            values |= {
                "iterations": self.iterations,
                "optimizer_sync": self.optimizer_sync,
                "steady_s": self.repeated.steady_s,
            }
        if explained:
            values |= {"explanation": self.explanation.to_json()}
        return values


def play(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    iterations: int = 1,
    optimizer_sync: OptimizerSync = "before",
    memory_reserve: float = 0.0,
    optimizer_state: float = 2.0,
) -> PlayedPlan:
    """Simulate one iteration of a plan on a cluster, and ``iterations`` in a row if more than one.

    ``optimizer_sync`` is that of `simulate_plan`, for several iterations. The plan fits if it
    leaves ``memory_reserve`` free, with ``optimizer_state`` bytes for each byte of parameters. Its
    tensor groups are the devices of the result.

    Raises:
        BadInput: the plan does not fit the profile or the cluster, or its schedule refuses it.
    """
    bare = replace(plan, tensor_groups=())
    problem = problem_of_plan(bare, profile, cluster, memory_reserve, optimizer_state)
    baselines = baselines_of(problem, make_score(problem))
    plan, problem = on_groups(plan, problem)
    groups, plan = plan.tensor_groups, replace(plan, tensor_groups=())
    planned = assess_plan(plan, problem, baselines)
    repeated = None
    if iterations > 1:
        repeated = predict_plan(problem, plan, iterations=iterations, optimizer_sync=optimizer_sync)
    return PlayedPlan(problem, planned, iterations, repeated, optimizer_sync, groups)


def play_changed(before: PlayedPlan, changes: WhatIf) -> PlayedPlan:
    """Simulate the same plan with the changes that are asked for.

    Raises:
        BadInput: no such device, or the plan cannot have the schedule.
    """
    cluster = changed_cluster(before.problem.cluster, changes)
    problem = replace(before.problem, cluster=cluster)
    plan = changed_plan(problem, before.planned.plan, changes)
    return play(
        plan,
        problem.profile,
        cluster,
        before.iterations,
        before.optimizer_sync,
        problem.memory_reserve,
        problem.optimizer_bytes_per_parameter_byte,
    )
