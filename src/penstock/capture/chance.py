"""Refuses random numbers and clocks in a model's Python code while it is traced.

A captured graph would keep the values that they had at capture: one layer always dropped, one fixed
mask. So `random`, `numpy.random` and `time` return a `RandomNumber` during tracing. It may be
printed, subtracted, and compared if the outcome is certain (``random.random() < 0.0``: no layer is
dropped). Any other use is refused, with the line. Numbers drawn after the code has called ``seed``
are the same in every call, and are allowed. So is all that torch and Python's library draw.
"""

import contextlib
import datetime
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import sympy
import torch
from torch import nn

from penstock.capture.capture_errors import REMEDY, current_line
from penstock.capture.torch_calls import replaced
from penstock.errors import CaptureFailed

__all__ = ["RandomNumber", "python_modules", "refusing_chance"]

_LIBRARIES = tuple(
    str(path)
    for path in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        Path(np.__file__).parent,
        Path(sympy.__file__).parent,
    )
)
_STANDARD = sysconfig.get_paths()["stdlib"]
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")
_UNIT = frozenset(["random", "random_sample", "ranf", "sample", "rand"])
"""Functions that return a number in [0, 1) if called without arguments."""


_DATETIME = datetime.datetime


class _AnyDatetime(type):
    """The type of a class whose instances are all dates with times."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _DATETIME)


class RandomNumber:
    """An unknown number; at most its range [``low``, ``high``) is known."""

    def __init__(self, source: str, low: float | None = None, high: float | None = None) -> None:
        self._source, self._low, self._high = source, low, high

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _refused(self._source)

    def _below(self, other: Any) -> bool:
        """Whether it is less than ``other``; refused if that is uncertain."""
        if isinstance(other, int | float) and self._low is not None and self._high is not None:
            if other <= self._low:
                return False
            if other >= self._high:
                return True
        self._refuse()

    def _combined(self, *_: object) -> "RandomNumber":
        return RandomNumber(self._source)

    def __lt__(self, other: Any) -> bool:
        return self._below(other)

    def __le__(self, other: Any) -> bool:
        return self._below(other)

    def __gt__(self, other: Any) -> bool:
        return not self._below(other)

    def __ge__(self, other: Any) -> bool:
        return not self._below(other)

    def __str__(self) -> str:
        return "?"

    def __format__(self, _: str) -> str:
        return "?"

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = _combined
    __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = __array__ = __iter__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __matmul__ = __rpow__ = __abs__ = _refuse
    __mul__ = __rmul__ = __rtruediv__ = __pow__ = __neg__ = __round__ = __getitem__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be an argument of a torch function."""
        given = (*args, *(kwargs or {}).values())
        raise _refused(next((a._source for a in given if isinstance(a, RandomNumber)), "a number"))


def _refused(source: str) -> CaptureFailed:
    line = current_line()
    at = f", used at {line}" if line else ""
    return CaptureFailed(
        f"{source} gives forward another number in every call{at}, but "
        "a captured model would always use the first; draw with torch (torch.rand), turn the "
        f"option off, or {REMEDY}"
    )


@contextlib.contextmanager
def refusing_chance(model: nn.Module) -> Iterator[None]:
    """Within, in this thread, the code of ``model`` gets unknown numbers from random functions."""
    thread = threading.get_ident()
    seeded: set[str] = set()

    def called_by_model() -> bool:
        if threading.get_ident() != thread:
            return False
        caller = sys._getframe(2).f_code.co_filename
        inside = caller.startswith((*_LIBRARIES, "<frozen")) or (
            caller.startswith(_STANDARD) and "site-packages" not in caller
        )
        return not inside

    def draw(original: Any, source: str, kind: str) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not called_by_model() or kind in seeded:
                return original(*args, **kwargs)
            name = f"{kind}.{source}()"
            if kind == "time":
                return RandomNumber(name)
            if source in _UNIT and not args and not kwargs:
                return RandomNumber(name, 0.0, 1.0)
            if source == "uniform" and len(args) == 2 and not kwargs:
                return RandomNumber(name, *args)
            raise _refused(name)

        return drawn

    def seed(original: Any, kind: str) -> Callable[..., Any]:
        def seeding(*args: Any, **kwargs: Any) -> Any:
            if called_by_model():
                fixed = any(value is not None for value in (*args[:1], *kwargs.values()))
                (seeded.add if fixed else seeded.discard)(kind)
            return original(*args, **kwargs)

        return seeding

    def unseeded(original: Any) -> Callable[..., Any]:
        def generator(*args: Any, **kwargs: Any) -> Any:
            if called_by_model() and not args and not kwargs:
                raise _refused("numpy.random.default_rng()")
            return original(*args, **kwargs)

        return generator

    class RefusedClock(datetime.datetime, metaclass=_AnyDatetime):
        """`datetime.datetime` that refuses to tell the time."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            """Refuse calls from the model."""
            if called_by_model():
                raise _refused("datetime.now()")
            return _DATETIME.now(tz)

    makers: list[tuple[Any, str, Any]] = [(datetime, "datetime", RefusedClock)]
    for owner, kind, names in (
        (random, "random", _bound_to(random, random.random)),
        (np.random, "numpy.random", _bound_to(np.random, np.random.random)),
        (time, "time", [*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS)]),
    ):
        for name in names:
            original = getattr(owner, name)
            if name == "seed":
                makers.append((owner, name, seed(original, kind)))
            elif name not in ("getstate", "setstate", "get_state", "set_state"):
                makers.append((owner, name, draw(original, name, kind)))
    makers.append((np.random, "default_rng", unseeded(np.random.default_rng)))
    originals = {id(getattr(owner, name)): new for owner, name, new in makers}
    with contextlib.ExitStack() as stack:
        for module in python_modules(model):
            for name, value in list(vars(module).items()):
                if id(value) in originals:
                    stack.enter_context(replaced(module, name, originals[id(value)]))
        for owner, name, new in makers:
            stack.enter_context(replaced(owner, name, new))
        yield


def _bound_to(owner: Any, like: Any) -> list[str]:
    """The functions of ``owner`` that draw from the same generator as ``like``."""
    hidden = like.__self__
    found = [
        name for name in dir(owner) if getattr(getattr(owner, name), "__self__", None) is hidden
    ]
    return sorted({*found, "seed"})


def python_modules(model: nn.Module) -> list[Any]:
    """The Python modules that define the classes of ``model``, except libraries."""
    classes = {cls for part in model.modules() for cls in type(part).__mro__ if cls is not object}
    names = {cls.__module__ for cls in classes}
    found = [sys.modules.get(name) for name in sorted(names)]
    return [
        module
        for module in found
        if module is not None
        and not str(getattr(module, "__file__", None) or "").startswith(_LIBRARIES)
    ]
