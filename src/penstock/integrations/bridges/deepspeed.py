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

from itertools import accumulate

from penstock.errors import BadInput
from penstock.files import json_text
from penstock.integrations.bridges.modules import NamedPlan

TARGET = "DeepSpeed"


def deepspeed_parts(given: NamedPlan) -> tuple[str, list[str]]:
    """The partition of a ``PipelineModule``, with the numbers of its configuration; and notes."""
    layout = given.layout
    if layout.pipeline_size < len(layout.stages):
        raise BadInput(
            f"schedule '{layout.schedule}' puts {len(layout.stages)} stages on "
            f"{layout.pipeline_size} ranks; {TARGET} has one on each; plan with --schedule 1f1b"
        )
    document = {
        "parts": [0, *accumulate(map(len, given.names))],
        "layers": [name for names in given.names for name in names],
        "num_stages": len(layout.stages),
        "num_dp": layout.replicas,
        "train_micro_batch_size_per_gpu": layout.rows,
        "gradient_accumulation_steps": layout.micro_batches,
        "train_batch_size": layout.micro_batches * layout.rows * layout.replicas,
    }
    notes: list[str] = []
    if layout.schedule != "1f1b":
        notes.append(f"{TARGET} runs 1F1B, and not the plan's '{layout.schedule}'")
    if given.profile.shared:
        tied = given.profile.shared[0].name
        notes.append(f"'{tied}' is tied: make its layers of TiedLayerSpec")
    return json_text(document), notes
