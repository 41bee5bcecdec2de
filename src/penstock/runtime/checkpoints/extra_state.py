"""Extra state of modules (`torch.nn.Module.get_extra_state`), read and restored."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.runtime.engine import Engine
from penstock.runtime.serialization import from_bytes, to_bytes
from penstock.torch_internals import EXTRA_STATE

PREFIX = "extra."
"""Prefix of the names of tensors in a checkpoint whose bytes are a module's extra state."""


def extra_states(engine: Engine) -> dict[str, Any]:
    """The extra state of modules by its name in a state dict, of those that this rank runs last."""
    plan, found = engine.plan, dict[str, Any]()
    for path, module in engine.graph.program.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            stage = plan.stages[plan.stage_of_layer(engine.graph.cut.last_layer_under(path))]
            if engine.world.rank == plan.ranks_of(stage.devices[0])[0]:
                found[f"{path}.{EXTRA_STATE}".removeprefix(".")] = module.get_extra_state()
    return found


def extra_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """`extra_states` as tensors of bytes, by their names in a checkpoint."""
    every = {name: to_bytes(state, f"'{name}'") for name, state in extra_states(engine).items()}
    return {f"{PREFIX}{n}": torch.frombuffer(held, dtype=torch.uint8) for n, held in every.items()}


def restore_extra(engine: Engine, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give modules the extra state that is among the tensors of a checkpoint."""
    for name, held in tensors.items():
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX)
            module = engine.graph.program.module(key.removesuffix(EXTRA_STATE).removesuffix("."))
            module.set_extra_state(from_bytes(held.numpy().tobytes(), f"'{key}'"))
