"""Which plans this runtime can run: every synchronous order of one stage a rank."""

from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.schedule.weight_rule import SYNCHRONOUS

__all__ = ["check_runnable"]

REMEDY = (
    "it can be simulated but not yet trained; plan with a schedule that has one stage a device, "
    "such as '1f1b' or 'zb-h1'"
)


def check_runnable(plan: Plan) -> None:
    """Raise `BadInput` for a plan whose ranks hold several stages or several weight versions."""
    if plan.mirrored:
        raise BadInput(f"schedule '{plan.schedule}' holds every stage on two ranks: {REMEDY}")
    if plan.placement:
        raise BadInput(
            f"the plan has {len(plan.stages)} stages on {len(plan.device_groups)} sets of devices, "
            f"so that ranks hold several stages: {REMEDY}"
        )
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
