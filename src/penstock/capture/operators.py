"""Properties of single operators: views, random ones, heavy ones, in-place ones.

The operator by which a stage checks, as it runs, values that capture took as constant.

It has no result. `is_check` lets capture keep it as work of a layer although nothing reads it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect

from penstock.errors import RunFailed

__all__ = [
    "CHECKS",
    "OPAQUE",
    "WRITES",
    "OpaqueFacts",
    "assert_unchanged",
    "facts_of",
    "functional_twin",
    "heavy_operator",
    "is_assertion",
    "is_check",
    "is_grouped",
    "is_heavy",
    "is_loss",
    "is_mutation",
    "is_pointwise",
    "is_random",
    "is_view",
    "normalises_batch",
    "packet_name",
    "random_operator",
    "shares_storage",
    "tensor_value",
    "traced_bytes",
    "written_inputs",
]

_HEAVY = frozenset(
    [
        *("addmm", "baddbmm", "bilinear", "bmm", "einsum", "linear", "matmul", "mm", "tensordot"),
        *("embedding", "embedding_bag", "scaled_dot_product_attention"),
        *("gru", "lstm", "rnn_relu", "rnn_tanh"),
    ]
)
_SHAPE_OPERATORS = frozenset(
    [
        *("_unsafe_view", "alias", "contiguous", "expand", "expand_as", "flatten", "movedim"),
        *("permute", "reshape", "squeeze", "t", "transpose", "unflatten", "unsqueeze"),
        *("mT", "moveaxis", "numpy_T", "ravel", "swapaxes", "swapdims", "view", "view_as"),
    ]
)
_UPDATES_STATISTICS = frozenset(["batch_norm", "instance_norm"])

OPAQUE = "opaque"
"""The entry of a node's ``meta`` with the facts about a call that is kept whole."""

WRITES = "writes"
"""The entry of the ``meta`` of a region (`torch.no_grad`) with the arguments that it writes to."""


@dataclass(frozen=True)
class OpaqueFacts:
    """Facts about a call that is kept whole: its operators, and which results have a gradient.

    Calls of one ``group`` run once, in one stage, even if nothing reads their results; with
    ``beside_arguments`` in the stage that makes their arguments. ``mixes`` is the name of a call in
    which samples act on one another.
    """

    heavy: bool = False
    random: bool = False
    with_gradient: tuple[bool, ...] = ()
    group: str = ""
    beside_arguments: bool = False
    mixes: str = ""


def facts_of(node: fx.Node) -> OpaqueFacts | None:
    """The facts about the opaque call that the node makes or whose result it reads, if any."""
    return node.meta.get(OPAQUE)


def packet_name(node: fx.Node) -> str:
    """The operator's name without namespace and overload, such as ``linear``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return _name_of(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _name_of(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[-1]


def tensor_value(node: fx.Node) -> torch.Tensor | None:
    """The symbolic tensor that the node produced while tracing, if it is one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def traced_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a symbolic tensor for the traced number of samples."""
    count = tensor.element_size()
    for size in tensor.shape:
        # A size that depends on values has no traced number; it counts as 1.
        count *= size if isinstance(size, int) else (size.node.hint or 1)
    return count


def same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two traced tensors have one shape for every batch.

    Symbolic sizes are not compared directly: that would fix them to be equal from then on.
    """
    return [size_text(s) for s in one.shape] == [size_text(s) for s in other.shape]


def size_text(size: int | torch.SymInt) -> str:
    """A traced size as text: its number or its formula."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def is_assertion(node: fx.Node) -> bool:
    """Whether the node only checks an assumption of tracing."""
    name = packet_name(node)
    own = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range")
    return name.startswith(own) or name == "_guards_fn"


def is_grouped(node: fx.Node) -> bool:
    """Whether the node is a call with an effect, which must run once."""
    facts = facts_of(node)
    return facts is not None and facts.group != ""


def is_random(node: fx.Node) -> bool:
    """Whether running the node twice may give different results."""
    facts = facts_of(node)
    return random_operator(node.target) if facts is None else facts.random


def random_operator(target: object) -> bool:
    """Whether an operator draws random numbers."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = _name_of(target)
    return torch.Tag.nondeterministic_seeded in target.tags or "dropout" in name or "rand" in name


def is_heavy(node: fx.Node) -> bool:
    """Whether the node is work worth a layer: products, convolutions, look-ups, custom kernels."""
    facts = facts_of(node)
    if facts is not None:
        return facts.heavy
    return heavy_operator(node.target) and not is_check(node)


