"""Makes the layer graph of a model from one example batch, by recording its calls."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import nn

from penstock.capture.batch_call import BatchCall, as_function
from penstock.capture.batch_layout import layout_of
from penstock.capture.chain import Chain
from penstock.capture.kinds import dynamic_in, joined
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import Dynamic
from penstock.capture.record.example import record_program
from penstock.capture.record.units import Granularity
from penstock.capture.record.user_program import UserProgram
from penstock.capture.stage_program import Batch, Loss
from penstock.errors import BadInput

__all__ = ["Granularity", "capture_model"]


def capture_model(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    granularity: Granularity = "module",
    dynamic: Dynamic | None = None,
    autocast: torch.dtype | None = None,
    other_examples: Sequence[Batch] = (),
) -> LayerGraph:
    """The layers of ``model`` with its loss, and the tensors between them.

    ``dynamic`` names the dimensions of the batch that vary besides the samples, for example
    ``{"input_ids": {1: "length"}, "labels": {1: "length"}}``; equal names mean equal sizes.

    ``other_examples`` is a list with a batch of each further kind, as those that lack a key. Costs
    and sizes are those of ``batch``, so let that be of the kind that takes most.

    The model stays unchanged. A model in evaluation mode is captured in training mode; modules in
    evaluation mode inside a model in training mode stay so (frozen batch norms).

    Raises:
        BadInput: the batch does not fit the model, the loss is not a scalar or cannot be computed
            from slices of a batch, the granularity is unknown, or two examples are of one kind.
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
    function, entry = as_function(loss), model
    if isinstance(model, Chain):
        entry = model.get_submodule(model.layer_names[0])
        if function is not None and model.loss is not None and function is not model.loss:
            raise BadInput(
                "the chain has a loss function and another was passed as loss=...; pass only one"
            )
        function = function or model.loss
    examples, graphs = [batch, *other_examples], list[LayerGraph]()
    for example in examples:
        layout = layout_of(example, dynamic_in(dynamic, example, examples))
        call = BatchCall.of(layout, entry.forward, has_loss=function is not None)
        program = UserProgram(model, function, call)
        program.check()
        leaves = layout.flatten(example)
        recorded = record_program(program, leaves, granularity=granularity, autocast=autocast)
        graphs.append(LayerGraph.of(program, recorded))
    return joined(graphs, examples) if other_examples else graphs[0]


def check_wrappers(model: nn.Module) -> None:
    """Raise `BadInput` for wrappers that do themselves what a pipeline does."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise BadInput(
            "the model is a DistributedDataParallel, whose work a pipeline does itself: it sums "
            "the gradients of replicas; pass the bare module (model.module)"
        )
    for name, part in model.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise BadInput(
                f"'{name}' is a SyncBatchNorm, which is not needed here: the replicas of a stage "
                f"share the statistics of each micro-batch; leave convert_sync_batchnorm out"
            )
