"""The plan of a job: how it is made, checked and predicted."""

from dataclasses import replace
from functools import partial

from penstock.cluster.cluster import Cluster
from penstock.costs.sharding import with_sharding
from penstock.errors import BadInput, Infeasible
from penstock.plan.ordering import schedule_refusal, updates_per_batch
from penstock.plan.pins import read_pin
from penstock.plan.plan import Plan, parallel_words, plan_words
from penstock.plan.problem import PlanningProblem
from penstock.plan.side_by_side import pipelines_in
from penstock.plan_here import problem_under, slowed_problem
from penstock.planners.find_plan import TimeLimit, find_plan
from penstock.planners.tensor_groups import on_groups, on_ranks, without_groups
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.conflicts import BY_SLICES, check_conflicts, uses_of
from penstock.runtime.micro_batches import check_runnable
from penstock.runtime.tables import Constraints
from penstock.simulate.by_length import LengthPrediction, expected_s, predict_lengths
from penstock.simulate.local_sgd import meeting_price
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.text import seconds_text
from penstock.train.job import Job
from penstock.train.optimizers import state_bytes_per_parameter_byte

STEADY_ITERATIONS = 6
"""Iterations to simulate for the steady-state step time."""


def problem_of(job: Job, profile: ModelProfile, cluster: Cluster) -> PlanningProblem:
    """The planning problem of a job.

    An average needs the bytes of the parameters again, as do float32 sums of 16-bit gradients.
    """
    more = bool(job.average_decay) + bool(job.gradient_dtype)
    return PlanningProblem(
        profile=profile,
        cluster=cluster,
        global_batch=job.batch_size,
        micro_batch_sizes=job.micro_batch_choices(),
        optimizer_bytes_per_parameter_byte=state_bytes_per_parameter_byte(job.optimizer) + more,
        kept_on_device=more,
    )


def training_problem(problem: PlanningProblem, job: Job) -> PlanningProblem:
    """The planning problem of a run, whose plans keep to the job's constraints."""
    left_out = pins_left_out(job, problem)
    held = tuple(pin for pin in job.constraints.pins if pin not in left_out)
    return problem_under(replace(job.constraints, pins=held), problem)


def pins_left_out(job: Job, problem: PlanningProblem) -> tuple[str, ...]:
    """The job's pins of more stages than there are workers: fewer may be left after a loss."""
    profile, cluster = problem.profile, problem.cluster
    pins = ((pin, read_pin(pin, profile, cluster)) for pin in job.constraints.pins)
    return tuple(pin for pin, read in pins if read.stages > len(cluster.devices))


def new_plan(job: Job, problem: PlanningProblem, limit: TimeLimit | None = None) -> Plan:
    """A plan of the job's planner, the best one that it finds until the limit.

    It may have tensor groups of the sizes that the job names.
    """
    problem = training_problem(problem, job)
    sizes, planner = job.tensor_parallel.ranks, job.constraints.planner
    plan = find_plan(problem, planner, make_score(problem), sizes=sizes, limit=limit)
    if job.meet_every:
        pipelines_in(plan)
    return plan


def check_plan_of_job(plan: Plan, job: Job, workers: int, name: str) -> None:
    """Raise `BadInput` for a plan that these workers cannot run with this job."""
    check_conflicts(job.uses | uses_of(plan, name), f"job '{job.name}': ")
    check_runnable(plan)
    if job.meet_every:
        pipelines_in(plan)
    if max(plan.ranks) >= workers:
        what = "rank" if plan.tensor_groups else "device"
        raise BadInput(
            f"{name} uses {what} {max(plan.ranks)}, but there are {workers} workers ({what}s 0 "
            f"to {workers - 1}); start {max(plan.ranks) + 1} with --workers, or plan for {workers}"
        )
    if plan.global_batch != job.batch_size:
        raise BadInput(
            f"{name} is for batches of {plan.global_batch} samples ({plan.micro_batches} "
            f"micro-batches of {plan.micro_batch_size}), but job '{job.name}' has batches of "
            f"{job.batch_size}; plan for those or set batch_size = {plan.global_batch} in the job"
        )


