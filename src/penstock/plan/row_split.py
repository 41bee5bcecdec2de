"""Split of the rows of a micro-batch over replicas, and re-split between two stages."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple


class RowOverlap(NamedTuple):
    """Rows of a micro-batch that replica ``sender`` has and replica ``receiver`` needs."""

    sender: int
    receiver: int
    rows: range


def row_ranges(slices: Sequence[int]) -> tuple[range, ...]:
    """The rows of each replica, in order.

    >>> row_ranges((2, 1))
    (range(0, 2), range(2, 3))
    """
    return tuple(range(lo, hi) for lo, hi in pairwise(accumulate(slices, initial=0)))


def row_overlaps(sender: Sequence[int], receiver: Sequence[int]) -> tuple[RowOverlap, ...]:
    """The messages between two stages that cut the same rows differently (DAPPLE, split/concat).

    Each sender replica sends each receiver replica exactly the rows that both hold.

    >>> [(o.sender, o.receiver, o.rows) for o in row_overlaps((2, 2), (3, 1))]
    [(0, 0, range(0, 2)), (1, 0, range(2, 3)), (1, 1, range(3, 4))]
    """
    have, need = list(accumulate(sender)), list(accumulate(receiver))
    ends = sorted(end for end in {0, *have, *need} if end <= min(have[-1], need[-1]))
    return tuple(
        RowOverlap(bisect_right(have, row), bisect_right(need, row), range(row, end))
        for row, end in pairwise(ends)
    )


def split_rows(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut ``rows`` in proportion to ``weights``, by largest remainder; earlier ones win ties.

    Every share is at least 1 where there are enough rows.

    >>> split_rows(7, (1, 1, 1))
    (3, 2, 2)
    >>> split_rows(8, (3, 1))
    (6, 2)
    """
    return split_once(rows, tuple(weights))


@lru_cache(maxsize=4096)
def split_once(rows: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """`split_rows`, with its results kept: planners need the same ones often."""
    least = 1 if rows >= len(weights) else 0
    spare = rows - least * len(weights)
    whole = sum(weights)
    exact = [max(0.0, rows * weight / whole - least) for weight in weights]
    total = sum(exact)
    exact = [spare * share / total if total else 0.0 for share in exact]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in range(spare - sum(shares)):
        shares[by_remainder[i % len(weights)]] += 1
    return tuple(least + share for share in shares)
