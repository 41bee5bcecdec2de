"""Which plans this runtime can run: every synchronous order of stages that are held once."""

from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.schedule.weight_rule import SYNCHRONOUS

__all__ = ["check_runnable"]

REMEDY = "it can be simulated but not yet trained; plan with another schedule, such as '1f1b'"


def check_runnable(plan: Plan) -> None:
    """Raise `BadInput` for a plan that holds stages twice, or several versions of its weights."""
    if plan.mirrored:
        raise BadInput(f"schedule '{plan.schedule}' holds every stage on two ranks: {REMEDY}")
    schedule = order_of(plan)
    if schedule.concurrent:
        raise BadInput(
            f"schedule '{plan.schedule}' runs forwards and backwards of a device at once: {REMEDY}"
        )
    if schedule.weights != SYNCHRONOUS:
        raise BadInput(
            f"schedule '{plan.schedule}' updates weights while micro-batches are in flight: "
            f"{REMEDY}"
        )
