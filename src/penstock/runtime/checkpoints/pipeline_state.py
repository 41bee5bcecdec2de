"""What a pipeline keeps in a checkpoint: its tensors by name, and the rest as JSON."""

from pathlib import Path
from typing import Any

import torch

from penstock.runtime.checkpoints.checkpoint import (
    STATE_FILE,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    stored_tensors,
)
from penstock.runtime.checkpoints.loader_state import (
    StatefulLoader,
    loader_from_text,
    loader_to_text,
)
from penstock.runtime.rank import Worker
from penstock.runtime.stages.replay import random_state, restore_random_state
from penstock.runtime.steps.training import Training, merged_states

__all__ = ["load_state", "restore", "save_state", "state_tensors"]


def state_tensors(worker: Worker, training: Training) -> dict[str, torch.Tensor]:
    """All tensors that this rank must remember, by name."""
    tensors = {f"model.{n}": t.detach() for n, t in worker.named_tensors().items()}
    tensors |= training.tensors()
    random = f"random.{worker.world.rank}"
    cpu, own = random_state(worker.world.device)
    tensors[random] = cpu
    if own is not None:
        tensors[f"{random}.device"] = own
    return tensors | worker.random.tensors(random)


def restore(
    worker: Worker, training: Training, tensors: dict[str, torch.Tensor], state: dict[str, Any]
) -> None:
    """Take back what is not in the model itself; random numbers where they were kept."""
    training.restore(tensors, state)
    random = f"random.{worker.world.rank}"
    if random in tensors:
        device = tensors.get(f"{random}.device")
        restore_random_state(worker.world.device, tensors[random], device)
    worker.random.restore(tensors, random)


def save_state(
    worker: Worker,
    training: Training,
    directory: Path,
    extra: Any,
    loader: StatefulLoader | None,
    keep: int,
) -> Path:
    """Write a checkpoint; see `Pipeline.save`."""
    tensors = {
        name: tensor
        for name, tensor in state_tensors(worker, training).items()
        if name.startswith("random.") or worker.owns(name.partition(".")[2])
    }
    state = merged_states(worker.world.gather(training.state()))
    place = loader_to_text(loader) if loader is not None else None
    return save_checkpoint(
        directory,
        training.steps,
        tensors,
        {**state, "extra": extra, "loader": place},
        keep=keep,
        group=worker.world.control,
    )


def load_state(
    worker: Worker, training: Training, directory: Path, loader: StatefulLoader | None
) -> None:
    """Continue from a checkpoint; see `Pipeline.load`."""
    path = directory
    if not (path / STATE_FILE).is_file():
        path = latest_checkpoint(path)
    tensors = {f"model.{n}": t.detach() for n, t in worker.named_tensors().items()}
    wanted = tuple(f"optimizer.{name}." for name in training.names.values())
    random = f"random.{worker.world.rank}"
    for name, (shape, dtype) in stored_tensors(path).items():
        is_random = name == random or name.startswith(f"{random}.")
        if is_random or (wanted and name.startswith(wanted)):
            tensors[name] = torch.empty(shape, dtype=dtype)
    state = load_checkpoint(path, tensors, group=worker.world.control)
    restore(worker, training, tensors, state)
    if loader is not None:
        loader_from_text(loader, state.get("loader"), str(path))
