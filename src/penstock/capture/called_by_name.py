"""Functions that a model's code calls by name, so that they can be replaced.

self.position_ids(grid)          a method of the modules of a class
get_position_ids(grid)           a function that a Python module knows by that name
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from penstock.capture.capture_errors import GoesByValues, frames_of
from penstock.capture.loss_module import LossModule
from penstock.capture.torch_calls import replaced

__all__ = ["Callee", "callees_at", "callees_on_stack", "replaced_callees"]

_TORCH = str(Path(torch.__file__).parent)
WRAPPERS = 4
"""The most decorator frames between a function and its caller."""


@dataclass(frozen=True)
class Callee:
    """Method ``name`` of modules of class ``kind``, or function ``name`` in module ``space``."""

    name: str
    kind: type[nn.Module] | None = None
    space: str = ""

    def __str__(self) -> str:
        return self.name if self.kind is None else f"{self.kind.__name__}.{self.name}"


def callees_on_stack(model: nn.Module) -> tuple[Callee, ...]:
    """The functions on the stack, innermost first, without the forward of ``model`` itself."""
    parts = {id(part): part for part in model.modules()}
    found: dict[Callee, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), LossModule):
        if not frame.f_code.co_filename.startswith(_TORCH):
            callee = _callee(frame, parts)
            if callee is not None:
                found[callee] = None
        frame = frame.f_back
    found.pop(Callee("forward", type(model)), None)
    return tuple(found)


def callees_at(error: BaseException, model: nn.Module) -> tuple[Callee, ...]:
    """The functions that were running when ``error`` was raised, as in `callees_on_stack`."""
    if isinstance(error, GoesByValues) and error.within:
        return error.within
    parts = {id(part): part for part in model.modules()}
    found: dict[Callee, None] = {}
    for frame in frames_of(error):
        if not frame.f_code.co_filename.startswith(_TORCH):
            callee = _callee(frame, parts)
            if callee is not None:
                found[callee] = None
    found.pop(Callee("forward", type(model)), None)
    return tuple(found)


def _callee(frame: FrameType, parts: Mapping[int, nn.Module]) -> Callee | None:
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if isinstance(owner, nn.Module) and id(owner) in parts:
        if _runs(getattr(type(owner), name, None), frame.f_code):
            return Callee(name, type(owner))
        return None
    caller = frame.f_back
    for _ in range(WRAPPERS):
        if caller is None:
            return None
        if _runs(caller.f_globals.get(name), frame.f_code):
            return Callee(name, space=str(caller.f_globals.get("__name__")))
        caller = caller.f_back
    return None


def _runs(function: Any, code: CodeType) -> bool:
    """Whether calling ``function``, which may be decorated, runs ``code``."""
    return callable(function) and getattr(inspect.unwrap(function), "__code__", None) is code


Wrap = Callable[[Callee, nn.Module | None, Callable[..., Any]], Callable[..., Any]]
"""Makes the replacement of a function, which belongs to a module or to none."""


@contextlib.contextmanager
def replaced_callees(model: nn.Module, callees: Collection[Callee], wrap: Wrap) -> Iterator[None]:
    """Within, calls of ``callees`` in the code of ``model`` go to what ``wrap`` makes for them."""
    with contextlib.ExitStack() as stack:
        for callee in callees:
            if callee.kind is None:
                space = sys.modules[callee.space]
                function = wrap(callee, None, getattr(space, callee.name))
                stack.enter_context(replaced(space, callee.name, function))
                continue
            for part in model.modules():
                if type(part) is callee.kind:
                    function = wrap(callee, part, getattr(part, callee.name))
                    stack.enter_context(replaced(part, callee.name, function))
        yield
