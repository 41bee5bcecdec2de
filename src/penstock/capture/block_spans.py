"""The operators of one traced call of a block, and the comparison of two calls."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from penstock.capture.block_calls import Call, begins, ends
from penstock.capture.block_structure import Block
from penstock.capture.opaque import OpaqueTable, recorded_call
from penstock.capture.operators import is_assertion
from penstock.capture.sizes import size_of_batch

__all__ = [
    "Attributes",
    "CallSpan",
    "Stack",
    "Unlike",
    "check_closed",
    "described",
    "signature",
    "span_of",
]

Stack: TypeAlias = Mapping[str, tuple[str, Any]]
"""The modules that contain an operator, outermost first: key, path and class."""

MARKS = (begins, ends)


class Unlike(Exception):
    """Two calls do not do the same, or what they do cannot be copied."""


@dataclass(frozen=True)
class CallSpan:
    """What one call did: its operators, and the nodes of its arguments and results.

    ``stack`` are the modules around its operators, including the block. ``trace`` are the code
    lines that led to it.
    """

    call: Call
    inputs: Sequence[fx.Node]
    nodes: Sequence[fx.Node]
    results: Sequence[fx.Node]
    stack: Stack
    trace: str


def span_of(call: Call, begin: fx.Node) -> CallSpan:
    """The span of ``call`` from its first mark on (Unlike if its end is missing)."""
    nodes: list[fx.Node] = []
    node = begin.next
    while not (node.target is ends and node.args[1] == call.number):
        if node.op == "output":
            raise Unlike
        if node.target not in MARKS and node.op != "get_attr":
            nodes.append(node)
        node = node.next
    stack = begin.meta["nn_module_stack"]
    trace = begin.meta.get("stack_trace") or ""
    return CallSpan(call, begin.args[0], nodes, node.args[0], stack, trace)  # pyright: ignore


class Attributes:
    """The attributes that a traced graph reads: tensors of the model, constants, regions."""

    def __init__(self, traced: fx.GraphModule, root: nn.Module, table: OpaqueTable) -> None:
        self.opaque_calls = table
        self._traced = traced
        self._tensors: dict[str, torch.Tensor] = dict(root.named_parameters(remove_duplicate=False))
        self._tensors |= dict(root.named_buffers(remove_duplicate=False))
        self._nodes = {str(n.target): n for n in traced.graph.nodes if n.op == "get_attr"}
        self._by_tensor = {
            id(self._tensors[target]): node
            for target, node in self._nodes.items()
            if target in self._tensors
        }

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The parameter or buffer that a node reads."""
        return self._tensors.get(str(node.target))

    def value(self, node: fx.Node) -> Any:
        """The value that a node reads."""
        value: Any = self._traced
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value

    def of_other_block(self, node: fx.Node, block: Block, other: Block) -> fx.Node:
        """The node that reads in ``other`` what ``node`` reads in ``block``."""
        target = str(node.target)
        if target.startswith(f"{block.path}."):
            renamed = self._nodes.get(other.path + target.removeprefix(block.path))
            if renamed is not None:
                return renamed
        tensor = self._tensors[target]
        counterpart = other.tensors[name_in(block, tensor)]
        return node if counterpart is tensor else self._by_tensor[id(counterpart)]


def name_in(block: Block, tensor: torch.Tensor) -> str:
    """The first name of ``tensor`` in ``block`` (Unlike if it is not one of its tensors)."""
    for name, own in block.tensors.items():
        if own is tensor:
            return name
    raise Unlike


def check_closed(span: CallSpan) -> None:
    """Raise Unlike if tensors other than the call's results are used outside the span."""
    inside = set(span.nodes) | set(span.results)
    for node in span.nodes:
        if node in span.results or _is_size(node):
            continue
        if any(user not in inside and user.target not in MARKS for user in node.users):
            raise Unlike


@dataclass(frozen=True)
class _Word:
    """Represents a node in a signature."""

    origin: Hashable


def signature(span: CallSpan, attributes: Attributes) -> list[Any]:
    """A description of what a call did; equal for calls that did the same.

    Raises:
        Unlike: it read something besides its arguments, its own tensors, constants and sizes.
    """
    known: dict[fx.Node, Hashable] = {n: ("argument", k) for k, n in enumerate(span.inputs)}

    def word(node: fx.Node) -> Any:
        if node in known:
            return _Word(known[node])
        if _is_size(node):
            return _Word(("size", str(node.meta["val"].node.expr)))
        if node.op != "get_attr":
            raise Unlike
        tensor = attributes.tensor(node)
        if tensor is not None:
            return _Word(("tensor", name_in(span.call.block, tensor)))
        return _Word(_held(attributes.value(node)))

    lines: list[Any] = []
    depth = len(span.stack)
    for node in span.nodes:
        if is_dropped(node) or _is_size(node):
            continue
        stack = node.meta.get("nn_module_stack") or {}
        if list(stack)[:depth] != list(span.stack):
            raise Unlike
        inside = [str(kind) for _, kind in list(stack.values())[depth:]]
        given: Any = node.args
        if (call := recorded_call(node, attributes.opaque_calls)) is not None:
            if call.flags or call.facts.group:
                raise Unlike  # Other blocks have their own modules and groups.
            given = (call.description, *given[1:])
        arguments = fx.map_arg((given, dict(node.kwargs)), word)
        lines.append((node.op, node.target, arguments, described(node), inside))
        known[node] = ("made", len(lines))
    return [*lines, *(word(node) for node in span.results)]


def is_dropped(node: fx.Node) -> bool:
    """Whether a node only checks an assumption of tracing; such nodes are dropped later."""
    return node.op in ("call_function", "call_module") and is_assertion(node)


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and size_of_batch(node.meta.get("val"))


def _held(value: Any) -> Hashable:
    """A description of a constant or a region."""
    if isinstance(value, fx.GraphModule):
        return "region", str(_region(value))
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise Unlike
    return "constant", value.dtype, tuple(value.shape), str(value.tolist())


def described(node: fx.Node) -> Any:
    """Type and shape of what a node made; sizes that depend on values all count as equal."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [_shape(v) if isinstance(v, torch.Tensor) else type(v) for v in values]


def _shape(tensor: torch.Tensor) -> Any:
    sizes = [str(s) if _is_plain(s) else "any" for s in (*tensor.shape, *tensor.stride())]
    return tensor.dtype, tensor.device, tensor.requires_grad, sizes


def _is_plain(size: Any) -> bool:
    return isinstance(size, int) or size_of_batch(size)


def _region(body: fx.GraphModule) -> list[Any]:
    """A description of what a region such as ``torch.no_grad`` does."""
    known: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for node in body.graph.nodes:
        known[node] = len(known)
        target = node.target
        if node.op == "get_attr":
            target = _held(getattr(body, str(target)))
        arguments = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)  # pyright: ignore
        lines.append((node.op, "" if node.op == "placeholder" else target, arguments))
        lines.append(described(node))
    return lines
