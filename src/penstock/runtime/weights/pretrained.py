"""Read initial weights in Hugging Face's layout, after matching them with the model's tensors.

A directory contains either ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and an
index with the file of each tensor. ``config.json`` describes the model.

All names, shapes and kinds of types are compared on every rank before anything is read. Then each
rank reads the tensors of its own stages, one after another.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.capture.forward.materialise import named_tensors, put_tensor
from penstock.capture.forward.stage_module import StageModule
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.absent import Absent
from penstock.capture.tensor_parts import (
    become,
    is_quantised,
    plain_parts,
    unquantised,
    wrapper_of,
)
from penstock.errors import BadInput
from penstock.files import parse_json, read_text
from penstock.runtime.tables import Quantise, Weights
from penstock.runtime.weights.safetensors_file import StoredTensor, read_header, read_into
from penstock.torch_internals import unsaved_buffers

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LOSS_FILE = "loss.safetensors"
"""The weights of a loss that is a module, next to those of the model, which load by themselves."""

SHOWN = 3
"""The number of names that a message lists."""


def sources_of(weights: Weights | Path | str, graph: LayerGraph) -> dict[str, StoredTensor]:
    """Find the sources of the model's tensors, by their first names.

    The directory may contain any name of a tied tensor. It may use names with or without the prefix
    of a base model, and old names that transformers has renamed.
    """
    weights = weights if isinstance(weights, Weights) else Weights(weights)
    directory, model = Path(weights.directory), graph.model
    stored = tensors_in_folder(directory)
    check_architecture(directory, model)
    held = state_tensors_of(model)
    renamed = own_names(model, stored, held)
    if merged := [name for name, own in renamed.items() if own is None]:
        raise BadInput(
            f"'{directory}' has tensors that transformers merges when it loads them "
            f"({names_listed(merged)}); load it with from_pretrained() once, and save it with "
            f"save_pretrained(..., save_original_format=False)"
        )
    found = {own: stored[name] for name, own in renamed.items() if own is not None}
    first = {name: graph.tied_names.get(name, name) for name in held}
    sources = {first[name]: tensor for name, tensor in found.items() if name in held}
    # If several names of a tied tensor are there, the first one is read.
    sources |= {name: tensor for name, tensor in found.items() if first.get(name) == name}
    new = [*weights.new, *expressions(model, "_keys_to_ignore_on_load_missing")]
    if is_adapted(model):  # the files of a model do not contain an adapter's own tensors
        new.append(f"*.{getattr(model.base_model, 'prefix', 'lora_')}*")
    unused = [*weights.unused, *expressions(model, "_keys_to_ignore_on_load_unexpected")]
    optional = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    missing = [n for n in dict.fromkeys(first.values()) if n not in sources and not matches(n, new)]
    left = [
        tensor.name
        for name, tensor in found.items()
        if name not in held and name not in optional and not matches(tensor.name, unused)
    ]
    check_names(directory, graph.name, missing, left)
    for name, tensor in found.items():
        if name in held:
            check_tensor(directory, name, tensor, held[name])
    of_loss = graph.program.loss_state if (directory / LOSS_FILE).is_file() else {}
    for name, tensor in read_header(directory / LOSS_FILE).items() if of_loss else ():
        if name in of_loss:
            check_tensor(directory, name, tensor, of_loss[name])
            sources[name] = tensor
    return sources


def state_tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers as in a state dict, without what classes add, as scales of bytes."""
    modules = model.named_modules(remove_duplicate=False)
    left = {f"{path}.{n}".removeprefix(".") for path, m in modules for n in unsaved_buffers(m)}
    return {name: tensor for name, tensor in named_tensors(model) if name not in left}


def tensors_in_folder(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory, by its name there."""
    if (directory / INDEX_FILE).is_file():
        return tensors_of_index(directory)
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    if not directory.is_dir():
        raise BadInput(f"weights '{directory}' are no directory; name one with {SINGLE_FILE} in it")
    hint = f"name a directory with {SINGLE_FILE}, or with {INDEX_FILE} and its files"
    if any(directory.glob("model-*-of-*.safetensors")):
        hint = f"{INDEX_FILE} is missing: copy it too"
    elif any(directory.glob("*.bin")):
        hint = "pickled weights are not read: save them with save_pretrained(), in safetensors"
    raise BadInput(f"no weights in '{directory}'; {hint}")


def tensors_of_index(directory: Path) -> dict[str, StoredTensor]:
    index = read_json(directory / INDEX_FILE)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise BadInput(f"'{directory / INDEX_FILE}' has no weight_map; copy it again")
    files = sorted(set(places.values()))
    absent = [file for file in files if not isfile(directory / file)]
    if absent:
        raise BadInput(
            f"{INDEX_FILE} of '{directory}' names {len(absent)} of {len(files)} files that are not "
            f"there, '{absent[0]}' first; copy them too"
        )
    found = {file: read_header(directory / file) for file in files}
    tensors: dict[str, StoredTensor] = {}
    for name, file in places.items():
        if name not in found[file]:
            raise BadInput(
                f"{INDEX_FILE} of '{directory}' has tensor '{name}' in '{file}', which lacks it; "
                f"copy the files of one save"
            )
        tensors[name] = found[file][name]
    return tensors


def check_architecture(directory: Path, model: nn.Module) -> None:
    """Raise `BadInput` if ``config.json`` describes another type of model."""
    path, config = directory / "config.json", getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or not path.is_file():
        return
    stored = read_json(path)
    found = stored.get("model_type", kind)
    if found != kind:
        built = stored.get("architectures")
        names = ", ".join(map(str, built)) if isinstance(built, list) else str(found)
        raise BadInput(
            f"'{directory}' holds a model of type '{found}' ({names}), the model is a "
            f"{type(model).__name__} of type '{kind}'; build the model that was saved"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    value: Any = parse_json(read_text(path, "file"), path, "file")
    if not isinstance(value, dict):
        raise BadInput(f"'{path}' holds no JSON object; copy it again")
    return value


def own_names(
    model: nn.Module, names: Iterable[str], held: Mapping[str, torch.Tensor]
) -> dict[str, str | None]:
    """The model's name for each name in the files; ``None`` if transformers merges the tensor."""
    prefix = getattr(model, "base_model_prefix", "")
    plain = {without_adapter(name): name for name in held} if is_adapted(model) else {}
    # No import here: if the model is from transformers, both modules are loaded.
    loading = sys.modules.get("transformers.core_model_loading")
    mapping = sys.modules.get("transformers.conversion_mapping")
    transforms = []
    if loading is not None and mapping is not None and hasattr(model, "base_model_prefix"):
        whole: Any = model
        base = whole.get_base_model() if is_adapted(model) else model
        transforms = mapping.get_model_conversion_mapping(base)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]  # pyright: ignore
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]  # pyright: ignore

    def own_name(name: str) -> str | None:
        if name in held:
            return name
        if transforms:
            name, merged = loading.rename_source_key(name, renamings, converters)  # pyright: ignore
            if merged is not None:
                return None
        choices = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        found = (plain.get(choice, choice) for choice in choices)
        return next((choice for choice in found if choice in held), name)

    return {name: own_name(name) for name in names}


