"""The operator by which a stage checks, as it runs, values that capture took as constant.

It has no result. `is_check` lets capture keep it as work of a layer although nothing reads it.
"""

import math

import torch
from torch import fx
from torch.fx.node import has_side_effect

from penstock.errors import RunFailed

__all__ = ["assert_unchanged", "is_check"]

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("unchanged(Tensor value, Scalar expected, str line) -> ()")


def assert_unchanged(value: torch.Tensor, expected: float, line: str) -> None:
    """Add a check to a graph that is being traced: the one element of ``value`` is ``expected``.

    A stage that finds another value raises `RunFailed`, which names ``line`` of the user's code.
    """
    torch.ops.penstock.unchanged(value, expected, line)


def is_check(node: fx.Node) -> bool:
    """Whether the node is such a check."""
    return node.target is torch.ops.penstock.unchanged.default


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


_LIBRARY.impl("unchanged", _unchanged, "CompositeExplicitAutograd")
_LIBRARY.impl("unchanged", _without_values, "Meta")
has_side_effect(torch.ops.penstock.unchanged.default)
