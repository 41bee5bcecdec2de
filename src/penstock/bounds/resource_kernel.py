"""The cheapest chain of visits, compiled: the one loop of the bound that holds for every order."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

    A state keeps the least of every figure apart: when the first and the mean row get there, and
    the price.
    """
    cuts = steps.own_s.shape[1]
    price = np.full((cuts, devices + 1, 2), np.inf)
    thin = np.full((cuts, devices + 1, 2), np.inf)
    mean = np.full((cuts, devices + 1, 2), np.inf)
    came = np.full((cuts, devices + 1, 2, 4), NOWHERE)
    price[0, 0, 0] = thin[0, 0, 0] = mean[0, 0, 0] = 0.0
    for hi in range(1, cuts):
        for way in range(len(steps.devices)):
            more = steps.devices[way]
            for lo in range(hi):
                if steps.alone_s[way, lo, hi] > time_s:
                    continue
                own_s, links_s = steps.own_s[way, lo, hi], steps.links_s[way, lo, hi]
                mean_s, wait = steps.mean_s[way, lo, hi], steps.wait[way]
                fixed = steps.price[way, lo, hi]
                for used in range(2 - steps.once[way]):
                    then = used + steps.once[way]
                    for taken in range(steps.seats[way], devices + 1 - more):
                        ready_s = thin[lo, taken, used]
                        first_s = ready_s + steps.thin_hop_s[way, lo]
                        row_s = mean[lo, taken, used] + steps.hop_s[way, lo]
                        if steps.single[way]:
                            first_s = max(first_s, row_s)
                        if (
                            first_s + own_s > time_s
                            or ready_s + links_s > time_s
                            or row_s + mean_s > time_s
                        ):
                            continue
                        there = taken + more
                        paid = price[lo, taken, used] + fixed + wait * first_s
                        if paid < price[hi, there, then]:
                            price[hi, there, then] = paid
                            came[hi, there, then, 0] = way
                            came[hi, there, then, 1] = lo
                            came[hi, there, then, 2] = taken
                            came[hi, there, then, 3] = used
                        first_s += steps.thin_s[way, lo, hi]
                        row_s += steps.row_s[way, lo, hi]
                        thin[hi, there, then] = min(thin[hi, there, then], first_s)
                        mean[hi, there, then] = min(mean[hi, there, then], row_s)
    return Reached(price, came)
