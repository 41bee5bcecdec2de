"""Random pipelines of every kind: any placement, any valid order, any link, unequal throughout."""

from collections import defaultdict
from dataclasses import dataclass, replace
from random import Random

from penstock.cluster.cluster import Cluster, Device, Host, with_devices
from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
)
from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.order import Order
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, placement_of_style
from penstock.schedule.weight_rule import SYNCHRONOUS, WeightRule

MEGABYTE = 10**6

STYLES: tuple[PlacementStyle, ...] = ("straight", "looped", "folded", "mirrored")


@dataclass(frozen=True)
class RandomPipeline:
    """A plan with all that plays it; the plan's schedule is not the one of its name."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    schedule: Schedule
    iterations: int


def random_pipeline(
    random: Random, *, slots: bool = False, divided: bool = False, flushes: bool = False
) -> RandomPipeline:
    """A pipeline of any kind, or that ``flushes``; with ``slots`` some hosts have too few cores.

    Where devices may have ``divided`` what they keep, backwards are whole, there is a flush, and no
    parameter is tied.

    Without them no two things happen at the same instant but by a rare chance, or because a forward
    runs beside a backward and takes as long.
    """
    style = random.choice(STYLES[:3] if divided else STYLES)
    asynchronous = not (divided or flushes) and style == "straight"
    without_flush = asynchronous and random.random() < 0.4
    groups, rounds = random.randint(1, 3), 1
    if style in ("looped", "folded"):
        rounds = random.randint(2, 3)
    if style == "mirrored":
        groups = random.randint(1, 4)
    stages = groups * rounds
    ties = not (without_flush or divided)
    profile = random_profile(random, random.randint(stages, stages + 4), ties=ties)
    cluster = random_cluster(random, groups + random.randint(0, 3), slots)
    micro_batches = random.randint(1, 6)
    plan = random_plan(random, profile, len(cluster.devices), micro_batches, style, groups, rounds)
    if divided:
        # So that the devices of a stage, which wait for one another, do not end at one instant.
        profile = replace(profile, stage_forward_s=0.1, stage_backward_s=0.2, statistics_s=0.03)
        kinds = [random.choice(SHARDINGS) for _ in plan.stages]
        stages_of_plan = zip(plan.stages, kinds, strict=True)
        plan = replace(plan, stages=tuple(replace(s, sharding=k) for s, k in stages_of_plan))
    weights = SYNCHRONOUS
    if without_flush:
        versions = tuple(random.randint(1, 4) for _ in plan.stages)
        weights = WeightRule(random.randint(1, micro_batches), versions)
    concurrent = random.random() < 0.3
    schedule = random_order(random, plan.shape(), concurrent, weights, 0.0 if divided else 0.4)
    iterations = 1 if without_flush else random.choice([1, 1, 2, 3])
    cluster = some_stream(random, cluster)
    if not concurrent and not any(device.concurrent_passes for device in cluster.devices):
        cluster = replace(cluster, messages_in_order=random.random() < 0.5)
    return RandomPipeline(plan, profile, cluster, schedule, iterations)


def random_profile(random: Random, layers: int, *, ties: bool) -> ModelProfile:
    """Unequal layers, skip connections, tensors without rows, a tied parameter."""

    def seconds() -> Affine:
        return Affine(random.uniform(0.01, 0.5), random.uniform(0.1, 2))

    def size() -> Affine:
        return Affine(random.uniform(0, 2), random.uniform(1, 9))

    costs = tuple(
        LayerCost(
            f"layer{i}",
            seconds(),
            seconds(),
            seconds(),
            random.choice([0, 5, 30, 80]) * MEGABYTE,
            random.randrange(1000),
            size(),
            size(),
            norms=(norms := random.choice([0, 0, 3])),
            norm_channels=100 * norms,
        )
        for i in range(layers)
    )
    edges: list[Edge] = []
    for i in range(layers - 1):
        tensor = random.choice([size(), Affine(random.uniform(1, 9), 0.0)])
        gradient = random.choice([tensor, Affine()])
        consumers = {i + 1, random.randrange(i + 1, layers)}
        edges += [Edge(i, j, f"tensor{i}", tensor, gradient) for j in sorted(consumers)]
    # A tensor without gradients passes no time upwards: let every pair exchange one that does. All
    # of them have one name, which tells no tensors of different layers apart.
    edges += [Edge(i, i + 1, "also", size(), size()) for i in range(layers - 1)]
    shared: tuple[SharedParameter, ...] = ()
    if ties and random.random() < 0.5:
        users = tuple(sorted({random.randrange(layers), layers - 1}))
        shared = (SharedParameter("tied", 40 * MEGABYTE, users),)
    return ModelProfile("model", costs, tuple(edges), shared, step_s_per_byte=1e-9)


def random_cluster(random: Random, devices: int, slots: bool) -> Cluster:
    """Unequal devices of every kind on up to three hosts of every kind."""
    sizes = [0] * random.randint(1, min(3, devices))
    for _ in range(devices):
        sizes[random.randrange(len(sizes))] += 1
    overlaps = random.random() < 0.6
    rate = random.choice([1, MEGABYTE])
    hosts = [
        Host(
            f"host{i}",
            tuple(random_device(random, overlaps) for _ in range(size)),
            link_bytes_per_s=random.uniform(2, 40) * rate,
            port_bytes_per_s=random.uniform(2, 40) * rate,
            link_latency_s=random.uniform(0.001, 0.1),
            port_latency_s=random.uniform(0.001, 0.1),
            full_speed_devices=random.choice([0, 1, 2]) if slots else 0,
            half_duplex=random.random() < 0.4,
            separate_links=random.random() < 0.4,
        )
        for i, size in enumerate(sizes)
        if size
    ]
    return Cluster("cluster", tuple(hosts))


def some_stream(random: Random, cluster: Cluster) -> Cluster:
    """The same cluster; if no device communicates alone, some stream their messages.

    A message that ends may let one device compute and another start a message to it, both at once.
    """
    if not all(device.overlaps_communication for device in cluster.devices):
        return cluster
    return with_devices(
        cluster, lambda device: replace(device, concurrent_passes=random.random() < 0.6)
    )


def random_device(random: Random, overlaps: bool) -> Device:
    """A device of its own speed; some communicate alone, some read parameters from off the chip."""
    off_chip = random.random() < 0.3
    return Device(
        "device",
        1e12,
        random.uniform(0.5, 2),
        overlaps_communication=overlaps or random.random() < 0.3,
        on_chip_bytes=20e6 if off_chip else 0.0,
        off_chip_bytes_per_s=random.uniform(5e6, 2e8) if off_chip else 0.0,
        message_s=random.choice([0.0, 0.01]),
        message_bytes_per_s=random.choice([0.0, 1e8]),
    )


def random_plan(
    random: Random,
    profile: ModelProfile,
    devices: int,
    micro_batches: int,
    style: PlacementStyle,
    groups: int,
    rounds: int,
) -> Plan:
    """Any cuts, unequal slices that differ between the stages of one device group."""
    layers, stages = len(profile.layers), groups * rounds
    cuts = [0, *sorted(random.sample(range(1, layers), stages - 1)), layers]
    free = random.sample(range(devices), devices)
    size = random.randint(3, 6)
    held: list[tuple[int, ...]] = []
    for group in range(groups):
        replicas = random.randint(1, min(3, len(free) - (groups - group - 1)))
        held.append(tuple(free[:replicas]))
        free = free[replicas:]
    made: list[Stage] = []
    for stage, group in enumerate(placement_of_style(style, groups, rounds)):
        replicas = len(held[group])
        ends = [0, *sorted(random.sample(range(1, size), replicas - 1)), size]
        slices = tuple(ends[i + 1] - ends[i] for i in range(replicas))
        run = range(cuts[stage], cuts[stage + 1])
        made.append(Stage(run, held[group], slices, random.random() < 0.3))
    if style != "mirrored":
        return Plan(tuple(made), micro_batches, size, "1f1b")
    mirrored = next(name for name, family in FAMILIES.items() if family.placement == "mirrored")
    return Plan(tuple(made), micro_batches, size, mirrored)


def random_order(
    random: Random,
    shape: PipelineShape,
    concurrent: bool = False,
    weights: WeightRule = SYNCHRONOUS,
    split_share: float = 0.4,
) -> Schedule:
    """Any order that can be played: actions one after the other as their inputs allow.

    Some backwards are split; without a flush all of a stage or none.
    """
    halves = {
        (stage, m): random.random() < split_share
        for stage in range(shape.stages)
        for m in range(shape.micro_batches)
    }
    if weights.micro_batches_per_update:
        halves = {(stage, m): halves[stage, 0] for stage, m in halves}
    todo = [
        Action(kind, stage, m)
        for (stage, m), split in halves.items()
        for kind in (("F", "I", "W") if split else ("F", "B"))
    ]
    needed = {action: set(predecessors(action, shape)) & set(todo) for action in todo}
    orders: dict[int, list[Action]] = defaultdict(list)
    while needed:
        ready = [action for action, before in needed.items() if not before & needed.keys()]
        # Mostly the oldest work, so that orders look like schedules, not like noise.
        ready.sort(key=lambda a: (a.micro_batch - (a.kind != "F"), a.stage))
        action = ready[min(int(random.expovariate(0.7)), len(ready) - 1)]
        orders[shape.group_of(action.stage, action.micro_batch)].append(action)
        del needed[action]
    made = (with_recomputes(Order(orders[group]), shape) for group in range(shape.groups))
    return Schedule(tuple(made), concurrent, weights)
