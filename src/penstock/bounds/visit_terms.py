"""What every visit must fit within a time, and what it uses: the terms of the bound."""

from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.bounds.resource_kernel import ChainVisits, Uses
from penstock.bounds.shortened_chain import PrefixSums
from penstock.bounds.visits import (
    Replicas,
    Setting,
    VisitTimes,
    reduce_s,
    replica_counts,
    visit_times,
)
from penstock.plan.run_tables import Floats, of_runs

__all__ = ["ROUNDING", "VisitKind", "Visits", "idle_s", "least_speed", "visits_of"]

ROUNDING = 1e-9
"""A visit or a chain that exceeds a time by a smaller share counts as fitting within it."""


@dataclass(frozen=True)
class VisitKind:
    """The number of replicas of a visit, and whether it is a ``revisit`` of devices counted before.

    In a mirrored pipeline (``copies`` 2) each visit is of one direction. ``middle``: the stage in
    the middle of an odd number of stages, whose devices work on it in both directions.
    """

    replicas: Replicas
    revisit: bool = False
    copies: int = 1
    middle: bool = False


class Terms(NamedTuple):
    """What must fit within the time for every run of layers; see `ChainVisits`."""

    alone_s: Floats
    own_s: Floats
    links_s: Floats
    after_mean_row_s: Floats
    first_row_s: Floats
    mean_row_s: Floats


@dataclass(frozen=True)
class Visits:
    """All visits by kind, and what they use.

    ``device_s`` are the seconds that a device computes, receives and sends for every run; None for
    kinds whose devices may have no other visit.
    """

    setting: Setting
    kinds: tuple[VisitKind, ...]
    steps: ChainVisits
    uses: Uses
    device_s: tuple[Floats | None, ...]


def visits_of(setting: Setting, *, mirrored: bool) -> Visits:
    """Every visit of a straight pipeline, or of one direction of a mirrored one."""
    counts = replica_counts(min(setting.devices, setting.rows))
    if mirrored:
        kinds = [VisitKind(c, copies=2) for c in counts if c.fewest < setting.devices]
        kinds += [VisitKind(c, middle=True) for c in counts]
    else:
        more = (False,) if setting.whole_backwards else (False, True)
        kinds = [VisitKind(c, revisit=revisit) for c in counts for revisit in more]
    times = cache(partial(times_of, setting))
    every = [times(kind.replicas, kind.copies) for kind in kinds]
    terms = [terms_of(setting, *pair) for pair in zip(kinds, every, strict=True)]
    uses = [uses_of(setting, *pair) for pair in zip(kinds, every, strict=True)]
    first_messages_s, mean_messages_s = zip(
        *(hops_of(setting, kind) for kind in kinds), strict=True
    )
    steps = ChainVisits(
        np.array([0 if kind.revisit else kind.replicas.fewest for kind in kinds]),
        np.array([kind.replicas.fewest if kind.revisit else 0 for kind in kinds]),
        np.array([int(kind.middle) for kind in kinds]),
        np.array([int(kind.replicas.most == 1) for kind in kinds]),
        *map(np.array, zip(*terms, strict=True)),
        first_row_message_s=np.array(first_messages_s),
        mean_row_message_s=np.array(mean_messages_s),
    )
    device_s = [device_s_of(setting, *pair) for pair in zip(kinds, every, strict=True)]
    every_use = Uses(*map(np.array, zip(*uses, strict=True)))
    return Visits(setting, tuple(kinds), steps, every_use, tuple(device_s))


