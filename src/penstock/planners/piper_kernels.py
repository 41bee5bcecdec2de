"""The compiled dynamic program of `penstock.planners.piper`."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from penstock.plan.run_tables import Floats
from penstock.planners.spp.kernels import Integers, kept_s, stage_s

__all__ = ["extend_prefixes"]

NUMBERS = 1024


def extend_prefixes(
    value: Floats,
    choice: Integers,
    prefix: Floats,
    held: Floats,
    parameters: Floats,
    inputs: Floats,
    workspaces: Floats,
    kinds: Floats,
    crowd: float,
    edge_s: Floats,
    sync_s_per_byte: float,
    in_flight: int,
    position: int,
    width: int,
    number: int,
    mode: int,
) -> None:
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
