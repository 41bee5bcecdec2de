"""What a model returns besides its loss: a structure around tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.capture.layer_graph import TensorSpec
from penstock.errors import BadInput

__all__ = ["LOSS_SLOT", "Flattened", "StructuredOutputs", "flatten_outputs"]

LOSS_SLOT = -1
"""The place of the loss itself, which predictions leave out."""


@dataclass(frozen=True)
class _Slot:
    """The place of output ``index`` in the structure."""

    index: int


@dataclass(frozen=True)
class _Keyed:
    """A mapping that is made from its entries, such as the outputs of Hugging Face models."""

    kind: type
    entries: Mapping[str, Any]


@dataclass
class Flattened:
    """A model's result taken apart; ``problem`` says why it cannot be, if it cannot."""

    structure: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    problem: str = ""


def flatten_outputs(value: Any, loss: torch.Tensor | None = None) -> Flattened:
    """The tensors in what a model returned, in a fixed order, and the structure around them.

    ``loss`` is left out where it is one of them: its place holds ``None`` afterwards.
    """
    tensors: list[torch.Tensor] = []
    try:
        return Flattened(_structure(value, "the model's result", tensors, loss), tensors)
    except BadInput as problem:
        return Flattened(problem=str(problem))


def _structure(
    value: Any, name: str, tensors: list[torch.Tensor], loss: torch.Tensor | None
) -> Any:
    if isinstance(value, torch.Tensor):
        if value is loss:
            return _Slot(LOSS_SLOT)
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, Mapping):
        entries = {k: _structure(v, f"{name}[{k!r}]", tensors, loss) for k, v in value.items()}
        return _Keyed(type(value), entries)
    if isinstance(value, list | tuple):
        parts = [_structure(v, f"{name}[{i}]", tensors, loss) for i, v in enumerate(value)]
        return _like(value, parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(
        f"{name} is a {type(value).__name__}, but predictions and metrics need tensors, tuples, "
        f"lists, dicts and plain constants; return those from forward"
    )


@dataclass(frozen=True)
class StructuredOutputs:
    """A flattened result and its tensors, as an `OutputLayout`."""

    structure: Any
    specs: tuple[TensorSpec, ...]
    problem: str = ""

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result as the model gives it, around ``tensors``."""
        return _rebuild(self.structure, tensors)


def _rebuild(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(structure, _Slot):
        return None if structure.index == LOSS_SLOT else tensors[structure.index]
    if isinstance(structure, _Keyed):
        entries = {key: _rebuild(entry, tensors) for key, entry in structure.entries.items()}
        return entries if structure.kind is dict else structure.kind(**entries)
    if isinstance(structure, list | tuple):
        return _like(structure, [_rebuild(entry, tensors) for entry in structure])
    return structure


def _like(value: Sequence[Any], entries: Sequence[Any]) -> Any:
    """``entries`` in the sequence type of ``value`` (a named tuple keeps its type)."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*entries)
    return list(entries) if isinstance(value, list) else tuple(entries)
