"""Lists a directory of weights in Hugging Face's layout, before anything is read.

It contains either ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and an index with
the file of each tensor. ``config.json`` describes the model.
"""

import json
from os.path import isfile
from pathlib import Path
from typing import Any

from torch import nn

from penstock.errors import BadInput
from penstock.runtime.weights.safetensors_file import StoredTensor, read_header

__all__ = [
    "CONFIG_FILE",
    "INDEX_FILE",
    "SINGLE_FILE",
    "check_architecture",
    "shard_name",
    "tensors_in",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


def shard_name(number: int, count: int) -> str:
    """The name of one of ``count`` files, numbered from 1.

    >>> shard_name(2, 30)
    'model-00002-of-00030.safetensors'
    """
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def tensors_in(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory, by its name there.

    Raises:
        BadInput: there are no weights, a file is missing or incomplete, or the index is wrong.
    """
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
    """The tensors of a directory with several files and an index."""
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
    path, config = directory / CONFIG_FILE, getattr(model, "config", None)
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
    """The object in a JSON file.

    Raises:
        BadInput: the file cannot be read, or contains no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise BadInput(f"'{path}' cannot be read ({cause}); copy it again") from cause
    if not isinstance(value, dict):
        raise BadInput(f"'{path}' holds no JSON object; copy it again")
    return value
