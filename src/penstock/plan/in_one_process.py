"""A plan for any number of devices, with all of its stages in one process."""

from dataclasses import dataclass, field, replace

from penstock.plan.plan import Plan
from penstock.schedule.concurrent_clock import one_at_a_time
from penstock.schedule.message_order import unit_times
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape


@dataclass(frozen=True, repr=False)
class PlanInOneProcess(Plan):
    """The stages of ``planned`` on one device; its order is that of all devices of ``planned``."""

    planned: Plan = field(kw_only=True)


def in_one_process(plan: Plan) -> PlanInOneProcess:
    """``plan`` on device 0 alone; replicas of a stage, and ranks of a tensor group, become one."""
    size = plan.micro_batch_size
    stages = tuple(replace(stage, devices=(0,), slices=(size,)) for stage in plan.stages)
    return PlanInOneProcess(
        stages,
        plan.micro_batches,
        size,
        plan.schedule,
        plan.planner,
        plan.in_flight_limit,
        plan.costs,
        planned=plan,
    )


def merged_order(schedule: Schedule, shape: PipelineShape) -> Schedule:
    """One order of all groups' actions: each as soon as it can be, if all last equally long.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=2, micro_batches=2)
    >>> print(merged_order(one_f_one_b(shape), shape))
    stage 0,1 0F0 0F1 1F0 1B0 1F1 0B0 1B1 0B1
    """
    alone = one_at_a_time(schedule, shape)
    times = unit_times(alone.orders, shape)
    return replace(alone, orders=(Order(sorted(times, key=times.__getitem__)),))
