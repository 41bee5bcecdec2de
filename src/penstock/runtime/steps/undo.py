"""Keeps what an optimizer step changes, so that the step can be undone bit by bit."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.runtime.steps.training import Training

__all__ = ["KeptStep"]


@dataclass
class KeptStep:
    """Copies of the parameters that a rank steps, of their optimizer state and its settings.

    They take as many bytes as parameters and state together: with AdamW three times the parameters.
    Their memory is reused in every step. State that an optimizer keeps outside ``state`` and
    ``param_groups`` is not copied; checkpoints do not contain it either.
    """

    training: Training
    copies: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _state: dict[Any, dict[Any, Any]] = field(default_factory=dict[Any, dict[Any, Any]])
    _groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _schedule: dict[str, Any] | None = None

    @torch.no_grad()
    def keep(self) -> None:
        """Copy all that the next step may change."""
        optimizer, schedule = self.training.optimizer, self.training.schedule
        assert optimizer is not None
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: contents(state, tensors) for p, state in optimizer.state.items()}
        self._groups = [
            contents({k: v for k, v in group.items() if k != "params"}, tensors)
            for group in optimizer.param_groups
        ]
        self._schedule = deepcopy(schedule.state_dict()) if schedule is not None else None
        if not same_layout(tensors, self.copies):
            self.copies = [torch.empty_like(tensor) for tensor in tensors]
        self._kept = tensors
        for tensor, copy in zip(tensors, self.copies, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore everything as it was at the latest `keep`; may be called more than once."""
        optimizer, schedule = self.training.optimizer, self.training.schedule
        assert optimizer is not None
        for tensor, copy in zip(self._kept, self.copies, strict=True):
            tensor.copy_(copy)
        # In place: the parts of a combined optimizer share its state.
        optimizer.state.clear()
        optimizer.state.update({p: deepcopy_but_tensors(s) for p, s in self._state.items()})
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(deepcopy_but_tensors(settings), params=parameters)
        if schedule is not None and self._schedule is not None:
            schedule.load_state_dict(deepcopy(self._schedule))


def contents(values: dict[Any, Any], tensors: list[torch.Tensor]) -> dict[Any, Any]:
    """A copy of ``values`` without copying tensors; these are appended to ``tensors``."""
    tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return deepcopy_but_tensors(values)


def deepcopy_but_tensors(values: dict[Any, Any]) -> dict[Any, Any]:
    """A deep copy with the same tensors."""
    return {k: v if isinstance(v, torch.Tensor) else deepcopy(v) for k, v in values.items()}


def same_layout(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> bool:
    """Whether each of ``copies`` has the shape, type and device of its tensor."""
    return len(tensors) == len(copies) and all(
        tensor.shape == copy.shape and tensor.dtype == copy.dtype and tensor.device == copy.device
        for tensor, copy in zip(tensors, copies, strict=True)
    )
