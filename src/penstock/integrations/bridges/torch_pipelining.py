"""Layouts of ``torch.distributed.pipelining``: split points, and the order of work of each rank.

Source of the format: torch 2.13. ``pipeline(..., split_spec)`` takes the names of the modules at
which stages begin (``SplitPoint.BEGINNING``). ``_PipelineScheduleRuntime._load_csv`` in
``torch/distributed/pipelining/schedules.py`` reads the actions, with ``format="compute_only"``:
one line for each rank and one cell for each action: stage, kind (F, B, I or W, with our meanings),
micro-batch. Empty cells are waits. The runtime adds the messages. It has no action for
recomputation, which happens inside its backwards. Which rank holds which stage follows from the
actions. The JSON document around the two is ours:

    {"format": "penstock-torch-layout", "schema_version": 1, "split_points": ["h.2", "h.4"],
     "stages": [["wte", "h.0", "h.1"], ...], "stage_to_rank": [0, 1, 0], "n_microbatches": 8, ...}

``split_points`` is all that an import needs. Replicas are data parallelism around the pipeline.
"""

import csv
import io
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.errors import BadInput
from penstock.files import Entry, json_text, read_document, read_text, shown
from penstock.integrations.bridges.layout import LayoutOptions, PipelineLayout
from penstock.integrations.bridges.modules import NamedPlan, stages_of_starts
from penstock.plan.ordering import order_of
from penstock.plan.plan import MOST_MICRO_BATCHES, Plan
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.action import Action, parse_action
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import check_playable

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


def torch_layout(given: NamedPlan) -> tuple[str, list[str]]:
    """Split points for torch's pipelines, with the name of the CSV file of actions."""
    layout = given.layout
    document = {
        "format": "penstock-torch-layout",
        "schema_version": 1,
        "split_points": [modules[0].name for modules in given.modules[1:]],
        "stages": [list(names) for names in given.names],
        "stage_to_rank": list(layout.ranks),
        "n_microbatches": layout.micro_batches,
        "microbatch_size": layout.rows,
        "data_parallel_size": layout.replicas,
        "schedule": layout.schedule,
        "schedule_csv": given.path.with_suffix(".csv").name,
    }
    return json_text(document), []


def read_torch_layout(path: Path, profile: ModelProfile, options: LayoutOptions) -> PipelineLayout:
    """The layout in a document like the one that `torch_layout` writes."""
    entry = read_document(TorchLayoutEntry, path, "layout")
    stages = stages_of_starts(entry.split_points, profile, path)
    count = len(stages)
    size = options.ranks or count
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
    return with_actions(layout, options.schedule, path.parent / entry.schedule_csv)


def with_actions(layout: PipelineLayout, options: str, place: Path) -> PipelineLayout:
    """The layout with the ranks, micro-batches and schedule that a CSV file of actions says."""
    schedule = read_csv(place)
    ranks = ranks_of(schedule, len(layout.stages), place)
    micro_batches = 1 + max(max(order.micro_batches.tolist()) for order in schedule.orders)
    if micro_batches > MOST_MICRO_BATCHES:
        raise BadInput(
            f"{place} has micro-batch {micro_batches - 1}, and they are numbered from 0 to at most "
            f"{MOST_MICRO_BATCHES - 1}; renumber them"
        )
    straight = ranks == tuple(range(len(ranks)))
    shape = PipelineShape(len(ranks), micro_batches, () if straight else ranks)
    try:
        check_playable(schedule, shape)
    except BadInput as error:
        raise BadInput(f"{place}: {error}") from None
    name = options or layout.schedule or schedule_named_by_order(schedule, shape)
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


NO_WORK = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
MOST_ACTIONS = 4_000_000
"""The most actions of a file that is read."""


def csv_of_plan(plan: Plan) -> str:
    """The order of work of a plan, one line for each pipeline rank, without recomputations."""
    schedule = order_of(plan)
    if schedule.concurrent:
        raise BadInput(
            f"schedule '{plan.schedule}' runs forwards beside backwards, and a list of actions "
            f"has one at a time; plan with another, such as --schedule 1f1b"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow(str(action) for action in order if action.kind != "R")
    return text.getvalue()


def read_csv(path: Path) -> Schedule:
    """The compute actions of a file; messages and other work of the runtime are left out."""
    orders: list[list[Action]] = []
    rows = csv.reader(io.StringIO(read_text(path, "schedule")))
    try:
        for number, row in enumerate(rows, start=1):
            orders.append(
                [action for cell in row for action in actions_in_cell(cell, path, number)]
            )
    except csv.Error as error:
        raise BadInput(f"schedule '{path}' is no CSV file: {error}; write it again") from None
    if not orders or not all(orders):
        raise BadInput(f"schedule '{path}' has a rank without actions; give each rank a line")
    if sum(map(len, orders)) > MOST_ACTIONS:
        raise BadInput(
            f"schedule '{path}' has more than {MOST_ACTIONS} actions; name a smaller one"
        )
    return schedule_from_actions(orders)


def actions_in_cell(cell: str, path: Path, line: int) -> list[Action]:
    """The actions of a cell: none for a wait or a message, two for an overlapped pair."""
    text = cell.strip()
    if not text or NO_WORK.fullmatch(text):
        return []
    pair = OVERLAPPED.fullmatch(text)
    words = pair[1].split(";") if pair else [text]
    try:
        return [parse_action(word) for word in words]
    except BadInput as error:
        raise BadInput(f"{path}, line {line}: {error}") from None


def schedule_named_by_order(schedule: Schedule, shape: PipelineShape) -> str:
    """The name of the schedule that gives this order on a pipeline of this shape; "" if none does.

    Schedules that search for an order are not tried, because theirs depends on costs.
    """
    for name, family in FAMILIES.items():
        if family.is_searched or not family.flushes:
            continue
        if family.placement == "mirrored":
            continue
        try:
            made = family.make(shape)
        except BadInput:
            continue
        if not made.concurrent and [*map(list, made.orders)] == [*map(list, schedule.orders)]:
            return name
    return ""
