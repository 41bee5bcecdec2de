"""Which linear layers of a model tensor parallelism divides, and along which dimension."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from penstock.capture.layer_graph import LayerGraph, Parallelize, SplitTable
from penstock.errors import BadInput

PER_HEAD = "replicated_with_grad_allreduce"
"""Of a plan of Hugging Face: a norm of heads, of which each rank sees its own."""


def function_of(graph: LayerGraph) -> Parallelize:
    """The function that divides a graph's model: the user's, or one that follows a table."""
    given = graph.tensor_parallel
    if callable(given):
        return given
    return partial(parallelize_layers, layers=divided_layers(graph.model, given))


def parallelize_layers(model: nn.Module, mesh: Any, *, layers: Mapping[str, str]) -> None:
    """Divide layers by `parallelize_module`; between a colwise and a rowwise one run shards.

    That is so where both are parts of one module; other layers take and give whole tensors. A norm
    of heads is whole, and the gradients of the ranks' heads are summed.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    known = {(name.rpartition(".")[0], kind) for name, kind in layers.items()}
    styles: dict[str, Any] = {}
    for name, kind in layers.items():
        parent = name.rpartition(".")[0]
        other = "rowwise" if kind == "colwise" else "colwise"
        between = Shard(-1) if (parent, other) in known else Replicate()
        if kind == "colwise":
            styles[name] = ColwiseParallel(output_layouts=between)
        elif kind == "rowwise":
            styles[name] = RowwiseParallel(input_layouts=between)
        elif between.is_shard():
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    parallelize_module(model, mesh, styles)


def divided_layers(model: nn.Module, table: SplitTable | None) -> dict[str, str]:
    """The layers that a table, or the model's own, divides, by full names."""
    modules = dict(model.named_modules())
    layers: dict[str, str] = {}
    for pattern, split in (own_table(model) if table is None else table).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        found = [
            name
            for name, module in modules.items()
            if expression.fullmatch(name) and isinstance(module, nn.Linear) != (split == PER_HEAD)
        ]
        if table is not None and not (found and split in ("colwise", "rowwise")):
            raise BadInput(
                f'tensor_parallel says "{split}" for \'{pattern}\', which must be "colwise" or '
                f'"rowwise" for linear layers (torch.nn.Linear) of the model; they are named as in '
                f"named_modules(), with * for any one part"
            )
        layers |= dict.fromkeys(found, split)
    return layers


def own_table(model: nn.Module) -> Mapping[str, str]:
    """The colwise and rowwise layers, and norms of heads, of a Hugging Face model's own plan."""
    config: Any = getattr(model, "config", None)
    own: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix = str(getattr(model, "base_model_prefix", ""))
    start = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    styles = ("colwise", "rowwise", PER_HEAD)
    found = {start + pattern: split for pattern, split in own.items() if split in styles}
    if not found:
        raise BadInput(
            f"model {type(model).__name__} does not say how its layers are divided among the ranks "
            f"of a tensor group (it has no base_model_tp_plan); give capture_model (in a job: "
            f"tensor_parallel.layers) a table tensor_parallel of its linear layers, such as "
            f'{{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}'
        )
    return found
