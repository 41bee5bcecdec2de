"""Rewrites a loss that is a sum of several means, so that slices of a batch give it exactly.

    loss = sum_t c_t * num_t / den_t          over a batch: sum_t c_t * (sum_m num_tm) / den_t

Slices are weighted by their rows. So a mean over rows stays as it is, and a sum over the rows of a
slice is multiplied by all rows over those of the slice. Values that depend only on the batch (valid
targets, ``mask.sum()``, the number of samples) must be those of the whole step, not of the slice.
An additional leaf carries them: ``wholes`` of `CleanGraph`, equal in every row.

    cross_entropy(mean)    ->    cross_entropy(sum) * all rows / rows / whole(valid targets)
    x.sum() / mask.sum()   ->    x.sum() * all rows / rows / whole(mask.sum())
    x.mean()               ->    x.mean()
    weight.square().sum()  ->    itself: it depends on no sample, and counts once

Between these and the loss the following may occur: sums, differences, stacks, changes of shape and
type, and products with a value that does not depend on both samples and model. Any other function
of statistics of the samples (the product of two means for each expert, in the loss of a router)
mixes samples, as a batch norm does, and is computed for each micro-batch. If that statistic is a
single number (``sqrt(mse)``, a product of two losses), the loss is refused.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from sympy import Integer
from torch import fx

from penstock.capture.capture_errors import line_of
from penstock.capture.cleaning import CleanGraph
from penstock.capture.loss_weight import target_weight
from penstock.capture.operators import (
    is_mutation,
    is_random,
    packet_name,
    shares_storage,
    tensor_value,
    written_inputs,
)
from penstock.capture.sizes import ROWS
from penstock.errors import BadInput

__all__ = [
    "MEAN",
    "SUM",
    "TARGET_LOSSES",
    "Sources",
    "arguments_of",
    "by_slices",
    "has_unknown_size",
    "is_of_batch",
    "of_whole",
    "reduction_of",
    "sources_of",
]

MEAN, SUM = 1, 2
TARGET_LOSSES = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"])
_LINEAR = frozenset(
    [
        *(
            "_to_copy",
            "_unsafe_view",
            "alias",
            "clone",
            "contiguous",
            "detach",
            "expand",
            "flatten",
        ),
        *("float", "getitem", "index", "mean", "nan_to_num", "neg", "permute", "reshape", "select"),
        *("slice", "split", "squeeze", "sum", "t", "to", "transpose", "type_as", "unbind"),
        *("unsqueeze", "view"),
    ]
)
_SUMS = frozenset(["add", "cat", "rsub", "stack", "sub", "where"])
_PRODUCTS = frozenset(["dot", "inner", "linear", "matmul", "mm", "mul", "multiply", "mv"])
_QUOTIENTS = frozenset(["div", "divide", "true_divide"])
_SUM_OVER_ROWS = frozenset(
    [
        *("bmm", "count_nonzero", "dot", "einsum", "inner", "matmul", "mm", "mv", "nansum"),
        *("sum", "tensordot", "vdot"),
    ]
)


@dataclass(frozen=True)
class Sources:
    """The nodes that depend on the batch, and those that depend on the model or random numbers."""

    batch: Collection[fx.Node]
    model: Collection[fx.Node]


def sources_of(clean: CleanGraph) -> Sources:
    """What the nodes of ``clean`` depend on; the number of samples counts as the batch."""
    updated = {
        source.target
        for node in clean.graph.nodes
        for source in written_inputs(node)
        if source.op == "get_attr"
    }
    batch: set[fx.Node] = {*clean.leaves, clean.rows, *clean.lengths}
    model: set[fx.Node] = set()
    for node in clean.graph.nodes:
        if node in clean.found_by_stage:
            continue
        held = node.op == "get_attr" and node.target in updated
        found = [node]
        if node.op == "call_function" and is_mutation(node):
            for written in written_inputs(node):
                while written.op == "call_function":
                    found.append(written)
                    if not shares_storage(written) or not written.all_input_nodes:
                        break
                    written = written.all_input_nodes[0]
        if any(source in batch for source in node.all_input_nodes):
            batch |= {*found}
        own = held or bool(node.meta.get("is_parameter")) or is_random(node)
        if own or any(source in model for source in node.all_input_nodes):
            model |= {*found}
    return Sources(batch, model)


def is_of_batch(node: fx.Node, sources: Sources) -> bool:
    """Whether the value is computed from the batch, and not from anything that training changes."""
    return node in sources.batch and node not in sources.model


def by_slices(
    clean: CleanGraph, sources: Sources, losses: Sequence[fx.Node], *, declared: bool
) -> tuple[CleanGraph, list[fx.Node]]:
    """The graph with ``losses`` rewritten such that slices, weighted by rows, give the batch's.

    ``declared``: the user has passed them as terms. Then a term that cannot be rewritten stays as
    it is, and counts by rows.

    Raises:
        BadInput: a loss is not a weighted sum of means or sums over the samples.
    """
    values = [tensor_value(leaf) for leaf in clean.leaves[:1]]
    assert values[0] is not None
    with clean.graph.inserting_after(clean.leaves[-1]):
        leaf = clean.graph.placeholder("wholes")
    rewriting = _Rewriting(clean, sources, leaf)
    found: list[fx.Node] = []
    for loss in losses:
        kept = list(rewriting.wholes)
        try:
            found.append(rewriting.linear(loss))
        except _NotSeparable as refused:
            if not declared:
                raise refused.error() from None
            rewriting.wholes = kept
            found.append(loss)
    if found == list(losses):
        clean.graph.erase_node(leaf)
        return clean, found
    leaf.meta["val"] = values[0].new_empty(
        (values[0].shape[0], 1 + rewriting.columns), dtype=torch.float64
    )
    wholes = (clean.rows, *rewriting.wholes)
    return replace(clean, leaves=(*clean.leaves, leaf), wholes=wholes), found


def has_unknown_size(node: fx.Node, clean: CleanGraph) -> bool:
    """Whether the number of elements that ``node`` reads depends on values, not only on sizes."""
    known = {ROWS, *clean.symbols.lengths}
    sizes = [size for source in node.all_input_nodes for size in _shape(source)]
    return any(not clean.symbols.formula(size).free_symbols <= known for size in sizes)


class _NotSeparable(Exception):
    """A node for which slices of the batch cannot be combined."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self._node, self._why = node, why

    def error(self) -> BadInput:
        """The error for the user."""
        line = line_of(self._node)
        at = f" at {line}" if line else ""
        return BadInput(
            f"the loss cannot be put together from slices of the batch: "
            f"{packet_name(self._node)}{at} {self._why}; make it a weighted sum of means over the "
            f"samples, or pass loss=[(1.0, first), (0.5, second)], terms that count by rows where "
            f"they cannot be told apart"
        )


