"""BaPipe's partition of a chain: between layers, in blocks, inside layers, within memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__ = ["Share", "coarse_cuts", "inter_layer_cuts", "intra_layer_shares", "memory_fine_tuned"]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a layer that one stage computes."""

    layer: int
    fraction: float


def inter_layer_cuts(
    times: Sequence[float], speeds: Sequence[float], allowed: Sequence[int]
) -> tuple[int, ...]:
    """Cut a chain so that every accelerator's share of the time is nearest to its share of speed.

    The ``allowed`` cuts are inside the chain and rising. Cut ``k`` is the one whose prefix sum is
    nearest to the share of the first ``k`` speeds; the first of equal ones. Each stage has at least
    one layer. With too few allowed cuts there are fewer stages, with the first speeds.

    >>> inter_layer_cuts([1, 1, 1, 1, 2], [1, 1, 2], [1, 2, 3, 4])
    (0, 1, 3, 5)
    """
    prefix = list(accumulate(times, initial=0.0))
    stages = min(len(speeds), len(allowed) + 1)
    power = list(accumulate(speeds[:stages]))
    cuts = [0]
    first = 0
    for k in range(stages - 1):
        target = prefix[-1] * power[k] / power[-1]
        last = len(allowed) - (stages - 2 - k)
        best = min(range(first, last), key=lambda i: abs(prefix[allowed[i]] - target))
        cuts.append(allowed[best])
        first = best + 1
    return (*cuts, len(times))


def coarse_cuts(transfers_s: Sequence[float], stage_s: float) -> tuple[int, ...]:
    """The cuts inside the chain whose transfer takes no longer than a stage computes.

    This is BaPipe's coarse-grained partition. Layers whose boundary has more bytes than
    ``a_th = stage compute x bandwidth`` become one block, so no transfer is slower than a stage.
    ``transfers_s[cut]`` is the transfer at each cut, ends of the chain included.

    >>> coarse_cuts([0.0, 5.0, 1.0, 2.0, 0.0], stage_s=2.0)
    (2, 3)
    """
    return tuple(cut for cut in range(1, len(transfers_s) - 1) if transfers_s[cut] <= stage_s)


def intra_layer_shares(
    times: Sequence[float], speeds: Sequence[float]
) -> tuple[tuple[Share, ...], ...]:
    """Every accelerator's layers and parts of layers, so that all finish at the same time.

    This is BaPipe's intra-layer partition. A layer on the border of two shares is split between
    them, by channels or rows. Every accelerator works for ``sum of times / sum of speeds``. Layers
    that take no time are left out.

    >>> [[(s.layer, s.fraction) for s in stage] for stage in intra_layer_shares([8, 2, 2], [1, 1])]
    [[(0, 0.75)], [(0, 0.25), (1, 1.0), (2, 1.0)]]
    """
    prefix = list(accumulate(times, initial=0.0))
    ends = [prefix[-1] * power / sum(speeds) for power in accumulate(speeds, initial=0.0)]
    shares: list[tuple[Share, ...]] = []
    for start, end in pairwise(ends):
        parts = [
            (layer, min(end, prefix[layer + 1]) - max(start, prefix[layer]))
            for layer in range(len(times))
        ]
        shares.append(tuple(Share(layer, part / times[layer]) for layer, part in parts if part > 0))
    return tuple(shares)


def memory_fine_tuned(
    cuts: tuple[int, ...],
    memory_bytes: Sequence[float],
    needed_bytes: Callable[[int, int, int], float],
    busy_s: Callable[[int, int, int], float],
) -> tuple[int, ...]:
    """Cuts with which every stage fits, found by moving border layers; empty where none is found.

    The stage that exceeds its memory most gives its first or last layer to the neighbour with the
    most free memory. If both have as much, the move that leaves the shorter bottleneck is taken. No
    move returns to cuts seen before. The search ends after as many moves as layers times stages.
    ``needed_bytes(stage, lo, hi)`` and ``busy_s(stage, lo, hi)`` are those of a run of layers on a
    stage's accelerator.
    """
    seen = {cuts}
    for _ in range(cuts[-1] * len(memory_bytes) + 1):
        excess = [
            needed_bytes(s, lo, hi) - memory_bytes[s] for s, (lo, hi) in enumerate(pairwise(cuts))
        ]
        fullest = max(range(len(excess)), key=lambda s: excess[s])
        if excess[fullest] <= 0:
            return cuts
        moves = [
            (excess[neighbour], bottleneck(moved, busy_s), moved)
            for neighbour, moved in border_moves(cuts, fullest)
            if moved not in seen
        ]
        if not moves:
            return ()
        cuts = min(moves)[2]
        seen.add(cuts)
    return ()


def border_moves(cuts: tuple[int, ...], stage: int) -> list[tuple[int, tuple[int, ...]]]:
    """The neighbours of a stage, each with the cuts after it took over a border layer."""
    if cuts[stage + 1] - cuts[stage] < 2:
        return []
    moves: list[tuple[int, tuple[int, ...]]] = []
    if stage > 0:
        moves.append((stage - 1, (*cuts[:stage], cuts[stage] + 1, *cuts[stage + 1 :])))
    if stage + 2 < len(cuts):
        moves.append((stage + 1, (*cuts[: stage + 1], cuts[stage + 1] - 1, *cuts[stage + 2 :])))
    return moves


def bottleneck(cuts: tuple[int, ...], busy_s: Callable[[int, int, int], float]) -> float:
    """The slowest stage."""
    return max(busy_s(s, lo, hi) for s, (lo, hi) in enumerate(pairwise(cuts)))
