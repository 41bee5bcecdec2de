"""The number of terms of a traced loss, read off the graph.

    cross_entropy(scores, target, mean)     valid targets (or the sum of their class weights)
    sum(...) / count                        count, where it does not depend on parameters
    anything else                           rows: every sample has as many terms as the others

Scaling by a constant and changing the type do not change the number of terms.
"""

from typing import Any

import torch
from torch import fx

from penstock.capture.cleaning import CleanGraph
from penstock.capture.loss_weight import target_weight
from penstock.capture.operators import packet_name, tensor_value
from penstock.errors import BadInput

__all__ = ["add_weight"]

_MEAN, _SUM = 1, 2
_SAME_TERMS = frozenset(
    ["_to_copy", "alias", "clone", "contiguous", "float", "reshape", "squeeze", "to", "view"]
)
_TARGET_LOSSES = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"])


def add_weight(clean: CleanGraph) -> None:
    """Let the graph return ``(loss, weight)``.

    Raises:
        BadInput: the loss is a sum over the batch, which slices cannot be weighted for.
    """
    output = next(node for node in clean.graph.nodes if node.op == "output")
    with clean.graph.inserting_before(output):
        weight = _weight(clean, clean.loss)
    value = tensor_value(clean.loss)
    assert value is not None
    weight.meta["val"] = value.new_empty((), dtype=torch.float32)
    output.args = ((clean.loss, weight),)


def count_rows(loss: torch.Tensor, rows: int) -> torch.Tensor:
    """``rows`` as a 0-dim tensor beside ``loss``."""
    return torch.full((), float(rows), dtype=torch.float32, device=loss.device)


def as_weight(count: torch.Tensor) -> torch.Tensor:
    """A count that the model's code computed, as a weight."""
    return count.detach().to(torch.float32)


def _weight(clean: CleanGraph, loss: fx.Node) -> fx.Node:
    """A node that computes the number of terms of ``loss``."""
    graph, node, divided = clean.graph, loss, False
    while True:
        name = packet_name(node)
        others = node.args[1:]
        if name == "div" and _is_count(node.args[1]):
            return graph.call_function(as_weight, (node.args[1],))
        if name in ("div", "true_divide") and not _is_number(node.args[1]):
            divided = True
        scaled = name in ("div", "mul", "true_divide") and (_is_number(others[0]) or divided)
        if isinstance(node.args[0] if node.args else None, fx.Node) and (
            (name in _SAME_TERMS and tensor_value(node) is not None) or scaled
        ):
            node = node.args[0]
            assert isinstance(node, fx.Node)
            continue
        break
    if packet_name(node) in _TARGET_LOSSES and _reduction(node) == _MEAN:
        return _valid_targets(graph, node)
    _refuse_sums(node, divided)
    return graph.call_function(count_rows, (loss, clean.rows))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_count(value: Any) -> bool:
    """Whether a divisor is a 0-dim tensor computed from the batch alone."""
    if not isinstance(value, fx.Node) or tensor_value(value) is None:
        return False
    seen, pending = set[fx.Node](), [value]
    while pending:
        node = pending.pop()
        if node.op == "get_attr" and node.meta.get("is_parameter"):
            return False
        seen.add(node)
        pending += [source for source in node.all_input_nodes if source not in seen]
    found = tensor_value(value)
    return found is not None and found.dim() == 0 and any(n.op == "placeholder" for n in seen)


def _valid_targets(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The divisor of a mean over targets."""
    arguments = _arguments(node)
    values = (
        arguments["self"],
        arguments["target"],
        arguments.get("weight"),
        arguments.get("ignore_index", -100),
    )
    return graph.call_function(target_weight, values)


def _reduction(node: fx.Node) -> int:
    return _arguments(node).get("reduction", _MEAN)


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    found = {a.name: v for a, v in zip(schema, node.args, strict=False)}
    return found | dict(node.kwargs)


def _refuse_sums(node: fx.Node, divided: bool) -> None:
    name = packet_name(node)
    summed = name == "sum"
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments]
        summed = summed or ("reduction" in names and _reduction(node) == _SUM)
    value = tensor_value(node.all_input_nodes[0]) if node.all_input_nodes else None
    if summed and not divided and value is not None and value.dim() > 0:
        raise BadInput(
            f"the loss is a sum over the batch ({name}), but micro-batches and replicas are "
            'combined as means; use reduction="mean", or divide by the number of terms'
        )