@dataclass
class _Rewriting:
    """Copies of the nodes between the loss and what is summed over rows."""

    clean: CleanGraph
    sources: Sources
    leaf: fx.Node
    wholes: list[fx.Node] = field(default_factory=list[fx.Node])
    done: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    @property
    def columns(self) -> int:
        """The number of elements of all ``wholes`` together."""
        return sum(self._count(node) for node in self.wholes)

    def linear(self, node: fx.Node) -> fx.Node:
        """``node``, a value without rows, as slices must compute it."""
        if node not in self.sources.batch:
            return node
        if node not in self.done:
            if node not in self.sources.model:
                self.done[node] = self._whole(node)
            elif any(self._has_rows(source) for source in node.all_input_nodes):
                self.done[node] = self._reduction(node)
            else:
                self.done[node] = self._combination(node)
        return self.done[node]

    def _combination(self, node: fx.Node) -> fx.Node:
        """A function of values without rows."""
        mixed = [n for n in node.all_input_nodes if self._is_mixed(n)]
        name = packet_name(node)
        if name in _SUMS or (name in _LINEAR and mixed == [node.args[0]]):
            allowed = name != "where" or node.args[0] not in mixed
        elif name in _PRODUCTS:
            allowed = len(mixed) == 1 and sum(a is mixed[0] for a in node.args) == 1
        else:
            divided = name in _QUOTIENTS and node.kwargs.get("rounding_mode") is None
            allowed = divided and mixed == [node.args[0]] and node.args[1] is not mixed[0]
        if allowed:
            return self._copy(node, self.linear)
        if any(self._count(source) == 1 for source in mixed):
            raise _NotSeparable(node, "is not linear in a mean or sum over the samples")
        return node

    def _reduction(self, node: fx.Node) -> fx.Node:
        """A function of values with rows."""
        name, reduction = packet_name(node), reduction_of(node)
        if name in TARGET_LOSSES and reduction == MEAN:
            return self._over_targets(node, arguments_of(node))
        if reduction == MEAN:
            self._check_number_of_elements(node)
            return node
        if name in _SUM_OVER_ROWS or reduction == SUM:
            return self._of_all_rows(node)
        value = tensor_value(node)
        if value is None or self._count(node) == 1:
            raise _NotSeparable(node, "is neither a mean nor a sum over the samples")
        return node

    def _over_targets(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
        """Cross entropy, or negative log likelihood, as a sum over the valid targets."""
        target, weight = arguments["target"], arguments.get("weight")
        classes = tensor_value(target)
        if classes is not None and classes.is_floating_point():
            self._check_number_of_elements(node)
            return node
        if self._is_mixed(target) or (weight is not None and weight in self.sources.model):
            raise _NotSeparable(node, "has a number of valid targets that depends on the model")
        graph = self.clean.graph
        values = (target, weight, arguments.get("ignore_index", -100))
        with graph.inserting_after(node):
            count = graph.call_function(target_weight, values)
        value = tensor_value(node)
        assert value is not None
        count.meta["val"] = value.new_empty(())
        with graph.inserting_after(node):
            summed = graph.node_copy(node)
        _set_argument(summed, "reduction", SUM)
        whole = self._of_all_rows(summed)
        return self._after(whole, torch.ops.aten.div.Tensor, (whole, self._whole(count)))

    def _check_number_of_elements(self, node: fx.Node) -> None:
        if has_unknown_size(node, self.clean):
            raise _NotSeparable(
                node, "is the mean of a number of terms that is not known beforehand"
            )

    def _of_all_rows(self, node: fx.Node) -> fx.Node:
        return self._after(node, of_all_rows, (node, self.leaf, self.clean.rows))

    def _whole(self, node: fx.Node) -> fx.Node:
        """The value of ``node``, which depends only on the batch, for the whole step."""
        if self._has_rows(node):
            raise _NotSeparable(
                node, "has the samples in it, where a sum or mean over them is needed"
            )
        if self._count(node) < 0:
            raise _NotSeparable(node, "has a length in it, where a sum or mean over it is needed")
        start = 1 + self.columns
        self.wholes.append(node)
        value = node.meta["val"]
        is_tensor = isinstance(value, torch.Tensor)
        shape = tuple(value.shape) if is_tensor else ()
        # An integer does not change the type of what it divides.
        dtype = value.dtype if is_tensor else torch.int64
        with self.clean.graph.inserting_after(self.leaf):
            made = self.clean.graph.call_function(of_whole, (self.leaf, start, shape, dtype))
        made.meta["val"] = _example(self.clean).new_empty(shape, dtype=dtype)
        return made

    def _has_rows(self, node: fx.Node) -> bool:
        """Whether a size of the value depends on the samples."""
        return not all(map(self.clean.symbols.is_fixed, _shape(node)))

    def _count(self, node: fx.Node) -> int:
        """The number of elements of a value; -1 if it depends on the lengths of the batch."""
        count = prod(map(self.clean.symbols.formula, _shape(node)), start=Integer(1))
        return int(count) if count.is_Integer else -1

    def _is_mixed(self, node: Any) -> bool:
        return node in self.sources.batch and node in self.sources.model

    def _copy(self, node: fx.Node, change: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """``node`` with changed inputs; itself if none changes."""
        changed = {source: change(source) for source in node.all_input_nodes}
        if all(new is old for old, new in changed.items()):
            return node
        with self.clean.graph.inserting_after(node):
            return self.clean.graph.node_copy(node, lambda old: changed[old])

    def _after(self, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
        with self.clean.graph.inserting_after(node):
            made = self.clean.graph.call_function(target, arguments)
        made.meta.update(node.meta)
        return made


def of_all_rows(summed: torch.Tensor, wholes: torch.Tensor, rows: int) -> torch.Tensor:
    """A sum over the ``rows`` of a slice, scaled to all rows of the step."""
    return summed * (wholes[0, 0] / rows).to(summed.dtype)


def of_whole(
    wholes: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A value of the whole step; ``wholes`` has all values side by side."""
    count = 1
    for size in shape:
        count *= size
    return wholes[0, start : start + count].reshape(shape).to(dtype)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, without those that were left out."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    schema = node.target._schema.arguments
    found = {a.name: v for a, v in zip(schema, node.args, strict=False)}
    return found | dict(node.kwargs)


def reduction_of(node: fx.Node) -> int | None:
    """How an operator reduces: `MEAN`, `SUM`, or 0 for none; None if it has no such argument."""
    if packet_name(node) == "mean":
        return MEAN
    if isinstance(node.target, torch._ops.OpOverload):
        for argument in node.target._schema.arguments:
            if argument.name == "reduction":
                return arguments_of(node).get("reduction", argument.default_value)
    return None


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _example(clean: CleanGraph) -> torch.Tensor:
    value = tensor_value(clean.leaves[0])
    assert value is not None
    return value


def _shape(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return [size for part in value if isinstance(part, torch.Tensor) for size in part.shape]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