def check_model_of_plan(plan: Plan, profile: ModelProfile) -> None:
    """Raise `BadInput` for a plan of another model, or one that cannot run this model."""
    layers = plan.stages[-1].layers.stop
    if layers != len(profile.layers):
        raise BadInput(
            f"the plan has {layers} layers, but '{profile.name}' has {len(profile.layers)}; plan "
            f"this model again"
        )
    refusal = schedule_refusal(plan.schedule, whole_loss=profile.whole_loss)
    if refusal and plan.micro_batches > 1:
        raise BadInput(
            f"the loss of '{profile.name}' is of all samples of a step at once, and schedule "
            f"'{plan.schedule}' {refusal}; {BY_SLICES.format('use a plan with gpipe')}"
        )
    refusal = schedule_refusal(plan.schedule, norms=True) if profile.has_norms else ""
    if refusal:
        raise BadInput(
            f"'{profile.name}' has batch normalisation, and schedule '{plan.schedule}' {refusal}; "
            f"use a schedule that holds every stage once"
        )


def predict_iteration(job: Job, plan: Plan, problem: PlanningProblem) -> Prediction:
    """Simulate an iteration of ``plan``; its time is that of a whole step with all its batches.

    Without a flush it is the time in the steady state. Where pipelines train alone, it has its
    share of a meeting. With ``accumulate``, replicas are summed only after the last batch; here
    that is counted for each. Its devices are the workers, also where the plan has tensor groups.
    They are as slow as other programs and waits for the slowest make them (`slowed_problem`).
    """
    problem = slowed_problem(problem, plan)
    place = "host" if job.constraints.state_on == "host" else plan.state_on
    grouped, own = on_groups(plan, problem.with_state_on(place))
    whole = without_groups(grouped)
    simulated = partial(
        simulate_plan,
        with_sharding(whole, "optimizer") if job.shards_optimizer else whole,
        own.profile,
        own.cluster,
        optimizer_bytes_per_parameter_byte=own.optimizer_bytes_per_parameter_byte,
    )
    prediction = on_ranks(simulated(), grouped, len(problem.cluster.devices))
    if job.meet_every:
        price = meeting_price(own, plan, job.meet_every)
        alone_s = job.accumulate * price.alone_s
        return replace(prediction, iteration_s=alone_s + price.meeting_s / job.meet_every)
    if not updates_per_batch(plan):
        return replace(prediction, iteration_s=job.accumulate * prediction.iteration_s)
    several = simulated(iterations=STEADY_ITERATIONS)
    peaks = several.peak_memory_bytes
    return replace(prediction, iteration_s=several.steady_s, peak_memory_bytes=peaks)


def predict_step(
    job: Job, plan: Plan, problem: PlanningProblem
) -> tuple[Prediction, tuple[LengthPrediction, ...]]:
    """The result of `predict_iteration`, and that of each length, of which it has the mean time."""
    prediction = predict_iteration(job, plan, problem)
    by_length = predict_lengths(
        problem.profile,
        lambda at: predict_iteration(job, plan, replace(problem, profile=at)).iteration_s,
    )
    mean_s = expected_s(by_length) if by_length else prediction.iteration_s
    return replace(prediction, iteration_s=mean_s), by_length


def other_words(job: Job, plan: Plan, problem: PlanningProblem) -> str:
    """The step time without the job's constraints, or of plain data parallelism, in words.

    Empty if the plan is that.
    """
    if job.constraints != Constraints():
        other = new_plan(replace(job, constraints=Constraints()), problem)
        words = f"without constraints {plan_words(other, 'worker').partition(';')[0]}"
    elif len(plan.device_groups) == 1:
        return ""
    else:
        problem = replace(problem, schedules=("1f1b",), blocks="allowed")
        try:
            other = find_plan(problem, "data-parallel", make_score(problem))
        except Infeasible:
            return "DDP does not fit in memory"
        words = (
            parallel_words(other, "worker")[0]
            + " with activation checkpointing" * other.stages[0].by_block
        )
    if plan_words(other) == plan_words(plan):
        return ""
    step_s = predict_step(job, other, problem)[0].iteration_s
    return f"{words} would take {seconds_text(step_s)}"
