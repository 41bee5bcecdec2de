"""SPP's recursive device ordering (RDO): an order that crosses slow links as rarely as possible."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.cluster.link_matrices import link_matrices
from penstock.costs.run_tables import Floats

MOST_VERTICES = 128
"""Number of blocks above which those with the strongest ties are joined first."""

TWIN_ROUNDS = 4
"""Rounds in which blocks of equal ties are joined: for hosts, racks and two further levels."""

Block = tuple[int, ...]


def recursive_device_order(cluster: Cluster) -> tuple[int, ...]:
    """All devices of a cluster, with well connected ones side by side (SPP, INFOCOM 2022, RDO)."""
    weights = device_weights(cluster)
    linked = {end for link in cluster.links for end in (link.source, link.target)}
    by_host: dict[int, list[int]] = {}
    for device, host in enumerate(cluster.host_index):
        by_host.setdefault(host, []).append(device)
    blocks: list[Block] = []
    for members in by_host.values():
        if linked.isdisjoint(members):
            blocks.append(tuple(members))
        else:
            blocks += [(device,) for device in members]
    return ordered_by_minimum_cuts(weights, blocks)


def device_weights(cluster: Cluster) -> Floats:
    """Bytes per second between every two devices, the mean of both directions; 0 to itself.

    All devices of a host share its port. So a pair counts with the share of the port that each
    device of the larger host has when all of them send at once. With the whole port for every pair,
    a host of eight devices would seem to have 64 ports to the next one.
    """
    links, host = link_matrices(cluster), np.array(cluster.host_index)
    sharing = np.bincount(host)[host]
    shared = np.maximum(sharing[:, None], sharing[None, :])
    weights = np.where(links.uses_port, links.bytes_per_s / shared, links.bytes_per_s)
    weights = (weights + weights.T) / 2
    np.fill_diagonal(weights, 0.0)
    finite = weights[np.isfinite(weights)]
    # The weight of a link without a limit is only compared: more than all others is enough.
    most = 2 * float(finite.sum()) + 1.0
    return np.where(np.isfinite(weights), weights, most)


def ordered_by_minimum_cuts(weights: Floats, blocks: Sequence[Block]) -> tuple[int, ...]:
    """The devices of all blocks in the order of recursive minimum cuts.

        RDO(U) = [u]                     if U is a single block
        RDO(U) = RDO(U1) + RDO(U2)       for (U1, U2) the minimum cut of U

    ``weights`` are bytes per second between devices. Either half may be reversed: of the four
    results, the one with the strongest tie where the halves meet is taken, or the first of equal
    ones. Where all ties between blocks are equal, any order is as good, and they keep their own.

    A block is never cut; it is a host with equal links. Two things go beyond the paper, because a
    cut takes time cubic in the blocks. Blocks with equal ties to all others are ordered as one. Of
    more than `MOST_VERTICES` blocks, those with the strongest ties are joined first.
    """
    ties = between(weights, blocks)
    for _ in range(TWIN_ROUNDS):
        if all_equal(ties):
            break
        merged = merge_twins(ties, blocks)
        if len(merged) == len(blocks):
            break
        blocks, ties = merged, between(weights, merged)
    while len(blocks) > MOST_VERTICES:
        blocks = merge_strongest(ties, blocks)
        ties = between(weights, blocks)
    return recurse(weights, ties, list(blocks), list(range(len(blocks))))


def between(weights: Floats, blocks: Sequence[Block]) -> Floats:
    """The mean weight of a pair of devices, between every two blocks; 0 to itself."""
    member = np.zeros((len(blocks), len(weights)))
    for row, block in zip(member, blocks, strict=True):
        row[list(block)] = 1.0
    sizes = member.sum(axis=1)
    ties = (member @ weights @ member.T) / np.outer(sizes, sizes)
    np.fill_diagonal(ties, 0.0)
    return ties


def all_equal(ties: Floats) -> bool:
    """Return whether all pairs of blocks have equal ties."""
    pairs = ties[~np.eye(len(ties), dtype=bool)]
    return len(pairs) == 0 or bool(np.allclose(pairs, pairs[0], rtol=1e-9, atol=0.0))


def merge_twins(ties: Floats, blocks: Sequence[Block]) -> list[Block]:
    """Join blocks with equal ties to all others that are tied at least as strongly to each other.

    No minimum cut need separate them: together they are one block of equal links.
    """
    by_ties: dict[bytes, list[int]] = {}
    for block, row in enumerate(np.sort(ties, axis=1)):
        by_ties.setdefault(np.float32(row).tobytes(), []).append(block)
    merged: list[tuple[int, ...]] = []
    for free in by_ties.values():
        while free:
            twins = [free[0], *(other for other in free[1:] if is_twin(ties, free[0], other))]
            pairs = ties[np.ix_(twins, twins)]
            if not all_equal(pairs):
                twins = twins[:1]
            merged.append(tuple(twins))
            free = [block for block in free if block not in twins]
    return [tuple(device for twin in twins for device in blocks[twin]) for twins in sorted(merged)]


def is_twin(ties: Floats, first: int, other: int) -> bool:
    """Return whether two blocks have equal ties to the rest, none stronger than their own."""
    rest = np.ones(len(ties), dtype=bool)
    rest[[first, other]] = False
    here, there = ties[first, rest], ties[other, rest]
    by_ties = bool((np.abs(here - there) <= 1e-9 * np.abs(there)).all())
    return by_ties and bool(ties[first, other] >= here.max(initial=0.0) * (1 - 1e-9))


def merge_strongest(ties: Floats, blocks: Sequence[Block]) -> list[Block]:
    """The pairs of blocks with the strongest ties joined, none twice, until few are left."""
    count = len(blocks)
    rows, columns = np.triu_indices(count, 1)
    partner: dict[int, int] = {}
    for pair in np.argsort(-ties[rows, columns], kind="stable"):
        i, j = int(rows[pair]), int(columns[pair])
        if i not in partner and j not in partner:
            partner[i], partner[j] = j, i
            if count - len(partner) // 2 <= MOST_VERTICES:
                break
    return [
        blocks[i] + (blocks[partner[i]] if i in partner else ())
        for i in range(count)
        if partner.get(i, count) > i
    ]


def recurse(weights: Floats, ties: Floats, blocks: list[Block], among: list[int]) -> Block:
    """The devices of the blocks ``among``, ordered."""
    inside = ties[np.ix_(among, among)]
    if len(among) == 1 or all_equal(inside):
        return tuple(device for block in among for device in blocks[block])
    first, second = halves(inside, [len(blocks[block]) for block in among])
    left = recurse(weights, ties, blocks, [among[i] for i in first])
    right = recurse(weights, ties, blocks, [among[i] for i in second])
    return joined_halves(weights, left, right)


def halves(ties: Floats, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The two sides of the minimum cut, that with the first block first."""
    counts = np.array(sizes, dtype=np.int64)
    side = minimum_cut(ties * np.outer(counts, counts), counts)
    if not side[0]:
        side = ~side
    return [int(i) for i in np.flatnonzero(side)], [int(i) for i in np.flatnonzero(~side)]


