"""Which plans this runtime can run: all that update weights after a flush."""

from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import schedule_of
from penstock.schedule.weight_rule import SYNCHRONOUS

__all__ = ["check_runnable"]

REMEDY = "it can be simulated but not yet trained; plan with another schedule, such as '1f1b'"


def check_runnable(plan: Plan) -> None:
    """Raise `BadInput` for a plan with several versions of its weights."""
    schedule, _ = schedule_of(plan, plan.micro_batches)
    if schedule.weights != SYNCHRONOUS:
        raise BadInput(
            f"schedule '{plan.schedule}' updates weights while micro-batches are in flight: "
            f"{REMEDY}"
        )
