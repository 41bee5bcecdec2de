"""What is known about each tensor of a captured graph: its samples, and whether it has a gradient.

The samples' dimension is known from the symbolic shape. If samples and another dimension were
flattened together, their order decides whether rows can be divided among replicas:

    (samples, words) -> flatten   0 0 0 1 1 1 2 2 2   sample after sample: rows can be cut
    (words, samples) -> flatten   0 1 2 0 1 2 0 1 2   they cannot
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import sympy
import torch
from torch import fx

from penstock.capture.cleaning import CleanGraph, in_autocast
from penstock.capture.layer_graph import TensorSpec
from penstock.capture.lengths import SizeFormula
from penstock.capture.operators import (
    facts_of,
    is_view,
    packet_name,
    shares_storage,
    tensor_value,
    written_inputs,
)
from penstock.capture.regions import with_gradients
from penstock.capture.sizes import BatchSymbols

__all__ = ["TensorFacts", "find_facts"]

ONE = sympy.Integer(1)
_NO_GRADIENT = frozenset(
    ["detach", "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"]
)
_REORDERS_ROWS = frozenset(
    ["cat", "flip", "gather", "index_select", "repeat", "roll", "sort", "stack", "tile"]
)


@dataclass(frozen=True)
class _Samples:
    """Where the samples are: dimension (-1 for none), rows per sample, and whether in order.

    ``rows`` is a number, or a formula of the lengths.
    """

    dim: int
    rows: sympy.Expr
    ordered: bool


@dataclass(frozen=True)
class TensorFacts:
    """Facts about the tensors of a graph, by node."""

    samples: Mapping[fx.Node, _Samples]
    with_gradient: frozenset[fx.Node]
    sampled: Collection[fx.Node]
    symbols: BatchSymbols

    def can_cross(self, node: fx.Node) -> bool:
        """Whether a spec can describe the node's value for every number of samples."""
        return node in self.samples

    def can_be_recut(self, node: fx.Node) -> bool:
        """Whether replicas can exchange rows of the value."""
        facts = self.samples[node]
        return facts.ordered if facts.dim >= 0 else node not in self.sampled

    def spec(self, node: fx.Node, layer_name: str, batch_size: int) -> TensorSpec:
        """The spec of the node's value, named after the layer that makes it."""
        value, facts = tensor_value(node), self.samples[node]
        assert value is not None
        formulas = [self.symbols.formula(size) for size in value.shape]
        rows = self.symbols.varying(facts.rows)
        varying = [
            (dim, found)
            for dim, formula in enumerate(formulas)
            if dim != facts.dim and (found := self.symbols.varying(formula)) is not None
        ]
        example = self.symbols.example
        rows_per_sample = SizeFormula(facts.rows).at(example)
        shape = [
            batch_size * rows_per_sample if dim == facts.dim else SizeFormula(formula).at(example)
            for dim, formula in enumerate(formulas)
        ]
        return TensorSpec(
            f"{layer_name}/{node.name}",
            tuple(shape),
            value.dtype,
            facts.dim,
            rows_per_sample,
            node in self.with_gradient,
            not self.can_be_recut(node),
            tuple(varying),
            rows,
        )


def find_facts(clean: CleanGraph, sampled: Collection[fx.Node]) -> TensorFacts:
    """The facts about every tensor of the graph."""
    samples: dict[fx.Node, _Samples] = {}
    with_gradient: set[fx.Node] = set()
    for node in clean.graph.nodes:
        found = _samples(node, samples, clean.symbols)
        if found is not None:
            samples[node] = found
        if _has_gradient(node, with_gradient):
            with_gradient.add(node)
            with_gradient |= _written_storage(node)
    return TensorFacts(samples, frozenset(with_gradient), sampled, clean.symbols)


