"""The compiled min-max partition of `penstock.planners.gpipe`."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np

from penstock.plan.run_tables import Floats
from penstock.planners.spp.kernels import Integers, kept_s, stage_s

__all__ = ["balanced_ends"]


def balanced_ends(
    prefix: Floats,
    held: Floats,
    inputs: Floats,
    workspaces: Floats,
    kinds: Floats,
    crowd: float,
    depths: Integers,
    mode: int,
) -> Integers:
    """Where each stage ends so that the longest is as short as possible; -1 where nothing fits.

    Stage ``s`` runs on the device of ``kinds[s]``. ``longest[s, lo]`` is the least longest time of
    stages ``s ..`` on the layers from ``lo``: ``min over hi of max(stage(s, lo, hi),
    longest[s + 1, hi])``. The first grows with ``hi``; ``floor[s + 1, hi]``, the least of the
    second up to ``hi``, does not, so only ends near the one where both meet are looked at.
    """
    stages, layers = kinds.shape[0], prefix.shape[1] - 1
    longest = np.full((stages + 1, layers + 1), np.inf)
    floor = np.full((stages + 1, layers + 1), np.inf)
    end = np.full((stages, layers + 1), -1)
    longest[stages, layers] = floor[stages, layers] = 0.0
    for s in range(stages - 1, -1, -1):
        kind = kinds[s : s + 1]
        for lo in range(layers):
            meeting, high = lo + 1, layers + 1
            while meeting < high:
                middle = (meeting + high) // 2
                if kept_s(prefix, kind, crowd, lo, middle) >= floor[s + 1, middle]:
                    high = middle
                else:
                    meeting = middle + 1
            for direction in range(2):
                hi = meeting if direction == 0 else meeting - 1
                while lo < hi <= layers:
                    least = kept_s(prefix, kind, crowd, lo, hi) if direction == 0 else 0.0
                    if max(least, floor[s + 1, hi] if direction else 0.0) >= longest[s, lo]:
                        break
                    own = stage_s(
                        prefix, held, inputs, workspaces, kind, crowd, lo, hi, depths[s], mode
                    )
                    whole = max(own, longest[s + 1, hi])
                    if whole < longest[s, lo]:
                        longest[s, lo], end[s, lo] = whole, hi
                    hi += 1 if direction == 0 else -1
        floor[s, 0] = longest[s, 0]
        for lo in range(1, layers + 1):
            floor[s, lo] = min(floor[s, lo - 1], longest[s, lo])
    found = np.full(stages, -1)
    lo = 0
    for s in range(stages):
        found[s] = end[s, lo]
        if found[s] < 0:
            break
        lo = found[s]
    return found
