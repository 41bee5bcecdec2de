"""The compiled dynamic program of `penstock.plan.piper`. Import it inside functions only."""

# numba has no types: its decorator makes every compiled function unknown to a strict checker.
# pyright: basic

from typing import Any

import numba

from penstock.plan.spp_kernels import kept_s, stage_s

__all__ = ["extend_prefixes"]

NUMBERS = 1024

compiled: Any = numba.njit(cache=True)


@compiled
def extend_prefixes(
    value,
    choice,
    prefix,
    held,
    parameters,
    inputs,
    workspaces,
    kinds,
    crowd,
    edge_s,
    sync_s_per_byte,
    in_flight,
    position,
    width,
    number,
    mode,
):
    """Let the window of ``width`` blocks at ``position`` hold the first stage of every rest.

    ``value[lo, p]`` is the least slowest stage of layers ``lo ..`` on the blocks from ``p`` to the
    end of the line; that of the blocks behind the window must be complete. ``edge_s[lo, hi]`` are
    the seconds of the stage's own messages.
    """
    layers = prefix.shape[1] - 1
    behind = position + width
    for lo in range(layers):
        for hi in range(lo + 1, layers + 1):
            extra = edge_s[lo, hi] + sync_s_per_byte * parameters[lo, hi]
            own = kept_s(prefix, kinds, crowd, lo, hi)
            if own >= value[lo, position]:
                break
            if own + extra >= value[lo, position] or value[hi, behind] >= value[lo, position]:
                continue
            own = extra + stage_s(
                prefix, held, inputs, workspaces, kinds, crowd, lo, hi, in_flight, mode
            )
            whole = max(own, value[hi, behind])
            if whole < value[lo, position]:
                value[lo, position] = whole
                choice[lo, position] = hi * NUMBERS + number
