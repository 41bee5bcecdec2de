"""Plans that nearly meet the bound: balanced chains on equal devices, and one resource that binds.

What the bound gives away must not be more than what such plans lose, so a term that is too large by
a little shows here first.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from penstock.cluster.cluster import Cluster, Device, Host, with_devices
from penstock.costs.schedule_costs import with_costs
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, RecomputeChoice
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PlacementStyle, placement_of_style
from penstock.simulate.simulation import simulate_plan

SCHEDULES = {
    "1f1b": 1,
    "gpipe": 1,
    "early-backward": 1,
    "zb-h2": 1,
    "zero-bubble": 1,
    "list": 2,
    "interleaved": 2,
    "breadth-first": 3,
    "hanayo": 2,
    "zb-v": 2,
    "v-min": 2,
    "chimera": 1,
    "dualpipe": 1,
    "dualpipe-v": 2,
}
"""Families with the rounds in which their groups of devices are visited."""

ROOMY = 1e12


@dataclass(frozen=True)
class NearTight:
    """A plan, and the question that it answers."""

    problem: PlanningProblem
    plan: Plan


def near_tight(random: Random) -> NearTight:
    """A plan that loses little, on devices with just its memory in half of the cases."""
    schedule = random.choice(list(SCHEDULES))
    rounds, groups = SCHEDULES[schedule], random.choice([1, 2, 2, 3, 4])
    if FAMILIES[schedule].placement == "mirrored":
        groups = random.choice([2, 4])
    replicas = [random.choice([1, 1, 1, 2, 3])] * groups
    if random.random() < 0.2:
        replicas = [random.choice([1, 2, 3]) for _ in range(groups)]
    size = random.choice([1, 2, 3, 4, 6]) * max(replicas)
    micro_batches = random.choice([1, 2, 4, 8, 16])
    profile = balanced(random, groups * rounds, size)
    cluster = equal_devices(random, sum(replicas))
    recompute: RecomputeChoice = random.choice(["auto", "auto", "on", "off"])
    plan = plan_on(random, profile, schedule, replicas, size, micro_batches, recompute)
    problem = PlanningProblem(
        profile,
        cluster,
        size * micro_batches,
        (size,),
        recompute=recompute,
        schedules=(schedule,) if random.random() < 0.7 else ("chimera", schedule),
    )
    plan = with_costs(problem, plan)
    if random.random() < 0.5:
        # Some families refuse plans that recompute: those are refused again when they are played.
        with suppress(PenstockError):
            problem = with_memory(problem, max(1.0, *simulate_peaks(problem, plan)))
    return NearTight(problem, plan)


def simulate_peaks(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """The most bytes of each device."""
    return simulate_plan(plan, problem.profile, problem.cluster).peak_memory_bytes


def with_memory(problem: PlanningProblem, memory_bytes: float) -> PlanningProblem:
    """The question for devices of so much memory."""
    cluster = with_devices(problem.cluster, lambda d: replace(d, memory_bytes=memory_bytes))
    return replace(problem, cluster=cluster)


def balanced(random: Random, stages: int, size: int) -> ModelProfile:
    """One to three equal layers a stage; messages and gradients that are nothing, some, or much."""
    layers = stages * random.choice([1, 1, 2, 3])
    fixed = random.choice([0.0, 0.0, 1.0])
    costs = [
        Affine(fixed * size * part, part) for part in random.choices([0.5, 1.0, 1.0, 2.0], k=3)
    ]
    uneven = random.choice([0.0, 0.0, 0.02])
    saved = random.choice([0.0, 1.0, 1.0])
    parameter_bytes = random.choice([0, 0, 3, 30])
    made: list[LayerCost] = []
    for i in range(layers):
        more = 1 + uneven * random.random()
        forward, inputs, weights = (cost.scaled(more) for cost in costs)
        spread = random.choice([1.0, 1.0, 3.0])
        made.append(
            LayerCost(
                f"layer{i}",
                forward,
                inputs,
                weights,
                parameter_bytes * 10**6,
                saved_bytes=Affine(0.0, saved * 1e6 * spread),
            )
        )
    message = Affine(0.0, random.choice([0.0, 0.0, 0.1, 1.0, 4.0]))
    edges = tuple(Edge(i, i + 1, f"tensor{i}", message, message) for i in range(layers - 1))
    return ModelProfile("balanced", tuple(made), edges, step_s_per_byte=random.choice([0.0, 1e-8]))


def equal_devices(random: Random, count: int) -> Cluster:
    """Equal devices, each on a host of its own or all on one, with links of one byte a second.

    In some cases links are free, or those inside of a host.
    """
    rate = random.choice([1.0, 1.0, 1e6, 1e15])
    latency_s = random.choice([0.0, 0.0, 0.1])
    if random.random() < 0.5:
        host = Host("host", (Device("device", ROOMY),) * count, rate, 0.0, latency_s)
        return Cluster("one host", (host,))
    hosts = tuple(
        Host(f"host{i}", (Device("device", ROOMY),), rate, rate, latency_s, latency_s)
        for i in range(count)
    )
    return Cluster("hosts", hosts)


def plan_on(
    random: Random,
    profile: ModelProfile,
    schedule: str,
    replicas: list[int],
    size: int,
    micro_batches: int,
    recompute: RecomputeChoice,
) -> Plan:
    """Equal runs of layers; slices that are equal, or differ from stage to stage."""
    groups, rounds = len(replicas), SCHEDULES[schedule]
    style: PlacementStyle = FAMILIES[schedule].placement
    if schedule == "list":
        style = "looped" if random.random() < 0.5 else "folded"
    placement = placement_of_style(style, groups, rounds)
    each = len(profile.layers) // len(placement)
    starts = [sum(replicas[:group]) for group in range(groups)]
    stages: list[Stage] = []
    for index, group in enumerate(placement):
        devices = tuple(range(starts[group], starts[group] + replicas[group]))
        again = recompute == "on" or (recompute == "auto" and random.random() < 0.2)
        slices = slices_of(random, size, len(devices))
        stages.append(Stage(range(index * each, (index + 1) * each), devices, slices, again))
    return Plan(tuple(stages), micro_batches, size, schedule)


def slices_of(random: Random, size: int, replicas: int) -> tuple[int, ...]:
    """Rows that are as equal as they can be, in any order; in some cases not."""
    rows = [size // replicas + (i < size % replicas) for i in range(replicas)]
    if random.random() < 0.2 and replicas > 1 and rows[0] > 1:
        rows[0], rows[-1] = rows[0] - 1, rows[-1] + 1
    random.shuffle(rows)
    return tuple(rows)
