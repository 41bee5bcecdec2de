"""Write weights in the layout of Hugging Face, and adapters in that of peft.

Of weights, each rank writes the tensors that it owns. Adapters are small: rank 0 writes them.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.capture.tensor_parts import is_quantised
from penstock.errors import BadInput
from penstock.runtime.checkpoints.extra_state import extra_states
from penstock.runtime.checkpoints.folders import NewFolder
from penstock.runtime.engine import Engine
from penstock.runtime.weights.pretrained import INDEX_FILE, LOSS_FILE, SINGLE_FILE, is_adapted
from penstock.runtime.weights.safetensors_file import write_tensors

ADAPTER_FILE = "adapter_model.safetensors"


def check_free(directory: Path) -> None:
    """Raise `BadInput` if weights would be overwritten or the path is a file."""
    if directory.exists() and not directory.is_dir():
        raise BadInput(f"weights cannot be saved in '{directory}', which is a file; name another")
    if directory.is_dir() and any(directory.glob("*.safetensors*")):
        raise BadInput(
            f"'{directory}' holds weights already, which are not overwritten; name another "
            f"directory, or delete them"
        )


def check_not_quantised(engine: Engine, what: str) -> None:
    """Raise `BadInput` for ``what`` needs whole weights, if any weight is quantised."""
    named = engine.graph.program.named_parameters()
    name = next((name for name, parameter in named if is_quantised(parameter)), "")
    if name:
        raise BadInput(
            f"{what} writes or gathers whole weights, and '{name}' is quantised, in parts that "
            f"only its own library reads; write the adapters with save_adapters(), to be used with "
            f"the same base, or a checkpoint with save()"
        )


def begun(engine: Engine, directory: Path) -> NewFolder:
    """The folder that rank 0 has created to write in."""
    folder = NewFolder(f"weights '{directory}'", directory)

    def begin() -> None:
        check_free(directory)
        folder.begin()

    engine.world.on_first(begin)
    return folder


def save_weights(engine: Engine, directory: Path, max_shard_bytes: int) -> None:
    """Write the tensors of model and loss; see `Pipeline.save_pretrained`.

    Files are moved into an existing directory with the index last, so that it never looks complete
    before it is.
    """
    world = engine.world
    if max_shard_bytes < 1:
        raise BadInput(f"max_shard_bytes is {max_shard_bytes}; it must be >= 1")
    check_not_quantised(engine, "save_pretrained()")
    folder = begun(engine, directory)
    owned = engine.held.owned_tensors()
    own = split(weights_to_save(engine, owned), max_shard_bytes)
    of_loss = {n: t for n, t in owned.items() if n in engine.graph.program.loss_state}
    whole_loss = world.gather_tensors(of_loss)
    counts = world.all_gather(len(own))
    before, count = sum(counts[: world.rank]), sum(counts)
    names = [f"model-{before + n:05d}-of-{count:05d}.safetensors" for n in range(1, len(own) + 1)]
    if count == 1:
        names = [SINGLE_FILE] * len(own)

    def write_own() -> None:
        with folder.refusing():
            if whole_loss:
                write_tensors(folder.partial / LOSS_FILE, whole_loss)
            for name, tensors in zip(names, own, strict=True):
                write_tensors(folder.partial / name, tensors)

    world.all_succeed(write_own)
    index = {name: file for file, held in zip(names, own, strict=True) for name in held}
    size = sum(tensor.nbytes for held in own for tensor in held.values())
    world.on_first(
        partial(finish_folder, engine.graph.model, folder, world.all_gather((index, size)))
    )


def finish_folder(
    model: nn.Module, folder: NewFolder, parts: Sequence[tuple[Mapping[str, str], int]]
) -> None:
    """Write index and configuration, and give the folder its final name."""
    files = {name: file for index, _ in parts for name, file in index.items()}
    with folder.refusing():
        if SINGLE_FILE not in files.values():
            size = sum(size for _, size in parts)
            index = {"metadata": {"total_size": size}, "weight_map": files}
            (folder.partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
        save_configuration(model, folder.partial)
    folder.complete(last=INDEX_FILE)


def weights_to_save(engine: Engine, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select what this rank writes of its ``own``: the persistent tensors, tied ones once."""
    graph = engine.graph
    names: dict[str, list[str]] = {}
    for name in graph.model.state_dict():
        names.setdefault(graph.tied_names.get(name, name), []).append(name)
    return {main_name(graph.model, names[n]): t for n, t in own.items() if n in names}


def main_name(model: nn.Module, names: Sequence[str]) -> str:
    """Choose among the names of a tied tensor the one that the model's class does not call tied."""
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    return next((n for n in names if not any(re.search(t, n) for t in tied)), names[0])


def whole_state_dict(engine: Engine) -> dict[str, Any]:
    """Gather the ``state_dict`` of model and loss on rank 0; see `Pipeline.model_state_dict`."""
    check_not_quantised(engine, "model_state_dict()")
    program, tied = engine.graph.program, engine.graph.tied_names
    own = engine.held.owned_tensors()
    copies = {name: t.detach().to("cpu", copy=True) for name, t in own.items()}
    whole: dict[str, Any] = {**engine.world.gather_tensors(copies)}
    for extra in engine.world.all_gather(extra_states(engine)):
        whole |= extra
    if engine.world.rank:
        return {}
    roots = {root: program.module(root).state_dict() for root in program.root_names}
    names = [f"{root}.{name}".removeprefix(".") for root, held in roots.items() for name in held]
    return {name: whole[tied.get(name, name)] for name in names if tied.get(name, name) in whole}


def split(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Divide ``tensors`` into files of at most ``limit`` bytes; larger ones get their own file."""
    files: list[dict[str, torch.Tensor]] = []
    left = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > left:
            files.append({})
            left = limit
        files[-1][name] = tensor
        left -= tensor.nbytes
    return files


def save_configuration(model: nn.Module, directory: Path) -> None:
    """Write ``config.json`` and the generation's configuration, if the model has them."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return
    types = [p.dtype for p in model.parameters() if p.is_floating_point()]
    config.architectures = [type(model).__name__]
    config.dtype = str(types[0]).removeprefix("torch.") if types else None
    config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)


def save_adapters(engine: Engine, directory: Path) -> None:
    """Write the trained tensors of the active adapter; see `Pipeline.save_adapters`."""
    model: Any = engine.graph.model
    if not is_adapted(model):
        raise BadInput(
            f"{type(model).__name__} has no adapters of peft; save all of its weights with "
            f"save_pretrained"
        )
    folder = begun(engine, directory)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name: held for name, held in engine.held.owned_tensors().items() if name in trained}
    found = engine.world.gather_tensors(own)
    engine.world.on_first(partial(write_adapter, model, folder, found))


def write_adapter(model: Any, folder: NewFolder, trained: Mapping[str, torch.Tensor]) -> None:
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
    with folder.refusing():
        write_tensors(folder.partial / ADAPTER_FILE, kept)
        settings.save_pretrained(folder.partial)
    folder.complete(last=ADAPTER_FILE)
