"""Copy functions that hold a model in their closure, which `copy.deepcopy` takes as they are.

old = block.forward
block.forward = lambda x: 2 * old(x)          a patch: the copy of block must call its own
loss = lambda y, t: mse(y, t) + model.penalty()
def forward(x): return model.head(x)          model is a global of the script
"""

import functools
import operator
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


class CopiedFunctions:
    """Functions with the copies of what they hold; ``copies`` are these by the originals' ids.

    Functions that hold nothing of it stay themselves.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._cells: dict[int, CellType] = {}
        self._made: dict[int, FunctionType] = {}

    def put_into(self, model: nn.Module) -> None:
        """Exchange the functions on the modules of ``model``, which is a copy, and their hooks."""
        for module in model.modules():
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType | MethodType | functools.partial):
                    module.__dict__[key] = self.of(value)
                elif key.endswith("_hooks") and isinstance(value, dict):
                    for number, hook in list(value.items()):  # pyright: ignore
                        value[number] = self.of(hook)

    def of(self, value: Any) -> Any:
        """The value with copies in the place of what they were made of."""
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            owner, function = self.of(value.__self__), self.of(value.__func__)
            same = owner is value.__self__ and function is value.__func__
            return value if same else MethodType(function, owner)
        if isinstance(value, functools.partial):
            inner: Any = value.func
            args = self.of(value.args)
            named: dict[str, Any] = self.of(value.keywords)
            found = self.of(inner)
            same = found is inner and args is value.args and named is value.keywords
            return value if same else functools.partial(found, *args, **named)
        if id(value) in self._copies:
            return self._copies[id(value)]
        if type(value) in (list, tuple):
            entries = [self.of(entry) for entry in value]
            return value if all(map(operator.is_, entries, value)) else type(value)(entries)
        if type(value) is dict:
            found = {key: self.of(entry) for key, entry in value.items()}
            return value if all(map(operator.is_, found.values(), value.values())) else found
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._made:
            return self._made[id(function)]
        self._made[id(function)] = function  # where it holds itself
        cells = tuple(map(self._cell, function.__closure__ or ()))
        names = {
            name: self._copies[id(function.__globals__[name])]
            for name in function.__code__.co_names
            if isinstance(function.__globals__.get(name), nn.Module)
            and id(function.__globals__[name]) in self._copies
        }
        defaults = self.of(function.__defaults__)
        same = all(map(operator.is_, cells, function.__closure__ or ())) and not names
        if same and defaults is function.__defaults__:
            return function
        space = {**function.__globals__, **names} if names else function.__globals__
        made = FunctionType(function.__code__, space, function.__name__, defaults, cells or None)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        self._made[id(function)] = made
        return made

    def _cell(self, cell: CellType) -> CellType:
        known = self._cells.get(id(cell))
        if known is not None:
            return known
        self._cells[id(cell)] = cell
        try:
            before = cell.cell_contents
        except ValueError:  # not yet set
            return cell
        after = self.of(before)
        if after is not before:
            self._cells[id(cell)] = CellType(after)
        return self._cells[id(cell)]
