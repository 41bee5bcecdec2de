"""Layouts of DeepSpeed: ``parts``, the layers at which the stages of a ``PipelineModule`` begin.

Source of the format: deepspeedai/DeepSpeed 0.19, ``deepspeed/runtime/pipe/module.py``
(``PipelineModule._partition_layers``, ``partitions()``): stage ``s`` holds layers ``parts[s]`` to
``parts[s + 1] - 1`` of the list that the model was made of. Stage ``s`` is on pipeline rank ``s``.
The JSON document around it is ours; its other keys are those of ``PipelineModule`` and of
DeepSpeed's configuration:

    {"parts": [0, 3, 6], "layers": ["wte", "h.0", ...], "num_stages": 2, "num_dp": 1,
     "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, ...}

DeepSpeed has no option that takes ``parts``: a subclass of ``PipelineModule`` sets them (see the
documentation). ``layers`` is the order in which it must list the model's modules.
"""

from itertools import accumulate, pairwise

from pydantic import Field

from penstock.bridges.layout import PipelineLayout, layout_of_plan, recompute_notes
from penstock.bridges.module_chain import module_chain, with_light_modules
from penstock.bridges.named_stages import names_of_stages, stages_of_names
from penstock.bridges.request import Exported, ExportRequest, ImportRequest
from penstock.document import Entry, check_document, json_text, parse_json, read_text
from penstock.errors import BadInput

__all__ = ["export_deepspeed", "import_deepspeed"]

TARGET = "DeepSpeed"


class DeepSpeedEntry(Entry):
    """The document; only ``parts`` is needed."""

    parts: list[int]
    layers: list[str] = Field(default_factory=list[str])
    num_stages: int = Field(default=0, ge=0)
    num_dp: int = Field(default=0, ge=0)
    train_micro_batch_size_per_gpu: int = Field(default=0, ge=0)
    gradient_accumulation_steps: int = Field(default=0, ge=0)
    train_batch_size: int = Field(default=0, ge=0)


def export_deepspeed(request: ExportRequest) -> Exported:
    """The partition of a ``PipelineModule``, with the numbers of its configuration.

    Raises:
        BadInput: a cut inside a block, unequal replicas, or several stages on a device.
    """
    layout, chain = layout_of_plan(request.plan, TARGET), module_chain(request.profile)
    if layout.pipeline_size < len(layout.stages):
        raise BadInput(
            f"schedule '{layout.schedule}' puts {len(layout.stages)} stages on "
            f"{layout.pipeline_size} ranks; {TARGET} has one on each; plan with --schedule 1f1b"
        )
    stages = names_of_stages(layout, chain, request.joined, TARGET)
    document = {
        "parts": [0, *accumulate(map(len, stages))],
        "layers": [name for names in stages for name in names],
        "num_stages": len(stages),
        "num_dp": layout.replicas,
        "train_micro_batch_size_per_gpu": layout.rows,
        "gradient_accumulation_steps": layout.micro_batches,
        "train_batch_size": layout.micro_batches * layout.rows * layout.replicas,
    }
    notes = list(recompute_notes(request.plan))
    if layout.schedule != "1f1b":
        notes.append(f"{TARGET} runs 1F1B, and not the plan's '{layout.schedule}'")
    tied = [shared.name for shared in request.profile.shared]
    if tied:
        notes.append(f"'{tied[0]}' is tied: make its layers of TiedLayerSpec")
    return Exported(layout, stages, json_text(document), notes=tuple(notes))


def import_deepspeed(request: ImportRequest) -> PipelineLayout:
    """The layout in a document with ``parts``, or in a list of them.

    Without ``layers``, ``parts`` count the modules of the profile.

    Raises:
        BadInput: parts that are not in order or do not end with the last layer, or layers that are
            not those of the profile.
    """
    path, profile = request.path, request.profile
    data = parse_json(read_text(path, "layout"), path, "layout")
    entry = check_document(
        DeepSpeedEntry, {"parts": data} if isinstance(data, list) else data, path
    )
    parts = entry.parts
    names = entry.layers
    if not names:
        own = [module.name for module in module_chain(profile).modules]
        names = [name for listed in with_light_modules(own, {}).values() for name in listed]
    if len(parts) < 2 or parts[0] != 0 or any(lo >= hi for lo, hi in pairwise(parts)):
        raise BadInput(
            f"{path}: parts {str(parts)[:60]} must begin with 0 and grow: the first layer of each "
            f"stage, then the number of layers"
        )
    if parts[-1] != len(names):
        raise BadInput(
            f"{path}: parts end at {parts[-1]}, and there are {len(names)} layers ('{names[0]}' "
            f"to '{names[-1]}'); is it the layout of another model?"
        )
    if entry.num_stages not in (0, len(parts) - 1):
        raise BadInput(
            f"{path}: num_stages is {entry.num_stages}, and parts has {len(parts) - 1}; make them "
            f"equal"
        )
    stages = stages_of_names([names[lo:hi] for lo, hi in pairwise(parts)], profile, path)
    return PipelineLayout(
        stages,
        tuple(range(len(stages))),
        entry.num_dp,
        entry.gradient_accumulation_steps,
        entry.train_micro_batch_size_per_gpu,
        "1f1b",
    )
