"""The order of work as a CSV file of actions, which torch's pipeline runtime reads.

Source of the format: torch 2.13, ``torch/distributed/pipelining/schedules.py``,
``_PipelineScheduleRuntime._load_csv(format="compute_only")``. There is one line for each rank and
one cell for each action: stage, kind (F, B, I or W, with our meanings), micro-batch. Empty cells
are waits. The runtime adds the messages. It has no action for recomputation, which happens inside
its backwards.
"""

import csv
import io
import re
from pathlib import Path

from penstock.document import read_text
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.schedule.action import Action, parse_action
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape

__all__ = ["csv_of_plan", "read_csv", "schedule_named_by_order"]

NO_WORK = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
MOST_ACTIONS = 4_000_000
"""The most actions of a file that is read."""


def csv_of_plan(plan: Plan) -> str:
    """The order of work of a plan, one line for each pipeline rank, without recomputations.

    Raises:
        BadInput: the schedule lets forwards run beside backwards, which no list can say.
    """
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
    """The compute actions of a file; messages and other work of the runtime are left out.

    Raises:
        BadInput: the file cannot be read, has no actions or too many, or a cell is none.
    """
    orders: list[list[Action]] = []
    rows = csv.reader(io.StringIO(read_text(path, "schedule")))
    try:
        for number, row in enumerate(rows, start=1):
            orders.append([action for cell in row for action in actions_of(cell, path, number)])
    except csv.Error as error:
        raise BadInput(f"schedule '{path}' is no CSV file: {error}; write it again") from None
    if not orders or not all(orders):
        raise BadInput(f"schedule '{path}' has a rank without actions; give each rank a line")
    if sum(map(len, orders)) > MOST_ACTIONS:
        raise BadInput(
            f"schedule '{path}' has more than {MOST_ACTIONS} actions; name a smaller one"
        )
    return schedule_from_actions(orders)


def actions_of(cell: str, path: Path, line: int) -> list[Action]:
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