def joined_halves(weights: Floats, left: Block, right: Block) -> Block:
    """Two ordered halves, reversed so that the devices which meet are tied most strongly."""
    pairs = [(first, second) for first in (left, left[::-1]) for second in (right, right[::-1])]
    first, second = max(pairs, key=lambda pair: weights[pair[0][-1], pair[1][0]])
    return first + second


TIE = 1e-9
"""Cuts whose weights differ by less than this part of them are equal."""


def minimum_cut(
    weights: NDArray[np.float64],
    sizes: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """A mask of the vertices on one side of a global minimum cut (Stoer and Wagner, 1997).

    ``weights`` is symmetric with a zero diagonal. ``sizes`` is how many devices each vertex has.
    Every phase adds, one by one, the vertex that is tied most strongly to those added before. The
    last vertex alone is one side of a cut; then it is merged into the one before. Of equal cuts,
    the one that divides the devices most evenly is taken, then the first. Otherwise a graph of
    equal links would lose one vertex at a time. The time is cubic in the vertices.
    """
    count = len(weights)
    left, held = weights.copy(), sizes.copy()
    group, alive = np.eye(count, dtype=np.bool_), np.ones(count, dtype=np.bool_)
    best_weight, best_balance, best = np.inf, -1, group[0]
    for phase in range(count - 1):
        tied, waiting = np.zeros(count), alive.copy()
        before = last = -1
        for _ in range(count - phase):
            before, last = last, int(np.where(waiting, tied, -1.0).argmax())
            waiting[last] = False
            tied += np.where(waiting, left[last], 0.0)
        weight, balance = tied[last], min(held[last], sizes.sum() - held[last])
        is_less = weight < best_weight * (1 - TIE)
        is_equal = weight <= best_weight * (1 + TIE)
        if best_balance < 0 or is_less or (is_equal and balance > best_balance):
            best_weight, best_balance, best = weight, balance, group[last].copy()
        left[before] += left[last]
        left[:, before] = left[before]
        left[before, before] = 0.0
        group[before] |= group[last]
        held[before] += held[last]
        alive[last] = False
    return best
