"""Plans as JSON, one line for each stage, to be read and edited by hand."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.errors import BadInput
from penstock.files import (
    Entry,
    Json,
    check_document,
    in_one_line,
    json_text,
    read_document,
    version_is,
    write_text,
)
from penstock.plan.plan import Plan, Stage, StateOn
from penstock.schedule.shape import StageCost

VERSION = 2
"""Raised whenever the same model gets other layers, which plans and profiles count."""

OLDER = f"since version {VERSION} models have other layers, so plan again ('penstock plan')"

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Seconds or bytes."""


class StageEntry(Entry):
    """One stage: ``layers`` is the half-open range ``[lo, hi)``.

    ``recompute`` is true for all of them, false for none, "blocks" for all by block. ``sharding``
    is what the devices divide: the optimizer's state or, as FSDP does, the parameters too.
    ``in_turn``: they take whole micro-batches in turn.
    """

    layers: list[int]
    devices: list[int]
    slices: list[int]
    recompute: bool | Literal["blocks"] = False
    sharding: Literal["", "optimizer", "parameters"] = ""
    in_turn: bool = False


class CostEntry(Entry):
    """The costs of a stage that the order was made for; see `penstock.schedule.shape.StageCost`."""

    forward_s: NotNegative
    input_backward_s: NotNegative
    weight_backward_s: NotNegative
    transfer_s: NotNegative = 0.0
    saved_bytes: NotNegative = 0.0


class PlanEntry(Entry):
    """A whole plan."""

    format: Literal["penstock-plan"]
    schema_version: Annotated[int, AfterValidator(version_is(VERSION, OLDER))]
    planner: str = "hand"
    schedule: str
    micro_batches: int
    micro_batch_size: int
    in_flight_limit: list[int] = Field(default_factory=list[int])
    memory_bytes: list[NotNegative] = Field(default_factory=list[float])
    costs: list[CostEntry] = Field(default_factory=list[CostEntry])
    tensor_groups: list[list[int]] = Field(default_factory=list[list[int]])
    state_on: StateOn = "device"
    stages: list[StageEntry]


def read_plan(path: str | Path) -> Plan:
    """The plan that `write_plan` or a person wrote.

    Raises:
        BadInput: no such file, a syntax error, an unknown key, or a plan that no run could follow.
    """
    return plan_of_entry(read_document(PlanEntry, path, "plan"), path)


def plan_from_json(data: object, path: str | Path) -> Plan:
    """The plan in a JSON value; ``path`` is for messages."""
    return plan_of_entry(check_document(PlanEntry, data, path), path)


def plan_of_entry(entry: PlanEntry, path: str | Path) -> Plan:
    """The plan that a checked document describes."""
    for index, stage in enumerate(entry.stages):
        if len(stage.layers) != 2:
            raise BadInput(
                f"{path}: stages[{index}].layers is {stage.layers}; give the first layer and the "
                f"one after the last, as in [0, 4] for layers 0 to 3"
            )
    with in_one_line(f"{path}: "):
        return Plan(
            stages=tuple(
                Stage(
                    range(*s.layers),
                    tuple(s.devices),
                    tuple(s.slices),
                    s.recompute is True,
                    s.recompute == "blocks",
                    s.sharding,
                    s.in_turn,
                )
                for s in entry.stages
            ),
            micro_batches=entry.micro_batches,
            micro_batch_size=entry.micro_batch_size,
            schedule=entry.schedule,
            planner=entry.planner,
            in_flight_limit=tuple(entry.in_flight_limit),
            costs=tuple(StageCost(**cost.model_dump()) for cost in entry.costs),
            memory_bytes=tuple(entry.memory_bytes),
            tensor_groups=tuple(tuple(group) for group in entry.tensor_groups),
            state_on=entry.state_on,
        )


def plan_to_json(plan: Plan) -> dict[str, Json]:
    """The plan as a JSON object; layers as ``[lo, hi)``."""
    adapted: dict[str, Json] = {}
    if plan.costs:
        adapted = {
            "memory_bytes": list(plan.memory_bytes),
            "costs": [
                {name: getattr(cost, name) for name in CostEntry.model_fields}
                for cost in plan.costs
            ],
        }
    if plan.tensor_groups:
        adapted["tensor_groups"] = [list(group) for group in plan.tensor_groups]
    if plan.state_on != "device":
        adapted["state_on"] = plan.state_on
    return {
        "format": "penstock-plan",
        "schema_version": VERSION,
        "planner": plan.planner,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "in_flight_limit": list(plan.in_flight_limit),
        **adapted,
        "stages": [
            {
                "layers": [stage.layers.start, stage.layers.stop],
                "devices": list(stage.devices),
                "slices": list(stage.slices),
                "recompute": "blocks" if stage.by_block else stage.recompute,
                **({"sharding": stage.sharding} if stage.sharding else {}),
                **({"in_turn": True} if stage.in_turn else {}),
            }
            for stage in plan.stages
        ],
    }


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan``; `read_plan` gives it back.

    Raises:
        BadInput: the place cannot be written to.
    """
    write_text(path, json_text(plan_to_json(plan)))
