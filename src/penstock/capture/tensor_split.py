"""Which linear layers of a model tensor parallelism divides, and along which dimension."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from penstock.capture.layer_graph import LayerGraph, SplitTable
from penstock.errors import BadInput

DIMS = {
    ("colwise", "weight"): 0,
    ("colwise", "bias"): 0,
    ("rowwise", "weight"): 1,
}
"""The dimension of a linear layer's tensor that is divided; a rowwise layer's bias is whole."""


def divided_dims(graph: LayerGraph) -> dict[str, int]:
    """The divided dimension of each parameter that the graph's table divides."""
    modules = dict(graph.model.named_modules())
    dims: dict[str, int] = {}
    for name, split in divided_layers(graph).items():
        for kind in ("weight", "bias"):
            if (split, kind) in DIMS and getattr(modules[name], kind) is not None:
                dims[f"{name}.{kind}"] = DIMS[split, kind]
    names = {use.name for use in graph.parameter_uses}
    tied = {*graph.tied_names, *graph.tied_names.values()}
    if both := sorted(tied & set(dims)):
        raise BadInput(
            f"parameter '{both[0]}' is tied to another, so a tensor group cannot divide it; leave "
            f"its layer out of tensor_parallel"
        )
    return {name: dim for name, dim in dims.items() if name in names}


def divided_layers(graph: LayerGraph) -> SplitTable:
    """The linear layers that the graph's table, or the model's own, divides, by full names."""
    modules = dict(graph.model.named_modules())
    layers: dict[str, Literal["colwise", "rowwise"]] = {}
    table = graph.tensor_parallel
    for pattern, split in (own_table(graph.model) if table is None else table).items():
        found = matching(modules, pattern)
        if table is not None:
            check_pattern(modules, found, pattern, split)
        layers |= {name: split for name in found if isinstance(modules[name], nn.Linear)}
    return layers


def own_table(model: nn.Module) -> SplitTable:
    """The colwise and rowwise layers of a Hugging Face model's own plan."""
    config: Any = getattr(model, "config", None)
    own: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix = str(getattr(model, "base_model_prefix", ""))
    start = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    found: dict[str, Literal["colwise", "rowwise"]] = {}
    for pattern, split in own.items():
        if split == "colwise" or split == "rowwise":
            found[start + pattern] = split
    if not found:
        raise BadInput(
            f"model {type(model).__name__} does not say how its layers are divided among the ranks "
            f"of a tensor group (it has no base_model_tp_plan); give capture_model (in a job: "
            f"tensor_parallel.layers) a table tensor_parallel of its linear layers, such as "
            f'{{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}'
        )
    return found


def matching(modules: Mapping[str, nn.Module], pattern: str) -> list[str]:
    """The names that match; ``*`` stands for one part of a name.

    >>> matching({"a.0.q": nn.Linear(1, 1), "a.0.b.q": nn.Linear(1, 1)}, "a.*.q")
    ['a.0.q']
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in modules if expression.fullmatch(name)]


def check_pattern(
    modules: Mapping[str, nn.Module], found: list[str], pattern: str, split: str
) -> None:
    """Raise `BadInput` for an entry of the user's table that cannot be followed."""
    if split not in ("colwise", "rowwise"):
        raise BadInput(
            f'tensor_parallel says "{split}" for \'{pattern}\'; it must be "colwise" or "rowwise"'
        )
    if not found:
        raise BadInput(
            f"tensor_parallel names '{pattern}', and the model has no such layer; layers are named "
            f"as in named_modules(), with * for any one part"
        )
    for name in found:
        if not isinstance(modules[name], nn.Linear):
            raise BadInput(
                f"tensor_parallel names '{name}', a {type(modules[name]).__name__}; only linear "
                f"layers (torch.nn.Linear) can be divided, so leave it out"
            )
