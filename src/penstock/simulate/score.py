"""Seconds of any plan of a problem, fast enough to judge tens of thousands of them."""

from dataclasses import dataclass
from math import inf

from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.schedule.schedule import PipelineShape, Schedule
from penstock.simulate.arrays import OrderArrays, order_arrays
from penstock.simulate.durations import workload_of
from penstock.simulate.layer_sums import layer_sums
from penstock.simulate.memory import Held, held_while, peaks_bytes
from penstock.simulate.simulation import check_plan_fits_inputs

__all__ = ["make_score"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid schedule with all that depends on it alone."""

    schedule: Schedule
    arrays: OrderArrays
    held: tuple[tuple[Held, ...], ...]


def make_score(problem: PlanningProblem) -> Score:
    """The iteration time of a plan by the compiled engine; infinite where it does not fit.

    Schedules are made, proven and flattened once for each shape of pipeline.
    """
    from penstock.simulate import compiled

    profile, cluster = problem.profile, problem.cluster
    sums = layer_sums(profile)
    prepared: dict[tuple[str, PipelineShape], Prepared] = {}

    def prepare(plan: Plan) -> Prepared:
        shape = plan.shape()
        key = (plan.schedule, shape)
        if key not in prepared:
            schedule = order_of(plan)
            prepared[key] = Prepared(schedule, order_arrays(schedule), held_while(schedule, shape))
        return prepared[key]

    def score(plan: Plan) -> float:
        check_plan_fits_inputs(plan, profile, cluster)
        ready = prepare(plan)
        peaks = peaks_bytes(
            plan,
            profile,
            ready.held,
            len(cluster.devices),
            optimizer_bytes_per_parameter_byte=problem.optimizer_bytes_per_parameter_byte,
            sums=sums,
        )
        if any(
            peak > device.memory_bytes for peak, device in zip(peaks, cluster.devices, strict=True)
        ):
            return inf
        workload = workload_of(plan, profile, cluster, ready.schedule, sums=sums)
        return compiled.iteration_s(workload, ready.arrays)

    return score
