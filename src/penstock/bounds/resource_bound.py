"""A bound that holds for every plan and every order: stages share devices, backwards are split.

*The relaxation.* A plan is a chain of visits (`visits`) through the layers. Two sets of devices
have no device in common. A set is counted at its first visit; later visits to it count no further
devices. Every visit must fit within a time ``T`` by itself (`visit_terms`). What all visits use
must fit on the devices that were counted.

*Prices.* On a set of ``r`` devices each of three values is at most ``r T``:

- seconds of compute, with those of waiting for the first work and for the last all-reduce;
- seconds of the links, as the mean of both directions;
- seconds of all-reduce, times ``T / (T - F)``: no gradient is complete before all forwards are
  done, at ``F`` at the earliest.

So is every weighted mean of the three. The weights are chosen for each number of replicas. Under
any weights the cheapest chain costs no more than any plan, so ``T`` is too short if that is more
than the devices have. Bad weights only make the bound weaker. A few steps learn them from the
cheapest chains (fictitious play, Brown 1951).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from penstock.bounds.links import link_limits
from penstock.bounds.resource_kernel import ChainPrices, Reached, cheapest
from penstock.bounds.shortened_chain import ShortenedChain, shortened
from penstock.bounds.visit_terms import ROUNDING, Visits, idle_s, least_speed, visits_of
from penstock.bounds.visits import (
    Setting,
    full_speeds,
    has_whole_backwards,
    may_be_mirrored,
)
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats

__all__ = ["PRECISION", "Answer", "chains_of", "resource_bound"]

PRECISION = 2e-3
MOST_STEPS, FEWEST_STEPS = 20, 2
MOST_CELLS = 5e7
"""Steps in which prices are learnt; fewer where the steps would pass more cells than this."""
HOPELESS_STEPS, HOPELESS = 7, 0.4
"""Learning ends where after so many steps such a share of the devices' time is unused."""

SHARES = (0.0, 0.003, 0.02, 0.05, 0.1, 0.2)
"""The layers of least work, up to each of these shares of all work, are left out. Each share gives
a bound, and the largest counts."""

CHAINS = 2
MOST_LAYERS = 96
"""This many chains are tried: the longest ones with no more layers than that."""

MOST_DEVICES = 256
"""On more devices there are too many states: then only the floor of each size counts."""

MOST_GROWTH, ANY_TIME_S = 1e9, 1e100
"""If no chain fits within this many times the floor, it is checked whether any time is enough."""


@dataclass(frozen=True)
class Answer:
    """The bound, and the relaxed plan nearest to it: its micro-batch size, and what it uses."""

    seconds: float
    micro_batch_size: int
    argument: str = ""


def alone_at(visits: Visits, time_s: float) -> Floats:
    """`ChainVisits.alone_s`; infinite for a revisit that fits beside no other run."""
    alone_s = visits.steps.alone_s.copy()
    run = np.triu(np.ones(alone_s.shape[1:], dtype=bool), 1)
    for kind, device_s in enumerate(visits.device_s):
        possible = run & (alone_s[kind] <= time_s)
        if device_s is not None and possible.any():
            least_s = device_s[:, possible].min(axis=1)
            together_s = (device_s + least_s[:, None, None]).max(axis=0)
            alone_s[kind] = np.where(together_s <= time_s, alone_s[kind], inf)
    return alone_s


class Prices:
    """The weights of the three resources for every number of replicas, and how they are learnt."""

    def __init__(self, visits: Visits) -> None:
        self.visits = visits
        self.replicas = np.array([kind.replicas.fewest for kind in visits.kinds])
        self.weights = np.zeros((len(visits.kinds), 3))
        self.weights[:, 0] = 1.0
        self.seen = np.zeros(len(visits.kinds))
        self.kept_s, self.argument = inf, ""
        # Sets of devices that are charged as fewer than they are may be all devices together; in a
        # mirrored pipeline those of the other direction may hold layers that were left out here.
        grouped = any(kind.replicas.most > kind.replicas.fewest for kind in visits.kinds)
        all_sums = visits.setting.speed_sums
        uncounted = grouped or mirrored(visits)
        self.speeds = np.full_like(all_sums, all_sums[-1]) if uncounted else all_sums
        self.idle_s = np.array([idle_s(visits.setting, kind) for kind in visits.kinds])
        cells = visits.uses.compute.size * visits.setting.devices / 2
        self.steps = int(min(MOST_STEPS, max(FEWEST_STEPS, MOST_CELLS / cells)))

    def keep_within(self, time_s: float) -> bool:
        """Whether some chain may fit within ``time_s``, as far as the prices tried show."""
        visits, setting = self.visits, self.visits.setting
        steps = visits.steps._replace(alone_s=alone_at(visits, time_s))
        bar_s = time_s * (1 + ROUNDING)
        for step in range(self.steps):
            prices = self.present(time_s)
            reached = cheapest(steps, visits.uses, prices, setting.devices, bar_s)
            over = reached.price[-1].min(axis=1) - self.speeds * bar_s
            taken = int(over.argmin())
            if over[taken] > 0:
                return False
            self.learn(reached, taken, time_s)
            if step >= HOPELESS_STEPS and over[taken] < -HOPELESS * self.capacity(time_s):
                break
        return True

    def after_forwards(self, time_s: float) -> float:
        """The price of a second of all-reduce: all of them come after the last forward."""
        left_s = time_s - self.visits.setting.all_forwards_s
        return min(time_s / left_s, 1e6) if left_s > 0 else 1e6

    def present(self, time_s: float) -> ChainPrices:
        """The prices by the present weights."""
        compute, links, reduced = self.weights.T.copy()
        first = np.array([not kind.revisit for kind in self.visits.kinds])
        second = least_speed(self.visits.setting) * self.replicas * compute * first
        return ChainPrices(
            compute,
            links,
            reduced * self.after_forwards(time_s),
            0.0 * second if mirrored(self.visits) else second,
            second[:, None] * self.idle_s,
        )

    def learn(self, reached: Reached, taken: int, time_s: float) -> None:
        """Raise, for each number of replicas in the chain, the price of what it uses most."""
        layers, used = reached.price.shape[0] - 1, int(reached.price[-1, taken].argmin())
        loads: dict[int, Floats] = {}
        visits = 0
        while layers:
            kind, first, before, used_before = reached.origin[layers, taken, used].tolist()
            load = np.array([table[kind, first, layers] for table in self.visits.uses])
            load[2] *= self.after_forwards(time_s)
            number = int(self.replicas[kind])
            loads[number] = loads.get(number, np.zeros(3)) + load
            layers, taken, used, visits = first, before, used_before, visits + 1
        for number, load in loads.items():
            same = self.replicas == number
            self.seen[same] += 1
            share = 1 / (1 + self.seen[same][0])
            most = np.eye(3)[int(load.argmax())]
            self.weights[same] = (1 - share) * self.weights[same] + share * most
        if time_s < self.kept_s:
            self.kept_s, counts = time_s, sorted(loads)
            self.argument = chain_words(
                visits, counts, np.sum(list(loads.values()), axis=0), self.capacity(time_s)
            )

    def capacity(self, time_s: float) -> float:
        """Seconds of a device of speed 1 that all devices have within a time."""
        return float(self.visits.setting.speed_sums[-1]) * time_s


