"""Sizes that depend on the batch, as formulas of the number of samples and of the lengths."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from penstock.capture.lengths import LengthsOf, SizeFormula, length_symbol
from penstock.errors import CaptureFailed

__all__ = ["ROWS", "BatchSymbols", "batch_symbols", "size_nodes", "size_of_batch"]

ROWS = sympy.Symbol("rows", positive=True, integer=True)
"""The number of samples in formulas."""


@dataclass(frozen=True)
class BatchSymbols:
    """The meanings of the symbols of a traced graph: samples, or one of the batch's lengths.

    ``relations`` among the lengths are assumed by the code: the length with that index has the
    value of the formula. ``example`` are the traced lengths.
    """

    meanings: Mapping[sympy.Symbol, sympy.Expr]
    relations: tuple[tuple[int, SizeFormula], ...] = ()
    example: LengthsOf = ()

    @property
    def lengths(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of the lengths in formulas."""
        return tuple(map(length_symbol, range(len(self.example))))

    def formula(self, size: Any) -> sympy.Expr:
        """The formula of a size, with one symbol for the samples of all tensors of the batch.

        Sizes that depend on values (the number of nonzero entries) keep their own symbols.
        """
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(int(size))
        expression = size.node.expr
        known = {s: ROWS for s in expression.free_symbols if s.name.startswith("s")}
        return expression.xreplace(known | dict(self.meanings)).replace(FloorDiv, _divided)

    def rows_factor(self, size: Any) -> sympy.Expr | None:
        """``k`` if a size is ``k`` times the number of samples, else None.

        ``k`` is a number, or a formula of the lengths.
        """
        expression = self.formula(size)
        if ROWS not in expression.free_symbols:
            return None
        factor = sympy.cancel(expression / ROWS)
        if factor.is_Integer:
            return factor if factor > 0 else None
        is_of_lengths = factor.free_symbols <= set(self.lengths)
        return factor if is_of_lengths and factor.is_integer is not False else None

    def is_fixed(self, size: Any) -> bool:
        """Whether the size is the same for every number of samples, given the lengths."""
        return self.formula(size).free_symbols <= set(self.lengths)

    def varying(self, formula: sympy.Expr) -> SizeFormula | None:
        """The formula if it contains a length, else None."""
        return SizeFormula(formula) if formula.free_symbols else None


def _divided(size: sympy.Expr, divisor: sympy.Expr) -> Any:
    """An integer division, simplified if it has no remainder: 32 rows // (8 rows) is 4."""
    quotient = sympy.cancel(size / divisor)
    return quotient if quotient.is_Integer else FloorDiv(size, divisor)


def size_of_batch(value: Any) -> bool:
    """Whether a value is a symbolic number or condition that depends only on the batch's sizes."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    return all(symbol.name.startswith("s") for symbol in value.node.expr.free_symbols)


def batch_symbols(
    leaves: Sequence[fx.Node], places: Sequence[Sequence[tuple[int, int]]], example: LengthsOf
) -> BatchSymbols:
    """The symbols of a batch with lengths at ``places[number]``: pairs of leaf and dimension."""
    meanings: dict[Any, Any] = {}
    found: list[tuple[int, Any]] = []
    for number, dimensions in enumerate(places):
        for leaf, dim in dimensions:
            size = leaves[leaf].meta["val"].shape[dim]
            expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            unknown = [s for s in expression.free_symbols if s not in meanings]
            if len(unknown) == 1:
                (solution,) = sympy.solve(expression - length_symbol(number), unknown[0])
                meanings[unknown[0]] = solution
            else:
                found.append((number, expression))
    relations = {
        (number, SizeFormula(expression.xreplace(meanings)))
        for number, expression in found
        if expression.xreplace(meanings) != length_symbol(number)
    }
    return BatchSymbols(meanings, tuple(sorted(relations, key=str)), example)


def size_nodes(
    graph: fx.Graph, symbols: BatchSymbols, known: Mapping[sympy.Symbol, fx.Node]
) -> None:
    """Rewrite every node whose value is a symbolic integer as a formula of the ``known`` nodes.

    Raises:
        CaptureFailed: a size has operations other than sum, product, integer division, min, max.
    """
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        expression = symbols.formula(value)
        if node in known.values() or not expression.free_symbols <= set(known):
            continue
        with graph.inserting_before(node):
            replacement = _emit(graph, expression, known)
        if isinstance(replacement, fx.Node):
            replacement.meta.setdefault("val", value)
            node.replace_all_uses_with(replacement)
        else:
            _put_number(node, replacement)
        graph.erase_node(node)


def _put_number(node: fx.Node, number: int) -> None:
    """Replace ``node`` by a number in its readers, since fx has no nodes for plain numbers."""
    for reader in list(node.users):

        def exchanged(argument: fx.Node) -> Any:
            return number if argument is node else argument

        reader.args = fx.map_arg(reader.args, exchanged)  # pyright: ignore
        reader.kwargs = fx.map_arg(reader.kwargs, exchanged)  # pyright: ignore


def _emit(
    graph: fx.Graph, expression: sympy.Expr, known: Mapping[sympy.Symbol, fx.Node]
) -> fx.Node | int:
    """Nodes that compute ``expression``."""
    if expression.is_Integer:
        return int(expression)  # pyright: ignore[reportArgumentType]
    if isinstance(expression, sympy.Symbol):
        return known[expression]
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
    first, *rest = (_emit(graph, part, known) for part in expression.args)  # pyright: ignore
    value = first
    for part in rest:
        value = graph.call_function(function, (value, part))
    return value
