"""The costs of stages and transfers for compiled planners: `penstock.plan.cost` on flat arrays.

The arrays are those of `penstock.plan.cost_tables`. A stage is the number of a group of devices,
with the run of layers between the cuts ``lo`` and ``hi``. Tests compare every function with the
plain one.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import Any

import numpy as np

from penstock.cluster.collectives import STATISTIC_BYTES, STATISTICS_S

__all__ = [
    "ALWAYS",
    "AUTO",
    "FULL",
    "KEEPS",
    "LOAD_TERMS",
    "MOST_LOADS",
    "NEVER",
    "RECOMPUTES",
    "RECOMPUTE_MODES",
    "all_reduce_and_step_s",
    "backward_s",
    "forward_s",
    "load_s",
    "micro_batch_s",
    "needed_bytes",
    "recomputes",
    "resources",
    "transfer_loads",
]

AUTO, ALWAYS, NEVER = 0, 1, 2
RECOMPUTE_MODES = {"auto": AUTO, "on": ALWAYS, "off": NEVER}
"""Whether stages recompute: where memory asks for it, all of them, none."""

FULL, KEEPS, RECOMPUTES = -1, 0, 1
"""A stage on its devices: it does not fit, keeps its activations, or recomputes them."""

MOST_LOADS = 8
"""The most loads of a transfer that are kept apart. Of more, the last ones are merged."""

LOAD_TERMS = 3
"""The load of a resource has three terms, each a sum over its messages: seconds of latency, seconds
for each byte that does not depend on rows, and seconds for each byte of a row."""


def between(fixed, each, lo, hi, rows):
    """The cost of a run, from sums up to each cut."""
    return fixed[hi] - fixed[lo] + rows * (each[hi] - each[lo])


def forward_s(costs: Any, group: int, lo: int, hi: int) -> float:
    """Seconds of one forward on the slowest replica."""
    longest_s = slowest_s(costs, group, costs.forward_fixed, costs.forward_each, lo, hi)
    return (longest_s + norms_s(costs, group, lo, hi, True)) * costs.crowding[group]


def backward_s(costs: Any, group: int, lo: int, hi: int) -> float:
    """Seconds of one full backward on the slowest replica, without recompute."""
    longest_s = slowest_s(costs, group, costs.backward_fixed, costs.backward_each, lo, hi)
    return (longest_s + norms_s(costs, group, lo, hi, False)) * costs.crowding[group]


def slowest_s(costs, group, fixed, each, lo, hi):
    """Seconds of a run on the slowest replica, by the sums of its fixed costs and those a row."""
    longest = 0.0
    for k in range(costs.first_kind[group], costs.first_kind[group + 1]):
        longest = max(longest, between(fixed, each, lo, hi, costs.rows[k]) / costs.speed[k])
    return longest


def norms_s(costs, group, lo, hi, forward):
    """Seconds that replicas wait for batch norm's statistics, as `collectives.norm_sums_s`."""
    norms = costs.norms[hi] - costs.norms[lo]
    if norms <= 0 or costs.replicas[group] < 2:
        return 0.0
    channels = costs.norm_channels[hi] - costs.norm_channels[lo]
    size_bytes = 2 * channels / norms * STATISTIC_BYTES
    if forward:
        size_bytes = costs.replicas[group] * (size_bytes + STATISTIC_BYTES)
    return norms * (STATISTICS_S + all_reduce_s(costs, group, size_bytes))


def micro_batch_s(costs, group, lo, hi):
    """Seconds of a forward and a full backward on the slowest replica, without recompute."""
    fixed = costs.forward_fixed[hi] - costs.forward_fixed[lo]
    fixed = fixed + costs.backward_fixed[hi] - costs.backward_fixed[lo]
    each = costs.forward_each[hi] - costs.forward_each[lo]
    each = each + costs.backward_each[hi] - costs.backward_each[lo]
    longest = 0.0
    for k in range(costs.first_kind[group], costs.first_kind[group + 1]):
        longest = max(longest, (fixed + costs.rows[k] * each) / costs.speed[k])
    longest += norms_s(costs, group, lo, hi, True) + norms_s(costs, group, lo, hi, False)
    return longest * costs.crowding[group]


def all_reduce_and_step_s(costs: Any, group: int, lo: int, hi: int) -> float:
    """Seconds after a stage's last backward: gradient all-reduce and optimizer step."""
    size_bytes = costs.parameters[lo * costs.cuts + hi]
    if size_bytes <= 0:
        return 0.0
    return all_reduce_s(costs, group, size_bytes) + costs.step_s_per_byte[group] * size_bytes


def all_reduce_s(costs, group, size_bytes):
    """Seconds of an all-reduce of so many bytes among the devices of a group."""
    fastest = np.inf
    for i in range(group * costs.all_reduces, (group + 1) * costs.all_reduces):
        seconds = costs.all_reduce_latency_s[i] + costs.all_reduce_s_per_byte[i] * size_bytes
        fastest = min(fastest, seconds)
    return fastest


def needed_bytes(costs: Any, kind: int, lo: int, hi: int, depth: int, recompute: bool) -> float:
    """Peak bytes of a kind of replica with ``depth`` micro-batches in flight."""
    run, rows = lo * costs.cuts + hi, costs.rows[kind]
    saved = between(costs.saved_fixed, costs.saved_each, lo, hi, rows)
    held = costs.held[run] + costs.workspaces[costs.workspace[kind] * costs.cuts**2 + run]
    if recompute and depth > 1:
        inputs = costs.inputs_fixed[run] + rows * costs.inputs_each[run]
        return held + (depth - 1) * inputs + max(saved, inputs)
    return held + depth * saved


