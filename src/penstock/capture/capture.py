"""Make the layer graph of a model from one example batch, by recording its calls."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from penstock.capture.batch.call import BatchCall, loss_function
from penstock.capture.batch.layout import (
    BatchLayout,
    RowsOf,
    key_in_batch,
    layouts_of,
)
from penstock.capture.batch.lengths import Dynamic
from penstock.capture.batch.unread import UnreadEntry, is_plain
from penstock.capture.chain import Chain
from penstock.capture.contract import Batch, Loss
from penstock.capture.kinds import joined_graph, named_in
from penstock.capture.layer_graph import LayerGraph, Parallelize, SplitTable
from penstock.capture.record.absent import NeedsValues
from penstock.capture.record.example import Recorded, record_program
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.sizes import BatchSize
from penstock.capture.record.units import Granularity
from penstock.capture.record.user_lines import line_of
from penstock.errors import BadInput, CaptureFailed, PenstockError
from penstock.torch_internals import COMPILED_CALL

MOST_PATHS = 16
"""Limit of the recorded paths of a loss; more mean that it takes another in every step."""


def capture_model(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    granularity: Granularity = "module",
    dynamic: Dynamic | None = None,
    rows: RowsOf | None = None,
    autocast: torch.dtype | None = None,
    other_examples: Sequence[Batch] = (),
    compile: bool = False,
    tensor_parallel: SplitTable | Parallelize | None = None,
) -> LayerGraph:
    """The layers of ``model`` with its loss, and the tensors between them.

    ``dynamic`` names the dimensions of the batch that vary besides the samples, for example
    ``{"input_ids": {1: "length"}, "labels": {1: "length"}}``; equal names mean equal sizes.
    ``rows`` says how many rows of a tensor each sample has, as in ``{"patches": 16}``, or that all
    samples share it (``{"position_ids": 0}``). Where the example does not show it, it is tried.

    Entries of the batch without tensors, such as file names, are ignored if nothing reads them; a
    warning names them. A number or word that is read is a constant that all batches must repeat.

    ``other_examples`` is a list with a batch of each further kind, as those that lack a key. Costs
    and sizes are those of ``batch``, so let that be of the kind that takes most.

    Two arguments say how its stages will be run. ``compile`` compiles them with ``torch.compile``
    for the rows of a full micro-batch, which takes time once. ``tensor_parallel`` is a function
    ``parallelize(model, mesh)`` that divides the model in place among the ranks of a tensor group,
    or a table of its linear layers (``{"blocks.*.up": "colwise"}``; default: the model's
    ``base_model_tp_plan``).

    The model stays unchanged. A model in evaluation mode is captured in training mode; modules in
    evaluation mode inside a model in training mode stay so (frozen batch norms).

    Raises:
        BadInput: the batch does not fit the model, an object in it is read that is no tensor, the
            loss is not a scalar or cannot be computed from slices of a batch, the granularity is
            unknown, two examples are of one kind, or it is ambiguous which tensors are shared.
        CaptureFailed: the model does not run on the example, or cannot be recorded.
    """
    if granularity not in get_args(Granularity):
        raise BadInput(
            f'granularity is "{granularity}", but must be one of {", ".join(get_args(Granularity))}'
        )
    if other_examples and not isinstance(other_examples, list):
        raise BadInput(
            f"other_examples is a {type(other_examples).__name__}, but must be a list of batches; "
            f"write other_examples=[batch], also for one"
        )
    check_wrappers(model)
    function, entry = loss_function(loss), model
    if isinstance(model, Chain):
        entry = model.get_submodule(model.layer_names[0])
        if function is not None and model.loss is not None and function is not model.loss:
            raise BadInput(
                "the chain has a loss function and another was passed as loss=...; pass only one"
            )
        function = function or model.loss
    record = partial(record_program, granularity=granularity, autocast=autocast)

    def program_of(layout: BatchLayout) -> UserProgram:
        call = BatchCall.of(layout, entry.forward, has_loss=function is not None)
        return UserProgram(model, function, call)

    def captured(example: Batch) -> LayerGraph:
        named = named_in(dynamic, example, examples), named_in(rows, example, examples)
        recorded = partial(recorded_as, program_of, record, example=example, kinds=len(examples))
        return the_only_one(layouts_of(example, *named), named[1], recorded)

    examples = [batch, *other_examples]
    graphs = [captured(example) for example in examples]
    unread = [entry.name for graph in graphs for entry in graph.layout.unread]
    if unread and os.environ.get("RANK", "0") == "0":
        names = ", ".join(dict.fromkeys(unread))
        warnings.warn(f"not passed to the stages, since nothing reads it: {names}", stacklevel=2)
    graph = joined_graph(graphs, examples) if other_examples else graphs[0]
    first, *others = (
        with_evaluation(own, record, e) for own, e in zip(graph.kinds, examples, strict=True)
    )
    return replace(first, others=(*others,), compiles=compile, tensor_parallel=tensor_parallel)


def with_evaluation(
    graph: LayerGraph, record: Callable[..., Recorded], example: Batch
) -> LayerGraph:
    """A graph with that of evaluation mode, if it makes other calls there and has these layers.

    Where the model or its loss function gives no loss then, that has the model's outputs only.
    """
    program = graph.program
    for with_loss in () if graph.recorded.evaluates_alike else (True, False):
        try:
            leaves = graph.layout.flatten(example)
            recorded = record(program, leaves, training=False, with_loss=with_loss)
            found = LayerGraph.of(program, recorded, kinds=2)
            if found.cut.follow(graph.cut):
                return replace(graph, in_evaluation=found if with_loss else found.without_loss())
        except PenstockError:
            continue
    return graph


def with_path(graph: LayerGraph, kind: int, batch: Batch) -> LayerGraph:
    """``graph`` with one more kind of batch: as ``kind``, with the path that its loss takes now."""
    first, like = graph.kinds[0], graph.kinds[kind]
    if len(graph.kinds) == MOST_PATHS:
        raise BadInput(
            f"the loss has taken {MOST_PATHS} paths, and each takes a record; write what changes "
            f"as a factor or a tensor, with the same calls in every step"
        )
    plain = like.record
    assert plain is not None

    def record(program: UserProgram, leaves: list[torch.Tensor], **options: Any) -> Recorded:
        twice = [torch.cat([leaf, leaf]) for leaf in leaves]  # fewer samples have each row, too
        found = plain(program, twice, **options)
        found.size = BatchSize(len(leaves[0]), found.size.lengths)
        return found

    try:
        recorded = record(like.program, like.layout.flatten(batch))
    except CaptureFailed as problem:
        if isinstance(need := problem.__cause__, NeedsValues):
            raise BadInput(
                f"it needs {need}, which only one rank has, at {line_of(need.__traceback__)}; "
                f"write it with tensor operations, such as torch.where"
            ) from problem
        raise
    found = LayerGraph.of(like.program, recorded, kinds=len(graph.kinds) + 1)
    found.state.starts_training = like.state.starts_training
    found = replace(found, wants=like.wants, alone=like.alone, record=plain)
    if not found.cut.follow(like.cut):
        raise BadInput("the model cannot be cut there as it was; keep these layers in one stage")
    kinds = (*graph.kinds, with_evaluation(found, record, batch))
    for own in kinds:
        own.cut.kinds = tuple(other.cut for other in kinds)
    return replace(first, others=kinds[1:])


def recorded_as(
    program_of: Callable[[BatchLayout], UserProgram],
    record: Callable[[UserProgram, list[torch.Tensor]], Recorded],
    layout: BatchLayout,
    example: Batch,
    *,
    kinds: int,
) -> LayerGraph:
    """The graph of one example; again, if it reads entries without tensors, which are constants."""
    while True:
        program = program_of(layout)
        program.check()
        try:
            recorded = record(program, layout.flatten(example))
            found = replace(LayerGraph.of(program, recorded, kinds=kinds), record=record)
        except PenstockError:
            read = entries_read(layout, failed=True)
            if not read:
                raise
        else:
            read = entries_read(layout, failed=False)
            if not read:
                return found
        layout = layout.with_constants(read)


def the_only_one(
    layouts: Sequence[BatchLayout], said: RowsOf, recorded: Callable[[BatchLayout], LayerGraph]
) -> LayerGraph:
    """The graph by the one layout with which the program runs on parts of the batch."""
    found, problems = list[LayerGraph](), list[PenstockError]()
    for layout in layouts:
        taken = [i for i in sorted(layout.shared) if key_in_batch(layout.paths[i]) not in said]
        names = ", ".join(layout.leaves[i].name for i in taken)
        try:
            graph = recorded(layout)
        except PenstockError as problem:
            if not names:
                problems.append(problem)
                continue
            text = f"{problem} ({names}: taken to be shared by all {layout.batch_size} samples)"
            problems.append(type(problem)(text))
            problems[-1].__cause__ = problem
            continue
        mixing = graph.recorded.parts.mixing or graph.whole_loss
        if names and mixing:
            zeros = {key_in_batch(layout.paths[i]): 0 for i in taken}
            problems.append(
                BadInput(
                    f"it is not clear whether all {layout.batch_size} samples share {names}, since "
                    f"then it mixes samples ({mixing}); say it with rows={zeros}, or say how many "
                    f"rows each sample has"
                )
            )
            continue
        found.append(graph)
    if not found:
        raise problems[0]
    found = [graph for graph in found if not graph.recorded.sizes.any_shrinks] or found
    one, *others = (graph.layout for graph in found)
    record, loss = found[0].recorded.record, found[0].recorded.loss
    read = found[0].cut.leaves_of(record.behind([record.values[loss].maker]))
    for other in others:
        unlike = [i for i in sorted(read) if one.leaves[i].rows != other.leaves[i].rows]
        if unlike:
            ways = [
                {key_in_batch(own.paths[i]): own.leaves[i].rows for i in unlike}
                for own in (one, other)
            ]
            raise BadInput(
                f"the batch does not show which of its tensors all samples share (0 rows each): "
                f"the model runs with rows={ways[0]} and with rows={ways[1]}; pass one of them to "
                f"capture_model, or as [rows] of the job"
            )
    return found[0]


def entries_read(layout: BatchLayout, *, failed: bool) -> list[UnreadEntry]:
    """The entries without tensors that must be constants, since the program has read them.

    If it ``failed`` without that, a kernel may have refused a placeholder: then these are all that
    can be constants.
    """
    read = [entry for entry in layout.unread if entry.readers]
    for entry in read:
        if not is_plain(entry.value):
            raise entry.refusal
    return read or [entry for entry in layout.unread if failed and is_plain(entry.value)]


def check_wrappers(model: nn.Module) -> None:
    """Raise `BadInput` for wrappers that do themselves what a pipeline does."""
    for name, part in model.named_modules():
        what = f"'{name}'" if name else "the model"
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise BadInput(
                f"{what} is a {type(part).__name__}, whose work a pipeline does itself: it sums "
                f"the gradients of replicas; pass the bare module (its .module)"
            )
        if hasattr(part, "_orig_mod") or vars(part).get(COMPILED_CALL) is not None:
            raise BadInput(
                f"{what} is compiled, and a pipeline compiles stages, not modules; pass the bare "
                f"module, and capture_model(..., compile=True) if its stages are to be compiled"
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise BadInput(
                f"'{name}' is a SyncBatchNorm, which is not needed here: the replicas of a stage "
                f"share the statistics of each micro-batch; leave convert_sync_batchnorm out"
            )
