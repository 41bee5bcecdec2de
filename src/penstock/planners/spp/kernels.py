"""The compiled loops of SPP's partition and mapping; also the stage costs of `gpipe` and `piper`.

Tests hold the table that `extend` fills against
brute force over all plans.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np
from numpy.typing import NDArray

from penstock.plan.run_tables import Floats

__all__ = ["channel_s", "extend", "stage_s"]

Integers = NDArray[np.int64]

AUTO, ALWAYS, NEVER = 0, 1, 2


def kept_s(prefix, kinds, crowd, lo, hi):
    """Forward and backward of a run on the slowest replica of a window, nothing recomputed."""
    fixed = prefix[0, hi] - prefix[0, lo] + prefix[2, hi] - prefix[2, lo]
    per_sample = prefix[1, hi] - prefix[1, lo] + prefix[3, hi] - prefix[3, lo]
    longest = 0.0
    for kind in range(kinds.shape[0]):
        longest = max(longest, (fixed + kinds[kind, 0] * per_sample) / kinds[kind, 1])
    return crowd * longest


def forward_s(prefix, kinds, crowd, lo, hi):
    """Forward of a run on the slowest replica of a window."""
    fixed, per_sample = prefix[0, hi] - prefix[0, lo], prefix[1, hi] - prefix[1, lo]
    longest = 0.0
    for kind in range(kinds.shape[0]):
        longest = max(longest, (fixed + kinds[kind, 0] * per_sample) / kinds[kind, 1])
    return crowd * longest


def fits(
    prefix: Floats,
    held: Floats,
    inputs: Floats,
    workspaces: Floats,
    kinds: Floats,
    lo: int,
    hi: int,
    depth: int,
    recompute: bool,
) -> bool:
    """Whether every replica has the memory (`penstock.plan.cost.device_memory_bytes`)."""
    for kind in range(kinds.shape[0]):
        rows = kinds[kind, 0]
        saved = prefix[4, hi] - prefix[4, lo] + rows * (prefix[5, hi] - prefix[5, lo])
        needed = held[lo, hi] + workspaces[int(kinds[kind, 3]), lo, hi]
        if recompute and depth > 1:
            each = inputs[0, lo, hi] + rows * inputs[1, lo, hi]
            needed += (depth - 1) * each + max(saved, each)
        else:
            needed += depth * saved
        if needed > kinds[kind, 2]:
            return False
    return True


def stage_s(
    prefix: Floats,
    held: Floats,
    inputs: Floats,
    workspaces: Floats,
    kinds: Floats,
    crowd: float,
    lo: int,
    hi: int,
    depth: int,
    mode: int,
) -> float:
    """Seconds of one micro-batch on a stage; infinite where it does not fit in memory.

    With ``mode`` `AUTO` it recomputes only where it does not fit without.
    """
    seconds = kept_s(prefix, kinds, crowd, lo, hi)
    if mode != ALWAYS and fits(prefix, held, inputs, workspaces, kinds, lo, hi, depth, False):
        return seconds
    if mode != NEVER and fits(prefix, held, inputs, workspaces, kinds, lo, hi, depth, True):
        return seconds + (forward_s(prefix, kinds, crowd, lo, hi) if depth > 1 else 0.0)
    return np.inf


def reduce_s(ways, step_s_per_byte, size_bytes):
    """All-reduce by the fastest of its ways, and the optimizer's step."""
    fastest = 0.0
    if size_bytes > 0:
        for way in range(ways.shape[0]):
            seconds = ways[way, 0] + ways[way, 1] * size_bytes
            fastest = seconds if way == 0 else min(fastest, seconds)
    return fastest + step_s_per_byte * size_bytes


def add_load(loads, index, latency_s, s_per_byte, rows):
    """Add one message to the resource ``index``."""
    loads[index, 0] += latency_s
    loads[index, 1] += s_per_byte
    loads[index, 2] += s_per_byte * rows


def channel_s(
    out: Floats,
    first: int,
    slices: Integers,
    widths: Integers,
    next_slices: Integers,
    latency: Floats,
    per_byte: Floats,
    port: NDArray[np.bool_],
    host: Integers,
    sizes: Floats,
) -> None:
    """For every next window and cut: seconds to move a micro-batch down and its gradients up.

    ``out[0]`` becomes both directions together, ``out[1]`` the busier one. The sender's devices
    stand at ``first ..`` of the order, every receiver's right behind them. Each direction takes as
    long as its busiest engine or port: split/concat as in
    `penstock.cluster.collectives.split_concat_s`.
    """
    senders = slices.shape[0]
    hosts = host.max() + 1
    cuts = out.shape[2]
    for w in range(next_slices.shape[0]):
        receivers = widths[w]
        engines = senders + receivers
        loads = np.zeros((2, 2 * engines + 2 * hosts, 3))
        sender, receiver = 0, 0
        have, need, row = slices[0], next_slices[w, 0], 0
        while sender < senders and receiver < receivers:
            end = min(have, need)
            rows = end - row
            if rows > 0:
                i, j = first + sender, first + senders + receiver
                for direction in range(2):
                    source, target = (i, j) if direction == 0 else (j, i)
                    s_latency, s_per_byte = latency[source, target], per_byte[source, target]
                    load = loads[direction]
                    add_load(load, source - first, s_latency, s_per_byte, rows)
                    add_load(load, engines + target - first, s_latency, s_per_byte, rows)
                    if port[source, target]:
                        ports = 2 * engines
                        add_load(load, ports + host[source], s_latency, s_per_byte, rows)
                        add_load(load, ports + hosts + host[target], s_latency, s_per_byte, rows)
            row = end
            done, full = have == end, need == end
            if done:
                sender += 1
                have += slices[sender] if sender < senders else 0
            if full:
                receiver += 1
                need += next_slices[w, receiver] if receiver < receivers else 0
        busiest_each_way(out[:, w], loads, sizes, cuts)


