"""Layouts of torchtitan: the modules of each model part, as JSON or TOML.

Source of the format: pytorch/torchtitan, second half of 2026: the class ``ParallelismConfig``, and
``torchtitan/distributed/pipeline_parallel.py``. The keys are the fields of ``parallelism`` and
``training``. Today's torchtitan takes them from a Python config or as flags
(``--parallelism.num_pp_microbatches 8``), older ones from TOML. Stages go to ranks round after
round, or down and up again if the schedule's class is a V. The order of work is that of the CSV
file (see `penstock.integrations.bridges.torch_pipelining`), which replaces the order of the named
schedule.
"""

import json

from penstock.errors import BadInput
from penstock.files import json_text
from penstock.integrations.bridges.layout import PipelineLayout
from penstock.integrations.bridges.modules import NamedPlan
from penstock.schedule.shape import folded

TARGET = "torchtitan"

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Our names and torch's, for the schedules that both have."""


def torchtitan_config(given: NamedPlan) -> tuple[str, list[str]]:
    """The fields of torchtitan's configuration, and notes; TOML if the path ends so, else JSON."""
    layout = given.layout
    degrees = {
        "tensor_parallel_degree": layout.group_size,
        "expert_parallel_degree": given.expert_size,
    }
    document: dict[str, dict[str, object]] = {
        "parallelism": {
            "pipeline_parallel_degree": layout.pipeline_size,
            "pipeline_parallel_schedule": schedule_class(layout),
            "pipeline_parallel_schedule_csv": given.path.with_suffix(".csv").name,
            "num_pp_microbatches": layout.micro_batches,
            "data_parallel_replicate_degree": layout.replicas,
            **{name: degree for name, degree in degrees.items() if degree > 1},
            "module_fqns_per_model_part": [list(names) for names in given.names],
        },
        "training": {"local_batch_size": layout.micro_batches * layout.rows},
    }
    text = toml_text(document) if given.path.suffix == ".toml" else json_text(document)
    return text, [
        "modules without heavy work have no layer in the profile, and torchtitan drops modules "
        "that no part names: name a norm and the like with --join, such as --join norm=layers.7"
    ]


def schedule_class(layout: PipelineLayout) -> str:
    """The name of a class of torch with the same placement, and the same order if there is one."""
    size, rounds = layout.pipeline_size, len(layout.stages) / layout.pipeline_size
    if layout.schedule in SCHEDULES:
        return SCHEDULES[layout.schedule]
    if layout.is_looped:
        return "1F1B" if rounds == 1 else "Interleaved1F1B"
    if rounds == 2 and layout.ranks == folded(size, 2):
        return "ZBVZeroBubble"
    raise BadInput(
        f"the stages of schedule '{layout.schedule}' are on ranks {list(layout.ranks)}; {TARGET} "
        f"puts them round after round, or down and up once; plan with --schedule interleaved or "
        f"zb-v"
    )


def toml_text(document: dict[str, dict[str, object]]) -> str:
    """Tables of strings, numbers and lists as TOML; the JSON of these is TOML too."""
    tables: list[str] = []
    for table, values in document.items():
        pairs = ((key, json.dumps(value, ensure_ascii=False)) for key, value in values.items())
        lines = (f"{key} = {text}".replace("], [", "],\n  [") for key, text in pairs)
        tables.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(tables) + "\n"
