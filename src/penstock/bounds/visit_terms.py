"""What every visit must keep within the asked time, and what it uses: the terms of the bound."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.bounds.resource_kernel import ChainVisits
from penstock.bounds.shortened_chain import PrefixSums
from penstock.bounds.visits import (
    Replicas,
    Setting,
    VisitTimes,
    reduce_s,
    replica_counts,
    runs,
    visit_times,
)

__all__ = ["ROUNDING", "VisitKind", "Visits", "idle_s", "visits_of", "worth"]

Floats = npt.NDArray[np.float64]

ROUNDING = 1e-9
"""A visit or a chain that exceeds a time by less of it is taken to keep it."""


@dataclass(frozen=True)
class VisitKind:
    """A way to visit: on how many replicas, on devices not counted before or ``again``.

    Of a mirrored pipeline (``copies`` 2) each visit is of one direction. ``middle``: the one stage
    whose devices work on it in both directions, if the number of stages is odd.
    """

    replicas: Replicas
    again: bool = False
    copies: int = 1
    middle: bool = False


class Terms(NamedTuple):
    """What must fit into the asked time for every run of layers; see `ChainVisits`."""

    alone_s: Floats
    own_s: Floats
    links_s: Floats
    mean_s: Floats
    thin_s: Floats
    row_s: Floats


class Uses(NamedTuple):
    """What every run uses of compute, of links and of all-reduce on its devices together."""

    compute: Floats
    links: Floats
    reduce: Floats


class Shared(NamedTuple):
    """What a device spends on a run, and on that which it must at least do beside it.

    Each of compute, receiving and sending; ``beside`` is that of every run, one of which it is.
    """

    own_s: Floats
    beside_s: Floats


@dataclass(frozen=True)
class Visits:
    """All ways to visit: the steps without prices, what they use, and what they share."""

    setting: Setting
    kinds: tuple[VisitKind, ...]
    steps: ChainVisits
    uses: Uses
    shared: tuple[Shared | None, ...]


def visits_of(setting: Setting, *, mirrored: bool) -> Visits:
    """Every way to visit of a straight pipeline, or of one direction of a mirrored one."""
    counts = replica_counts(min(setting.devices, setting.rows))
    if mirrored:
        kinds = [VisitKind(c, copies=2) for c in counts if c.fewest < setting.devices]
        kinds += [VisitKind(c, middle=True) for c in counts]
    else:
        more = (False,) if setting.whole else (False, True)
        kinds = [VisitKind(c, again=again) for c in counts for again in more]
    every = [times_of(setting, kind) for kind in kinds]
    terms = [terms_of(setting, *pair) for pair in zip(kinds, every, strict=True)]
    uses = [uses_of(setting, *pair) for pair in zip(kinds, every, strict=True)]
    hops = [hops_of(setting, kind) for kind in kinds]
    none = np.zeros(len(kinds))
    steps = ChainVisits(
        devices=np.array([0 if kind.again else kind.replicas.fewest for kind in kinds]),
        seats=np.array([kind.replicas.fewest if kind.again else 0 for kind in kinds]),
        once=np.array([int(kind.middle) for kind in kinds]),
        single=np.array([int(kind.replicas.most == 1) for kind in kinds]),
        alone_s=np.array([term.alone_s for term in terms]),
        own_s=np.array([term.own_s for term in terms]),
        links_s=np.array([term.links_s for term in terms]),
        mean_s=np.array([term.mean_s for term in terms]),
        thin_s=np.array([term.thin_s for term in terms]),
        row_s=np.array([term.row_s for term in terms]),
        thin_hop_s=np.array([thin_s for thin_s, _ in hops]),
        hop_s=np.array([row_s for _, row_s in hops]),
        price=none,
        wait=none,
    )
    shared = [shared_of(setting, *pair) for pair in zip(kinds, every, strict=True)]
    every_use = Uses(*(np.array(tables) for tables in zip(*uses, strict=True)))
    return Visits(setting, tuple(kinds), steps, every_use, tuple(shared))


def times_of(setting: Setting, kind: VisitKind) -> VisitTimes:
    """The times of one way to visit; of a mirrored pipeline those of the direction with less."""
    over = kind.replicas.fewest + kind.copies - 1
    return visit_times(setting, kind.replicas, setting.micro_batches // kind.copies, over)


def terms_of(setting: Setting, kind: VisitKind, its: VisitTimes) -> Terms:
    """What must fit, each a proof of its own.

    - *compute*: after the first row has come (A) the busiest device computes all micro-batches,
      at least as long as the mean one (slices may differ from stage to stage, so no device need
      have the most rows of all); then the last gradient to be complete, of one of its layers, is
      reduced, and the optimizer steps.
    - *last backward*: after its forwards and input halves the last gradient still goes up.
    - *last forward*: after its forwards the last micro-batch goes down and all the way up.
    - *links in, out*: what the mean device takes in, and what it sends, with its all-reduces.
      What comes in last is followed by a backward, and the way up.
    - *all-reduce*: no gradient of the visit is complete before all forwards of the iteration are
      done, and the input halves of all later layers.
    - *memory*: parameters, gradients, optimizer and one layer's rows on the largest device; what
      is saved beyond its room is computed again.
    - *whole backwards*: all but the last is over when the first gradient is complete.

    Apart from these the mean row goes down and up once (`mean_s`): each row of a micro-batch waits
    for all rows of its replica, on average ``sum of n_d^2 / b >= b / r`` of them.
    """
    chain, most, count = setting.chain, kind.replicas.most, setting.micro_batches // kind.copies
    fastest, rows = setting.speeds[0], setting.rows
    widest = setting.speed_sums[min(setting.devices, rows)]
    speed = setting.speed_sums[most]

    def full(costs: PrefixSums) -> Floats:
        return count * (kind.replicas.fewest * costs.fixed + rows * costs.per_row) / speed

    def mean_row(costs: PrefixSums, over: float) -> Floats:
        return costs.fixed / fastest + costs.per_row * (rows / over)

    forward, inputs, work = (c.of_runs() for c in (chain.forward, chain.inputs, chain.work))
    down_s = (chain.way_down.fixed + chain.way_down.per_row) / fastest
    down_row_s, up_row_s = mean_row(chain.way_down, widest), mean_row(chain.way_up, widest)
    up_s = way_up_s(setting, kind)
    parameters = runs(chain.parameter_bytes)
    after_s = least_of_runs(reduced_layers(setting, kind))
    after_s = after_s + setting.problem.profile.step_s_per_byte * parameters / fastest
    own_s = np.maximum.reduce(
        [
            full(work) + its.again_s / speed + after_s,
            full(forward) + full(inputs) + up_s[:, None],
            full(forward) + (down_s[-1] - down_s)[None, :] + up_s[-1],
        ]
    )
    if setting.whole:
        before_s = (full(work) * (count - 1) + full(forward)) / count
        own_s = np.maximum(own_s, before_s + its.reduce)
    mean_s = mean_row(forward, speed) + (down_row_s[-1] - down_row_s)[None, :] + up_row_s[-1]
    thin_s = runs(down_s)
    if most == 1:
        thin_s = thin_s + (rows - 1) * forward.per_row / fastest
    row_s = runs(down_row_s) + forward.per_row * rows * (1 / speed - 1 / widest)
    links, reduced_s = its.again if kind.again else its.fresh, its.reduce
    beside_s = 0.0 if setting.links_apart else reduced_s
    sent_s = hops_of(setting, kind)[0][:, None] + thin_s + links.send + beside_s
    taken_s = links.receive + np.maximum(beside_s, up_s[:, None])
    rest = PrefixSums(
        *(column[-1] - column for column in (chain.inputs.fixed, chain.inputs.per_row))
    )
    later = setting.micro_batches * rest.fixed + setting.problem.global_batch * rest.per_row
    complete_s = setting.all_forwards_s + later / setting.speed_sums[-1]
    alone_s = np.where(reduced_s > 0, complete_s[None, :] + reduced_s, 0.0)
    alone_s = np.where(np.isfinite(its.again_s), np.maximum(alone_s, own_s), inf)
    return Terms(alone_s, own_s, np.maximum(taken_s, sent_s), mean_s, thin_s, row_s)


def way_up_s(setting: Setting, kind: VisitKind) -> Floats:
    """Seconds of the way up before each layer, after the last backward there.

    Of any row at least; after a single device all rows of a micro-batch are still to come up, so
    no less than that of their mean.
    """
    way_up, fastest = setting.chain.way_up, setting.speeds[0]
    any_s = (way_up.fixed + way_up.per_row) / fastest
    if kind.replicas.most > 1:
        return any_s
    widest = setting.speed_sums[min(setting.devices, setting.rows)]
    return np.maximum(any_s, way_up.fixed / fastest + way_up.per_row * (setting.rows / widest))


def reduced_layers(setting: Setting, kind: VisitKind) -> Floats:
    """Seconds of the all-reduce of each layer alone: its bucket follows its last backward."""
    over = kind.replicas.fewest + kind.copies - 1
    return reduce_s(setting.limits, over, np.diff(setting.chain.parameter_bytes))


def idle_s(setting: Setting, kind: VisitKind) -> Floats:
    """Seconds in which devices stand still after their last work, by the first layer of a visit.

    At least one all-reduce follows; a whole backward is followed by the way up as well.
    """
    tail_s = reduced_layers(setting, kind).min()
    up_s = way_up_s(setting, kind)
    return np.maximum(tail_s, up_s) if setting.whole else np.full_like(up_s, tail_s)


def least_of_runs(values: Floats) -> Floats:
    """The least value of the layers of every run."""
    least = np.full((len(values) + 1,) * 2, inf)
    for lo in range(len(values)):
        least[lo, lo + 1 :] = np.minimum.accumulate(values[lo:])
    return np.where(np.isinf(least), 0.0, least)


def hops_of(setting: Setting, kind: VisitKind) -> tuple[Floats, Floats]:
    """Seconds of the message before each layer: of the first row to be there, of the mean row.

    A single device waits for all rows. Between ``s`` and ``r`` replicas of contiguous slices at
    most ``s + r - 1`` messages pass, so that the mean row's is of ``b / (s + r - 1)`` at least.
    """
    hop, limits, rows = setting.traffic.hop, setting.limits, setting.rows
    first = rows if kind.replicas.most == 1 else 1
    mean = max(1.0, rows / (2 * min(setting.devices, rows) - 1))
    some = hop.fixed + hop.per_row > 0

    def seconds(of_rows: float) -> Floats:
        sent = hop.fixed + of_rows * hop.per_row
        return np.where(some, limits.latency_s + sent / limits.best_rate, 0.0)

    return seconds(first), seconds(mean)


def uses_of(setting: Setting, kind: VisitKind, its: VisitTimes) -> Uses:
    """What a visit uses on all its devices, in seconds of a device of speed 1.

    In a mirrored pipeline the chain of each direction uses half; both cost no less than twice the
    cheaper. Gradients are reduced for both. A second of links is worth one of the slowest device.
    """
    whole = visit_times(setting, kind.replicas, setting.micro_batches, 1)
    links, each = whole.again if kind.again else whole.fresh, worth(setting) * kind.replicas.fewest
    reduced = kind.copies * its.reduce
    moved = (links.receive + links.send) / 2 + (0.0 if setting.links_apart else reduced)
    return Uses(whole.work + whole.again_s, each * moved, each * reduced)


def worth(setting: Setting) -> float:
    """The speed of the slowest device; nothing where not all compute at full speed at once."""
    return setting.speeds[-1] if len(setting.speeds) == setting.devices else 0.0


def shared_of(setting: Setting, kind: VisitKind, its: VisitTimes) -> Shared | None:
    """What devices with several visits have in common; none for the only visit of some.

    Devices that are visited again are also visited by another run on as many replicas: both must
    fit. (Those of a mirrored pipeline too, but by layers that may have been left out.)
    """
    if not kind.again:
        return None
    # The other visit may be the later one of the two, which need not take in all.
    reduced = 0.0 if setting.links_apart else its.reduce
    own = its.again if kind.again else its.fresh
    sides = [(its.compute, own.receive + reduced, own.send + reduced)]
    sides.append((its.compute, its.again.receive + reduced, its.again.send + reduced))
    return Shared(*(np.array(side) for side in sides))
