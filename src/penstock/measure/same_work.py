"""Recognise layers that do the same work."""

import re
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.forward.stage_module import StageModule
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.calls import TensorReference
from penstock.capture.record.model_state import PLAIN
from penstock.measure.layer_runs import LayerRun
from penstock.profile.model_profile import Affine, Edge, SharedParameter
from penstock.torch_internals import pytree, storage_id

_NUMBER = re.compile("idx|index|layer_id|layer_num")
"""Names of attributes in which modules keep their own number in a list of blocks."""


def work_of(run: LayerRun) -> Hashable:
    """The calls of a layer and the shapes of its inputs: equal for layers of equal cost."""
    inputs = (*run.leaves, *run.received)
    addresses = [storage_id(tensor) for tensor in inputs]
    given = tuple(
        (_shape(tensor), addresses.index(address))
        for tensor, address in zip(inputs, addresses, strict=True)
    )
    return given, run.program.is_last, _calls(run.program.module)


def _shape(tensor: torch.Tensor) -> Hashable:
    plain = (tensor.dtype, tensor.device, tensor.requires_grad)
    return (tuple(tensor.shape), tensor.stride(), *plain)


def _calls(stage: StageModule) -> Hashable:
    """The calls of a stage: units by what they are made of, functions, and all arguments.

    Its own tensors count by shape. What is made of the batch alone counts by identity: two masks
    may let kernels do different work.
    """
    record, tensors, part = stage.graph.recorded.record, stage.graph.program.tensors, stage.part
    received = {value: index for index, value in enumerate(part.received)}

    def value_of(value: int) -> Hashable:
        known = record.values[value]
        if part.first <= known.maker < part.last:
            return "made", known.maker - part.first, known.slot
        return ("received", received[value]) if value in received else ("batch", value)

    def parameter(name: str) -> Hashable:
        return described(tensors.parameters[tensors.tied.get(name, name)])

    described = _Described()
    lines: list[Hashable] = []
    for event in record.events[part.first : part.last]:
        what: Hashable = event.func
        if event.is_unit:
            path = event.address[0]
            described.own = {int(name) for name in path.split(".") if name.isdigit()}
            what = described(stage.get_submodule(path))
        leaves, spec = pytree.tree_flatten(event.args)
        given: list[Hashable] = []
        for leaf in leaves:
            if not isinstance(leaf, TensorReference):
                given.append(described(leaf))
            elif isinstance(leaf.value, str):
                given.append(parameter(leaf.value))
            else:
                of = "constant" if leaf.value is None else value_of(leaf.value)
                given.append((of, leaf.shape, leaf.dtype))
        others = (*map(value_of, event.reads), *map(parameter, event.params))
        lines.append((what, str(spec), tuple(given), others))
    return tuple(lines), tuple(map(value_of, part.sent))


class _Described:
    """A description of modules, attributes and arguments by what decides about work.

    Tensors count by shape, and other objects by identity. A module's number in a list of blocks
    (``layer_idx`` of ``layers.3``), which is one of ``own``, is left out.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any) -> Hashable:
        """The description of a value."""
        if isinstance(value, PLAIN):
            return type(value), repr(value) if isinstance(value, float) else value
        if isinstance(value, list | tuple | set | frozenset):
            return type(value), tuple(map(self, value))
        if isinstance(value, dict):
            return tuple((self(key), self(entry)) for key, entry in value.items())
        if not isinstance(value, torch.Tensor | nn.Module):
            return id(value)
        first = len(self._seen)
        number = self._seen.setdefault(id(value), first)
        if number < first:
            return "again", number
        if isinstance(value, torch.Tensor):
            return _shape(value)
        return type(value), tuple(map(self._attribute, *zip(*vars(value).items(), strict=True)))

    def _attribute(self, key: str, value: Any) -> Hashable:
        if key.endswith("_hooks"):
            return key, self(list(value.values()))
        if type(value) is int and value in self.own and _NUMBER.search(key):
            return key
        return key, self(value)


def parameter_bytes_of(
    graph: LayerGraph,
) -> tuple[list[tuple[int, int]], tuple[SharedParameter, ...]]:
    """The bytes of each layer's own parameters and of its buffers; and shared parameters.

    Parameters that are not trained need no gradient and no optimizer state, so they count as
    buffers. If several layers use one, it counts for each, since each may be on another stage.
    """
    own = [(0, 0)] * len(graph.layer_names)
    shared: list[SharedParameter] = []
    for use in graph.parameter_uses:
        if not use.layers:
            continue
        first = use.layers[0]
        parameters, buffers = own[first]
        if use.is_buffer:
            own[first] = (parameters, buffers + use.bytes)
        elif not use.requires_grad:
            for layer in use.layers:
                own[layer] = (own[layer][0], own[layer][1] + use.bytes)
        elif len(use.layers) > 1:
            shared.append(SharedParameter(use.name, use.bytes, use.layers))
        else:
            own[first] = (parameters + use.bytes, buffers)
    return own, tuple(shared)


def edges_of(graph: LayerGraph, lengths: LengthsOf) -> tuple[Edge, ...]:
    """One edge for each tensor and layer that reads it, for batches of these lengths.

    Bytes are affine in the number of samples.
    """
    edges: list[Edge] = []
    for example, producer, consumers in graph.crossings:
        spec = example.at(lengths)
        one, two = spec.bytes_for(1), spec.bytes_for(2)
        size = Affine(float(2 * one - two), float(two - one))
        back = size if spec.requires_grad else Affine()
        edges += (Edge(producer, consumer, spec.name, size, back) for consumer in consumers)
    return tuple(edges)
