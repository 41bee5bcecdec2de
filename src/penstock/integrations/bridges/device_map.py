"""Device maps of Accelerate: the device of each module, as ``device_map`` in ``from_pretrained``.

    {"model.embed_tokens": 0, "model.layers.0": 0, ..., "model.norm": 1, "lm_head": 1}

Source of the format: huggingface/accelerate 1.15, ``accelerate/utils/modeling.py``
(``infer_auto_device_map``, ``check_device_map``). A name covers all modules below it, and the
longest one counts. A batch goes through the devices as a whole, so one of them works at a time:
as a plan that is one micro-batch.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from penstock.errors import BadInput
from penstock.files import parse_json, read_text, shown
from penstock.integrations.bridges.layout import LayoutOptions, PipelineLayout
from penstock.profile.model_profile import ModelProfile

DEVICE = re.compile(r"(?:cuda:|xpu:)?(\d{1,5})")


def read_device_map(path: Path, profile: ModelProfile, options: LayoutOptions) -> PipelineLayout:
    """The layout of a device map: a stage for each run of layers on one device."""
    document = parse_json(read_text(path, "device map"), path, "device map")
    if not isinstance(document, dict) or not document:
        raise BadInput(f'{path} is no table of modules, such as {{"model.layers.0": 0}}')
    devices = {name: device_number(place, name, path) for name, place in document.items()}
    found: list[int] = []
    for layer in profile.layers:
        device = device_of_layer(layer.name, devices)
        if device is None and not found:
            raise BadInput(f"{path} has no device for layer '{layer.name}'; name its module there")
        # The model's own code outside modules, and the loss, run where the layer before them does.
        found.append(found[-1] if device is None else device)
    ranks = sorted(set(found))
    stages: list[range] = []
    for _, run in groupby(range(len(found)), key=found.__getitem__):
        layers = list(run)
        stages.append(range(layers[0], layers[-1] + 1))
    placed = tuple(ranks.index(found[stage.start]) for stage in stages)
    # Only a searched order takes stages in any place, such as a tied head beside its embedding.
    schedule = "gpipe" if placed == tuple(range(len(ranks))) else "list"
    return PipelineLayout(tuple(stages), placed, 1, 0 if options.micro_batch else 1, 0, schedule)


def device_number(place: object, name: str, path: Path) -> int:
    """The number of a device."""
    match = DEVICE.fullmatch(str(place))
    if match is None:
        raise BadInput(
            f"{path} has '{name}' on {shown(place)}; a stage keeps its weights on its device, so "
            f'give the number of one, such as 0 or "cuda:0"'
        )
    return int(match[1])


def device_of_layer(layer: str, devices: Mapping[str, int]) -> int | None:
    """The device of the longest name that a layer is in or below."""
    parts = re.sub(r"#\d+$", "", layer).split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((devices[name] for name in names if name in devices), None)
