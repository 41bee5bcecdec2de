"""The tensors, and the rows of them, that a rank reads of every batch.

    stage 0 (ranks 0, 1)      stage 1 (rank 2)      stage 2 (rank 3)
    x: rows 0-2 | rows 3-7    nothing               y: all rows

It follows from the programs of the rank's stages, so it holds for skip connections, metrics and
mirrored schedules too. It is the same in training and in evaluation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch

from penstock.capture.batch.layout import key_in_batch
from penstock.capture.batch.part import BatchPart, LeafKey
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.program import places_of_rank, rows_at

Entry = TypeVar("Entry")

Column: TypeAlias = Callable[[list[int]], Any] | Any
"""All samples of one tensor: indexed by a list of samples' numbers, or called with it."""


@dataclass(frozen=True, slots=True)
class LeafNeed:
    """A tensor of the batch that a rank reads.

    ``index`` is its place among the batch's tensors, ``key`` the user's key, as in ``dynamic``, and
    ``name`` how a user reaches it, as in ``batch['x']``. The ``stages`` of the rank read it, or all
    its rows are needed (``every_row``) to count the terms of the loss. Of what is ``shared`` by all
    samples the whole is read.
    """

    index: int
    key: LeafKey
    name: str
    stages: tuple[int, ...]
    every_row: bool = False
    shared: bool = False


@dataclass(frozen=True)
class BatchNeeds:
    """The tensors that ``rank`` reads of every batch, in training and evaluation; none in between.

    It can be pickled, so that the processes of a loader can have it. ``sized`` are tensors of which
    a stage reads only sizes, and which may be absent. The stages ``synchronised`` share statistics
    or parameters: a replica of them without rows of a micro-batch reads its first row.
    """

    rank: int
    plan: Plan = field(repr=False)
    leaves: tuple[LeafNeed, ...]
    sized: frozenset[int] = field(default=frozenset(), repr=False)
    synchronised: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def keys(self) -> tuple[LeafKey, ...]:
        """The keys of the tensors that this rank reads."""
        return tuple(leaf.key for leaf in self.leaves)

    def rows(self, key: LeafKey, samples: int | None = None) -> tuple[range, ...]:
        """The rows that this rank reads of a tensor, for a batch of ``samples``, in order.

        Rows are numbered in samples. Without ``samples`` the batch is the plan's full one. Empty if
        the rank does not read the tensor.
        """
        for leaf in self.leaves:
            if leaf.key == key:
                return self.rows_of(leaf, self.plan.global_batch if samples is None else samples)
        return ()

    def rows_of(self, leaf: LeafNeed, samples: int) -> tuple[range, ...]:
        """The rows that this rank reads of ``leaf`` in a batch of ``samples``."""
        if leaf.every_row or leaf.shared:
            return (range(samples),)
        waiting = self.synchronised.intersection(leaf.stages)
        return rows_of_stages(self.plan, self.rank, leaf.stages, frozenset(waiting), samples)

    def pick(self, key: LeafKey, entries: Sequence[Entry]) -> list[Entry]:
        """The entries of the samples whose rows this rank reads; ``entries`` has one for each."""
        return [entries[n] for rows in self.rows(key, len(entries)) for n in rows]

    def read(
        self,
        columns: Mapping[Any, Column],
        indices: Sequence[int],
        *,
        number: int = 0,
        lengths: Mapping[str, int] | None = None,
    ) -> BatchPart:
        """This rank's part of the batch of the samples ``indices``; reads nothing else.

        ``columns`` has a column for each tensor by its key, with one entry for each sample of the
        data set. It is called with the numbers of the samples to read, or indexed by them. Use it
        to collate in a loader over indices. What all samples share is its own column.

            DataLoader(range(len(data)), 32, collate_fn=partial(pipe.needs.read, columns))

        Raises:
            BadInput: there is no column for a tensor that this rank reads.
        """
        indices = [int(index) for index in indices]
        found: dict[LeafKey, torch.Tensor] = {}
        for leaf in self.leaves:
            if leaf.key not in columns:
                raise BadInput(
                    f"rank {self.rank} reads {leaf.name}, and there is no column {leaf.key!r} for "
                    f"it; give one for every tensor of the batch"
                )
            column, wanted = columns[leaf.key], self.pick(leaf.key, indices)
            if leaf.shared or wanted:
                one = leaf.shared and not callable(column)
                read = column if one else column(wanted) if callable(column) else column[wanted]
                found[leaf.key] = torch.as_tensor(read)
        return BatchPart(number, len(indices), found, lengths or {}, tuple(indices))

    def __str__(self) -> str:
        """``rank 1 reads batch[0] (rows 0-3)``, for a full batch."""
        shown = (f"{leaf.name} (rows {in_words(self.rows(leaf.key))})" for leaf in self.leaves)
        return f"rank {self.rank} reads {', '.join(shown) or 'nothing of a batch'}"


@lru_cache(maxsize=64)
def rows_of_stages(
    plan: Plan,
    rank: int,
    stages: tuple[int, ...],
    synchronised: frozenset[int],
    samples: int,
) -> tuple[range, ...]:
    """The rows of a batch that the given stages of a rank compute, joined where they touch."""
    cut, shape = cut_batch(plan, samples), plan.shape()
    found: list[range] = []
    for place in places_of_rank(plan, rank):
        if place.stage not in stages:
            continue
        for number, whole in enumerate(cut.micro_batches):
            rows = rows_at(place, number, cut, shape)
            if not rows and place.stage in synchronised:
                rows = range(whole.start, whole.start + 1)
            found.append(rows)
    return joined_ranges(found)


def joined_ranges(rows: Iterable[range]) -> tuple[range, ...]:
    """All rows once, in order, in as few ranges as possible.

    >>> joined_ranges([range(4, 6), range(0), range(0, 2), range(2, 3), range(5, 7)])
    (range(0, 3), range(4, 7))
    """
    found: list[range] = []
    for own in sorted((own for own in rows if own), key=lambda own: own.start):
        if found and own.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, own.stop))
        else:
            found.append(own)
    return tuple(found)


def in_words(rows: Sequence[range]) -> str:
    """Rows for messages.

    >>> in_words([range(0, 3), range(7, 8)])
    '0-2, 7'
    """
    return ", ".join(
        f"{own.start}-{own.stop - 1}" if len(own) > 1 else f"{own.start}" for own in rows
    )


def needs_of(
    graph: LayerGraph,
    plan: Plan,
    rank: int,
    programs: Mapping[int, StageProgram],
    *,
    metrics: bool,
    synchronised: frozenset[int],
) -> BatchNeeds:
    """Derive what ``rank`` reads from its stages' programs; with ``metrics`` also their target."""
    layout = graph.layout
    additional = len(layout.leaves)
    read: dict[int, set[int]] = {}
    for stage, program in programs.items():
        for index in program.batch_inputs:
            if index not in program.sized:
                read.setdefault(index, set()).add(stage)
    last = len(plan.stages) - 1
    if metrics and last in programs:
        for index in graph.program.call.target_leaves:
            read.setdefault(index, set()).add(last)
    every = graph.summed_leaves if additional in read else frozenset[int]()
    sized = frozenset(chain.from_iterable(program.sized for program in programs.values()))
    paths = layout.paths
    return BatchNeeds(
        rank,
        plan,
        tuple(
            LeafNeed(
                index,
                key_in_batch(paths[index]),
                layout.leaves[index].name,
                tuple(sorted(read.get(index, ()))),
                index in every,
                not layout.leaves[index].rows,
            )
            for index in sorted({*read, *every} - {additional})
        ),
        sized,
        synchronised,
    )