def is_adapted(model: nn.Module) -> bool:
    """Return whether peft has added adapters to a model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def without_adapter(name: str) -> str:
    """The name that a tensor of an adapted model has in the base model.

    >>> without_adapter("base_model.model.model.norm.weight")
    'model.norm.weight'
    >>> without_adapter("base_model.model.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def check_names(directory: Path, model: str, missing: Sequence[str], left: Sequence[str]) -> None:
    """Raise `BadInput` unless the directory contains exactly the model's tensors."""
    parts: list[str] = []
    if missing:
        parts.append(f"lacks {names_listed(missing)}, which {model} has")
    if left:
        parts.append(f"has {names_listed(left)}, which {model} has not")
    if parts:
        raise BadInput(
            f"'{directory}' {' and '.join(parts)}; build the model that was saved, or name what is "
            f"to be initialised in Weights(new=...) and what is not needed in Weights(unused=...)"
        )


def check_tensor(directory: Path, name: str, stored: StoredTensor, own: torch.Tensor) -> None:
    """Raise `BadInput` unless a stored tensor has the shape and kind of type of the model's."""
    shape, dtype = unquantised(own)
    if stored.shape != shape:
        raise BadInput(
            f"tensor '{name}' has shape {stored.shape} in '{directory}' and {shape} in "
            f"the model; build the model with the configuration that was saved"
        )
    if stored.dtype.is_floating_point != dtype.is_floating_point:
        raise BadInput(
            f"tensor '{name}' is {stored.dtype} in '{directory}' and {dtype} in the model; it "
            f"cannot be converted: build the model that was saved"
        )


def read_stage(
    module: StageModule,
    sources: Mapping[str, StoredTensor],
    tied_names: Mapping[str, str],
    device: torch.device,
    quantise: Quantise | None = None,
) -> None:
    """Fill the tensors of one stage that are in ``sources``, with memory for one more at a time.

    Tensors on the meta device are created on ``device``; quantised ones are what ``quantise`` makes
    of theirs.
    """
    filled: set[int] = set()
    targets: list[tuple[StoredTensor, torch.Tensor]] = []
    for name, tensor in named_tensors(module):
        source = sources.get(tied_names.get(name, name))
        if source is None or id(tensor) in filled:
            continue
        filled.add(id(tensor))
        if quantise is not None and is_quantised(tensor):
            become(tensor, read_quantised(name, tensor, source, quantise, device))
        elif tensor.is_meta or type(tensor) is Absent:  # (an earlier pipeline had it elsewhere)
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            put_tensor(module, name, tensor, value)
            targets.append((source, value))
        else:
            targets.append((source, tensor))
    read_into(targets)


def read_quantised(
    name: str, like: torch.Tensor, source: StoredTensor, quantise: Quantise, device: torch.device
) -> torch.Tensor:
    """Read a weight and quantise it as ``like`` is."""
    shape, dtype = unquantised(like)
    weight = torch.empty(shape, dtype=dtype, device=device)
    read_into([(source, weight)])
    with torch.no_grad():
        made = quantise(name, weight)
    found, wanted = kind_of_weight(made), kind_of_weight(like)
    if found != wanted:
        raise BadInput(
            f"quantise('{name}', weight) made {found}, and the model has {wanted} there; quantise "
            f"weights as the model was quantised"
        )
    return made


def kind_of_weight(tensor: torch.Tensor) -> str:
    """The class of a quantised weight, with the types and shapes of its parts."""
    parts = (f"{part.dtype}{list(part.shape)}" for part in plain_parts("", tensor).values())
    return f"{wrapper_of(tensor).__name__} of {', '.join(parts)}"


def matches(name: str, patterns: Iterable[str | re.Pattern[str]]) -> bool:
    """Return whether a name matches a shell pattern or a regular expression."""
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else pattern.search(name)
        for pattern in patterns
    )


def expressions(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """The patterns of names in an attribute of a transformers model, as regular expressions."""
    return [re.compile(text) for text in getattr(model, attribute, None) or ()]


def names_listed(names: Sequence[str]) -> str:
    """``'a', 'b', 'c' and 4 more``."""
    text = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return text + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
