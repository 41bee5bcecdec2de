"""Short trials: a few steps of several plans, so that an error of prediction costs nothing.

Nothing of them is kept: each has a pipeline of its own with the job's first weights and data.
"""

import gc
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from statistics import median

from penstock.capture.record.outside_state import kept_random_state
from penstock.device import release_unused
from penstock.errors import BadInput, Infeasible
from penstock.plan.ordering import updates_per_batch
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import find_plan
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.runtime.processes.world import World
from penstock.simulate.score import make_score
from penstock.train.job import Job
from penstock.train.plan_job import check_plan_of_job, training_problem
from penstock.train.train_request import TrainRequest
from penstock.train.training_loop import batches_of_steps, pipeline_of

TRIAL_STEPS, SETTLING_STEPS = 10, 2
"""Steps of a trial, and those at its start that are not measured."""

NEAR = 1.25
"""The longest predicted time of a plan to try, as a multiple of the best one's."""


def plans_to_try(job: Job, request: TrainRequest, problem: PlanningProblem) -> list[Plan]:
    """The planner's answer, then others that it has looked at, the fastest by simulation first.

    At most ``request.tries`` that are near the best and can be carried out. First come those that
    differ in the devices of stages or in micro-batches, since predictions of such are least sure;
    then those of other schedules. Of those that are predicted to take the same to five digits there
    is one: they do the same work.
    """
    problem, seen = training_problem(problem, job), dict[Plan, float]()
    score, sizes = make_score(problem), job.tensor_parallel.ranks

    def noted(plan: Plan) -> float:
        seconds = seen[replace(plan, planner=job.constraints.planner)] = score(plan)
        return seconds

    found = [find_plan(problem, job.constraints.planner, noted, sizes=sizes)]
    if sizes:  # plans with groups are scored in another way
        with suppress(Infeasible):
            find_plan(problem, job.constraints.planner, noted)
    limit_s = NEAR * min(seen.values(), default=0.0)
    # Planners also look at plans of schedules that are not allowed, to start from.
    allowed = (plan for plan in seen if plan.schedule in problem.schedules)
    near = sorted((plan for plan in allowed if seen[plan] <= limit_s), key=lambda p: seen[p])
    for kind in (division_of, kind_of_plan):
        known = {fact for plan in found for fact in (kind(plan), f"{seen.get(plan, 0):.5g}")}
        for plan in near:
            own = {kind(plan), f"{seen[plan]:.5g}"}
            if len(found) == request.tries or own & known:
                continue
            with suppress(BadInput):
                check_plan_of_job(plan, job, len(problem.cluster.devices), "a plan to try")
                found.append(plan)
                known |= own
    return found


def division_of(plan: Plan) -> object:
    """The division of the work among devices, wherever the plan cuts its stages."""
    sharding = frozenset(stage.sharding for stage in plan.stages)
    return tuple(map(len, plan.device_groups)), plan.micro_batches, sharding


def kind_of_plan(plan: Plan) -> object:
    """The division of the work, and the order in which it is done."""
    order = (plan.schedule, len(plan.stages)) if len(plan.device_groups) > 1 else ()
    return division_of(plan), order


def seconds_of_trial(
    world: World, job: Job, plan: Plan, device: str, timeout_s: float
) -> tuple[float, str]:
    """Seconds of a step of ``plan``, or 0 and why it failed; all ranks must call this.

    A step takes what its slowest rank takes; the median is over the steps after the first ones.
    """
    own = replace(job, steps=TRIAL_STEPS, callbacks=(), verify="off")
    seconds, failure = list[float](), ""
    with kept_random_state(world.device):
        try:
            with pipeline_of(own, plan, device, timeout_s) as pipe:
                batches = batches_of_steps(own, 0, pipe.needs)
                steps = starmap(pipe.step, batches)
                if updates_per_batch(plan):
                    steps = pipe.stream(batch for (batch,) in batches)
                seconds = [metrics.seconds for metrics in steps]
        except Exception as cause:  # whatever it is, the run continues without this plan
            failure = str(cause).strip().partition("\n")[0] or type(cause).__name__
    gc.collect()  # the pipeline, before the next one is made
    release_unused(world.device)
    HEARTBEAT.phase = "tries plans"
    ranks = world.all_gather((seconds, failure))
    if failure := next((why for _, why in ranks if why), ""):
        return 0.0, failure
    slowest = [max(of_ranks) for of_ranks in zip(*(own for own, _ in ranks), strict=True)]
    return median(slowest[SETTLING_STEPS:] or slowest), ""
