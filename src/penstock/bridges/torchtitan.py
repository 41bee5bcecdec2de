"""Layouts of torchtitan: the modules of each model part, as JSON or TOML.

Source of the format: pytorch/torchtitan, second half of 2026: the class ``ParallelismConfig``, and
``torchtitan/distributed/pipeline_parallel.py``. The keys are the fields of ``parallelism`` and
``training``. Today's torchtitan takes them from a Python config or as flags
(``--parallelism.num_pp_microbatches 8``), older ones from TOML. Stages go to ranks round after
round, or down and up again if the schedule's class is a V. The order of work is that of the CSV
file (see `penstock.bridges.action_csv`), which replaces the order of the named schedule.
"""

import json
from typing import cast

from penstock.bridges.action_csv import csv_of_plan
from penstock.bridges.layout import (
    Exported,
    ExportRequest,
    PipelineLayout,
    layout_of_plan,
    recompute_notes,
)
from penstock.bridges.module_chain import module_chain
from penstock.bridges.named_stages import check_neighbours, names_of_stages
from penstock.document import json_text
from penstock.errors import BadInput
from penstock.schedule.shape import folded

__all__ = ["export_torchtitan"]

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


def export_torchtitan(request: ExportRequest) -> Exported:
    """The fields of torchtitan's configuration; TOML if the path ends with ``.toml``, else JSON.

    Raises:
        BadInput: a cut inside a block, a skip connection, unequal replicas, or stages on ranks in
            an order that torchtitan does not have.
    """
    layout, chain = layout_of_plan(request.plan, TARGET), module_chain(request.profile)
    check_neighbours(layout, chain, request.profile, TARGET)
    stages = names_of_stages(layout, chain, request.joined, TARGET)
    document: dict[str, dict[str, object]] = {
        "parallelism": {
            "pipeline_parallel_degree": layout.pipeline_size,
            "pipeline_parallel_schedule": schedule_class(layout),
            "pipeline_parallel_schedule_csv": request.path.with_suffix(".csv").name,
            "num_pp_microbatches": layout.micro_batches,
            "data_parallel_replicate_degree": layout.replicas,
            "module_fqns_per_model_part": [list(names) for names in stages],
        },
        "training": {"local_batch_size": layout.micro_batches * layout.rows},
    }
    is_toml = request.path.suffix == ".toml"
    text = toml_text(document) if is_toml else json_text(document)
    notes = (
        "modules without heavy work have no layer in the profile, and torchtitan drops modules "
        "that no part names: name a norm and the like with --join, such as --join norm=layers.7",
        *recompute_notes(request.plan),
    )
    return Exported(layout, stages, text, csv_of_plan(request.plan), notes)


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
    """Tables of strings, numbers and lists as TOML; their JSON is TOML too."""
    lines: list[str] = []
    for table, values in document.items():
        lines += [*([""] if lines else []), f"[{table}]"]
        for key, value in values.items():
            rows = cast("list[object]", value) if isinstance(value, list) else []
            if rows and isinstance(rows[0], list):
                lines += [f"{key} = [", *(f"  {toml_value(row)}," for row in rows), "]"]
            else:
                lines.append(f"{key} = {toml_value(cast('object', value))}")
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A value in the form that JSON and TOML share."""
    return json.dumps(value, ensure_ascii=False)
