"""Conversion of what a rank was given of a batch into its leaves, in agreement with other ranks.

A whole batch is given to every rank, which compare its content after the step. Parts of a batch
differ from rank to rank. So the ranks compare their descriptions, before anything is computed:
then one rank's mistake is refused on all, and nothing has changed.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from penstock.capture.batch.layout import check_leaf, check_length, key_in_batch
from penstock.capture.batch.part import BatchPart, Leaf, PartialLeaf
from penstock.capture.contract import Batch
from penstock.capture.kinds import kind_of_batch
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.runtime.batch_needs import BatchNeeds, LeafNeed, in_words, needs_of
from penstock.runtime.engine import Engine

WHOLE = "{} was given a part of a batch, but needs the whole batch; give it that on every rank"
"""The message of what cannot take a part."""


class BatchReading:
    """Reader of the batches, whole or in part, that an engine's rank is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _graph(self) -> LayerGraph:
        """The graph of the kind of batch that runs."""
        return self._engine.graph

    @cached_property
    def needs(self) -> BatchNeeds:
        """The parts of every batch that this rank reads (BadInput if there are several kinds)."""
        engine, programs = self._engine, self._engine.stages.programs
        if len(engine.kinds.graphs) > 1:
            raise BadInput(
                "a model with other_examples needs whole batches, since a part does not show of "
                "which kind it is; give them on every rank"
            )
        synchronised = frozenset(
            place.stage
            for place in engine.places
            if engine.acts_jointly(place, programs[place.stage])
        )
        return needs_of(
            self._graph,
            engine.plan,
            engine.world.rank,
            programs,
            metrics=engine.metrics is not None,
            synchronised=synchronised,
        )

    def of_step(self, batches: Sequence[Batch]) -> list[list[Leaf]]:
        """The leaves of the batches of one step; all ranks must call this."""
        if any(isinstance(batch, BatchPart) for batch in batches):
            return [[*leaves] for leaves in self._agreed(batches)]
        self._engine.take_kind(batches)
        whole = [self._graph.batch_leaves(batch) for batch in batches]
        whole = self._graph.as_one_step(whole) if len(whole) > 1 else whole
        return [[*leaves] for leaves in whole]

    def of_stream(self, batch: Batch) -> list[Leaf]:
        """The leaves of a batch of a stream; ranks compare numbers and samples after it."""
        if not isinstance(batch, BatchPart):
            return [*self._graph.batch_leaves(batch)]
        with self._engine.failures.shared():
            (leaves,) = self._graph.as_one_step([self._leaves_of(batch)])
        return [*leaves]

    def whole(self, batch: Batch, what: str) -> list[torch.Tensor]:
        """The leaves of a batch that ``what`` needs whole."""
        if isinstance(batch, BatchPart):
            raise BadInput(WHOLE.format(what))
        self._engine.take_kind([batch])
        return self._graph.batch_leaves(batch)

    def samples_in(self, batch: Batch) -> int:
        """The number of samples of a batch."""
        if isinstance(batch, BatchPart):
            return batch.samples
        return self._of_kind(batch).batch_leaves(batch)[0].shape[0]

    def _of_kind(self, batch: Batch) -> LayerGraph:
        """The graph for batches like this one."""
        kinds = self._engine.kinds.graphs
        return kinds[kind_of_batch(kinds[0], batch)]

    def lengths_of(self, batch: Batch) -> dict[str, int]:
        """The lengths of a batch (or of its bucket) by name; empty for models without lengths."""
        is_part = isinstance(batch, BatchPart)
        graph = self._graph if is_part else self._of_kind(batch)
        if not graph.layout.lengths:
            return {}
        leaves = self._leaves_of(batch) if is_part else graph.batch_leaves(batch)
        found = graph.lengths_of(dict(enumerate(leaves)))
        return dict(zip((length.name for length in graph.layout.lengths), found, strict=True))

    def _agreed(self, batches: Sequence[Batch]) -> list[list[PartialLeaf]]:
        engine, made, problem = self._engine, list[list[PartialLeaf]](), ""
        try:
            made = self._graph.as_one_step([self._leaves_of(batch) for batch in batches])
        except BadInput as cause:
            problem = str(cause)
        given = sum(number * leaves[0].number for number, leaves in enumerate(made, 1))
        with engine.failures.shared():
            own = [float(bool(problem)), given]
            rows = engine.numbers.exchange(own, "what every rank was given of a batch")
        if any(row != [0.0, rows[0][1]] for row in rows):
            raise BadInput(self._difference(batches, given, problem))
        return made

    def _difference(self, batches: Sequence[Batch], given: float, problem: str) -> str:
        """Describe the problem of the first rank that differs; all ranks must call this."""
        shown = ""
        if not problem:
            shown = " and ".join(described(batch, self.lengths_of(batch)) for batch in batches)
        table = self._engine.world.all_gather((problem, given, shown))
        for other, _, _ in table:
            if other:
                return other
        rank = next(rank for rank, row in enumerate(table) if row[1] != table[0][1])
        return (
            f"rank {rank} was given {table[rank][2]}, and rank 0 {table[0][2]}; every rank must "
            f"take its part of the same batches in the same order: shuffle with one seed"
        )

    def _leaves_of(self, batch: Batch) -> list[PartialLeaf]:
        """The leaves of a part, without the additional one of a step."""
        rank = self.needs.rank
        if not isinstance(batch, BatchPart):
            raise BadInput(
                f"rank {rank} was given a whole batch beside parts of others in one step; give "
                f"only parts, or only whole batches"
            )
        try:
            return self._checked(batch)
        except BadInput as problem:
            raise BadInput(f"rank {rank} was given {batch}: {problem}") from None

    def _checked(self, part: BatchPart) -> list[PartialLeaf]:
        layout, graph = self._graph.layout, self._graph
        known = [key_in_batch(path) for path in layout.paths]
        for key in part.leaves:
            if key not in known:
                raise BadInput(
                    f"batches have no tensor {key!r}; theirs are {', '.join(map(repr, known))}"
                )
        held = {need.index: self._rows_given(part, need) for need in self.needs.leaves}
        lengths = self._lengths(part, {index: tensor for index, (_, tensor) in held.items()})
        number = identity(part, lengths)
        leaves: dict[int, PartialLeaf] = {}
        for index, spec in enumerate(layout.leaves):
            shape = list(spec.shape)
            for dim, length in spec.varying:
                shape[dim] = lengths[length]
            by_sample = (spec.rows,) if spec.rows > 1 else ()
            rows, tensor = held.get(index, ((), None))
            leaves[index] = PartialLeaf(
                (part.samples, *by_sample, *shape[1:]),
                spec.dtype,
                number,
                rows,
                tensor,
                sized=index in self.needs.sized,
            )
        graph.lengths_of(leaves)
        return list(leaves.values())

    def _rows_given(
        self, part: BatchPart, need: LeafNeed
    ) -> tuple[tuple[range, ...], torch.Tensor | None]:
        """The rows of a leaf that a part has, and their values with samples first."""
        wanted = self.needs.rows_of(need, part.samples)
        tensor = part.leaves.get(need.key)
        if tensor is None:
            if not wanted:
                return (), None
            raise BadInput(
                f"it lacks {need.name}, of which this rank reads the rows {in_words(wanted)}; give "
                f"leaves={{{need.key!r}: ...}}"
            )
        spec = self._graph.layout.leaves[need.index]
        if need.shared:
            tensor = spec.by_sample(tensor, part.samples)
            check_leaf(spec, tensor)
            return wanted, tensor
        check_leaf(spec, tensor)
        count, given = sum(map(len, wanted)), tensor.shape[0] / spec.rows
        if given not in (count, part.samples):
            raise BadInput(
                f"it has {given:g} rows of {need.name}; give the {count} that this rank reads "
                f"({in_words(wanted) or 'none'}), or all {part.samples}"
            )
        return wanted if given == count else (range(part.samples),), spec.by_sample(
            tensor, part.samples
        )

    def _lengths(self, part: BatchPart, held: Mapping[int, torch.Tensor | None]) -> tuple[int, ...]:
        """The lengths of the whole batch, as stated or as the tensors of this rank show them."""
        layout, found = self._graph.layout, list[int]()
        for length, places in zip(layout.lengths, layout.length_places, strict=True):
            sizes = {
                layout.place(leaf, dim): tensor.shape[dim]
                for leaf, dim in places
                if (tensor := held.get(leaf)) is not None
            }
            if length.name in part.lengths:
                sizes["the stated length"] = part.lengths[length.name]
            if not sizes:
                raise BadInput(
                    f"nothing that this rank reads shows its length '{length.name}'; give every "
                    f"rank lengths={{{length.name!r}: ...}}, that of the whole batch"
                )
            check_length(length, sizes)
            found.append(next(iter(sizes.values())))
        return tuple(found)


def identity(part: BatchPart, lengths: Sequence[int]) -> float:
    """A checksum of what all ranks must receive equally about a batch."""
    facts = (part.number, part.samples, tuple(lengths), tuple(part.indices))
    return float(zlib.crc32(repr(facts).encode()))


def described(batch: Batch, lengths: Mapping[str, int]) -> str:
    """The description of a batch that a rank received, for messages."""
    if not isinstance(batch, BatchPart):
        return "a whole batch"
    sizes = "".join(f", {name} {size}" for name, size in lengths.items())
    return f"{batch} of {batch.samples} samples{sizes}"
