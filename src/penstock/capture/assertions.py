"""The operator by which a stage checks, as it runs, values that capture took as constant.

It has no result. `is_check` lets capture keep it as work of a layer although nothing reads it.
"""

import math

import torch
from torch import fx
from torch.fx.node import has_side_effect

from penstock.errors import RunFailed

__all__ = ["CHECKS", "assert_unchanged", "is_check"]

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
