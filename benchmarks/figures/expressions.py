"""What a page says about a result file: paths into its JSON, and a few functions of what is there.

    median(abs(runs.error)) * 100
    rows[model == "bert-48"][cluster == "dapple-a"].answers[planner == "search"].iteration_s

A field of a list is that of every element, lists within are joined, and what is missing or null is
left out. A comparison in brackets keeps the elements for which it holds. The whole file is called
`document`. Nothing else of Python is understood.
"""

import ast
import operator
from collections.abc import Callable
from statistics import fmean, geometric_mean, median
from typing import Any

__all__ = ["part_of", "value_of"]

OF_LISTS: dict[str, Callable[[Any], float]] = {
    "min": min,
    "max": max,
    "median": median,
    "mean": fmean,
    "geometric_mean": geometric_mean,
    "sum": sum,
    "count": len,
}
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def value_of(expression: str, document: Any) -> float:
    """The one number that ``expression`` finds in ``document``.

    Raises:
        ValueError: it is no expression of these, finds nothing, or finds several numbers.
    """
    found = part_of(expression, document)
    if isinstance(found, list) and len(found) == 1:
        (found,) = found
    if not isinstance(found, int | float):
        told = f"{found!r:.80}"
        raise ValueError(f"{expression.strip()}: one number is asked for, and this is {told}")
    return found


def part_of(expression: str, document: Any) -> Any:
    """What ``expression`` finds in ``document``; all of it for none.

    Raises:
        ValueError: it is no expression of these, or finds nothing.
    """
    try:
        return evaluated(ast.parse(expression.strip() or "document", mode="eval").body, document)
    except (SyntaxError, KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as cause:
        raise ValueError(f"{expression.strip()}: {type(cause).__name__} {cause}") from cause


def evaluated(node: ast.expr, document: Any) -> Any:
    """A part of an expression, of ``document``."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return document if name == "document" else field(document, name)
        case ast.Attribute(value=of, attr=name):
            return field(evaluated(of, document), name)
        case ast.Subscript(value=of, slice=ast.Compare() as condition):
            return [each for each in evaluated(of, document) if evaluated(condition, each)]
        case ast.Subscript(value=of, slice=place):
            key = evaluated(place, document)
            found = evaluated(of, document)
            return field(found, key) if isinstance(key, str) else found[key]
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            return OPERATORS[type(operation)](evaluated(left, document), evaluated(right, document))
        case ast.Call(func=ast.Name(id="abs"), args=[of]):
            return of_each(abs, evaluated(of, document))
        case ast.Call(func=ast.Name(id=name), args=[of]):
            return OF_LISTS[name](evaluated(of, document))
        case ast.BinOp(left=left, op=operation, right=right):
            return joined(
                OPERATORS[type(operation)], evaluated(left, document), evaluated(right, document)
            )
        case ast.UnaryOp(op=ast.USub(), operand=of):
            return of_each(operator.neg, evaluated(of, document))
        case _:
            raise TypeError(f"{ast.unparse(node)} is not understood")


def field(of: Any, name: str) -> Any:
    """The value of ``name``; of a list, those of its elements."""
    if not isinstance(of, list):
        return of[name]
    values = [each[name] for each in of if each.get(name) is not None]
    if not values:
        raise KeyError(name)
    if all(isinstance(value, list) for value in values):
        return [each for value in values for each in value]
    return values


def of_each(function: Callable[[Any], Any], value: Any) -> Any:
    return [function(each) for each in value] if isinstance(value, list) else function(value)


def joined(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """A function of two numbers; of lists, element by element."""
    if isinstance(left, list) and isinstance(right, list):
        return [function(*pair) for pair in zip(left, right, strict=True)]
    if isinstance(left, list):
        return [function(each, right) for each in left]
    return of_each(lambda each: function(left, each), right)
