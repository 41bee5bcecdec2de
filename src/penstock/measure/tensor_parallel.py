"""Add to a profile what tensor groups divide of the model, as the function that divides it shows.

The function divides a copy of the model without values (on the meta device), over a mesh of ranks
that are not there. That takes neither memory nor other processes.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.capture.contract import Batch
from penstock.capture.cut.tensor_split import function_of
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.profile.model_profile import ModelProfile, TensorParallelCosts
from penstock.torch_internals import TorchDispatchMode, fake_mesh, own_parameters, pytree

RANKS = 2
"""The ranks of the mesh: what is divided is the same for any number."""

SUMS = {"allreduce": 1.0, "allgather": 0.5, "reducescatter": 0.5, "alltoall": 0.5}
"""Time of an operator of torch in a ring, relative to an all-reduce of the same bytes."""


def with_tensor_parallel(profile: ModelProfile, graph: LayerGraph, batch: Batch) -> ModelProfile:
    """``profile`` with what a tensor group divides of each layer, and what it has to sum.

    The share of a layer that is divided is computed, not measured: it is that of its parameters'
    bytes, also for its time, so a layer without divided parameters counts as whole. What a group
    sums in the forward it sums in the backward, too. A forward that reads values does not run on
    the meta device, and its sums count as none.
    """
    if len(profile.layers) != len(graph.layer_names):
        raise BadInput(
            f"profile '{profile.name}' has {len(profile.layers)} layers and model {graph.name} "
            f"{len(graph.layer_names)}; profile this captured model"
        )
    dims, exchanged = divided_parts(graph, batch)
    layers = len(profile.layers)
    whole, shared = [0.0] * layers, [0.0] * layers
    sums, sum_bytes = [0.0] * layers, [0.0] * layers
    first: dict[str, int] = {}
    for use in graph.parameter_uses:
        first[use.name.rpartition(".")[0]] = use.layers[0]
        for layer in use.layers if use.requires_grad and not use.is_buffer else ():
            whole[layer] += use.bytes
            shared[layer] += use.bytes * (use.name in dims)
    for path, (number, size) in exchanged.items():
        sums[first.get(path, 0)] += 2 * number
        sum_bytes[first.get(path, 0)] += 2 * size
    shares = tuple(part / (every or 1) for part, every in zip(shared, whole, strict=True))
    joined, experts = joined_layers(graph, dims), -3 in dims.values()
    costs = TensorParallelCosts(shares, tuple(sums), tuple(sum_bytes), (), joined, experts)
    return replace(profile, tensor_parallel=costs)


def divided_parts(
    graph: LayerGraph, batch: Batch
) -> tuple[dict[str, int], dict[str, tuple[float, float]]]:
    """The parts that the graph's function divides, found without values or other processes.

    The first are the dimensions of divided parameters, from the last (-1) on; that of experts is
    -3. The second are, by paths of modules, the number of all-reduces of a forward, and their bytes
    for one sample.
    """
    from torch.distributed.tensor import DTensor

    parallelize, model = function_of(graph), on_meta(graph.model)
    leaves = graph.batch_leaves(batch)[: len(graph.layout.leaves)]
    given = {index: leaf.to("meta") for index, leaf in enumerate(leaves)}
    with fake_mesh(RANKS) as mesh:
        parallelize(model, mesh)
        dims = {
            graph.tied_names.get(name, name): getattr(tensor.placements[0], "dim", 0) - tensor.dim()
            for name, tensor in model.named_parameters(remove_duplicate=False)
            if isinstance(tensor, DTensor) and not tensor.placements[0].is_replicate()
        }
        seen = Collectives(model)
        with suppress(RuntimeError, NotImplementedError), seen, torch.no_grad():
            graph.program.call.call(model, given)
    samples = leaves[0].shape[0]
    return dims, {path: (number, size / samples) for path, (number, size) in seen.found.items()}


def joined_layers(graph: LayerGraph, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The layers whose results are divided: from a weight that divides outputs to one of inputs.

    That is so within one module, whose parts the layers are.
    """
    found, begun = set[int](), dict[str, int]()
    for use in sorted(graph.parameter_uses, key=lambda use: use.layers[0]):
        path, _, kind = use.name.rpartition(".")
        parent, dim = path.rpartition(".")[0], dims.get(use.name) if kind == "weight" else None
        if dim == -1 and parent in begun:
            found |= {*range(begun.pop(parent), use.layers[0])}
        elif dim == -2:
            begun.setdefault(parent, use.layers[0])
    return tuple(sorted(found))


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model without values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        blank = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if is_parameter else blank
    return copy.deepcopy(model, memo)


class Collectives(TorchDispatchMode):
    """Counter of what ranks exchange while it is active: ``found[path]`` is number and bytes.

    The path is that of the latest module with parameters of its own whose forward has begun: what
    is exchanged before or after its forward is its part.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._path = ""
        for path, module in model.named_modules():
            if own_parameters(module):
                module.register_forward_pre_hook(partial(self._enter, path), prepend=True)

    def _enter(self, path: str, *_: Any) -> None:
        self._path = path

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it makes the operators on shards first
        result, name = func(*args, **(kwargs or {})), str(func).replace("_", "")
        weight = next((weight for kind, weight in SUMS.items() if kind in name), 0.0)
        if "c10d" in name and weight:
            tensors = [t for t in pytree.tree_leaves((args, result)) if torch.is_tensor(t)]
            number, size = self.found[self._path]
            most = max(tensor.nbytes for tensor in tensors)
            self.found[self._path] = number + weight, size + weight * most
        return result
