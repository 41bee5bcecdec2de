"""The order of work of a plan, made by its schedule; and what of it the runtime carries out.

Planning asks the latter before it chooses, the runtime before it runs.
"""

from penstock.errors import BadInput
from penstock.plan.choices import choice_refusal
from penstock.plan.plan import Plan
from penstock.schedule.registry import FAMILIES, known_schedule
from penstock.schedule.schedule import Schedule
from penstock.schedule.validate import validate

__all__ = [
    "NOT_AS_SIMULATED",
    "blocks_refusal",
    "check_choices",
    "order_of",
    "schedule_refusal",
    "sharding_refusal",
    "stage_refusal",
]


def order_of(plan: Plan) -> Schedule:
    """The schedule that simulator, runtime and drawings of ``plan`` share.

    Raises:
        BadInput: no schedule has the plan's name for it, or it cannot be played on this pipeline.
    """
    check_choices(plan)
    family = known_schedule(plan.schedule)
    if family is None:
        raise BadInput(
            f"the plan's schedule '{plan.schedule}' is unknown; use one of the "
            f"{len(FAMILIES)} that 'penstock list' names, or load its file with --plugin"
        )
    shape = plan.shape()
    schedule = family.make(shape)
    validate(schedule, shape)
    return schedule


def blocks_refusal(schedule: str) -> str:
    """Why stages cannot recompute by block under a schedule, in words; empty if they can.

    >>> blocks_refusal("1f1b"), blocks_refusal("zb-h1")
    ('', 'splits backwards: each half would need the activations')
    """
    return choice_refusal("blocks", schedule)


def sharding_refusal(schedule: str, sharding: str) -> str:
    """Why devices cannot divide that under a schedule, in words; empty if they can.

    >>> sharding_refusal("1f1b", "parameters"), sharding_refusal("pipedream", "optimizer")
    ('', '')
    >>> sharding_refusal("zb-h1", "parameters")
    'splits backwards: gradients of divided parameters come with whole ones'
    """
    family = FAMILIES.get(schedule)
    if family is None or sharding != "parameters":
        return ""
    if family.placement == "mirrored":
        return "holds stages twice"
    if not family.flushes:
        return "has no flush: several versions of the parameters would be divided"
    if family.splits:
        return "splits backwards: gradients of divided parameters come with whole ones"
    return ""


def check_choices(plan: Plan) -> None:
    """Raise `BadInput` where the schedule does not let stages recompute, or divide, as they do."""
    for index, stage in enumerate(plan.stages):
        if stage.sharding and (refusal := sharding_refusal(plan.schedule, stage.sharding)):
            raise BadInput(
                f"the devices of stage {index} divide its parameters, and schedule "
                f"'{plan.schedule}' {refusal}; use another schedule, such as '1f1b', or divide "
                f"only the optimizer's state"
            )
        if stage.sharding and plan.tensor_groups:
            raise BadInput(
                f"the devices of stage {index} are tensor groups, which divide its layers already; "
                f"leave out what they divide besides, or the tensor groups"
            )
    by_block = [index for index, stage in enumerate(plan.stages) if stage.by_block]
    if by_block and (refusal := blocks_refusal(plan.schedule)):
        raise BadInput(
            f"stage {by_block[0]} recomputes by block, and schedule '{plan.schedule}' {refusal}; "
            f"use another schedule, such as '1f1b', or recompute the whole stage"
        )


NOT_AS_SIMULATED = frozenset({"fbp-as"})
"""Schedules with a forward and a backward at once, of which a rank runs one after the other."""


def schedule_refusal(schedule: str, *, norms: bool = False, tensor_groups: bool = False) -> str:
    """Why the runtime does not carry out a schedule, in words; empty if it does.

    ``norms``: layers have batch normalisation. ``tensor_groups``: stages are on tensor groups.

    >>> schedule_refusal("1f1b", norms=True), schedule_refusal("gpipe", tensor_groups=True)
    ('', '')
    >>> schedule_refusal("pipedream", tensor_groups=True)
    'has no flush'
    """
    family = FAMILIES.get(schedule)
    if family is None:
        return ""
    if family.placement == "mirrored" and norms:
        return "holds it twice: the copies would average different statistics"
    if family.placement == "mirrored" and tensor_groups:
        return "holds stages twice"
    return "has no flush" if tensor_groups and not family.flushes else ""


def stage_refusal(*, norms: bool, ranks: int) -> str:
    """Why a group of so many ranks cannot run a stage, in words; empty if it can."""
    return "has batch normalisation" if norms and ranks > 1 else ""
