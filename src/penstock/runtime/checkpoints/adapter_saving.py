"""Saves the adapters that peft has added to a model, in the file layout of peft."""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import BadInput
from penstock.runtime.checkpoints.weight_saving import begin, cannot_write, rename
from penstock.runtime.engine import Engine
from penstock.runtime.processes.waiting import gathered
from penstock.runtime.weights.pretrained import is_adapted
from penstock.runtime.weights.safetensors_file import write_tensors

__all__ = ["save_adapters"]

FILE = "adapter_model.safetensors"


def save_adapters(engine: Engine, directory: Path) -> None:
    """Write the trained tensors of the active adapter; see `Pipeline.save_adapters`.

    Adapters are small, so rank 0 gathers and writes them.
    """
    model: Any = engine.graph.model
    if not is_adapted(model):
        raise BadInput(
            f"{type(model).__name__} has no adapters of peft; save all of its weights with "
            f"save_pretrained"
        )
    part, world = directory.with_name(f".{directory.name}.partial"), engine.world
    world.done_by_first(partial(begin, directory, part))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name: held for name, held in engine.held.owned_tensors().items() if name in trained}
    found = gathered(world, own)
    world.done_by_first(partial(write, model, directory, part, found))


def write(model: Any, directory: Path, part: Path, trained: Mapping[str, torch.Tensor]) -> None:
    """Write tensors and configuration of the trained adapter."""
    from peft import get_peft_model_state_dict

    name, *others = model.active_adapters
    if others:
        raise BadInput(
            f"several adapters are active ({', '.join(model.active_adapters)}); activate the one "
            f"to save before capture"
        )
    given: dict[str, Any] = {key: tensor.detach() for key, tensor in trained.items()}
    # `trained` holds no base weights.
    kept = get_peft_model_state_dict(
        model, state_dict=dict(given), adapter_name=name, save_embedding_layers=False
    )
    of_adapter = {id(tensor) for tensor in kept.values()}
    left = [key for key, tensor in given.items() if id(tensor) not in of_adapter]
    if left:
        raise BadInput(
            f"'{left[0]}' is trained, but no part of adapter '{name}' ({len(left)} such); list its "
            f"module in modules_to_save of the adapter's configuration, or save all weights with "
            f"save_pretrained"
        )
    settings = copy.copy(model.peft_config[name])
    base = getattr(model.get_base_model(), "name_or_path", "")
    settings.base_model_name_or_path = settings.base_model_name_or_path or base
    settings.inference_mode = True
    try:
        write_tensors(part / FILE, kept)
        settings.save_pretrained(part)
    except OSError as cause:
        raise cannot_write(directory, cause) from cause
    rename(part, directory, last=FILE)
