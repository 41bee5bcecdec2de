"""The cheapest chain of visits, compiled: the one loop of the bound that holds for every order."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.borrowed import borrowed
from penstock.kernels import compiled

__all__ = ["NOWHERE", "ChainVisits", "Reached", "cheapest"]

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

NOWHERE = -1


class ChainVisits(NamedTuple):
    """Every visit that a chain may make; arrays over (way, first layer, cut after the last).

    A *way* is a number of replicas together with what else is assumed of a visit. ``devices``
    are those that it takes; ``seats`` those that must have been taken before it. A ``once`` way is
    used at most once in a chain; a ``single`` way is on one device, which waits for all rows.

    ``alone_s`` must fit from the start; ``own_s``, ``links_s``, ``mean_s`` after the first row is
    there, after the devices before have it ready, and after the mean row is there. ``thin_s`` and
    ``row_s`` are the forward of the row that is through first, and of the mean row; ``thin_hop_s``
    and ``hop_s`` (way, first layer) the messages before. ``price`` is what a visit uses, ``wait``
    (way) the price of a second that its devices wait for their first work.
    """

    devices: Whole
    seats: Whole
    once: Whole
    single: Whole
    alone_s: Floats
    own_s: Floats
    links_s: Floats
    mean_s: Floats
    thin_s: Floats
    row_s: Floats
    thin_hop_s: Floats
    hop_s: Floats
    price: Floats
    wait: Floats


class Reached(NamedTuple):
    """For each state (layers done, devices taken, once used): least price, and how it came about.

    ``came`` holds the way, the first layer, the devices taken before, and whether once was used.
    """

    price: Floats
    came: Whole


def cheapest(steps: ChainVisits, devices: int, time_s: float) -> Reached:
    """The least price of each state, over all chains whose visits each fit within ``time_s``.

    A state keeps the least of each value apart: when the first and the mean row get there, and
    the price.
    """
    cuts = steps.own_s.shape[1]
    price, thin_s, mean_s = np.full((3, cuts, devices + 1, 2), np.inf)
    price[0, 0, 0] = thin_s[0, 0, 0] = mean_s[0, 0, 0] = 0.0
    came = np.full((cuts, devices + 1, 2, 4), NOWHERE)
    limits = ChainLimits(len(steps.devices), cuts, devices, 1 + int(steps.once.any()), time_s)
    compiled(fill)(steps, limits, States(price, thin_s, mean_s, came))
    return Reached(price, came)


class ChainLimits(NamedTuple):
    """How many ways, cuts and devices there are; the time that every visit must fit within.

    ``used`` is 2 where a way is used at most once, else 1: whether it was used plays no part.
    """

    ways: int
    cuts: int
    devices: int
    used: int
    time_s: float


class States(NamedTuple):
    """`Reached`, and the least seconds after which the first and the mean row get there."""

    price: Floats
    thin_s: Floats
    mean_s: Floats
    came: Whole


def fill(steps: ChainVisits, limits: ChainLimits, states: States) -> None:
    """Fill the states, cut by cut."""
    extend(borrowed(steps), limits, borrowed(states))


def extend(steps, limits, states):
    """`fill`, on addresses."""
    cuts, places = limits.cuts, 2 * (limits.devices + 1)
    for hi in range(1, cuts):
        for way in range(limits.ways):
            for lo in range(hi):
                visit = (way * cuts + lo) * cuts + hi
                if steps.alone_s[visit] <= limits.time_s:
                    for used in range(limits.used - steps.once[way]):
                        here = lo * places + used
                        there = hi * places + 2 * steps.devices[way] + used + steps.once[way]
                        take(steps, limits, states, (way, lo, visit), here, there)


def take(steps, limits, states, where, here, there):
    """Make a visit from every number of devices that may have been taken before."""
    way, lo, visit = where
    price, thin_s, mean_s, time_s = states.price, states.thin_s, states.mean_s, limits.time_s
    own_s, links_s, visit_mean_s = steps.own_s[visit], steps.links_s[visit], steps.mean_s[visit]
    hop = way * limits.cuts + lo
    thin_hop_s, hop_s, single = steps.thin_hop_s[hop], steps.hop_s[hop], steps.single[way]
    fixed, wait = steps.price[visit], steps.wait[way]
    for taken in range(steps.seats[way], limits.devices + 1 - steps.devices[way]):
        before, after = here + 2 * taken, there + 2 * taken
        ready_s = thin_s[before]
        first_s, row_s = ready_s + thin_hop_s, mean_s[before] + hop_s
        if single:
            first_s = max(first_s, row_s)
        if first_s + own_s > time_s or ready_s + links_s > time_s or row_s + visit_mean_s > time_s:
            continue
        paid = price[before] + fixed + wait * first_s
        if paid < price[after]:
            price[after] = paid
            came = 4 * after
            states.came[came], states.came[came + 1] = way, lo
            states.came[came + 2], states.came[came + 3] = taken, here % 2
        thin_s[after] = min(thin_s[after], first_s + steps.thin_s[visit])
        mean_s[after] = min(mean_s[after], row_s + steps.row_s[visit])
