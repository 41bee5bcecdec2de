"""Outputs of a model besides its loss, as tensors and the structure around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from penstock.capture.batch.layout import KeyedSlots, Slot, filling, in_sequence_of
from penstock.capture.contract import TensorSpec
from penstock.errors import BadInput

LOSS_SLOT = -1
"""The index of the loss itself, which predictions leave out."""


@dataclass(frozen=True)
class StructuredOutputs:
    """The structure around the tensors in a model's result, and specs of these.

    ``problem`` says why there is none.
    """

    structure: Any = None
    specs: tuple[TensorSpec, ...] = ()
    problem: str = ""

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result in the model's own structure, filled with ``tensors``."""
        given = {LOSS_SLOT: None, **dict(enumerate(tensors))}
        return filling(self.structure, itemgetter)(given)


def flatten_outputs(
    value: Any, loss: torch.Tensor | None = None
) -> tuple[StructuredOutputs, list[torch.Tensor]]:
    """The structure of what a model returned, and the tensors in it, in a fixed order.

    If ``loss`` is one of them, it is left out, and its place holds ``None`` later.
    """
    tensors: list[torch.Tensor] = []
    try:
        return StructuredOutputs(_structure(value, "the model's result", tensors, loss)), tensors
    except BadInput as problem:
        return StructuredOutputs(problem=str(problem)), []


def _structure(
    value: Any, name: str, tensors: list[torch.Tensor], loss: torch.Tensor | None
) -> Any:
    if isinstance(value, torch.Tensor):
        if value is loss:
            return Slot(LOSS_SLOT)
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, Mapping):
        entries = {k: _structure(v, f"{name}[{k!r}]", tensors, loss) for k, v in value.items()}
        return KeyedSlots(type(value), entries)
    if isinstance(value, list | tuple):
        parts = [_structure(v, f"{name}[{i}]", tensors, loss) for i, v in enumerate(value)]
        return in_sequence_of(value, parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(
        f"{name} is a {type(value).__name__}, but predictions and metrics need tensors, tuples, "
        f"lists, dicts and plain constants; return those from forward"
    )
