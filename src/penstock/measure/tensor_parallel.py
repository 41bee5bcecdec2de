"""Adds to a profile what tensor groups divide of the model, as the function that divides it shows.

The function divides a copy of the model without values (on the meta device), over a mesh of ranks
that are not there. That takes neither memory nor other processes.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.stage_program import Batch
from penstock.capture.tensor_split import function_of
from penstock.errors import BadInput
from penstock.profile.model_profile import ModelProfile, TensorParallelCosts
from penstock.torch_internals import TorchDispatchMode, fake_mesh, own_parameters, pytree

RANKS = 2
"""The ranks of the mesh: what is divided is the same for any number."""

SUMS = {
    **dict.fromkeys(("all_reduce", "allreduce_"), 1.0),
    **dict.fromkeys(("all_gather_into_tensor", "_allgather_base_", "allgather_"), 0.5),
    **dict.fromkeys(("reduce_scatter_tensor", "_reduce_scatter_base_"), 0.5),
    **dict.fromkeys(("all_to_all_single", "alltoall_base_", "alltoall_"), 0.5),
}
"""How many all-reduces of the same bytes an operator of torch takes as long as, in a ring."""


@dataclass(frozen=True)
class Divided:
    """What a function divides of a model: parameters by name, and the sums of modules by path.

    ``parameters[name]`` is the dimension, from the last (-1) on. ``sums[path]`` is the number of
    all-reduces of a forward, and their bytes for one sample.
    """

    parameters: Mapping[str, int]
    sums: Mapping[str, tuple[float, float]]


def with_tensor_parallel(profile: ModelProfile, graph: LayerGraph, batch: Batch) -> ModelProfile:
    """``profile`` with what a tensor group divides of each layer, and what it has to sum.

    The share of a layer that is divided is computed, not measured: it is that of its parameters'
    bytes, also for its time, so a layer without divided parameters counts as whole. What a group
    sums in the forward it sums in the backward, too. A forward that asks for values does not run
    on the meta device, and its sums count as none.
    """
    if len(profile.layers) != len(graph.layer_names):
        raise BadInput(
            f"profile '{profile.name}' has {len(profile.layers)} layers and model {graph.name} "
            f"{len(graph.layer_names)}; profile this captured model"
        )
    divided = divided_of(graph, batch)
    layers = len(profile.layers)
    whole, shared = [0.0] * layers, [0.0] * layers
    first: dict[str, int] = {}
    for use in graph.parameter_uses:
        first[use.name.rpartition(".")[0]] = use.layers[0]
        for layer in use.layers:
            if use.is_buffer or not use.requires_grad:
                continue
            whole[layer] += use.bytes
            shared[layer] += use.bytes if use.name in divided.parameters else 0.0
    sums, sum_bytes = [0.0] * layers, [0.0] * layers
    for path, (number, size) in divided.sums.items():
        layer = first.get(path, 0)
        sums[layer] += 2 * number
        sum_bytes[layer] += 2 * size
    shares = tuple(
        part / all_of if all_of else 0.0 for part, all_of in zip(shared, whole, strict=True)
    )
    costs = TensorParallelCosts(
        shares, tuple(sums), tuple(sum_bytes), (), joined_layers(graph, divided)
    )
    return replace(profile, tensor_parallel=costs)


def divided_of(graph: LayerGraph, batch: Batch) -> Divided:
    """What the graph's function divides, found without values, and without other processes."""
    from torch.distributed.tensor import DTensor

    parallelize, model = function_of(graph), on_meta(graph.model)
    leaves = graph.batch_leaves(batch)[: len(graph.call.layout.leaves)]
    samples = leaves[0].shape[0]
    given = {index: leaf.to("meta") for index, leaf in enumerate(leaves)}
    with fake_mesh(RANKS) as mesh:
        parallelize(model, mesh)
        names = {
            graph.tied_names.get(name, name): getattr(tensor.placements[0], "dim", 0) - tensor.dim()
            for name, tensor in model.named_parameters(remove_duplicate=False)
            if isinstance(tensor, DTensor) and not tensor.placements[0].is_replicate()
        }
        seen = Collectives(model)
        with suppress(RuntimeError, NotImplementedError), seen.watching(), torch.no_grad():
            graph.call.call(model, given)
    sums = {path: (number, size / samples) for path, (number, size) in seen.found.items()}
    return Divided(names, sums)


def joined_layers(graph: LayerGraph, divided: Divided) -> tuple[int, ...]:
    """The layers whose results are divided: from a weight that divides outputs to one of inputs.

    That is so within one module, whose parts the layers are.
    """
    layers = {use.name: use.layers[0] for use in graph.parameter_uses}
    found, begun = set[int](), dict[str, int]()
    for name, dim in sorted(divided.parameters.items(), key=lambda item: layers.get(item[0], 0)):
        path, _, kind = name.rpartition(".")
        parent = path.rpartition(".")[0]
        if kind != "weight" or name not in layers:
            continue
        if dim == -1 and parent in begun:
            found |= {*range(begun.pop(parent), layers[name])}
        elif dim == -2:
            begun.setdefault(parent, layers[name])
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
    """While `watching`, counts what ranks exchange: ``found[path]`` is the number and the bytes.

    The path is that of the latest module with parameters of its own whose forward has begun: what
    is exchanged before or after its forward is its part.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._path = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, modules and operators are seen."""

        def see(module: nn.Module, _: Any) -> None:
            if own_parameters(module) and id(module) in self._paths:
                self._path = self._paths[id(module)]

        handle = register_module_forward_pre_hook(see)
        try:
            with self:
                yield
        finally:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it makes the operators on shards first
        result = func(*args, **(kwargs or {}))
        weight = SUMS.get(str(func).split(".")[1]) if "c10d" in str(func) else None
        if weight is not None:
            tensors = [t for t in pytree.tree_leaves((args, result)) if torch.is_tensor(t)]
            number, size = self.found[self._path]
            most = max(tensor.nbytes for tensor in tensors)
            self.found[self._path] = number + weight, size + weight * most
        return result
