"""Random planning problems, on which no constant was tuned, and their plans.

A problem is drawn from a seed and its number: a model of one of `MODELS`, a cluster of 2 to 32
devices and a batch. So every recording may have new ones, and anybody can draw the same again.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import exp, inf, log
from random import Random
from statistics import median
from time import process_time
from typing import Any

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.lower_bound import gap, lower_bound_s
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import TimeLimit, find_plan
from penstock.planners.problem import planning_problem
from penstock.planners.registry import STARTING_PLANNERS
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

BEHIND = 0.001
"""A share by which `search` may be slower before it counts as behind."""

NAMED = 3
"""Schedules under which `search` plans alone, beside that of its plan for all of them."""

PLANNER_LIMIT_S = 1.0
"""Seconds of CPU time that a published planner has, with all schedules that were drawn."""

HOSTS = ((1, 2), (1, 4), (2, 2), (3, 2), (1, 8), (2, 4), (4, 2), (2, 6), (2, 8), (4, 4), (8, 2))
MORE_HOSTS = ((16, 1), (3, 8), (4, 8))
"""Hosts, and devices of each."""

BATCHES = (8, 12, 16, 24, 32, 48, 60, 64, 96, 128)

Made = tuple[list[float], list[float], list[float], list[tuple[int, int]]]
"""For each layer its forward seconds, parameter bytes and output bytes a sample, relative to one
another; and the edges beside those of the chain."""


def transformer(draw: Random, layers: int) -> Made:
    """An embedding without work, equal blocks, and a head whose work is that of several."""
    head, table = draw.uniform(0.3, 4), draw.uniform(0.5, 6)
    seconds = [0.01, *[1.0] * (layers - 2), head]
    return seconds, [table, *[1.0] * (layers - 2), table], [1.0] * layers, []


def convolutions(draw: Random, layers: int) -> Made:
    """Images become smaller and channels more, in four levels of unequal layers."""
    level = [4 * i // layers for i in range(layers)]
    seconds = [draw.uniform(0.3, 1.7) for _ in range(layers)]
    parameters = [4.0**at * draw.uniform(0.5, 1.5) / 16 for at in level]
    return seconds, parameters, [2.0**-at * 4 for at in level], []


def u_net(draw: Random, layers: int) -> Made:
    """Down and up again, with an edge from each level to the one opposite."""
    depth = [min(i, layers - 1 - i) * 6 // layers for i in range(layers)]
    seconds = [draw.uniform(0.7, 1.3) * 1.2**-at for at in depth]
    skips = [(i, layers - 1 - i) for i in range(0, layers // 2 - 1, max(2, layers // 8))]
    return seconds, [2.0**at for at in depth], [2.0 ** (2 - at) for at in depth], skips


def mixture(draw: Random, layers: int) -> Made:
    """Blocks in turns: attention, and experts with most of the parameters."""
    experts, work = draw.uniform(4, 16), draw.uniform(0.7, 2.5)
    odd = [i % 2 for i in range(layers)]
    return (
        [work if at else 1.0 for at in odd],
        [experts if at else 1.0 for at in odd],
        [1.0] * layers,
        [],
    )


def blocks(draw: Random, layers: int) -> Made:
    """The same few unequal layers over and over."""
    period = draw.randint(2, 5)
    own = [[exp(draw.gauss(0, 0.8)) for _ in range(period)] for _ in range(3)]
    seconds, parameters, sizes = ([of[i % period] for i in range(layers)] for of in own)
    return seconds, parameters, sizes, []


def uneven(draw: Random, layers: int) -> Made:
    """Layers of which no two are equal."""
    seconds, parameters, sizes = (
        [exp(draw.gauss(0, spread)) for _ in range(layers)] for spread in (0.7, 1.2, 0.9)
    )
    return seconds, parameters, sizes, []


MODELS: dict[str, Callable[[Random, int], Made]] = {
    "transformer": transformer,
    "convolutions": convolutions,
    "u-net": u_net,
    "mixture": mixture,
    "blocks": blocks,
    "uneven": uneven,
}


def between(draw: Random, low: float, high: float) -> float:
    """A number whose logarithm is evenly distributed."""
    return exp(draw.uniform(log(low), log(high)))


def random_profile(draw: Random, kind: str) -> ModelProfile:
    """A model of a kind, with 6 to 40 layers and 1 to 100 ms of forward for a sample."""
    layers = draw.randint(6, 40)
    seconds, parameters, sizes, skips = MODELS[kind](draw, layers)
    second = between(draw, 1e-3, 0.1) / sum(seconds)
    held = between(draw, 1e8, 4e9) / sum(parameters)
    size = between(draw, 2e5, 2e7)
    fixed, inputs = draw.choice([0.0, 0.0, 0.2, 1.0]), draw.uniform(0.8, 1.2)
    saved, norms = draw.uniform(2, 12), draw.random() < 0.15
    made = [
        LayerCost(
            f"{kind} {i}",
            Affine(fixed * second * seconds[i], second * seconds[i]),
            Affine(fixed * second * seconds[i] * inputs, second * seconds[i] * inputs),
            Affine(0.0, second * seconds[i] * draw.uniform(0.8, 1.1)),
            parameter_bytes=int(held * parameters[i]),
            saved_bytes=Affine(0.0, saved * size * sizes[i]),
            workspace_bytes=Affine(0.0, size * sizes[i]),
            norms=int(norms and seconds[i] > 0.02 * second),
            norm_channels=64 * int(norms),
        )
        for i in range(layers)
    ]
    chain = [*pairwise(range(layers)), *skips]
    sent = [Affine(0.0, size * own) for own in sizes]
    edges = tuple(Edge(i, j, f"tensor {i}", sent[i], sent[i]) for i, j in chain)
    return ModelProfile(kind, tuple(made), edges, batch_size=8)


def random_cluster(draw: Random, profile: ModelProfile) -> Cluster:
    """Hosts with links that take 0.1 to 300 % of the time of a layer, and memory, tight or not."""
    count, width = draw.choice((*HOSTS, *MORE_HOSTS))
    layers, total = profile.layers, range(len(profile.layers))
    second = sum(layer.forward_s.at(1) for layer in layers) / len(layers)
    size = sum(edge.bytes.at(1) for edge in profile.edges) / len(profile.edges)
    inside = size / second / between(draw, 1e-3, 0.3)
    outside = inside / between(draw, 1, 10)
    state = 4 * profile.parameter_bytes(total) / (count * width)
    largest = max(4 * layer.parameter_bytes + 2 * layer.saved_bytes.at(1) for layer in layers)
    saved = sum(layer.saved_bytes.at(1) for layer in layers)
    memory = 1.1 * largest + state * between(draw, 1, 4) + saved
    memory *= draw.choice([1, 1, 4, 100])
    speeds = draw.choice([(1.0,), (1.0,), (1.0,), (1.0, 0.5), (1.0, 1.0, 0.7), (1.0, 2.3)])
    hosts = tuple(
        Host(
            f"host {h}",
            (Device("drawn", memory, draw.choice(speeds)),) * width,
            link_bytes_per_s=inside,
            port_bytes_per_s=outside,
            link_latency_s=1e-5,
            port_latency_s=3e-5,
        )
        for h in range(count)
    )
    if draw.random() < 0.15:
        hosts = tuple(replace(host, half_duplex=True) for host in hosts)
    if draw.random() < 0.15:
        hosts = tuple(replace(host, separate_links=True) for host in hosts)
    return Cluster(f"{count} x {width}", hosts)


def random_problem(seed: int, number: int) -> PlanningProblem:
    """Problem ``number`` of a seed, under all schedules that `search` looks over."""
    draw = Random(f"{seed}/{number}")
    profile = random_profile(draw, list(MODELS)[number % len(MODELS)])
    cluster, batch = random_cluster(draw, profile), draw.choice(BATCHES)
    return planning_problem(
        profile, cluster, batch, planner="search", memory_reserve=0.0, as_fast=0.0
    )


def random_row(seed: int, number: int) -> dict[str, Any]:
    """`search` on one problem, against every planner and against itself under single schedules.

    The published planners may use their own schedules and those under which `search` plans
    alone: that of its plan, and `NAMED` others that are drawn.
    """
    problem = random_problem(seed, number)
    score, start_s = make_score(problem), process_time()
    first = answer(problem, "search", score)
    row = {
        "number": number,
        "model": f"{problem.profile.name}, {len(problem.profile.layers)} layers",
        "cluster": problem.cluster.name,
        "batch": problem.global_batch,
        "search": first,
    }
    draw = Random(f"{seed}/{number}/schedules")
    drawn = draw.sample(problem.schedules, min(NAMED, len(problem.schedules)))
    names = tuple(dict.fromkeys([*([first["schedule"]] if first["schedule"] else []), *drawn]))
    alone = [answer(replace(problem, schedules=(name,)), "search", score) for name in names]
    limit = TimeLimit(PLANNER_LIMIT_S, process_time)
    own = dict.fromkeys((*PlanningProblem.schedules, "wavefront", *names))
    asked = replace(problem, schedules=tuple(own))
    planners = [answer(asked, name, score, limit) for name in STARTING_PLANNERS]
    bound_s = lower_bound_s(problem)
    return row | {
        "gap": gap(first["seconds"], bound_s) if first["seconds"] else None,
        "alone": dict(zip(names, alone, strict=True)),
        "planners": dict(zip(STARTING_PLANNERS, planners, strict=True)),
        "cpu_s": process_time() - start_s,
    }


def answer(
    problem: PlanningProblem,
    planner: str,
    score: Callable[[Plan], float],
    limit: TimeLimit | None = None,
) -> dict[str, Any]:
    """The answer of a planner; no seconds where nothing fits."""
    start_s = process_time()
    try:
        plan = find_plan(problem, planner, score, limit=limit)
    except Infeasible:
        return {"seconds": None, "schedule": "", "cpu_s": process_time() - start_s}
    cpu_s = process_time() - start_s
    return {"seconds": score(plan), "schedule": plan.schedule, "cpu_s": cpu_s}


def behind(row: dict[str, Any], others: str) -> tuple[float, str]:
    """By which share `search` is behind the best of the ``others``, and the name of that one."""
    name, best = min(row[others].items(), key=lambda one: one[1]["seconds"] or inf)
    if not best["seconds"]:
        return 0.0, ""
    return (row["search"]["seconds"] or inf) / best["seconds"] - 1, name


def random_words(row: dict[str, Any]) -> str:
    """A row in a line."""
    found = row["search"]
    where = f"{row['number']:2} {row['model']}, {row['cluster']}, batch {row['batch']}"
    if found["seconds"] is None:
        return f"{where:<50} no plan"
    words = (
        f"{where:<50} {1e3 * found['seconds']:9.2f} ms  {found['schedule']:<15} "
        f"{100 * row['gap']:6.1f} % above  {found['cpu_s']:5.1f} of {row['cpu_s']:5.1f} s CPU"
    )
    for others in ("planners", "alone"):
        share, name = behind(row, others)
        if share > BEHIND:
            own = row[others][name]["schedule"]
            words += f"  BEHIND {others} {100 * share:.2f} %: {name} under {own}"
    return words


def random_table(rows: list[dict[str, Any]]) -> list[str]:
    """A summary of the rows, and a line for each on which `search` is behind."""
    solved = [row for row in rows if row["search"]["seconds"]]
    gaps = [row["gap"] for row in solved]
    spent = [row["search"]["cpu_s"] for row in rows]
    planners, alone = (
        sum(behind(row, others)[0] > BEHIND for row in rows) for others in ("planners", "alone")
    )
    return [
        "| problems | with a plan | behind a planner | behind itself under one schedule "
        "| gap, median and most | CPU seconds of `search`, median and most |",
        "|---|---|---|---|---|---|",
        f"| {len(rows)} | {len(solved)} | {planners} | {alone} "
        f"| {100 * median(gaps):.1f} %, {100 * max(gaps):.0f} % "
        f"| {median(spent):.1f}, {max(spent):.1f} |",
        *(f"- {random_words(row)}" for row in rows if "BEHIND" in random_words(row)),
    ]