def _samples(
    node: fx.Node, known: Mapping[fx.Node, _Samples], symbols: BatchSymbols
) -> _Samples | None:
    value = tensor_value(node)
    if value is None:
        return None
    varying = [dim for dim, size in enumerate(value.shape) if not symbols.is_fixed(size)]
    if not varying:
        return _Samples(-1, ONE, True)
    if len(varying) > 1:
        return None
    dim = varying[0]
    rows = symbols.rows_factor(value.shape[dim])
    if rows is None:
        return None
    found = _Samples(dim, rows, True)
    return _Samples(dim, rows, _ordered(node, value, found, known, symbols))


def _ordered(
    node: fx.Node,
    value: torch.Tensor,
    found: _Samples,
    known: Mapping[fx.Node, _Samples],
    symbols: BatchSymbols,
) -> bool:
    """Whether rows go sample after sample, given that of the inputs."""
    if node.op != "call_function":
        return True
    batched = [n for n in node.all_input_nodes if n in known and known[n].dim >= 0]
    if not all(known[n].ordered for n in batched):
        return False
    name = packet_name(node)
    if is_view(node) and batched:
        source, shape = known[batched[0]], tensor_value(batched[0])
        assert shape is not None
        if name in ("view", "reshape", "flatten", "unflatten", "_unsafe_view"):
            before = prod(map(symbols.formula, shape.shape[: source.dim]), start=ONE)
            return before == prod(map(symbols.formula, value.shape[: found.dim]), start=ONE)
        return source.rows == found.rows
    if name in _REORDERS_ROWS and _acts_on(node, found.dim, value.dim()):
        return False
    same = all(known[n].rows == found.rows for n in batched)
    return same or found.rows == 1 or name == "repeat_interleave"


def _acts_on(node: fx.Node, dim: int, dims: int) -> bool:
    """Whether an operator that moves rows does so along ``dim``; assumed if unknown."""
    name = packet_name(node)
    if name in ("repeat", "tile"):
        counts = node.args[1] if len(node.args) > 1 else ()
        counts = counts if isinstance(counts, list | tuple) else ()
        return len(counts) != dims or bool(counts[dim] != 1)
    candidates = node.args[1:] if name not in ("flip", "roll") else node.args[-1:]
    numbers = [a for c in candidates for a in (c if isinstance(c, list | tuple) else (c,))]
    along = [a % dims for a in numbers if isinstance(a, int)]
    if name in ("cat", "stack") and len(node.args) == 1:
        along = [int(node.kwargs.get("dim", 0)) % dims]  # pyright: ignore[reportArgumentType]
    return dim in along or not along


def _written_storage(node: fx.Node) -> set[fx.Node]:
    """The nodes whose storage the node writes to, and which have a gradient from then on."""
    found: set[fx.Node] = set()
    for source in written_inputs(node):
        while source.op == "call_function":
            found.add(source)
            if not shares_storage(source) or not source.all_input_nodes:
                break
            source = source.all_input_nodes[0]
    return found


def _has_gradient(node: fx.Node, known: Collection[fx.Node]) -> bool:
    value = node.meta.get("val")
    if node.op == "get_attr":
        return bool(node.meta.get("requires_grad"))
    if node.op != "call_function":
        return False
    name = packet_name(node)
    if name in _NO_GRADIENT or name.startswith("new_"):
        return False
    if node.target is with_gradients and node.args[0] is False:
        return False
    origin = node.all_input_nodes[0] if node.all_input_nodes else node
    if name == "getitem" and packet_name(origin) == "broadcast_tensors":
        # Its results correspond to its inputs, one by one.
        inputs, index = origin.args[0], node.args[1]
        assert isinstance(inputs, list | tuple) and isinstance(index, int)
        return inputs[index] in known
    facts = facts_of(node)
    if name == "getitem" and facts is not None:
        index = node.args[1]
        assert isinstance(index, int)
        return origin in known and facts.with_gradient[index]
    tensors = value if isinstance(value, list | tuple) else (value,)
    differentiable = any(
        isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors
    )
    reads = any(source in known for source in node.all_input_nodes)
    return reads and (differentiable or node.target is in_autocast)
