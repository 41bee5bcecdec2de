"""Layouts of ``torch.distributed.pipelining``: split points, and the order of work of each rank.

Source of the format: torch 2.13. ``pipeline(..., split_spec)`` takes the names of the modules at
which stages begin (``SplitPoint.BEGINNING``). ``_PipelineScheduleRuntime._load_csv`` reads the
actions (see `penstock.bridges.action_csv`). Which rank holds which stage follows from the actions.
The JSON document around the two is ours:

    {"format": "penstock-torch-layout", "schema_version": 1, "split_points": ["h.2", "h.4"],
     "stages": [["wte", "h.0", "h.1"], ...], "stage_to_rank": [0, 1, 0], "n_microbatches": 8, ...}

``split_points`` is all that an import needs. Replicas are data parallelism around the pipeline.
"""

from typing import Literal

from pydantic import Field

from penstock.bridges.action_csv import csv_of_plan, read_csv, schedule_named_by_order
from penstock.bridges.layout import (
    Exported,
    ExportRequest,
    ImportRequest,
    PipelineLayout,
    layout_of_plan,
    recompute_notes,
)
from penstock.bridges.module_chain import module_chain
from penstock.bridges.named_stages import check_neighbours, names_of_stages, stages_of_starts
from penstock.document import Entry, json_text, read_document, shown
from penstock.errors import BadInput
from penstock.plan.plan import MOST_MICRO_BATCHES
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import check_playable

__all__ = ["export_torch", "import_torch"]

TARGET = "torch.distributed.pipelining"


class TorchLayoutEntry(Entry):
    """The document; only ``split_points`` is needed."""

    format: Literal["penstock-torch-layout"] = "penstock-torch-layout"
    schema_version: Literal[1] = 1
    split_points: list[str]
    stages: list[list[str]] = Field(default_factory=list[list[str]])
    stage_to_rank: list[int] = Field(default_factory=list[int])
    n_microbatches: int = Field(default=0, ge=0)
    microbatch_size: int = Field(default=0, ge=0)
    data_parallel_size: int = Field(default=0, ge=0)
    schedule: str = ""
    schedule_csv: str = ""


def export_torch(request: ExportRequest) -> Exported:
    """Split points and actions for torch's pipelines.

    Raises:
        BadInput: a cut inside a block, a skip connection, unequal replicas, or a schedule that a
            list of actions cannot say.
    """
    layout, chain = layout_of_plan(request.plan, TARGET), module_chain(request.profile)
    check_neighbours(layout, chain, request.profile, TARGET)
    stages = names_of_stages(layout, chain, request.joined, TARGET)
    starts = [modules[0].name for modules in chain.stage_modules(layout.stages, TARGET)[1:]]
    document = {
        "format": "penstock-torch-layout",
        "schema_version": 1,
        "split_points": starts,
        "stages": [list(names) for names in stages],
        "stage_to_rank": list(layout.ranks),
        "n_microbatches": layout.micro_batches,
        "microbatch_size": layout.rows,
        "data_parallel_size": layout.replicas,
        "schedule": layout.schedule,
        "schedule_csv": request.path.with_suffix(".csv").name,
    }
    return Exported(
        layout,
        stages,
        json_text(document),
        csv_of_plan(request.plan),
        recompute_notes(request.plan),
    )


def import_torch(request: ImportRequest) -> PipelineLayout:
    """The layout in a document like the one that `export_torch` writes.

    Raises:
        BadInput: unknown modules, a rank for too few or too many stages, or actions that do not
            belong to these stages.
    """
    path, asked = request.path, request.asked
    entry = read_document(TorchLayoutEntry, path, "layout")
    stages = stages_of_starts(entry.split_points, request.profile, path)
    count = len(stages)
    size = asked.ranks or count
    ranks = tuple(entry.stage_to_rank) or tuple(stage % size for stage in range(count))
    if len(ranks) != count or sorted(set(ranks)) != list(range(len(set(ranks)))):
        raise BadInput(
            f"{path}: stage_to_rank is {shown(list(ranks))} for {count} stages; give each a "
            f"rank, and number the ranks from 0 without a gap"
        )
    layout = PipelineLayout(
        stages,
        ranks,
        entry.data_parallel_size,
        entry.n_microbatches,
        entry.microbatch_size,
        entry.schedule,
    )
    if not entry.schedule_csv:
        return layout
    return with_actions(layout, request, entry.schedule_csv)


def with_actions(layout: PipelineLayout, request: ImportRequest, csv_name: str) -> PipelineLayout:
    """The layout with the ranks, micro-batches and schedule that a CSV file of actions says.

    Raises:
        BadInput: the actions cannot run on these stages, or they are the order of none of our
            schedules and neither layout nor user name one.
    """
    place = request.path.parent / csv_name
    schedule = read_csv(place)
    ranks = ranks_of(schedule, len(layout.stages), place)
    micro_batches = 1 + max(max(order.micro_batches.tolist()) for order in schedule.orders)
    if micro_batches > MOST_MICRO_BATCHES:
        raise BadInput(
            f"{place} has micro-batch {micro_batches - 1}, and they are numbered from 0 to at most "
            f"{MOST_MICRO_BATCHES - 1}; number them anew"
        )
    straight = ranks == tuple(range(len(ranks)))
    shape = PipelineShape(len(ranks), micro_batches, () if straight else ranks)
    try:
        check_playable(schedule, shape)
    except BadInput as error:
        raise BadInput(f"{place}: {error}") from None
    name = request.asked.schedule or layout.schedule or schedule_named_by_order(schedule, shape)
    if not name:
        raise BadInput(
            f"the order in '{place}' is that of none of our schedules on {len(ranks)} stages and "
            f"{micro_batches} micro-batches; name the nearest with --schedule"
        )
    return PipelineLayout(layout.stages, ranks, layout.replicas, micro_batches, layout.rows, name)


def ranks_of(schedule: Schedule, stages: int, place: object) -> tuple[int, ...]:
    """The rank on whose line each stage's actions stand."""
    found: dict[int, int] = {}
    for rank, order in enumerate(schedule.orders):
        for stage in sorted(set(order.stages.tolist())):
            if found.setdefault(stage, rank) != rank:
                raise BadInput(
                    f"{place}: actions of stage {stage} are on ranks {found[stage]} and {rank}; "
                    f"put them on one"
                )
    if sorted(found) != list(range(stages)):
        raise BadInput(
            f"{place} has actions of stages {sorted(found)[:8]}, and the layout has {stages} "
            f"stages; is it the schedule of another layout?"
        )
    return tuple(found[stage] for stage in range(stages))
