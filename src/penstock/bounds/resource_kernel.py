"""The cheapest chain of visits, compiled: the one loop of the bound that holds for every order."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import NamedTuple

import numpy as np

from penstock.borrowed import borrowed
from penstock.kernels import compiled
from penstock.plan.run_tables import Floats, Integers

__all__ = ["ChainPrices", "ChainVisits", "Reached", "Uses", "cheapest"]


class ChainVisits(NamedTuple):
    """Every visit that a chain may make; arrays over (kind, first layer, cut after the last).

    A *kind* (`penstock.bounds.visit_terms.VisitKind`) is a number of replicas together with what
    else is assumed of a visit. Of each kind:

    - ``devices``: how many it takes; ``devices_before``: how many must have been taken before it;
    - ``once``: whether a chain may use it only once;
    - ``single``: whether it is on one device, which waits for all rows.

    Seconds of each visit that must fit within the time: ``alone_s`` from the start; ``own_s``
    from when its first row is there; ``links_s`` from when the devices before have that row ready;
    ``after_mean_row_s`` from when its mean row is there.

    ``first_row_s`` and ``mean_row_s`` are its forwards of the first row to pass, and of the mean
    row. ``first_row_message_s`` and ``mean_row_message_s`` (kind, first layer) are the messages
    before.
    """

    devices: Integers
    devices_before: Integers
    once: Integers
    single: Integers
    alone_s: Floats
    own_s: Floats
    links_s: Floats
    after_mean_row_s: Floats
    first_row_s: Floats
    mean_row_s: Floats
    first_row_message_s: Floats
    mean_row_message_s: Floats


class Uses(NamedTuple):
    """Seconds of compute, of links and of all-reduce that every visit uses on all its devices."""

    compute: Floats
    links: Floats
    reduce: Floats


class ChainPrices(NamedTuple):
    """Prices for each kind: of a second of each of the `Uses`, and of a second of ``wait``.

    Devices wait for their first work. ``after`` (kind, first layer) is the price of what follows
    their last work.
    """

    compute: Floats
    links: Floats
    reduce: Floats
    wait: Floats
    after: Floats


class Reached(NamedTuple):
    """For each state (layers done, devices taken, once used): the least price, and its last visit.

    ``origin`` holds the kind of that visit, its first layer, the devices taken before it, and
    whether ``once`` was used before it.
    """

    price: Floats
    origin: Integers


def cheapest(
    steps: ChainVisits, uses: Uses, prices: ChainPrices, devices: int, time_s: float
) -> Reached:
    """The least price of each state, over all chains whose visits each fit within ``time_s``.

    A state keeps the least of each value separately: when the first and the mean row get there,
    and the price.
    """
    cuts = steps.own_s.shape[1]
    price, first_row_s, mean_row_s = np.full((3, cuts, devices + 1, 2), np.inf)
    price[0, 0, 0] = first_row_s[0, 0, 0] = mean_row_s[0, 0, 0] = 0.0
    origin = np.full((cuts, devices + 1, 2, 4), -1)
    limits = ChainLimits(len(steps.devices), cuts, devices, 1 + int(steps.once.any()), time_s)
    states = States(price, first_row_s, mean_row_s, origin)
    compiled(fill)(steps, uses, prices, limits, states)
    return Reached(price, origin)


class ChainLimits(NamedTuple):
    """How many kinds, cuts and devices there are; the time that every visit must fit within.

    ``used`` is 2 if some kind may be used only once, else 1: then states need not say whether one
    was.
    """

    kinds: int
    cuts: int
    devices: int
    used: int
    time_s: float


class States(NamedTuple):
    """`Reached`, and the least seconds after which the first and the mean row get there."""

    price: Floats
    first_row_s: Floats
    mean_row_s: Floats
    origin: Integers


def fill(
    steps: ChainVisits, uses: Uses, prices: ChainPrices, limits: ChainLimits, states: States
) -> None:
    """Fill the states, cut by cut."""
    extend(borrowed(steps), borrowed(uses), borrowed(prices), limits, borrowed(states))


def extend(steps, uses, prices, limits, states):
    """`fill`, on addresses."""
    cuts, places = limits.cuts, 2 * (limits.devices + 1)
    for hi in range(1, cuts):
        for kind in range(limits.kinds):
            for lo in range(hi):
                visit = (kind * cuts + lo) * cuts + hi
                if steps.alone_s[visit] <= limits.time_s:
                    price = prices.compute[kind] * uses.compute[visit]
                    price += prices.links[kind] * uses.links[visit]
                    price += prices.reduce[kind] * uses.reduce[visit]
                    price += prices.after[kind * cuts + lo]
                    paid = price, prices.wait[kind]
                    for used in range(limits.used - steps.once[kind]):
                        here = lo * places + used
                        there = hi * places + 2 * steps.devices[kind] + used + steps.once[kind]
                        take(steps, limits, states, (kind, lo, visit), paid, here, there)


def take(steps, limits, states, where, paid, here, there):
    """Make a visit from every number of devices that may have been taken before.

    ``paid`` are its price and that of a second of waiting.
    """
    (kind, lo, visit), (fixed, wait) = where, paid
    price, time_s = states.price, limits.time_s
    first_rows_s, mean_rows_s = states.first_row_s, states.mean_row_s
    own_s, links_s = steps.own_s[visit], steps.links_s[visit]
    after_mean_row_s = steps.after_mean_row_s[visit]
    message = kind * limits.cuts + lo
    first_message_s = steps.first_row_message_s[message]
    mean_message_s, single = steps.mean_row_message_s[message], steps.single[kind]
    for taken in range(steps.devices_before[kind], limits.devices + 1 - steps.devices[kind]):
        before, after = here + 2 * taken, there + 2 * taken
        ready_s = first_rows_s[before]
        first_s, mean_s = ready_s + first_message_s, mean_rows_s[before] + mean_message_s
        if single:
            first_s = max(first_s, mean_s)
        if first_s + own_s > time_s or ready_s + links_s > time_s:
            continue
        if mean_s + after_mean_row_s > time_s:
            continue
        sum_paid = price[before] + fixed + wait * first_s
        if sum_paid < price[after]:
            price[after] = sum_paid
            origin = 4 * after
            states.origin[origin], states.origin[origin + 1] = kind, lo
            states.origin[origin + 2], states.origin[origin + 3] = taken, here % 2
        first_rows_s[after] = min(first_rows_s[after], first_s + steps.first_row_s[visit])
        mean_rows_s[after] = min(mean_rows_s[after], mean_s + steps.mean_row_s[visit])
