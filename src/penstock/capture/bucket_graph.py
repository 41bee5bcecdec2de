"""A model that was captured once for each bucket of lengths, as one layer graph.

    lengths of the data    7 .. 16      17 .. 32      33 .. 64
    captured for             16            32            64        the same layers each time

    a batch of 20 words runs as one of 32, filled up with the pad values that the user declared

All buckets have the same parameters, layers and cuts. Between two layers the same tensors pass in
every bucket, with other sizes. So one plan holds for all buckets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.capture.batch_layout import LeafSpec, layout_of
from penstock.capture.batch_part import AnyLeaf, Leaf, PartialLeaf, filled_up
from penstock.capture.bucket_stage import BucketPart, BucketStage, LengthSource
from penstock.capture.chain import Chain
from penstock.capture.chain_graph import ChainGraph
from penstock.capture.layer_graph import (
    Batch,
    LayerGraph,
    OutputLayout,
    ParameterUse,
    StageProgram,
    TensorSpec,
)
from penstock.capture.lengths import Dynamic, Length, LengthsOf, SizeTable
from penstock.capture.loss_module import BatchCall
from penstock.capture.traced_graph import TracedGraph
from penstock.errors import BadInput, CaptureFailed

__all__ = ["MOST_CAPTURES", "BucketGraph", "capture_buckets", "has_buckets"]

MOST_CAPTURES = 16
"""Captures take time, and every stage holds the operators of all buckets."""

Value = TypeVar("Value")
Graphs = Mapping[LengthsOf, TracedGraph | ChainGraph]


def has_buckets(lengths: Sequence[Length]) -> bool:
    """Whether every length has buckets."""
    return bool(lengths) and all(length.buckets for length in lengths)


def capture_buckets(
    model: nn.Module,
    batch: Batch,
    dynamic: Dynamic,
    capture: Callable[[Batch], TracedGraph | ChainGraph],
) -> "BucketGraph":
    """Capture a model once for each bucket; ``capture`` handles one length at a time.

    Raises:
        BadInput: the example fits no bucket, or there are too many buckets.
        CaptureFailed: ``capture`` fails, or the layers differ between lengths.
    """
    layout = layout_of(batch, dynamic)
    every = list(product(*(length.buckets for length in layout.lengths)))
    if len(every) > MOST_CAPTURES:
        names = " and ".join(f"'{length.name}'" for length in layout.lengths)
        raise BadInput(
            f"{type(model).__name__} would have to be captured for {len(every)} buckets of "
            f"{names}, and {MOST_CAPTURES} are the most; declare fewer"
        )
    leaves = layout.flatten(batch)
    entry = model.get_submodule(model.layer_names[0]) if isinstance(model, Chain) else model
    captured: dict[LengthsOf, TracedGraph | ChainGraph] = {}
    for lengths in every:
        sized = [resized(leaf, spec, lengths) for leaf, spec in zip(leaves, layout.leaves)]  # noqa: B905
        captured[lengths] = capture(layout.rebuild(dict(enumerate(sized))))
    first = next(iter(captured.values()))
    call = BatchCall.of(layout, entry.forward, has_loss=first.loss is not None)
    graph = BucketGraph(captured, call)
    graph.check()
    return graph


def resized(leaf: torch.Tensor, spec: LeafSpec, lengths: LengthsOf) -> torch.Tensor:
    """The example at other lengths: its first words, repeated if there are too few."""
    for dim, number in spec.varying:
        places = torch.arange(lengths[number], device=leaf.device) % leaf.shape[dim]
        leaf = leaf.index_select(dim, places)
    return leaf


@dataclass(frozen=True)
class BucketOutputs:
    """The model's result, as an `OutputLayout` whose sizes depend on the bucket."""

    example: OutputLayout
    specs: tuple[TensorSpec, ...]
    problem: str

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's result, filled with ``tensors``."""
        return self.example.rebuild(tensors)


