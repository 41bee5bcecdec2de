"""State of a pipeline in a checkpoint: tensors by name, and everything else as JSON."""

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.capture.record.outside_state import random_state, restore_random_state
from penstock.errors import BadInput
from penstock.runtime.checkpoints.checkpoint import (
    checkpoints_in,
    damage_of,
    first_mismatch,
    is_checkpoint,
    tensors_in_checkpoint,
)
from penstock.runtime.checkpoints.extra_state import extra_tensors, restore_extra
from penstock.runtime.checkpoints.loader_state import (
    StatefulLoader,
    loader_from_text,
    loader_to_text,
)
from penstock.runtime.engine import Engine
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.update.training import Training, merged_states
from penstock.runtime.weights.safetensors_file import StoredTensor, read_into


def state_tensors(engine: Engine, training: Training) -> dict[str, torch.Tensor]:
    """All tensors of this rank's state, by name."""
    tensors = {f"model.{n}": t.detach() for n, t in engine.held.named_tensors().items()}
    tensors |= training.tensors()
    random = f"random.{engine.world.rank}"
    cpu, own = random_state(engine.world.device)
    tensors[random] = cpu
    if own is not None:
        tensors[f"{random}.device"] = own
    return tensors | engine.random.tensors(random) | extra_tensors(engine)


