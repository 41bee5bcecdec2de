"""Finds from the graph how slices of a batch must be weighted in a traced loss.

    cross_entropy(scores, target, mean)     valid targets (or the sum of their class weights)
    sum(...) / mask.sum()                   the divisor, if it is a sum over the batch
    mean of a selection of terms            the selected terms
    anything else                           rows, and the loss is rewritten for that (loss_terms)

Multiplication by a number and change of type do not change the number of terms.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from penstock.capture.cleaning import CleanGraph
from penstock.capture.loss_terms import (
    MEAN,
    SUM,
    TARGET_LOSSES,
    Sources,
    arguments_of,
    by_slices,
    has_unknown_size,
    is_of_batch,
    reduction_of,
    sources_of,
)
from penstock.capture.loss_weight import target_weight
from penstock.capture.operators import packet_name, tensor_value

__all__ = ["add_weight", "count_rows"]

_SAME_TERMS = frozenset(
    ["_to_copy", "alias", "clone", "contiguous", "float", "reshape", "squeeze", "to", "view"]
)


def add_weight(clean: CleanGraph) -> CleanGraph:
    """Let the graph return ``(loss, weight)``.

    Raises:
        BadInput: the loss is not a sum of terms for which slices of a batch can be weighted.
    """
    sources = sources_of(clean)
    output = next(node for node in clean.graph.nodes if node.op == "output")
    loss = clean.loss
    weight = None if len(clean.terms) > 1 else _own_weight(clean, sources)
    if weight is None:
        clean, found = by_slices(
            clean, sources, clean.terms or [clean.loss], declared=bool(clean.terms)
        )
        with clean.graph.inserting_before(output):
            loss, weight = _joined(clean, found), None
            weight = clean.graph.call_function(count_rows, (loss, clean.rows))
    value = tensor_value(loss)
    assert value is not None
    weight.meta["val"] = value.new_empty((), dtype=torch.float32)
    output.args = ((loss, weight),)
    return replace(clean, loss=loss)


def count_rows(loss: torch.Tensor, rows: int) -> torch.Tensor:
    """``rows`` as a 0-dim tensor beside ``loss``."""
    return torch.full((), float(rows), dtype=torch.float32, device=loss.device)


def as_weight(count: torch.Tensor) -> torch.Tensor:
    """A count computed by the model's code, as a weight."""
    return count.detach().to(torch.float32)


def or_one(count: torch.Tensor) -> torch.Tensor:
    """A divisor; 1 instead of 0, for a slice without any term."""
    return torch.where(count == 0, torch.ones_like(count), count)


def count_elements(values: torch.Tensor) -> torch.Tensor:
    """The number of elements, as a weight."""
    return torch.full((), float(values.numel()), dtype=torch.float32, device=values.device)


def _joined(clean: CleanGraph, terms: list[fx.Node]) -> fx.Node:
    """The sum of the terms."""
    total, *others = terms
    for term in others:
        made = clean.graph.call_function(torch.ops.aten.add.Tensor, (total, term))
        made.meta.update(total.meta)
        total = made
    return total


def _own_weight(clean: CleanGraph, sources: Sources) -> fx.Node | None:
    """A node with the number of terms of the loss, if that is a single mean; otherwise None.

    It is added beside the loss, so that a single mean needs no values of other slices.
    """
    graph, node = clean.graph, clean.loss
    while True:
        name, source = packet_name(node), node.args[0] if node.args else None
        scaled = name in ("div", "mul", "true_divide") and _is_number(node.args[1])
        same = name in _SAME_TERMS and tensor_value(node) is not None
        if not isinstance(source, fx.Node) or not (same or scaled):
            break
        node = source
    arguments = arguments_of(node)
    before = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(before):
        if name in TARGET_LOSSES and reduction_of(node) == MEAN:
            values = (arguments["target"], arguments.get("weight"))
            return graph.call_function(
                target_weight, (*values, arguments.get("ignore_index", -100))
            )
        if name == "mean" and has_unknown_size(node, clean):
            return graph.call_function(count_elements, (node.args[0],))
        if name == "div" and _is_plain_sum(node.args[0]) and _is_count(node.args[1], sources):
            weight = graph.call_function(as_weight, (node.args[1],))
            with graph.inserting_before(node):
                divisor = graph.call_function(or_one, (node.args[1],))
            divisor.meta.update(node.args[1].meta)  # pyright: ignore
            node.update_arg(1, divisor)
            return weight
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_plain_sum(node: Any) -> bool:
    """Whether a dividend is nothing but a sum."""
    if not isinstance(node, fx.Node):
        return False
    while packet_name(node) in _SAME_TERMS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return packet_name(node) == "sum" or reduction_of(node) == SUM


def _is_count(node: Any, sources: Sources) -> bool:
    """Whether a divisor is a sum over the batch, so that slices add up to the whole batch."""
    value = tensor_value(node) if isinstance(node, fx.Node) else None
    single = value is not None and value.dim() == 0
    return single and _is_plain_sum(node) and is_of_batch(node, sources)