def busiest_each_way(out, loads, sizes, cuts):
    """The busiest resource down plus the busiest up, and the busier of the two, for every cut."""
    out[:, :] = 0.0
    seconds = np.zeros(cuts)
    for direction in range(2):
        seconds[:] = 0.0
        latency_s = tensors = rows = -1.0
        for resource in range(loads.shape[1]):
            load = loads[direction, resource]
            if load[2] == 0 or (load[0] <= latency_s and load[1] <= tensors and load[2] <= rows):
                continue
            latency_s, tensors, rows = load
            for cut in range(cuts):
                fixed, per_sample = sizes[direction, 0, cut], sizes[direction, 1, cut]
                if fixed + per_sample > 0:
                    taken = latency_s + tensors * fixed + rows * per_sample
                    seconds[cut] = max(seconds[cut], taken)
        for cut in range(cuts):
            out[0, cut] += seconds[cut]
            out[1, cut] = max(out[1, cut], seconds[cut])


def best_next(own, busy, micro_batches, channel, rest, hi, drains, best, best_choice):
    """The better of ``best`` and a stage that ends at ``hi`` with any next window behind it."""
    for w in range(channel.shape[1]):
        if drains:
            behind = busy + channel[0, w, hi] + rest[w]
            whole = max(own, micro_batches * channel[1, w, hi], behind)
        else:
            whole = max(own, micro_batches * channel[0, w, hi], rest[w])
        if whole < best:
            best, best_choice = whole, hi * (channel.shape[1] + 1) + w
    return best, best_choice


def extend(
    value: Floats,
    least: Floats,
    floor: Floats,
    choice: Integers,
    channel: Floats,
    prefix: Floats,
    held: Floats,
    parameters: Floats,
    inputs: Floats,
    workspaces: Floats,
    kinds: Floats,
    crowd: float,
    ways: Floats,
    step_s_per_byte: float,
    behind: int,
    depths: Integers,
    position: int,
    width: int,
    micro_batches: int,
    mode: int,
    drains: bool,
) -> None:
    """Fill ``value[k, lo, position, width]`` for all ``k`` and ``lo``.

    ``least[k, lo, p]`` is the least over the widths, ``floor[k, lo, p]`` the least of that over
    all starts up to ``lo``, which never grows with ``lo``; both must be complete for the windows
    ``behind``. A stage's own seconds never shrink with its end: from the end where both meet, the
    search goes up until the stage alone is too much, then down until the rest alone is.
    """
    most_stages, layers = value.shape[0], value.shape[1]
    for k in range(1, most_stages):
        for lo in range(layers):
            best, best_choice = np.inf, -1
            first_end = layers if k == 1 else lo + 1
            last_end = layers if k == 1 else layers - k + 1
            meeting = first_end
            high = last_end + 1
            while k > 1 and meeting < high:
                middle = (meeting + high) // 2
                own = micro_batches * kept_s(prefix, kinds, crowd, lo, middle)
                own += reduce_s(ways, step_s_per_byte, parameters[lo, middle])
                if own >= floor[k - 1, middle, behind]:
                    high = middle
                else:
                    meeting = middle + 1
            step, downwards = 0, last_end - meeting + 1
            while step < last_end - first_end + 1:
                hi = meeting + step if step < downwards else last_end - step
                step += 1
                if step > downwards and k > 1 and floor[k - 1, hi, behind] >= best:
                    break
                tail = reduce_s(ways, step_s_per_byte, parameters[lo, hi])
                if tail + micro_batches * kept_s(prefix, kinds, crowd, lo, hi) >= best:
                    # Every longer stage is too much as well; below there are shorter ones.
                    step = max(step, downwards)
                    continue
                if k > 1 and least[k - 1, hi, behind] >= best:
                    continue
                busy = stage_s(
                    prefix, held, inputs, workspaces, kinds, crowd, lo, hi, depths[k], mode
                )
                own = tail + micro_batches * busy
                if k == 1:
                    best, best_choice = own, layers * (channel.shape[1] + 1)
                    continue
                rest = value[k - 1, hi, behind]
                best, best_choice = best_next(
                    own, busy, micro_batches, channel, rest, hi, drains, best, best_choice
                )
            value[k, lo, position, width] = best
            choice[k, lo, position, width] = best_choice
