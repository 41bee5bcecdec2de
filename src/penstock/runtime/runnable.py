"""Which plans this runtime can run: all whose schedule can be played."""

from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import schedule_of

__all__ = ["check_runnable"]


def check_runnable(plan: Plan) -> None:
    """Raise `BadInput` for a plan whose schedule is unknown or cannot be played."""
    schedule_of(plan, plan.micro_batches)
