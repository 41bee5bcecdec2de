"""What SPP gains over its baselines as the links between devices grow uneven.

    python benchmarks/planning/uneven_links.py [--seeds 3] [--quick]

Every cluster has one device to a vertex of a complete graph. Its links have rates of their own,
drawn log-uniformly between ``FASTEST / spread`` and ``FASTEST``, the same in both directions. For
each spread the table gives the median and the largest gain of SPP's plan (iteration of the baseline
over that of SPP, minus 1) over all profiles, device counts and seeds; the last column compares
with the best of the other planners on each problem, naive order left out. Deterministic.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.dapple.dapple import dapple
from penstock.planners.data_parallel import data_parallel
from penstock.planners.gpipe import gpipe
from penstock.planners.pipedream.pipedream import pipedream
from penstock.planners.spp.spp import spp, spp_on_order
from penstock.planning.planning_problem import planning_problem
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

SPREADS = (1, 3, 10, 30, 100, 1000)
DEVICES = (8, 16)
FASTEST_BYTES_PER_S = 12.5e9
LATENCY_S = 20e-6
BATCHES = {"bert-48": 64, "gnmt-16": 1024, "vgg-19": 2048}
PUBLISHED_GAIN = 1.57
BEST = "the best of them"


def uneven_cluster(devices: int, spread: float, seed: int) -> Cluster:
    """A complete graph of equal devices with unequal links."""
    draw = random.Random(f"{devices} {spread} {seed}")
    links: list[Link] = []
    for i in range(devices):
        for j in range(i):
            rate = FASTEST_BYTES_PER_S * spread ** -draw.random()
            links += [Link(i, j, rate, LATENCY_S), Link(j, i, rate, LATENCY_S)]
    host = Host("graph", (Device("V100-16GB", 16e9),) * devices, FASTEST_BYTES_PER_S)
    return Cluster(f"uneven-{spread}", (host,), tuple(links))


def naive_spp(problem: PlanningProblem, score: Score) -> Plan:
    """SPP's partition on the devices in the order of their numbers."""
    return spp_on_order(problem, score, tuple(range(len(problem.cluster.devices))))


BASELINES: dict[str, Callable[[PlanningProblem, Score], Plan]] = {
    "data-parallel": data_parallel,
    "gpipe": gpipe,
    "pipedream": pipedream,
    "dapple": dapple,
    "naive order": naive_spp,
}


def gains(model: str, devices: int, spread: float, seed: int) -> dict[str, float]:
    """The gain of SPP over every baseline that has a plan."""
    profile, cluster = find_profile(model), uneven_cluster(devices, spread, seed)
    problem = planning_problem(profile, cluster, BATCHES[model], memory_reserve=0.0, as_fast=0.0)
    score = make_score(problem)
    ours_s = score(spp(problem, score))
    found: dict[str, float] = {}
    for name, planner in BASELINES.items():
        try:
            found[name] = score(planner(problem, score)) / ours_s - 1
        except Infeasible:
            continue
    found[BEST] = min(gain for name, gain in found.items() if name != "naive order")
    return found


def main() -> None:
    """Print one row for each spread and baseline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, eight devices")
    arguments = parser.parse_args()
    seeds, counts = (1, DEVICES[:1]) if arguments.quick else (arguments.seeds, DEVICES)
    say = partial(print, flush=True)
    columns = (*BASELINES, BEST)
    say("| spread of links | " + " | ".join(f"over {name}" for name in columns) + " |")
    say("|---" * (len(columns) + 1) + "|")
    most: dict[str, float] = defaultdict(lambda: -1.0)
    for spread in SPREADS:
        rows: dict[str, list[float]] = defaultdict(list)
        for model in BATCHES:
            for devices in counts:
                for seed in range(seeds):
                    for name, gain in gains(model, devices, spread, seed).items():
                        rows[name].append(gain)
                        most[name] = max(most[name], gain)
        cells = [
            f"{median(rows[name]):+.0%}, up to {max(rows[name]):+.0%}" if rows[name] else "no plan"
            for name in columns
        ]
        say(f"| x{spread} | " + " | ".join(cells) + " |")
    reached = [f"{name} {gain:.0%}" for name, gain in most.items() if gain >= PUBLISHED_GAIN]
    short = [f"{name} {gain:.0%}" for name, gain in most.items() if gain < PUBLISHED_GAIN]
    say(f"\nThe published gain is up to {PUBLISHED_GAIN:.0%}.")
    say(f"Reached over: {', '.join(reached) or 'none'}. Not reached over: {', '.join(short)}.")


if __name__ == "__main__":
    main()
