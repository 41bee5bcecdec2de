"""Finds whether samples of a batch act on one another, which micro-batches cannot reproduce.

    linear, attention, layer norm      every row is made of one sample: nothing mixes
    mean loss, sum over valid targets  added up over samples, and only at the end: nothing mixes
    batch norm, x - x.mean(0)          rows are made of other samples too
    mean(0) * mean(0), sqrt(mean)      sums over samples that are not simply added to the loss

If nothing mixes, a batch in micro-batches gives the gradients of the whole batch. If samples mix,
no pipeline can: it gives the gradients of gradient accumulation.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.dataflow import Dataflow
from penstock.capture.layers import module_path
from penstock.capture.loss_terms import of_whole
from penstock.capture.operators import (
    argument_value,
    facts_of,
    is_view,
    normalises_batch,
    packet_name,
    tensor_value,
)
from penstock.capture.tensor_specs import TensorFacts

__all__ = ["batch_norm_in", "mixing_operator"]

_ADDS_UP = frozenset(
    [
        *("addmm", "bmm", "dot", "einsum", "linear", "matmul", "mean", "mm", "sum"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    ]
)
_KEEPS_SUMS = frozenset(
    [
        *("_to_copy", "alias", "cat", "clone", "contiguous", "detach", "expand", "float"),
        *("getitem", "of_all_rows", "where"),
        *("mean", "neg", "permute", "reshape", "select", "slice", "squeeze", "stack", "sum"),
        *("t", "to", "transpose", "unbind", "unsqueeze", "view"),
    ]
)
_SCALES = frozenset(["div", "mul", "true_divide"])
_ADDS = frozenset(["add", "rsub", "sub"])
_ALONG_A_DIMENSION = frozenset(
    [
        *("_log_softmax", "_softmax", "argsort", "cummax", "cumprod", "cumsum", "flip", "gather"),
        *("index_select", "log_softmax", "logcumsumexp", "roll", "softmax", "sort", "topk"),
    ]
)


class _Kind(IntEnum):
    """How a value depends on the samples."""

    APART = 0
    """It does not, or each row depends on one sample."""
    COUNT = 1
    """It depends on several samples but not on parameters: the number of valid targets."""
    SUM = 2
    """It is a sum or mean over samples."""


def mixing_operator(flow: Dataflow, facts: TensorFacts) -> str:
    """The first operator that mixes samples, in words; empty if none does.

    A sum over samples mixes nothing if only additions and constant factors lead from it to the
    loss.
    """
    kinds: dict[fx.Node, _Kind] = {}
    bodies, wanted = flow.clean.bodies, _ancestors(flow.clean.loss)
    for node in flow.clean.graph.nodes:
        if node.op != "call_function" or node not in wanted or node not in flow.sampled:
            continue
        opaque = facts_of(node)
        if opaque is not None and opaque.mixes:
            return f"call of '{opaque.mixes}'"
        found = None if _normalises(node, bodies) else _kind(node, kinds, facts)
        if found is None:
            return _in_words(node)
        kinds[node] = found
    return ""


def batch_norm_in(named_modules: Iterable[tuple[str, nn.Module]]) -> str:
    """The first batch norm in training mode among the modules, in words; empty if none."""
    for name, module in named_modules:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f"{type(module).__name__} '{name}'"
    return ""


def _ancestors(loss: fx.Node) -> set[fx.Node]:
    """The node and everything that it is computed from."""
    pending, found = [loss], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _kind(node: fx.Node, kinds: dict[fx.Node, _Kind], facts: TensorFacts) -> _Kind | None:
    """How the node's value depends on the samples; ``None`` if it mixes them."""
    if node.target is of_whole:
        # It is equal for all slices of a step.
        return _Kind.APART
    inputs = [kinds.get(source, _Kind.APART) for source in node.all_input_nodes]
    worst = max(inputs, default=_Kind.APART)
    if not _tensors(node):
        # A size, or a number read from a tensor.
        return _Kind.COUNT if packet_name(node) in ("item", "_local_scalar_dense") else worst
    rows = _has_rows(node, facts)
    trained = node in facts.with_gradient
    if worst == _Kind.APART:
        from_rows = any(_has_rows(source, facts) for source in node.all_input_nodes)
        if rows:
            return None if _acts_along_samples(node, facts) else _Kind.APART
        if not from_rows:
            return _Kind.APART
        if not trained:
            return _Kind.COUNT
        return _Kind.SUM if _adds_up(node) else None
    if rows:
        return None
    if not trained:
        return _Kind.COUNT
    return _Kind.SUM if _keeps_sums(node, kinds) else None


