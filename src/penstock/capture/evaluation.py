"""Switches a captured stage between training and evaluation.

In a traced stage the mode is an argument of its operators (``dropout(x, 0.1, True)``), so these
arguments are changed. In evaluation no buffer is written, whatever the model's code does.
"""

from typing import Any

import torch
from torch import fx, nn

from penstock.capture.bucket_stage import graphs_in
from penstock.capture.opaque import OpaqueCall
from penstock.capture.operators import (
    argument_value,
    functional_twin,
    shares_storage,
    written_inputs,
)
from penstock.capture.regions import IS_BUFFER
from penstock.capture.stage.stage_tensors import StageModule

__all__ = ["set_training"]

_IN_EVALUATION: dict[str, Any] = {
    "train": False,
    "training": False,
    "use_input_stats": False,
    "dropout_p": 0.0,
}
_CAPTURED = "captured_for_training"
_FLAGS = "_training_flags_before_evaluation"


def set_training(module: nn.Module, training: bool) -> None:
    """Put a stage's module into training or evaluation mode, in place.

    Training mode is the state at capture: what was in evaluation mode then (a frozen batch norm)
    stays so. Works on the modules of traced stages and of chains, and is idempotent.
    """
    if isinstance(module, StageModule):
        module.graph.set_training(training)
        return
    for part in module.modules():
        if isinstance(part, OpaqueCall):
            part.training = training
    graphs = graphs_in(module)
    if not graphs:
        _set_flags(module, training)
        return
    for graph_module in graphs:
        changed = [_switch(node, training) for node in graph_module.graph.nodes]
        graph_module.training = training
        if any(changed):
            graph_module.recompile()


def _switch(node: fx.Node, training: bool) -> bool:
    """Switch one operator; returns whether it changed."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    captured = node.meta.setdefault(_CAPTURED, (node.target, node.args, dict(node.kwargs)))
    if training:
        target, args, kwargs = captured
        changed = (node.target, node.args, node.kwargs) != (target, args, kwargs)
        node.target, node.args, node.kwargs = target, args, kwargs
        return changed
    changed = _stop_writing(node)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name not in _IN_EVALUATION or _has_no_statistics(node, argument.name):
            continue
        value = _IN_EVALUATION[argument.name]
        before = argument_value(node, position, argument.name)
        if before is None or before == value:
            continue
        if position < len(node.args):
            node.update_arg(position, value)
        else:
            node.update_kwarg(argument.name, value)
        changed = True
    return changed


def _has_no_statistics(node: fx.Node, name: str) -> bool:
    """Whether a norm has no running statistics, and so uses the batch's in evaluation too."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if name not in ("training", "use_input_stats"):
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "running_mean":
            return argument_value(node, position, argument.name) is None
    return False


def _stop_writing(node: fx.Node) -> bool:
    """Replace an operator that writes to a buffer by one that only returns the result."""
    twin = functional_twin(node)
    if twin is None or not any(_is_buffer(source) for source in written_inputs(node)):
        return False
    node.target = twin
    return True


def _is_buffer(node: fx.Node) -> bool:
    """Whether a node is a tensor of the model or a view of one."""
    while node.op == "call_function" and shares_storage(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "get_attr" or bool(node.meta.get(IS_BUFFER))


def _set_flags(module: nn.Module, training: bool) -> None:
    before: dict[str, bool] | None = getattr(module, _FLAGS, None)
    if not training:
        if before is None:
            flags = {name: part.training for name, part in module.named_modules()}
            setattr(module, _FLAGS, flags)
        module.eval()
    elif before is not None:
        for name, part in module.named_modules():
            part.training = before[name]
        delattr(module, _FLAGS)
    else:
        module.train()
