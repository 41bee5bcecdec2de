"""Slots stand for the tensors in the nested structure of a batch or of a model's result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["KeyedSlots", "Slot", "fill_slots", "in_sequence_of"]


@dataclass(frozen=True)
class Slot:
    """The place of tensor ``index`` in a structure."""

    index: int


@dataclass(frozen=True)
class KeyedSlots:
    """A mapping class that is constructed from its entries, as Hugging Face models return."""

    kind: type
    entries: Mapping[str, Any]


def fill_slots(structure: Any, value_of: Callable[[int], Any]) -> Any:
    """``structure`` with ``value_of(index)`` in each slot; constants stay as they are."""
    if isinstance(structure, Slot):
        return value_of(structure.index)
    if isinstance(structure, KeyedSlots):
        entries = fill_slots(structure.entries, value_of)
        return entries if structure.kind is dict else structure.kind(**entries)
    if isinstance(structure, Mapping):
        return {key: fill_slots(entry, value_of) for key, entry in structure.items()}
    if isinstance(structure, list | tuple):
        return in_sequence_of(structure, [fill_slots(entry, value_of) for entry in structure])
    return structure


def in_sequence_of(value: Sequence[Any], entries: Sequence[Any]) -> Any:
    """``entries`` in the sequence type of ``value`` (a named tuple keeps its type)."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*entries)
    return list(entries) if isinstance(value, list) else tuple(entries)