def _keeps_sums(node: fx.Node, kinds: dict[fx.Node, _Kind]) -> bool:
    """Whether a sum over samples among the inputs stays one, scaled or added to others."""
    name = packet_name(node)
    if name in _ADDS:
        # Counts and rows must not be added to a sum of the loss.
        others = [n for n in node.all_input_nodes if kinds.get(n) == _Kind.COUNT]
        return not others
    if name in _SCALES:
        first, second = (*node.args, None)[:2]
        numerator = isinstance(first, fx.Node) and kinds.get(first) == _Kind.SUM
        if name == "mul" and not numerator:
            first, second = second, first
            numerator = isinstance(first, fx.Node) and kinds.get(first) == _Kind.SUM
        if not numerator or not isinstance(second, fx.Node):
            return numerator
        of_second = kinds.get(second, _Kind.APART)
        return of_second == _Kind.APART or (of_second == _Kind.COUNT and name != "mul")
    return name in _KEEPS_SUMS or is_view(node)


def _adds_up(node: fx.Node) -> bool:
    """Whether the operator sums or averages over the samples."""
    name = packet_name(node)
    return "loss" in name or name in _ADDS_UP


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that the node makes."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


def _has_rows(node: fx.Node, facts: TensorFacts) -> bool:
    """Whether one or several dimensions of the value contain the samples."""
    if node in facts.samples:
        return facts.samples[node].dim >= 0
    return any(_growing(tensor, facts) for tensor in _tensors(node))


def _growing(tensor: torch.Tensor, facts: TensorFacts) -> int:
    """How many dimensions depend on the number of samples, or on values."""
    return sum(not facts.symbols.is_fixed(size) for size in tensor.shape)


def _acts_along_samples(node: fx.Node, facts: TensorFacts) -> bool:
    """Whether the operator reads other rows along the dimension of the samples."""
    if any(_growing(tensor, facts) > 1 for tensor in _tensors(node)):
        return True
    if packet_name(node) not in _ALONG_A_DIMENSION or not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    value = tensor_value(source)
    if value is None or source not in facts.samples:
        return False
    return facts.samples[source].dim in {dim % value.dim() for dim in _dimensions(node)}


def _dimensions(node: fx.Node) -> Iterator[int]:
    """The dimensions along which the operator works."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = argument_value(node, position, argument.name)
            value: Any = argument.default_value if given is None else given
            yield from (value if isinstance(value, list | tuple) else (value,))


def _normalises(node: fx.Node, bodies: Mapping[str, nn.Module]) -> bool:
    """Whether the node, or a region that it runs, is a batch norm in training mode."""
    if normalises_batch(node):
        return True
    regions = [bodies.get(str(source.target)) for source in node.all_input_nodes]
    graphs = [region.graph for region in regions if isinstance(region, fx.GraphModule)]
    return any(normalises_batch(inner) for graph in graphs for inner in graph.nodes)


def _in_words(node: fx.Node) -> str:
    """``BatchNorm2d 'bn1'`` for a torch module, else the operator and where it was called."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = module_path(node), str(stack[-1][1]) if stack else ""
    if kind.startswith("torch.nn.modules.") and path:
        return f"{kind.rpartition('.')[2]} '{path}'"
    where = f"in '{path}'" if path else "in forward"
    return f"operator '{packet_name(node)}' {where}"
