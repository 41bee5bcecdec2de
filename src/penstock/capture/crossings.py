"""Which tensors of a traced graph pass from which layer to which."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from penstock.capture.dataflow import Dataflow
from penstock.capture.layer_graph import TensorSpec
from penstock.capture.layers import Layers
from penstock.capture.tensor_specs import TensorFacts

__all__ = [
    "Crossings",
    "crossings_of",
    "find_crossings",
    "layer_needs",
    "layer_of_work",
    "needs_of",
]


@dataclass(frozen=True)
class Crossings:
    """Tensors that later layers read, in order of execution: spec, producer and consumers."""

    specs: Mapping[fx.Node, TensorSpec]
    made_by: Mapping[fx.Node, int]
    read_by: Mapping[fx.Node, tuple[int, ...]]


def layer_of_work(flow: Dataflow, layers: Layers) -> dict[fx.Node, int]:
    """The layer of every work node."""
    found: dict[fx.Node, int] = {}
    layer = 0
    for position, node in enumerate(flow.work):
        while layer + 1 < len(layers.starts) and position >= layers.starts[layer + 1]:
            layer += 1
        found[node] = layer
    return found


def layer_needs(flow: Dataflow, layers: Layers) -> list[set[fx.Node]]:
    """What each layer reads in training: work of any layer, attributes, leaves."""
    needs = needs_of(flow, layer_of_work(flow, layers), layers)
    output = next(n for n in flow.clean.graph.nodes if n.op == "output")
    needs[-1] |= flow.needs[output]
    return needs


def needs_of(flow: Dataflow, layer_of: Mapping[fx.Node, int], layers: Layers) -> list[set[fx.Node]]:
    """What the work of each layer reads."""
    needs: list[set[fx.Node]] = [set() for _ in layers.names]
    for node, layer in layer_of.items():
        needs[layer] |= flow.needs[node]
    return needs


def find_crossings(
    flow: Dataflow, facts: TensorFacts, layers: Layers, batch_size: int
) -> Crossings:
    """The crossings in training."""
    layer_of = layer_of_work(flow, layers)
    return crossings_of(layer_needs(flow, layers), layer_of, facts, layers, batch_size)


def crossings_of(
    needs: list[set[fx.Node]],
    layer_of: Mapping[fx.Node, int],
    facts: TensorFacts,
    layers: Layers,
    batch_size: int,
) -> Crossings:
    """The crossings if the layers read ``needs``."""
    specs: dict[fx.Node, TensorSpec] = {}
    read_by: dict[fx.Node, tuple[int, ...]] = {}
    for node, layer in layer_of.items():
        readers = tuple(r for r in range(layer + 1, len(needs)) if node in needs[r])
        if readers:
            read_by[node] = readers
            specs[node] = facts.spec(node, layers.names[layer], batch_size)
    return Crossings(specs, {node: layer_of[node] for node in read_by}, read_by)
