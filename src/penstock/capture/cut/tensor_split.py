"""Linear layers of a model that tensor parallelism divides, and the dimension of each."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from penstock.capture.layer_graph import LayerGraph, Parallelize, SplitTable
from penstock.errors import BadInput

PER_HEAD = "replicated_with_grad_allreduce"
"""Style in Hugging Face plans for a norm of heads, of which each rank sees its own."""


def function_of(graph: LayerGraph) -> Parallelize:
    """The function that divides a graph's model: the user's, or one that follows a table."""
    given = graph.tensor_parallel
    if callable(given):
        return given
    return partial(parallelize_layers, layers=divided_layers(graph.model, given))


def parallelize_layers(model: nn.Module, mesh: Any, *, layers: Mapping[str, str]) -> None:
    """Divide layers by `parallelize_module`; between a colwise and a rowwise one run shards.

    That is so where both are parts of one module; other colwise layers give whole tensors. Rowwise
    layers take whole tensors, too, as those that a stage has received. A norm of heads is whole,
    and the gradients of the ranks' heads are summed.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def take_whole(module: nn.Linear, args: tuple[Any, ...]) -> Any:
        if isinstance(args[0], DTensor) or args[0].shape[-1] != module.in_features:
            return None
        placed = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        return placed.redistribute(placements=[Shard(-1)]), *args[1:]

    known = {(name.rpartition(".")[0], kind) for name, kind in layers.items()}
    styles: dict[str, Any] = {}
    for name, kind in layers.items():
        parent = name.rpartition(".")[0]
        if kind == "colwise":
            local = (parent, "rowwise") in known
            styles[name] = ColwiseParallel(output_layouts=Shard(-1) if local else Replicate())
        elif kind == "rowwise":
            model.get_submodule(name).register_forward_pre_hook(take_whole)
            styles[name] = RowwiseParallel()
        elif (parent, "colwise") in known:
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