@dataclass(frozen=True)
class BucketGraph:
    """Graphs of one model for several lengths, as one :class:`LayerGraph`.

    ``call`` gives batches of all lengths to the model.
    """

    graphs: Graphs
    call: BatchCall

    @cached_property
    def example(self) -> LengthsOf:
        """The bucket of the example batch."""
        return self.bucket_for(self.call.layout.example_lengths)

    @property
    def usual(self) -> TracedGraph | ChainGraph:
        """The graph of the example batch; it stands for all others in what they share."""
        return self.graphs[self.example]

    def check(self) -> None:
        """Raise `CaptureFailed` if a plan could not cut all buckets at the same layers."""
        self._same("layers", lambda graph: graph.layer_names)
        self._same("parameters", lambda graph: graph.parameter_uses)
        self._same("leaves", lambda graph: sorted(graph.leaves_read))
        self._same(
            "tensors between its layers",
            lambda graph: [
                (spec.dtype, spec.batch_dim, spec.requires_grad, spec.reduced, made, read)
                for spec, made, read in graph.crossings
            ],
        )

    def _same(self, what: str, of: Callable[[LayerGraph], Any]) -> None:
        usual = of(self.usual)
        for lengths, graph in self.graphs.items():
            found = of(graph)
            if found != usual:
                raise CaptureFailed(
                    f"{self.name} has other {what} at {self._shown(lengths)} than at "
                    f"{self._shown(self.example)} ({len(found)} and {len(usual)}), so no plan "
                    f'could cut both alike; capture with granularity="block", and put a loop over '
                    f"the length into a block of its own (in an nn.ModuleList), which is never cut"
                )

    def _shown(self, lengths: LengthsOf) -> str:
        pairs = zip(self.lengths, lengths, strict=True)
        return ", ".join(f"{length.name} {size}" for length, size in pairs)

    # What all buckets share.

    @property
    def name(self) -> str:
        """The class of the model."""
        return self.usual.name

    @property
    def model(self) -> nn.Module:
        """The captured model."""
        return self.usual.model

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers, which are the same in all buckets."""
        return self.usual.layer_names

    @property
    def mixing(self) -> str:
        """Why micro-batches cannot give the result of the whole batch, in some bucket."""
        return next((graph.mixing for graph in self.graphs.values() if graph.mixing), "")

    def own_module(self) -> nn.Module:
        """The user's model with its loss."""
        return self.usual.own_module()

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        return self.usual.batch_size

    @property
    def parameter_uses(self) -> tuple[ParameterUse, ...]:
        """Every parameter and buffer, with the layers that read it."""
        return self.usual.parameter_uses

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Additional names of tied parameters, with the first name."""
        return self.usual.tied_names

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The layer whose stage returns each output."""
        return self.usual.output_layers

    @property
    def leaves_read(self) -> frozenset[int]:
        """The leaves of a batch that layers may read."""
        return self.usual.leaves_read

    def targets(self, leaves: Mapping[int, torch.Tensor]) -> Batch:
        """What the loss function gets besides the output."""
        return self.call.target(leaves)

    def with_outputs(self) -> "BucketGraph":
        """A copy that returns loss, weight and the model's outputs (BadInput if it has none)."""
        return self._seen(lambda graph: graph.with_outputs())

    def without_loss(self) -> "BucketGraph":
        """A copy that returns only the model's outputs (BadInput if it has none)."""
        return self._seen(lambda graph: graph.without_loss())

    def _seen(
        self, view: Callable[[TracedGraph | ChainGraph], TracedGraph | ChainGraph]
    ) -> "BucketGraph":
        if self.outputs.problem:
            raise BadInput(self.outputs.problem)
        seen = replace(self, graphs={at: view(graph) for at, graph in self.graphs.items()})
        seen._same("output layers", lambda graph: graph.output_layers)
        seen.check()
        return seen

    # What differs in size between buckets.

    @property
    def crossings(self) -> tuple[tuple[TensorSpec, int, tuple[int, ...]], ...]:
        """Tensors read by later layers, in order of execution."""
        found = self._by_bucket(lambda graph: graph.crossings)
        return tuple(
            (self._spec({at: own[0] for at, own in entry.items()}), *entry[self.example][1:])
            for entry in found
        )

    @property
    def outputs(self) -> BucketOutputs:
        """The model's outputs."""
        usual = self.usual.outputs
        problem = next((g.outputs.problem for g in self.graphs.values() if g.outputs.problem), "")
        kinds = {tuple(spec.dtype for spec in g.outputs.specs) for g in self.graphs.values()}
        if not problem and len(kinds) > 1:
            problem = f"{self.name} returns other tensors at one length than at another"
        if problem:
            return BucketOutputs(usual, (), problem)
        specs = tuple(map(self._spec, self._by_bucket(lambda graph: graph.outputs.specs)))
        return BucketOutputs(usual, specs, "")

    def _by_bucket(
        self, of: Callable[[LayerGraph], Sequence[Value]]
    ) -> Iterator[dict[LengthsOf, Value]]:
        """For each entry, its values in all buckets."""
        found = {at: of(graph) for at, graph in self.graphs.items()}
        for number in range(len(found[self.example])):
            yield {at: own[number] for at, own in found.items()}

    def _spec(self, specs: Mapping[LengthsOf, TensorSpec]) -> TensorSpec:
        """The specs of one tensor in all buckets, as one spec with sizes that depend on lengths."""
        usual = specs[self.example]

        def table(size: Callable[[TensorSpec], int]) -> SizeTable | None:
            sizes = tuple((at, size(spec)) for at, spec in specs.items())
            return SizeTable(sizes) if len({size for _, size in sizes}) > 1 else None

        dims = [dim for dim in range(len(usual.shape)) if dim != usual.batch_dim]
        tables = [(dim, table(lambda spec, dim=dim: spec.shape[dim])) for dim in dims]
        return replace(
            usual,
            varying=tuple((dim, found) for dim, found in tables if found is not None),
            varying_rows=table(lambda spec: spec.rows_per_sample),
        )

    def stage(self, layers: range) -> StageProgram:
        """The layers ``layers`` as one module for all buckets (BadInput as for one bucket)."""
        programs = {at: graph.stage(layers) for at, graph in self.graphs.items()}
        usual = programs[self.example]
        sources = self._sources
        read = {index for program in programs.values() for index in program.batch_inputs}
        read |= {source[0] for source in sources if not isinstance(source, int)}
        inputs = tuple(sorted(read))
        placed: list[LengthSource] = [
            source if isinstance(source, int) else (inputs.index(source[0]), source[1])
            for source in sources
        ]
        parts = {
            at: BucketPart(program.module, [inputs.index(i) for i in program.batch_inputs])
            for at, program in programs.items()
        }
        received = self._by_program(programs, lambda program: program.received)
        sent = self._by_program(programs, lambda program: program.sent)
        module = BucketStage(parts, len(inputs), placed)
        values = {i for p in programs.values() for i in p.batch_inputs if i not in p.sized}
        sized = frozenset(inputs) - values
        return replace(
            usual, module=module, batch_inputs=inputs, received=received, sent=sent, sized=sized
        )

    def _by_program(
        self,
        programs: Mapping[LengthsOf, StageProgram],
        of: Callable[[StageProgram], tuple[TensorSpec, ...]],
    ) -> tuple[TensorSpec, ...]:
        found = {at: of(program) for at, program in programs.items()}
        every = zip(*found.values(), strict=True)
        return tuple(self._spec(dict(zip(found, specs, strict=True))) for specs in every)

    @property
    def _sources(self) -> tuple[LengthSource, ...]:
        """A leaf and a dimension for each length, the same in every stage."""
        found: list[LengthSource] = []
        for places, usual in zip(self.call.layout.length_places, self.example, strict=True):
            read = [place for place in places if place[0] in self.leaves_read]
            found.append(read[0] if read else usual)
        return tuple(found)

    # Batches.

    @property
    def lengths(self) -> tuple[Length, ...]:
        """The lengths that vary from batch to batch, as declared."""
        return self.call.layout.lengths

    @property
    def largest_lengths(self) -> LengthsOf:
        """The largest buckets."""
        return tuple(length.buckets[-1] for length in self.lengths)

    def lengths_of(self, leaves: Mapping[int, Leaf]) -> LengthsOf:
        """The bucket of a batch that `batch_leaves` or `known_leaves` has padded."""
        places = self.call.layout.length_places
        found = tuple(
            next((leaves[leaf].shape[dim] for leaf, dim in own if leaf in leaves), usual)
            for own, usual in zip(places, self.example, strict=True)
        )
        self.bucket_for(found)
        return found

    def bucket_for(self, lengths: LengthsOf) -> LengthsOf:
        """The smallest bucket that holds a batch of these lengths.

        Raises:
            BadInput: no bucket is large enough.
        """
        found: list[int] = []
        for length, size in zip(self.lengths, lengths, strict=True):
            fitting = [bucket for bucket in length.buckets if bucket >= size]
            if not fitting:
                raise BadInput(
                    f"the batch has {length.name} {size}, but the largest bucket is "
                    f"{length.buckets[-1]}; trim the batch, or declare a larger bucket"
                )
            found.append(fitting[0])
        return tuple(found)

    def batch_leaves(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, padded (BadInput if unlike the example)."""
        leaves = self.padded(dict(enumerate(self.call.layout.flatten(batch))))
        return self.as_one_step([list(leaves.values())])[0]

    def known_leaves(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The leaves of a batch that are read, by index, padded (BadInput if unlike)."""
        return self.padded(self.call.leaves(batch, self.leaves_read))

    @property
    def summed_leaves(self) -> frozenset[int]:
        """The leaves that values of a whole step are computed from, in some bucket."""
        return frozenset().union(*(graph.summed_leaves for graph in self.graphs.values()))

    def as_one_step(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves of the batches of one step (BadInput if they must be of one bucket)."""
        return self._as_one_step(batches, lambda graph, own: graph.as_one_step(own))

    def parts_as_one_step(self, parts: Sequence[Sequence[PartialLeaf]]) -> list[list[PartialLeaf]]:
        """The leaves of the parts of one step (BadInput if they must be of one bucket)."""
        return self._as_one_step(parts, lambda graph, own: graph.parts_as_one_step(own))

    def _as_one_step(
        self,
        batches: Sequence[Sequence[AnyLeaf]],
        joined: Callable[[LayerGraph, Sequence[Sequence[AnyLeaf]]], list[list[AnyLeaf]]],
    ) -> list[list[AnyLeaf]]:
        own = len(self.call.layout.leaves)
        found = [self.lengths_of(dict(enumerate(leaves[:own]))) for leaves in batches]
        if len(set(found)) == 1:
            return joined(self.graphs[found[0]], batches)
        alone = [
            joined(self.graphs[at], [leaves])[0] for at, leaves in zip(found, batches, strict=True)
        ]
        if any(len(leaves) > own for leaves in alone):
            raise BadInput(
                f"a step was given {len(batches)} batches of different lengths, but a term of the "
                f"loss is divided by a number that must be computed from all of them together; pad "
                f"them to one length, or give each a step of its own"
            )
        return alone

    def as_own_steps(self, leaves: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch in which each micro-batch is a step of its own."""
        return self.graphs[self.lengths_of(dict(enumerate(leaves)))].as_own_steps(leaves, cut)

    def padded(self, leaves: Mapping[int, AnyLeaf]) -> dict[int, AnyLeaf]:
        """Leaves padded to the lengths of their bucket.

        Raises:
            BadInput: no bucket holds them, or no pad value was declared.
        """
        bucket = self.bucket_for(self.call.layout.lengths_of(leaves))
        specs = self.call.layout.leaves
        return {number: self._fill(leaf, specs[number], bucket) for number, leaf in leaves.items()}

    def _fill(self, leaf: AnyLeaf, spec: LeafSpec, bucket: LengthsOf) -> AnyLeaf:
        for dim, number in spec.varying:
            missing = bucket[number] - leaf.shape[dim]
            if not missing:
                continue
            pad = dict(spec.pads).get(dim)
            if pad is None:
                length = self.lengths[number]
                raise BadInput(
                    f"dimension {dim} of {spec.name} is {leaf.shape[dim]}, but {self.name} runs at "
                    f"{length.name} {', '.join(map(str, length.buckets))} only; pad in the loader, "
                    f"or declare what to fill it up with: Length('{length.name}', ..., pad=0)"
                )
            leaf = filled_up(leaf, dim, missing, pad)
        return leaf
