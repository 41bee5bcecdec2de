"""Decides whether two blocks of a model are equal: by tensors, classes and the attributes read.

A block is an entry of a ``ModuleList`` or ``Sequential`` that has children. Attributes such as
``layer_idx`` differ from block to block. They make blocks unequal only if the code reads them: two
runs of the same code that read the same values do the same.
"""

import functools
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = [
    "Attribute",
    "Block",
    "State",
    "find_blocks",
    "read_attributes",
    "structure_of",
    "values_of",
]

Attribute: TypeAlias = tuple[str, str]
"""A module of a block, by its path in the block, and the name of one of its attributes."""

EVERY_ATTRIBUTE = "*"
_OWN = frozenset(nn.Module().__dict__)
_PLAIN = (int, float, complex, str, bytes, bool, types.NoneType, torch.dtype, torch.device, Enum)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_BY_IDENTITY = (torch.Tensor, nn.Module, *_FUNCTIONS)
_NOT_THE_MODEL = (nn.Module.__init__.__code__.co_filename, str(Path(__file__).parent))
_DEEPEST = 6


@dataclass(frozen=True)
class Block:
    """A block; ``tensors`` are its parameters and buffers by their names in it."""

    path: str
    module: nn.Module
    parts: Mapping[str, nn.Module]
    tensors: Mapping[str, torch.Tensor]
    description: Hashable


def find_blocks(root: nn.Module) -> dict[int, Block]:
    """The blocks inside ``root``, by `identity`."""
    found: dict[int, Block] = {}
    for path, container in root.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for name, module in container.named_children():
                if identity(module) not in found and next(module.children(), None) is not None:
                    found[identity(module)] = _block(f"{path}.{name}" if path else name, module)
    return found


def identity(module: nn.Module) -> int:
    """An identifier that stays the same if torch replaces the module by a proxy of it."""
    return id(_attributes(module))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The module's own attributes, read without triggering `_noted_attribute`."""
    return object.__getattribute__(module, "__dict__")


def _block(path: str, module: nn.Module) -> Block:
    parts = dict(module.named_modules(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    described = tuple(
        (name, first.setdefault(id(tensor), name), _tensor(tensor))
        for name, tensor in tensors.items()
    )
    classes = tuple((name, type(part)) for name, part in parts.items())
    return Block(path, module, parts, tensors, (classes, described))


def _tensor(tensor: torch.Tensor) -> Hashable:
    plain = (tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))
    return (tuple(tensor.shape), tensor.stride(), *plain)


def structure_of(block: Block) -> Hashable | None:
    """What blocks with the same code must share; None if hooks could do what a trace misses."""
    flags: list[bool] = []
    for part in block.parts.values():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
        if any(hooks) or part._backward_pre_hooks:
            return None
        flags.append(part.training)
    return block.description, tuple(flags)


@contextmanager
def read_attributes(block: Block) -> Iterator[set[Attribute]]:
    """Collect the attributes of the block's modules that code reads inside the context."""
    paths: dict[int, list[str]] = {}
    for path, part in block.parts.items():
        paths.setdefault(identity(part), []).append(path)
    found: set[Attribute] = set()

    def note(module: nn.Module, name: str) -> None:
        found.update((path, name) for path in paths.get(identity(module), ()))

    with _watched(note):
        yield found


_watchers: list[Callable[[nn.Module, str], None]] = []


@contextmanager
def _watched(note: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Call ``note`` for every attribute of a module that code outside torch reads."""
    _watchers.append(note)
    if len(_watchers) == 1:
        nn.Module.__getattribute__ = _noted_attribute  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        _watchers.pop()
        if not _watchers:
            del nn.Module.__getattribute__


def _noted_attribute(module: nn.Module, name: str) -> Any:
    if name == "__dict__":
        # torch reads parameters and children from it; code of the model may read anything.
        if not sys._getframe(1).f_code.co_filename.startswith(_NOT_THE_MODEL):
            for note in _watchers:
                note(module, EVERY_ATTRIBUTE)
    elif name not in _OWN and not name.startswith("__"):
        # Class attributes too: another block may have its own value.
        for note in _watchers:
            note(module, name)
    return object.__getattribute__(module, name)


class State:
    """The attributes of a block's modules, to find out whether a call changes them."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._attributes = [(path, EVERY_ATTRIBUTE) for path in block.parts]
        # Keeping the objects prevents a new object from getting the id of an old one.
        self._held = [dict(_attributes(part)) for part in block.parts.values()]
        self._values = values_of(block, self._attributes)

    def has_changed(self) -> bool:
        """Whether an attribute has another value now."""
        return values_of(self._block, self._attributes) != self._values


def values_of(block: Block, attributes: Collection[Attribute]) -> Hashable:
    """The values of ``attributes`` in ``block``; equal if code cannot tell them apart."""
    described: list[Hashable] = []
    known: dict[int, Hashable] = {}
    for path, name in sorted(attributes):
        own = _attributes(block.parts[path])
        for key in sorted(own.keys() - _OWN) if name == EVERY_ATTRIBUTE else [name]:
            if key in own and id(own[key]) not in known:
                known[id(own[key])] = _value(own[key], block)
            described.append((path, key, known[id(own[key])] if key in own else "absent"))
    return tuple(described)


def _value(value: Any, block: Block, depth: int = 0) -> Hashable:
    """A description of ``value``: by content for known types, otherwise by identity."""
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, value
    if depth > _DEEPEST or isinstance(value, _BY_IDENTITY):
        return _identity(value, block)
    inner = functools.partial(_value, block=block, depth=depth + 1)
    if isinstance(value, types.MethodType):
        return kind, id(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return kind, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, list | tuple):
        return kind, tuple(map(inner, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(inner, value))
    if isinstance(value, Mapping):
        return kind, tuple((inner(key), inner(entry)) for key, entry in value.items())
    if hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
        return kind, inner(vars(value))
    return _identity(value, block)


def _identity(value: Any, block: Block) -> Hashable:
    """The identity of an object; a module of the block is identified by its path."""
    if isinstance(value, nn.Module):
        for path, part in block.parts.items():
            if part is value:
                return nn.Module, path
    return id, id(value)
