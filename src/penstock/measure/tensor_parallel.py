"""Adds to a profile what tensor groups can divide of the model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.stage_program import Batch
from penstock.capture.tensor_split import divided_dims, divided_layers
from penstock.errors import BadInput
from penstock.measure.layer_runs import undisturbed
from penstock.profile.model_profile import ModelProfile, TensorParallelCosts


def with_tensor_parallel(profile: ModelProfile, graph: LayerGraph, batch: Batch) -> ModelProfile:
    """``profile`` with what a tensor group divides of each layer, and what it has to sum.

    The share of a layer that is divided is computed, not measured: it is that of its parameters'
    bytes, also for its time, so a layer without divided parameters counts as whole. A group sums
    the output of each rowwise layer in the forward, and as much in the backward. The model runs
    forward once, to see how large these outputs are.
    """
    if len(profile.layers) != len(graph.layer_names):
        raise BadInput(
            f"profile '{profile.name}' has {len(profile.layers)} layers and model {graph.name} "
            f"{len(graph.layer_names)}; profile this captured model"
        )
    divided = divided_dims(graph)
    split = divided_layers(graph)
    rowwise = [name for name, kind in split.items() if kind == "rowwise"]
    output_bytes = bytes_of_outputs(graph, batch, rowwise)
    layers = len(profile.layers)
    whole, shared = [0.0] * layers, [0.0] * layers
    sums, sum_bytes = [0.0] * layers, [0.0] * layers
    for use in graph.parameter_uses:
        for layer in use.layers:
            if use.is_buffer or not use.requires_grad:
                continue
            whole[layer] += use.bytes
            shared[layer] += use.bytes if use.name in divided else 0.0
            module, _, kind = use.name.rpartition(".")
            if kind == "weight" and module in output_bytes:
                sums[layer] += 2
                sum_bytes[layer] += 2 * output_bytes[module]
    shares = tuple(
        part / all_of if all_of else 0.0 for part, all_of in zip(shared, whole, strict=True)
    )
    costs = TensorParallelCosts(shares, tuple(sums), tuple(sum_bytes))
    return replace(profile, tensor_parallel=costs)


def bytes_of_outputs(graph: LayerGraph, batch: Batch, names: Sequence[str]) -> Mapping[str, float]:
    """For one sample the bytes of the outputs of some modules of the model."""
    found: dict[str, float] = {}
    device = next((p.device for p in graph.model.parameters()), torch.device("cpu"))
    with undisturbed(graph, device) as own, torch.no_grad(), watched(own.model, names, found):
        leaves = [leaf.to(device) for leaf in own.batch_leaves(batch)]
        own.own_module()(*leaves)
    return {name: size / leaves[0].shape[0] for name, size in found.items()}


@contextmanager
def watched(model: nn.Module, names: Sequence[str], found: dict[str, float]) -> Iterator[None]:
    """Within, ``found`` gets the bytes of what the named modules return."""

    def watch(name: str) -> Any:
        def see(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            found[name] = found.get(name, 0.0) + output.nbytes

        return model.get_submodule(name).register_forward_hook(see)

    handles = [watch(name) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