def times_of(setting: Setting, replicas: Replicas, copies: int) -> VisitTimes:
    """The times of a visit; if mirrored, those of the direction with fewer micro-batches."""
    over = replicas.fewest + copies - 1
    return visit_times(setting, replicas, setting.micro_batches // copies, over)


def terms_of(setting: Setting, kind: VisitKind, times: VisitTimes) -> Terms:
    """What must fit within the time, each a proof of its own.

    - *compute*: after the first row has arrived, the busiest device computes all micro-batches. It
      takes at least as long as the mean device. (Slices may differ from stage to stage, so no
      device need have the most rows in all of them.) Then the last gradient to be complete, of one
      of its layers, is reduced, and the optimizer steps.
    - *last backward*: after the forwards and input backwards, the last gradient still passes all
      earlier layers.
    - *last forward*: after the forwards, the last micro-batch passes all later layers, and its
      gradient all layers.
    - *links*: the messages that the mean device receives, and those that it sends, with its
      all-reduces. The last message received is followed by a backward, here and in all earlier
      layers.
    - *all-reduce*: no gradient of the visit is complete before all forwards of the iteration and
      the input backwards of all later layers.
    - *memory*: parameters, gradients, optimizer and one layer's rows on the largest device. Saved
      activations beyond its memory are recomputed.
    - *whole backwards*: all work but the last backward is done when the first gradient is complete.

    Apart from these, the mean row passes all layers forward and back once (``after_mean_row_s``).
    Each row of a micro-batch waits for all rows of its replica: on average for
    ``sum of n_d^2 / b >= b / r`` rows.
    """
    chain, most, count = setting.chain, kind.replicas.most, setting.micro_batches // kind.copies
    fastest, rows = setting.speeds[0], setting.rows
    widest = setting.speed_sums[min(setting.devices, rows)]
    speed = setting.speed_sums[most]

    def full(costs: PrefixSums) -> Floats:
        return count * (kind.replicas.fewest * costs.fixed + rows * costs.per_row) / speed

    def mean_row(costs: PrefixSums, over: float) -> Floats:
        return costs.fixed / fastest + costs.per_row * (rows / over)

    forward, inputs, work = (c.runs for c in (chain.forward, chain.input_backward, chain.work))
    down_s = (chain.all_forward.fixed + chain.all_forward.per_row) / fastest
    down_row_s, up_row_s = (
        mean_row(chain.all_forward, widest),
        mean_row(chain.all_input_backward, widest),
    )
    up_s = up_after_s(setting, kind)
    parameters = of_runs(chain.parameter_bytes)
    after_s = least_of_runs(reduced_layers(setting, kind))
    after_s = after_s + setting.problem.profile.step_s_per_byte * parameters / fastest
    own_s = np.maximum.reduce(
        [
            full(work) + times.recompute_s / speed + after_s,
            full(forward) + full(inputs) + up_s[:, None],
            full(forward) + (down_s[-1] - down_s)[None, :] + up_s[-1],
        ]
    )
    if setting.whole_backwards:
        before_s = (full(work) * (count - 1) + full(forward)) / count
        own_s = np.maximum(own_s, before_s + times.reduce)
    after_mean_row_s = mean_row(forward, speed) + (down_row_s[-1] - down_row_s)[None, :]
    after_mean_row_s = after_mean_row_s + up_row_s[-1]
    first_row_s = of_runs(down_s)
    if most == 1:
        first_row_s = first_row_s + (rows - 1) * forward.per_row / fastest
    mean_row_s = of_runs(down_row_s) + forward.per_row * rows * (1 / speed - 1 / widest)
    links, reduced_s = times.revisit if kind.revisit else times.first_visit, times.reduce
    beside_s = 0.0 if setting.links_apart else reduced_s
    sent_s = hops_of(setting, kind)[0][:, None] + first_row_s + links.send + beside_s
    received_s = links.receive + np.maximum(beside_s, up_s[:, None])
    passing = chain.input_backward
    later = setting.micro_batches * (passing.fixed[-1] - passing.fixed)
    later = later + setting.problem.global_batch * (passing.per_row[-1] - passing.per_row)
    complete_s = setting.all_forwards_s + later / setting.speed_sums[-1]
    alone_s = np.where(reduced_s > 0, complete_s[None, :] + reduced_s, 0.0)
    alone_s = np.where(np.isfinite(times.recompute_s), np.maximum(alone_s, own_s), inf)
    links_s = np.maximum(received_s, sent_s)
    return Terms(alone_s, own_s, links_s, after_mean_row_s, first_row_s, mean_row_s)


def up_after_s(setting: Setting, kind: VisitKind) -> Floats:
    """Least seconds of a gradient through all layers before each one, after the last backward.

    At least those of one row. After a single device, all rows of a micro-batch still have to pass,
    so at least those of the mean row.
    """
    all_input_backward, fastest = setting.chain.all_input_backward, setting.speeds[0]
    any_s = (all_input_backward.fixed + all_input_backward.per_row) / fastest
    if kind.replicas.most > 1:
        return any_s
    widest = setting.speed_sums[min(setting.devices, setting.rows)]
    return np.maximum(
        any_s,
        all_input_backward.fixed / fastest + all_input_backward.per_row * (setting.rows / widest),
    )


def reduced_layers(setting: Setting, kind: VisitKind) -> Floats:
    """Seconds of the all-reduce of each layer alone, which follows its last backward."""
    over = kind.replicas.fewest + kind.copies - 1
    return reduce_s(setting.limits, over, np.diff(setting.chain.parameter_bytes))


def idle_s(setting: Setting, kind: VisitKind) -> Floats:
    """Seconds in which devices are idle after their last work, by the first layer of a visit.

    At least one all-reduce follows. A whole backward is also followed by those of all earlier
    layers.
    """
    tail_s = reduced_layers(setting, kind).min()
    up_s = up_after_s(setting, kind)
    return np.maximum(tail_s, up_s) if setting.whole_backwards else np.full_like(up_s, tail_s)


def least_of_runs(values: Floats) -> Floats:
    """The least value of the layers of every run."""
    least = np.full((len(values) + 1,) * 2, inf)
    for lo in range(len(values)):
        least[lo, lo + 1 :] = np.minimum.accumulate(values[lo:])
    return np.where(np.isinf(least), 0.0, least)


def hops_of(setting: Setting, kind: VisitKind) -> tuple[Floats, Floats]:
    """Seconds of the message before each layer: for the first row to arrive, and for the mean row.

    A single device waits for all rows. Between ``s`` and ``r`` replicas of contiguous slices there
    are at most ``s + r - 1`` messages. So the mean row's message has at least ``b / (s + r - 1)``
    rows.
    """
    hop, limits, rows = setting.traffic.hop, setting.limits, setting.rows
    first = rows if kind.replicas.most == 1 else 1
    mean = max(1.0, rows / (2 * min(setting.devices, rows) - 1))
    some = hop.fixed + hop.per_row > 0

    def seconds(of_rows: float) -> Floats:
        sent = hop.fixed + of_rows * hop.per_row
        return np.where(some, limits.latency_s + sent / limits.best_rate, 0.0)

    return seconds(first), seconds(mean)


def uses_of(setting: Setting, kind: VisitKind, times: VisitTimes) -> Uses:
    """What a visit uses on all its devices, in seconds of a device of speed 1.

    In a mirrored pipeline the chain of each direction uses half; both together cost at least twice
    the cheaper one. Gradients are reduced for both. A second of links counts as a second of the
    slowest device.
    """
    whole = times
    if kind.copies > 1:
        whole = visit_times(setting, kind.replicas, setting.micro_batches, 1)
    links = whole.revisit if kind.revisit else whole.first_visit
    each = least_speed(setting) * kind.replicas.fewest
    reduced = kind.copies * times.reduce
    moved = (links.receive + links.send) / 2 + (0.0 if setting.links_apart else reduced)
    return Uses(whole.work + whole.recompute_s, each * moved, each * reduced)


def least_speed(setting: Setting) -> float:
    """The speed of the slowest device; 0 where not all can compute at full speed at once."""
    return setting.speeds[-1] if len(setting.speeds) == setting.devices else 0.0


def device_s_of(setting: Setting, kind: VisitKind, times: VisitTimes) -> Floats | None:
    """Seconds that a device computes, receives and sends for every run; None for a first visit.

    Devices with a revisit are also visited by another run on as many replicas, and both must fit.
    (So must those of a mirrored pipeline, but for layers that may have been left out.) Either visit
    may be the later one, so both count as revisits.
    """
    if not kind.revisit:
        return None
    reduced, links = 0.0 if setting.links_apart else times.reduce, times.revisit
    return np.array([times.compute, links.receive + reduced, links.send + reduced])
