"""The training state of a rank by the model's names, so that any plan can load it.

Tensors are called ``model.<parameter or buffer>``, ``optimizer.<parameter>.<key>`` and
``random.<rank>``. The rest is JSON: the settings of the optimizer's groups with the names of their
parameters, the learning-rate schedule, the number of steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = [
    "ParameterGroup",
    "group_settings",
    "optimizer_entries",
    "optimizer_tensors",
    "restore_optimizer",
]


@dataclass
class ParameterGroup:
    """The settings of one parameter group of an optimizer, and the names of its parameters."""

    settings: dict[str, Any]
    names: list[str] = field(default_factory=list)


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors by the names of their parameters."""
    return {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        if parameter in names
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_entries(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter without its tensors."""
    entries = {
        names[parameter]: {
            key: value for key, value in state.items() if not isinstance(value, torch.Tensor)
        }
        for parameter, state in optimizer.state.items()
        if parameter in names
    }
    return {name: entry for name, entry in entries.items() if entry}


def group_settings(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[ParameterGroup]:
    """The settings of every parameter group (learning rate, ...), with its parameters' names."""
    return [
        ParameterGroup(
            {key: plain(value) for key, value in group.items() if key != "params"},
            [names[parameter] for parameter in group["params"] if parameter in names],
        )
        for group in optimizer.param_groups
    ]


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    tensors: Mapping[str, torch.Tensor],
    entries: Mapping[str, Mapping[str, Any]],
    groups: Iterable[ParameterGroup],
) -> None:
    """Restore the optimizer's state of its parameters, whichever ranks saved it."""
    known = list(groups)
    settings_of = {name: group.settings for group in known for name in group.names}
    state_dict = optimizer.state_dict()
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(ordered):
        name = names.get(parameter, "")
        prefix = f"optimizer.{name}."
        found = {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if name and key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        if found or name in entries:
            state[index] = {**found, **entries.get(name, {})}
    pairs = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    for place, (described, actual) in enumerate(pairs):
        first = next((names[p] for p in actual["params"] if p in names), "")
        # A group without parameters here takes those of the first rank's group of that number.
        like = known[min(place, len(known) - 1)].settings if known else {}
        settings = settings_of.get(first) or like
        described.update({key: sequence_as_tuple(value) for key, value in settings.items()})
    state_dict["state"] = state
    optimizer.load_state_dict(state_dict)


def plain(value: Any) -> Any:
    """A setting as a JSON value."""
    return value.item() if isinstance(value, torch.Tensor) else value


def sequence_as_tuple(value: Any) -> Any:
    """Convert lists back into tuples such as Adam's betas, which JSON cannot express."""
    return tuple(value) if isinstance(value, list) else value
