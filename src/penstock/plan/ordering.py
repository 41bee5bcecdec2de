"""The order of work of a plan: made by its schedule, and validated."""

from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.schedule.registry import FAMILIES, known_schedule
from penstock.schedule.schedule import Schedule
from penstock.schedule.validate import validate

__all__ = ["order_of"]


def order_of(plan: Plan) -> Schedule:
    """The schedule that simulator, runtime and drawings of ``plan`` share.

    Raises:
        BadInput: no schedule has the plan's name for it, or it cannot be played on this pipeline.
    """
    family = known_schedule(plan.schedule)
    if family is None:
        raise BadInput(
            f"the plan's schedule '{plan.schedule}' is unknown; use one of the "
            f"{len(FAMILIES)} that 'penstock list' names"
        )
    shape = plan.shape()
    schedule = family.make(shape)
    validate(schedule, shape)
    return schedule