def heavy_operator(target: object) -> bool:
    """Whether an operator is work worth a layer."""
    if isinstance(target, torch._ops.OpOverload):
        name = _name_of(target)
        foreign = target.namespace not in ("aten", "prims", "prim", "penstock")
        return foreign or name in _HEAVY or "conv" in name or name.startswith("fft_")
    return False


def is_loss(node: fx.Node) -> bool:
    """Whether the node is a loss, or the log-softmax with which one begins."""
    name = packet_name(node)
    return "loss" in name or name in (
        "log_softmax",
        "logsumexp",
        "binary_cross_entropy_with_logits",
    )


def is_pointwise(node: fx.Node) -> bool:
    """Whether every element of the result depends on one element of each input."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def is_view(node: fx.Node) -> bool:
    """Whether the node only rearranges one tensor, without dropping or changing elements."""
    name = packet_name(node)
    value = tensor_value(node)
    if value is None or not node.all_input_nodes:
        return False
    if name in _SHAPE_OPERATORS:
        return True
    source = tensor_value(node.all_input_nodes[0])
    if source is None:
        return False
    if name in ("to", "type_as"):
        return source.dtype == value.dtype
    # Exported graphs contain slices of a whole dimension, which keep the shape.
    return name == "slice" and same_shape(source, value)


def shares_storage(node: fx.Node) -> bool:
    """Whether the result may share its storage with the first input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return is_view(node) or any(r.alias_info is not None for r in returns)


def written_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs that the node writes to."""
    target = node.target
    for position in node.meta.get(WRITES, ()):
        if isinstance(value := node.args[position], fx.Node):
            yield value
    if not isinstance(target, torch._ops.OpOverload):
        return
    schema = target._schema.arguments
    for position, argument in enumerate(schema):
        statistics = (
            packet_name(node) in _UPDATES_STATISTICS
            and argument.name in ("running_mean", "running_var")
            and _updates_statistics(node)
        )
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or statistics:
            value = argument_value(node, position, argument.name)
            if isinstance(value, fx.Node):
                yield value


def argument_value(node: fx.Node, position: int, name: str) -> Any:
    """The argument at ``position`` of the schema, by position or keyword; None if left out."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _updates_statistics(node: fx.Node) -> bool:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("training", "use_input_stats"):
            return bool(argument_value(node, position, argument.name))
    return False


def normalises_batch(node: fx.Node) -> bool:
    """Whether the node is a batch norm that computes its statistics from the samples."""
    return "batch_norm" in packet_name(node) and _updates_statistics(node)


def is_mutation(node: fx.Node) -> bool:
    """Whether the node writes to one of its inputs."""
    return next(written_inputs(node), None) is not None


def functional_twin(node: fx.Node) -> Callable[..., Any] | None:
    """The operator that does the same as an in-place one but returns a new tensor."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = packet_name(node)
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
    return getattr(packet, target._overloadname, None)


CHECKS = "checks"
"""The entry of a region's ``meta`` that is true if its body checks values."""

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("unchanged(Tensor value, Scalar expected, str line) -> ()")


def assert_unchanged(value: torch.Tensor, expected: float, line: str) -> None:
    """Add a check to a graph that is being traced: the one element of ``value`` is ``expected``.

    A stage that finds another value raises `RunFailed`, which names ``line`` of the user's code.
    """
    torch.ops.penstock.unchanged(value, expected, line)


def is_check(node: fx.Node) -> bool:
    """Whether the node checks values: so, by the user's assertion, or as an unread region."""
    return node.target in _CHECKS or (bool(node.meta.get(CHECKS)) and not node.users)


def _unchanged(value: torch.Tensor, expected: float, line: str) -> None:
    found = value.detach().item()
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return
    what = f"finds {found}, not {expected}," if value.dtype is not torch.bool else "branches"
    raise RunFailed(
        f"the model {what} at {line} otherwise than on the batch that it was captured with, and "
        "stages hold what was done there; write the line with tensor operations such as "
        "torch.where, or the model as penstock.Chain([...]), whose modules are not traced"
    )


def _without_values(value: torch.Tensor, expected: float, line: str) -> None:
    """Symbolic and meta tensors have no values, so nothing is checked."""


_CHECKS = (
    torch.ops.penstock.unchanged.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
)

_LIBRARY.impl("unchanged", _unchanged, "CompositeExplicitAutograd")
_LIBRARY.impl("unchanged", _without_values, "Meta")
has_side_effect(torch.ops.penstock.unchanged.default)
