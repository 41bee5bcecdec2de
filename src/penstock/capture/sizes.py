"""Sizes that depend on the number of samples: every one a formula of one node, ``rows``."""

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from penstock.errors import CaptureFailed

__all__ = ["rows_factor", "size_nodes", "unified"]

_ROWS = sympy.Symbol("rows", positive=True, integer=True)


def rows_factor(size: Any) -> int | None:
    """``k`` where a symbolic size is ``k`` times the number of samples, else None."""
    expression = unified(size)
    if expression.free_symbols != {_ROWS}:
        return None
    factor = sympy.cancel(expression / _ROWS)
    return int(factor) if factor.is_Integer and factor > 0 else None


def unified(size: Any) -> sympy.Expr:
    """The formula of a size, with one symbol for the samples of every tensor of the batch.

    Sizes that depend on values (the number of nonzero entries) keep their own symbols.
    """
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(int(size))
    expression = size.node.expr
    of_batch = {symbol for symbol in expression.free_symbols if symbol.name.startswith("s")}
    return expression.xreplace(dict.fromkeys(of_batch, _ROWS))


def size_nodes(graph: fx.Graph, leaves: Sequence[fx.Node], rows: fx.Node) -> None:
    """Rewrite every node whose value is a symbolic integer as a formula of ``rows``.

    Raises:
        CaptureFailed: a size is not built from sums, products, whole divisions, min and max.
    """
    rows.meta["val"] = leaves[0].meta["val"].shape[0]
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt) or node is rows:
            continue
        expression = unified(value)
        if not expression.free_symbols <= {_ROWS}:
            continue
        with graph.inserting_before(node):
            replacement = _emit(graph, expression, rows)
        if isinstance(replacement, fx.Node):
            replacement.meta.setdefault("val", value)
            node.replace_all_uses_with(replacement)
        else:
            _put_number(node, replacement)
        graph.erase_node(node)


def _put_number(node: fx.Node, number: int) -> None:
    """Give the readers of ``node`` a number instead: fx has no nodes for plain numbers."""
    for reader in list(node.users):

        def exchanged(argument: fx.Node) -> Any:
            return number if argument is node else argument

        reader.args = fx.map_arg(reader.args, exchanged)  # pyright: ignore
        reader.kwargs = fx.map_arg(reader.kwargs, exchanged)  # pyright: ignore


def _emit(graph: fx.Graph, expression: sympy.Expr, rows: fx.Node) -> fx.Node | int:
    """Nodes that compute ``expression``."""
    if expression.is_Integer:
        return int(expression)  # pyright: ignore[reportArgumentType]
    if expression.is_Symbol:
        return rows
    kinds = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}
    kinds |= {"PythonMod": operator.mod, "Mod": operator.mod, "Pow": operator.pow}
    kinds |= {"CleanDiv": operator.floordiv, "Max": max, "Min": min}
    function = kinds.get(type(expression).__name__)
    if function is None:
        raise CaptureFailed(
            f"a size in the model is {expression} of the number of samples, which cannot be "
            "recomputed on another stage; use sums, products, whole divisions, min and max, "
            "or write the model as penstock.Chain([...])"
        )
    first, *rest = (_emit(graph, part, rows) for part in expression.args)  # pyright: ignore
    value = first
    for part in rest:
        value = graph.call_function(function, (value, part))
    return value