def restore(
    engine: Engine, training: Training, tensors: dict[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Restore all but the model's tensors; also random generators, if the checkpoint has them."""
    training.restore(tensors, state)
    restore_extra(engine, tensors)
    random = f"random.{engine.world.rank}"
    if random in tensors:
        drawn = tensors[random], tensors.get(f"{random}.device")
        restore_random_state(engine.world.device, drawn)
    engine.random.restore(tensors, random)


@torch.no_grad()
def restore_own(engine: Engine, training: Training, state_dict: Mapping[str, Any]) -> None:
    """Restore what `Pipeline.state_dict` returned on this rank."""
    tensors = {name: value for name, value in state_dict.items() if name != "state"}
    for name, tensor in engine.held.named_tensors().items():
        tensor.copy_(tensors[f"model.{name}"])
    restore(engine, training, tensors, state_dict["state"])


def checkpoint_tensors(engine: Engine, training: Training) -> dict[str, torch.Tensor]:
    """The tensors that this rank writes into a checkpoint. One rank of a pipeline writes each.

    All ranks must call this: tensors that a tensor group divides are gathered.
    """
    own = state_tensors(engine, training)
    if engine.pipeline:
        # The first pipeline's have no prefix, so that any plan can load the checkpoint.
        kept = [name for name in own if not name.startswith("outer.")]
        return {name_in(engine.pipeline, name): own[name] for name in kept}
    return {
        name: tensor
        for name, tensor in engine.shards.whole(own, owners_of_tensors(own)).items()
        if name.startswith(("random.", "extra.")) or engine.held.owns(name.partition(".")[2])
    }


def name_in(pipeline: int, name: str) -> str:
    """The name in a checkpoint of a tensor of a pipeline that is not the first.

    >>> name_in(1, "model.a.weight"), name_in(1, "random.3")
    ('pipeline.1.model.a.weight', 'random.3')
    """
    return name if name.startswith("random.") else f"pipeline.{pipeline}.{name}"


def as_found_by(
    engine: Engine, stored: Mapping[str, StoredTensor], state: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint from which this rank's pipeline continues, by their plain names.

    Another number of pipelines than wrote it continues from the first's.
    """
    wrote = state.get("meetings") or {"pipelines": 1, "met": True}
    if wrote["pipelines"] != max(1, len(engine.pipelines)):
        if not wrote["met"] and engine.world.rank == 0:
            warnings.warn(
                f"the checkpoint of step {state['steps']} was written while "
                f"{wrote['pipelines']} pipelines trained alone; the first one's weights go on, "
                f"and what the others have learned since they met is lost",
                stacklevel=2,
            )
        return dict(stored)
    prefix = f"pipeline.{engine.pipeline}."
    own = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
    return {**stored, **own}


def owners_of_tensors(tensors: Iterable[str]) -> dict[str, str]:
    """The parameter or buffer to which each tensor of a checkpoint belongs, by its name.

    >>> owners_of_tensors(["model.a.weight", "optimizer.a.weight.exp_avg", "random.0"])
    {'model.a.weight': 'a.weight', 'optimizer.a.weight.exp_avg': 'a.weight'}
    """
    found = {name: name.partition(".") for name in tensors}
    return {
        name: rest.rpartition(".")[0] if kind == "optimizer" else rest
        for name, (kind, _, rest) in found.items()
        if kind in ("model", "average", "optimizer")
    }


def saved_state(
    engine: Engine, training: Training, extra: Any, loader: StatefulLoader | None
) -> dict[str, Any]:
    """All that a checkpoint keeps besides tensors; all ranks must call this."""
    state = merged_states(engine.world.all_gather(training.state()))

    def as_json() -> dict[str, Any]:
        place = loader_to_text(loader) if loader is not None else None
        return {**state, "extra": extra, "loader": place}

    return engine.world.all_succeed(as_json)


@doing("loads a checkpoint")
def load_state(
    engine: Engine,
    training: Training,
    checkpoint: tuple[Path, Mapping[str, Any]],
    loader: StatefulLoader | None,
) -> None:
    """Continue from a checkpoint with this state; see `Pipeline.load`."""
    world, (path, state) = engine.world, checkpoint
    stored = world.all_succeed(partial(tensors_in_checkpoint, path, state))
    stored = as_found_by(engine, stored, state)
    tensors = wanted_tensors(engine, training, stored)

    def check() -> None:
        if problem := first_mismatch(path, stored, tensors):
            raise BadInput(problem)

    world.all_succeed(check)
    world.all_succeed(lambda: read_into([(stored[name], t) for name, t in tensors.items()]))
    keep_own_parts(engine, tensors)
    restore(engine, training, tensors, state)
    if loader is not None:
        loader_from_text(loader, state.get("loader"), str(path))


def chosen_checkpoint(engine: Engine, directory: Path) -> Path:
    """``directory`` if it is a checkpoint, else its newest undamaged one; all ranks agree."""
    world = engine.world

    def candidates() -> list[str]:
        if is_checkpoint(directory):
            return [str(directory)]
        return [str(path) for path in reversed(checkpoints_in(directory))]

    tried = world.broadcast(world.all_succeed(candidates))
    problem = ""
    for path in map(Path, tried):
        found = world.all_gather(damage_of(path, world.rank, world.size))
        problem = next(filter(None, found), "")
        if not problem:
            return path
        if world.rank == 0 and len(tried) > 1:
            warnings.warn(f"checkpoint '{path}' is left out: {problem}", stacklevel=2)
    raise BadInput(
        f"no whole checkpoint to load: {problem}; restore one from a copy, or begin a new run"
    )


def wanted_tensors(
    engine: Engine, training: Training, stored: Mapping[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """The tensors that this rank loads: those of its model, and new ones for everything else."""
    held, room = engine.held.named_tensors(), engine.shards.room
    tensors = {f"model.{name}": room(name, tensor.detach()) for name, tensor in held.items()}
    kinds = ("optimizer", "outer") if training.meetings is not None else ("optimizer",)
    wanted = tuple(f"{kind}.{name}." for kind in kinds for name in training.names.values())
    random = f"random.{engine.world.rank}"
    averages = set[str]()
    if training.averages is not None:
        averages = {f"average.{name}" for name in training.names.values()}
    for name, found in stored.items():
        is_random = name == random or name.startswith(f"{random}.")
        is_own = is_random or name.startswith("extra.")
        if is_own or name in averages or (wanted and name.startswith(wanted)):
            tensors[name] = torch.empty(found.shape, dtype=found.dtype)
    return tensors


@torch.no_grad()
def keep_own_parts(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    """Keep of whole tensors the shards of this rank, and put the model's into the model."""
    if not engine.shards.is_divided:
        return
    held = engine.held.named_tensors()
    for name, parameter in owners_of_tensors(tensors).items():
        tensors[name] = engine.shards.own_part(parameter, tensors[name])
        if name == f"model.{parameter}":
            held[parameter].copy_(tensors[name])
