"""What changes the weights on one rank: optimizer and learning-rate schedule, and their state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.runtime.training_state import (
    Group,
    group_settings,
    optimizer_entries,
    optimizer_tensors,
    restore_optimizer,
)

__all__ = ["MakeOptimizer", "MakeSchedule", "Training", "merged_states"]

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
MakeSchedule: TypeAlias = Callable[[Optimizer], LRScheduler | None]


class Training:
    """The optimizer of this rank's parameters, its schedule, and the steps taken.

    ``parameters`` are by their first names in the model. Without ``optimizer`` steps are only
    counted.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        optimizer: MakeOptimizer | None,
        schedule: MakeSchedule | None,
    ) -> None:
        self.steps = 0
        self.names: dict[torch.Tensor, str] = {p: name for name, p in parameters}
        # A stage without parameters must follow the learning-rate schedule all the same.
        own = [p for _, p in parameters] or [nn.Parameter(torch.zeros(0, device=device))]
        self.optimizer = optimizer(own) if optimizer is not None else None
        self.schedule = None
        if schedule is not None and self.optimizer is not None:
            self.schedule = schedule(self.optimizer)

    @property
    def learning_rate(self) -> float:
        """That of the optimizer's first group, for the next step; 0 without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    def step(self) -> None:
        """Change the weights, then the learning rate."""
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.steps += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, by name."""
        return optimizer_tensors(self.optimizer, self.names) if self.optimizer is not None else {}

    def state(self) -> dict[str, Any]:
        """All else, as JSON can hold it."""
        optimizer = self.optimizer
        groups = group_settings(optimizer, self.names) if optimizer is not None else []
        return {
            "steps": self.steps,
            "groups": [asdict(group) for group in groups],
            "entries": optimizer_entries(optimizer, self.names) if optimizer is not None else {},
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Take back what `tensors` and `state` gave, on this rank or merged over all."""
        if self.optimizer is not None:
            groups = [Group(**group) for group in state["groups"]]
            restore_optimizer(self.optimizer, self.names, tensors, state["entries"], groups)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.steps = state["steps"]


def merged_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, from which each can find its own under any plan."""
    return {
        **states[0],
        "groups": [group for state in states for group in state["groups"]],
        "entries": {name: e for state in states for name, e in state["entries"].items()},
    }
