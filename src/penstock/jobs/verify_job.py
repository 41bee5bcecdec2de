"""Checks that a job's pipeline computes what its model computes without Penstock."""

from pathlib import Path

from penstock.cluster.toml_file import local_cluster
from penstock.errors import BadInput
from penstock.jobs.job import Job
from penstock.jobs.plan_job import check_plan_fits, problem_of
from penstock.jobs.profile_job import profile_job
from penstock.jobs.training_loop import pipeline_of
from penstock.machine import usable_cores, usable_memory_bytes
from penstock.plan.json_file import read_plan
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.dynamic_program import pipeline_candidates
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.verify.verify import VerifyResult
from penstock.simulate.score import make_score

__all__ = ["verify_job"]


def verify_job(
    job: Job, *, workers: int, plan: Path | None = None, device: str = "cpu"
) -> VerifyResult:
    """Run the first batch of ``job`` through a pipeline and through the plain model, and compare.

    Without ``plan``, the best plan with several stages is made from estimated costs: the comparison
    does not depend on how fast the plan is.

    Raises:
        BadInput: the plan does not match this job or these workers.
        RunFailed: a worker failed.
    """
    chosen = read_plan(plan) if plan else several_stages(estimated_problem(job, workers))
    check_plan_fits(chosen, job, workers, f"plan '{plan}'" if plan else "the plan")
    return launch_workers(verify_worker, (job, chosen, device), workers=workers)[0]


def estimated_problem(job: Job, workers: int) -> PlanningProblem:
    """The planning problem with estimated costs; all memory may be used."""
    profile = profile_job(job, estimate_for="cpu")
    return problem_of(job, profile, local_cluster(workers, usable_cores(), usable_memory_bytes()))


def several_stages(problem: PlanningProblem) -> Plan:
    """The best plan of at least two stages, or of one if there is one worker or one layer."""
    devices, layers = len(problem.cluster.devices), len(problem.profile.layers)
    score = make_score(problem)
    plans = [
        candidate.plan
        for candidate in pipeline_candidates(problem)
        if len(candidate.plan.stages) >= min(2, devices, layers)
    ]
    if not plans:
        raise BadInput(
            f"no plan of several stages fits {devices} workers; name one with --plan, or use more "
            f"workers"
        )
    return min(plans, key=score)


def verify_worker(job: Job, plan: Plan, device: str) -> VerifyResult:
    """Run by each worker."""
    with pipeline_of(job, plan, device) as pipe:
        return pipe.verify(job.example_batch())
