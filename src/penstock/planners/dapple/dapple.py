"""DAPPLE's planner: a search over layers planned and devices occupied, by a closed form."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf

from penstock.core.native import DappleQuestion, dapple_plan
from penstock.costs.fit import Assignment, fitted_plans
from penstock.costs.run_tables import prefix_sums
from penstock.costs.stage_costs import depth_function
from penstock.costs.tables import (
    FULL,
    RECOMPUTE_MODES,
    RECOMPUTES,
    ChainCosts,
)
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.choice import Candidate, best_candidate
from penstock.planners.coarse_chain import likely_cuts
from penstock.planners.dapple.groups import (
    Groups,
    network_of_steps,
    search_steps_of,
)
from penstock.planners.dapple.placement import occupancies

SLACK = 1.05
"""Plans whose closed form is more than this many times the best so far are left out."""

MOST_STAGES = 64
"""Deeper pipelines are not tried; on more than 64 devices none of more than 24 stages."""

THREADS = 2
"""Micro-batch sizes that are searched at the same time."""

MOST_LAYERS = 400
"""Longer chains are cut at likely places only."""


def dapple(problem: PlanningProblem, score: Score) -> Plan:
    """The best plan of DAPPLE's search (PPoPP 2021).

    A state is how many layers are planned, and which devices their stages occupy. The other layers
    are provisionally one last stage on all devices left. From every state, the next stage takes any
    number of layers and devices. Three policies choose the devices: Fresh First, Append First,
    Scatter First. Each plan is judged by `penstock.core.native.dapple_latency_s`, and the best
    plan that leads to a state is kept. The search starts from pure data parallelism. Plans that
    cannot be below the best so far, or do not fit at the schedule's depth, are left out.

        T(j, g)  = least L of   stages of layers 0..j on devices g  |  layers j..N on the others
        T(j', g + g') = min over (j, g) and g' of L(best prefix of (j, g), j..j' on g', the rest)

    Equal servers are interchangeable, so ``g`` counts devices of each server. There is one search
    for every micro-batch size, with the depths of the first schedule allowed. '1f1b' is the paper's
    P_A and 'early-backward' its P_B; another schedule is used only where neither is allowed. For
    every size, ``score`` judges the best plan and the best of two stages, if they are within a
    twentieth of the least closed form of all sizes. It also judges data parallelism. So the closed
    form decides the search, and the score decides between a few plans, P_A and P_B.

    Departures from the paper:

    - Where a micro-batch has fewer rows than devices are left, the last stage takes only as many
      devices as there are rows.
    - Where speeds differ, there is also a search without the slowest devices.
    - In the closed form the pivot waits for less, `min(S - Q, M) - 1` forwards where the authors'
      slides have `S - Q`. These are P_B's depths, with transfers as stages. Memory is that of P_A
      where one of the two is allowed.
    - On more than 16 devices not all numbers of replicas are tried (`occupancies`).
    - Chains of more than `MOST_LAYERS` layers are cut at likely places only.
    """
    return best_candidate(problem, dapple_candidates(problem), score, planner="dapple")


def dapple_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """The best plans of all micro-batch sizes, each with every schedule in which it fits."""
    # P_A and P_B as far as they are allowed, else the first schedule that is.
    allowed = [name for name in ("1f1b", "early-backward") if name in problem.schedules]
    allowed = allowed or [problem.schedules[0]]
    leanest = "1f1b" if "early-backward" in allowed else allowed[0]
    chain = ChainCosts(problem, likely_cuts(problem, MOST_LAYERS))
    found: list[Found] = []
    for speed in sorted({device.speed for device in problem.cluster.devices}):
        groups = Groups(problem.cluster, occupancies(problem.cluster, speed))
        searches = [Search(chain, groups, size, leanest) for size in problem.micro_batch_sizes]
        found += searched(searches, min((each.seconds for each in found), default=inf))
    least_s = min((each.seconds for each in found), default=inf)
    for each in dict.fromkeys(found):
        if each.seconds <= SLACK * least_s or len(each.stages) == 1:
            for schedule in allowed:
                for plan in fitted_plans(problem, each.stages, schedule):
                    yield Candidate(plan, each.seconds)


def searched(searches: Sequence["Search"], least_s: float) -> list["Found"]:
    """The results of the searches for all micro-batch sizes.

    The first searches are for at most two stages: they are quick, and show which sizes are
    promising. The full searches begin with the promising sizes, so the others end early.
    """
    found = [each for search in searches for each in search.one_stage()]
    with ThreadPoolExecutor(THREADS) as threads:
        shallow = list(threads.map(Search.pipeline, searches, repeat(inf), repeat(2)))
        found += chain.from_iterable(shallow)
        least_s = min([least_s, *(each.seconds for each in found)])
        quick = [min((each.seconds for each in plans), default=inf) for plans in shallow]
        order = sorted(range(len(searches)), key=quick.__getitem__)
        for first in range(0, len(order), THREADS):
            some = [searches[number] for number in order[first : first + THREADS]]
            for deep in threads.map(Search.pipeline, some, repeat(SLACK * least_s)):
                least_s = min([least_s, *(each.seconds for each in deep)])
                found += deep
    return found


@dataclass(frozen=True)
class Found:
    """Stages with the layers and devices that a search chose, and their closed form."""

    stages: tuple[Assignment, ...]
    seconds: float


@dataclass
class Search:
    """One search: a micro-batch size, a set of devices, the depths of a schedule.

    ``depths[k]`` are the micro-batches in flight of a stage with ``k`` stages from itself to the
    end. ``least_s`` are sums up to each cut of the least seconds of a row in each layer.
    """

    chain: ChainCosts
    groups: Groups
    size: int
    schedule: str

    def __post_init__(self) -> None:
        chain, groups, size = self.chain, self.groups, self.size
        problem, depth = chain.problem, depth_function(self.schedule)
        devices = sum(len(server) for server in groups.places.servers)
        most = min(devices, chain.layers, MOST_STAGES if devices <= 64 else 24)
        self.most_stages = min(most, problem.max_stages or most)
        self.micro_batches = problem.global_batch // size
        self.depths = [0, *(depth(k, self.micro_batches) for k in range(1, self.most_stages + 1))]
        self.recompute = RECOMPUTE_MODES[problem.recompute]
        self.steps, self.occupancies = search_steps_of(groups, size)
        slices = [groups.slices(own, size) for own in groups.devices]
        self.costs = chain.costs(groups.devices, slices)
        self.network = network_of_steps(chain, groups, size)
        largest = max(problem.micro_batch_sizes)
        work = (layer.work_s for layer in problem.profile.layers)
        # Any slice of a stage costs at least so much for each of its rows.
        least = (max(0.0, min(w.at(1), w.at(largest) / largest)) for w in work)
        self.least_s = prefix_sums(least)[list(chain.cuts)]

    def one_stage(self) -> list[Found]:
        """Data parallelism."""
        costs, group, depth = self.costs, self.occupancies[0].rest_group, self.depths[1]
        place = (group, 0, self.chain.layers)
        does = costs.fit(*place, depth, self.recompute)
        if does == FULL:
            return []
        forward, backward = costs.forward_s(*place), costs.backward_s(*place)
        if does == RECOMPUTES and depth > 1:
            backward += forward
        seconds = self.micro_batches * (forward + backward) + costs.after_s(*place)
        return [Found(self.stages(()), seconds)]

    def pipeline(self, limit_s: float, most_stages: int = MOST_STAGES) -> list[Found]:
        """The best plan of several stages, if one has a closed form below ``limit_s``."""
        most_stages = min(most_stages, self.most_stages)
        if most_stages < 2:
            return []
        question = DappleQuestion(
            self.micro_batches,
            self.size,
            self.recompute,
            most_stages,
            self.depths,
            self.least_s,
            self.steps,
            self.occupancies,
        )
        seconds, taken = dapple_plan(self.costs, self.network, question, limit_s)
        return [Found(self.stages(taken), seconds)] if taken else []

    def stages(self, taken: Sequence[Sequence[int]]) -> tuple[Assignment, ...]:
        """The stages of steps on real devices, and the last stage."""
        stages: list[Assignment] = []
        end = occupancy = 0
        places = self.groups.places
        # States renumber equal servers. These are the real devices by their number in a state:
        real = {d: d for server in places.servers for d in server}

        def add(lo: int, hi: int, devices: tuple[int, ...]) -> None:
            slices = self.groups.slices(devices, self.size)
            stages.append((self.chain.layers_of(lo, hi), tuple(real[d] for d in devices), slices))

        for lo, end, number in taken:
            add(lo, end, self.groups.receivers[number])
            step = places.steps[number]
            real, occupancy = renumbered_devices(real, places.servers, step.servers), step.target
        add(end, self.chain.layers, self.groups.rest(occupancy, self.size))
        return tuple(stages)


def renumbered_devices(
    real: dict[int, int], servers: tuple[tuple[int, ...], ...], order: tuple[int, ...]
) -> dict[int, int]:
    """The real devices after server ``i`` represents what server ``order[i]`` represented."""
    return {
        new: real[old]
        for place, server in enumerate(order)
        for new, old in zip(servers[place], servers[server], strict=True)
    }
