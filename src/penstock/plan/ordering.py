"""The order of work of a plan, made by its schedule; and what of it the runtime carries out.

Planning checks the latter before it chooses, the runtime before it runs.
"""

from dataclasses import replace

from penstock.errors import BadInput
from penstock.plan.choices import choice_refusal, choices_of
from penstock.plan.in_one_process import PlanInOneProcess, merged_order
from penstock.plan.plan import Plan
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule
from penstock.schedule.validate import validate


def order_of(plan: Plan) -> Schedule:
    """The schedule that simulator, runtime and drawings of ``plan`` share."""
    if isinstance(plan, PlanInOneProcess):
        planned = replace(plan.planned, micro_batches=plan.micro_batches)
        return merged_order(order_of(planned), planned.shape())
    check_choices(plan)
    family = FAMILIES.get(plan.schedule)
    if family is None:
        raise BadInput(
            f"the plan's schedule '{plan.schedule}' is unknown; use one of the "
            f"{len(FAMILIES)} that 'penstock list' names"
        )
    shape = plan.shape()
    schedule = family.make(shape)
    validate(schedule, shape)
    return schedule


def has_forwards_first(schedule: Schedule, stage: int) -> bool:
    """Return whether a stage has all its forwards before its first backward.

    >>> from penstock.schedule.families.early_backward import gpipe, one_f_one_b
    >>> from penstock.schedule.shape import PipelineShape
    >>> shape = PipelineShape(stages=2, micro_batches=3)
    >>> has_forwards_first(gpipe(shape), 1), has_forwards_first(one_f_one_b(shape), 1)
    (True, False)
    """
    for order in schedule.orders:
        own = "".join(action.kind for action in order if action.stage == stage)
        if "F" in own.lstrip("F"):
            return False
    return True


def updates_per_batch(plan: Plan) -> int:
    """The number of weight updates of each stage in a batch; 0 if it waits for a flush."""
    per_update = order_of(plan).weights.micro_batches_per_update
    return plan.micro_batches // per_update if per_update else 0


INSTEAD = {
    "optimizer": ("divides its optimizer's state", "keep that whole"),
    "parameters": ("divides its parameters", "divide only the optimizer's state"),
    "blocks": ("recomputes by block", "recompute the whole stage"),
}
"""The action of a stage and its alternative, in words, by choice."""


def check_choices(plan: Plan) -> None:
    """Raise `BadInput` where the schedule does not let stages recompute, or divide, as they do."""
    for index, stage in enumerate(plan.stages):
        for choice in choices_of(stage):
            if refusal := choice_refusal(choice, plan.schedule):
                does, instead = INSTEAD[choice]
                raise BadInput(
                    f"stage {index} {does}, and schedule '{plan.schedule}' {refusal}; use another "
                    f"schedule, such as '1f1b', or {instead}"
                )


NOT_AS_SIMULATED = frozenset({"fbp-as"})
"""Schedules with a forward and a backward at once, of which a rank runs one after the other."""


def schedule_refusal(
    schedule: str, *, norms: bool = False, whole_loss: bool = False, tensor_groups: bool = False
) -> str:
    """Return why the runtime does not carry out a schedule, in words; empty if it does.

    ``norms``: layers have batch normalisation. ``whole_loss``: the loss is computed on all samples
    of a step at once. ``tensor_groups``: stages are on tensor groups.

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
    if whole_loss and not family.forwards_first:
        return "has backwards before the last forward"
    if family.placement == "mirrored" and tensor_groups:
        return "holds stages twice"
    return "has no flush" if tensor_groups and not family.flushes else ""


def stage_refusal(*, norms: bool, ranks: int) -> str:
    """Return why a group of ``ranks`` ranks cannot run a stage, in words; empty if it can."""
    return "has batch normalisation" if norms and ranks > 1 else ""