def fits(costs, group, lo, hi, depth, recompute):
    """Whether every replica has the memory."""
    for kind in range(costs.first_kind[group], costs.first_kind[group + 1]):
        if needed_bytes(costs, kind, lo, hi, depth, recompute) > costs.memory[kind]:
            return False
    return True


def recomputes(costs: Any, group: int, lo: int, hi: int, depth: int, mode: int) -> int:
    """`KEEPS`, `RECOMPUTES` or `FULL`: as ``mode`` asks for it, keeping where both fit."""
    if mode != ALWAYS and fits(costs, group, lo, hi, depth, False):
        return KEEPS
    if mode != NEVER and fits(costs, group, lo, hi, depth, True):
        return RECOMPUTES
    return FULL


def transfer_loads(network, sender, receiver, busy, loads, base):
    """Put the loads of the busiest resources of a transfer into ``loads``; return how many.

    The messages from one group to the other are those of `split_concat_s`. ``busy`` has place for
    the loads of all resources: senders' engines, receivers' engines, ports out, ports in. The
    results are in ``loads`` from ``base`` on.
    """
    i, last_sender = network.start[sender], network.start[sender + 1]
    j, last_receiver = network.start[receiver], network.start[receiver + 1]
    for place in range(i, last_sender):
        clear(busy, engine_out(network, network.device[place]))
        clear(busy, port_out(network, network.device[place]))
    for place in range(j, last_receiver):
        clear(busy, engine_in(network, network.device[place]))
        clear(busy, port_in(network, network.device[place]))
    row, have, need = 0, network.rows[i], network.rows[j]
    while i < last_sender and j < last_receiver:
        end = min(have, need)
        a, b = network.device[i], network.device[j]
        if end > row and a != b:
            link = a * network.devices + b
            add_message(network, busy, engine_out(network, a), link, end - row)
            add_message(network, busy, engine_in(network, b), link, end - row)
            if network.uses_port[link] > 0:
                add_message(network, busy, port_out(network, a), link, end - row)
                add_message(network, busy, port_in(network, b), link, end - row)
        row = end
        if have == end:
            i += 1
            have += network.rows[i] if i < last_sender else 0
        if need == end:
            j += 1
            need += network.rows[j] if j < last_receiver else 0
    count = 0
    for place in range(network.start[sender], last_sender):
        count = with_load(loads, base, count, busy, engine_out(network, network.device[place]))
        count = with_load(loads, base, count, busy, port_out(network, network.device[place]))
    for place in range(network.start[receiver], last_receiver):
        count = with_load(loads, base, count, busy, engine_in(network, network.device[place]))
        count = with_load(loads, base, count, busy, port_in(network, network.device[place]))
    return count


def resources(network):
    """How many engines and ports messages may occupy."""
    return 2 * (network.devices + network.hosts)


def engine_out(network, device):
    """The place of the load of a device's sending engine."""
    return LOAD_TERMS * device


def engine_in(network, device):
    """The place of the load of a device's receiving engine."""
    return LOAD_TERMS * (network.devices + device)


def port_out(network, device):
    """The place of the load of the outgoing port of a device's host."""
    return LOAD_TERMS * (2 * network.devices + network.host[device])


def port_in(network, device):
    """The place of the load of the incoming port of a device's host."""
    return LOAD_TERMS * (2 * network.devices + network.hosts + network.host[device])


def clear(busy, resource):
    """Set the load of a resource to 0."""
    for term in range(resource, resource + LOAD_TERMS):
        busy[term] = 0.0


def add_message(network, busy, resource, link, rows):
    """Add a message to the load of a resource."""
    busy[resource] += network.latency_s[link]
    busy[resource + 1] += network.s_per_byte[link]
    busy[resource + 2] += network.s_per_byte[link] * rows


def with_load(loads, base, count, busy, resource):
    """Keep a resource's load unless another outweighs it; return how many are kept."""
    end = base + LOAD_TERMS * count
    for load in range(base, end, LOAD_TERMS):
        if outweighs(loads, load, busy, resource):
            return count
    kept = base
    for load in range(base, end, LOAD_TERMS):
        if not outweighs(busy, resource, loads, load):
            for term in range(LOAD_TERMS):
                loads[kept + term] = loads[load + term]
            kept += LOAD_TERMS
    if kept == base + LOAD_TERMS * MOST_LOADS:
        kept -= LOAD_TERMS
        for term in range(LOAD_TERMS):
            loads[kept + term] = max(loads[kept + term], busy[resource + term])
    else:
        for term in range(LOAD_TERMS):
            loads[kept + term] = busy[resource + term]
    return (kept - base) // LOAD_TERMS + 1


def outweighs(loads, one, others, other):
    """Whether no term of a load is less than that of another."""
    return (
        loads[one] >= others[other]
        and loads[one + 1] >= others[other + 1]
        and loads[one + 2] >= others[other + 2]
    )


def load_s(loads, base, count, fixed, each):
    """Seconds of a transfer of so many bytes, fixed and for each row."""
    seconds = 0.0
    if fixed + each > 0:
        for i in range(base, base + LOAD_TERMS * count, LOAD_TERMS):
            seconds = max(seconds, loads[i] + loads[i + 1] * fixed + loads[i + 2] * each)
    return seconds