def chain_words(visits: int, counts: Sequence[int], load: Floats, capacity: float) -> str:
    """What the cheapest chain of visits uses of all devices.

    >>> chain_words(3, [1, 2], np.array([3.0, 2.0, 0.0]), 4.0)
    '3 visits of 1 to 2 devices take 75 % of the devices for compute, 50 % for links'
    """
    part = 100 / capacity if capacity > 0 else 0.0
    compute, links, _ = (round(part * seconds) for seconds in load.tolist())
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    many = "visits" if visits > 1 else "visit"
    device = "device" if counts[-1] == 1 else "devices"
    return (
        f"{visits} {many} of {number} {device} take {compute} % of the devices for compute, "
        f"{links} % for links"
    )


def mirrored(visits: Visits) -> bool:
    """Whether the visits are those of a mirrored pipeline."""
    return any(kind.copies > 1 for kind in visits.kinds)


@dataclass(frozen=True)
class RelaxedChain:
    """A chain in one direction or both. Its prices are made when they are first needed.

    Where one chain shows that a time is too short, those of the others are not needed.
    """

    setting: Setting
    mirrored: bool

    @cached_property
    def prices(self) -> Prices:
        """The prices, with all visits."""
        return Prices(visits_of(self.setting, mirrored=self.mirrored))


def resource_bound(problem: PlanningProblem, floors_s: dict[int, float]) -> Answer:
    """Seconds that no plan of ``problem`` beats in any order.

    ``floors_s`` are bounds known for each micro-batch size. Sizes whose floor is above the least
    found are left out. The answer is infinite where no plan fits in memory.
    """
    directions = (False, True) if may_be_mirrored(problem) else (False,)
    limits, best = link_limits(problem.cluster), Answer(inf, 0)
    speeds = tuple(full_speeds(problem.cluster))
    for size in sorted(floors_s, key=floors_s.__getitem__):
        if floors_s[size] >= best.seconds:
            break
        chains = chains_of(problem, size) if len(problem.cluster.devices) <= MOST_DEVICES else []
        relaxed = [
            RelaxedChain(Setting(problem, chain, limits, speeds, size), mirrored)
            for mirrored in directions
            for chain in chains
        ]
        found_s = floors_s[size]
        if chains:
            found_s = least_kept(relaxed, len(chains), found_s, best.seconds)
        if found_s < best.seconds:
            nearest = min(relaxed, key=lambda one: one.prices.kept_s, default=None)
            best = Answer(found_s, size, nearest.prices.argument if nearest else "")
    return best


def chains_of(problem: PlanningProblem, rows: int) -> list[ShortenedChain]:
    """The chains that are tried: a few of the longest that are not too long."""
    whole = has_whole_backwards(problem)
    tried = (shortened(problem.profile, share, rows, whole=whole) for share in SHARES)
    every = {len(chain.layers): chain for chain in tried}
    short = [length for length in sorted(every, reverse=True) if length <= MOST_LAYERS]
    return [every[length] for length in short[:CHAINS]]


def least_kept(relaxed: list[RelaxedChain], chains: int, floor_s: float, most_s: float) -> float:
    """The least time within which all chains of some direction fit, rounded down.

    At most ``most_s``.
    """

    def kept(time_s: float) -> bool:
        return any(
            all(one.prices.keep_within(time_s) for one in relaxed[first : first + chains])
            for first in range(0, len(relaxed), chains)
        )

    least_s, enough_s, step = floor_s, most_s, 1 + 4 * PRECISION
    if most_s < inf and not kept(most_s):
        return most_s
    if kept(least_s):
        return least_s
    while enough_s == inf:
        if kept(least_s * step):
            enough_s = least_s * step
            break
        least_s, step = least_s * step, step * step
        if step > MOST_GROWTH:
            return least_s if kept(ANY_TIME_S) else inf
    while enough_s > least_s * (1 + PRECISION):
        middle_s = (least_s * enough_s) ** 0.5
        if kept(middle_s):
            enough_s = middle_s
        else:
            least_s = middle_s
    return least_s
