"""Start ranks of this host that train a job, and fewer where some are lost; or that verify it.

Every process that is started runs `penstock.train.rank_program`. This one passes signals on,
reports why the run has failed, and starts the ranks again as long as ``may_lose`` allows.
"""

from dataclasses import replace
from pathlib import Path

from penstock.cluster.toml_file import local_cluster
from penstock.errors import BadInput, Infeasible, RunFailed
from penstock.machine import usable_cores, usable_memory_bytes
from penstock.plan.json_file import read_plan
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.dynamic_program import plans_of_tables
from penstock.runtime.checkpoints.checkpoint import latest_checkpoint
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.verify.verify import VerifyResult
from penstock.simulate.score import make_score
from penstock.train.job import Job
from penstock.train.plan_job import check_plan_of_job, problem_of
from penstock.train.profile_job import estimate_job
from penstock.train.rank_program import (
    LOST,
    checked_request,
    ignore,
    last_checkpoint_said,
    run_local_rank,
    say,
)
from penstock.train.run_directory import RunDirectory
from penstock.train.train_request import TrainRequest, TrainResult
from penstock.train.training_loop import pipeline_of


def train_job(job: Job, request: TrainRequest) -> TrainResult:
    """Train ``job`` on ranks of this host and write its run directory; see `TrainRequest`.

    Lines about what happens go to standard error, unless the request says that nothing is shown.
    """
    show = say if request.shown else ignore
    if request.workers < 1:
        raise BadInput(f"--workers is {request.workers}; at least 1 is needed")
    if not 0 <= request.may_lose < request.workers:
        raise BadInput(
            f"--may-lose is {request.may_lose}, but of {request.workers} workers at most "
            f"{request.workers - 1} can be lost"
        )
    request = part = checked_request(job, request, show, may_idle=False)
    assert request.out is not None
    directory, history = RunDirectory(request.out), TrainResult()
    with directory.held():
        pass  # rank 0 will hold it; no start disturbs another run's
    back_with: Path | None = None
    patience = 1
    while True:
        missing = request.workers - part.workers
        show(f"starting {part.workers} workers")
        try:
            with last_checkpoint_said(directory, show, goes_on=part.may_lose > 0):
                ended = launch_workers(
                    run_local_rank,
                    (job, part, history, patience if missing else 0),
                    workers=part.workers,
                    log_directory=directory.path / "workers",
                    drains=True,
                    imports=(run_local_rank.__module__,),
                )[0]
        except LOST as cause:
            if not part.may_lose:
                raise
            # One that is lost again before the next checkpoint takes its place later: it may break
            # down each time.
            again = back_with is not None and back_with == latest_checkpoint(directory.checkpoints)
            patience = 2 * patience if again else 1
            history = replace(history, lost_workers=history.lost_workers + 1)
            part = replace(
                part,
                workers=part.workers - 1,
                may_lose=part.may_lose - 1,
                plan=None,
                resume=directory.is_planned,
            )
            show(f"{cause}; the run continues with {part.workers} worker(s)")
            continue
        except Infeasible as none:
            if not missing:
                raise
            raise RunFailed(f"{part.workers} worker(s) cannot go on alone: {none}") from none
        if not ended.paused:
            return ended
        history, back_with = ended, latest_checkpoint(directory.checkpoints)
        show(f"step {ended.steps}: the places of {missing} lost worker(s) are taken again")
        part = replace(part, workers=request.workers, may_lose=request.may_lose, resume=True)


def verify_job(
    job: Job, *, workers: int, plan: Path | None = None, device: str = "cpu"
) -> VerifyResult:
    """Run the first batch of ``job`` through a pipeline and through the plain model, and compare.

    Without ``plan``, the best plan with several stages is made from estimated costs: the comparison
    does not depend on how fast the plan is.
    """
    chosen = read_plan(plan) if plan else several_stages(estimated_problem(job, workers))
    check_plan_of_job(chosen, job, workers, f"plan '{plan}'" if plan else "the plan")
    return launch_workers(verify_worker, (job, chosen, device), workers=workers)[0]


def estimated_problem(job: Job, workers: int) -> PlanningProblem:
    """The planning problem with estimated costs; all memory may be used."""
    (profile,) = estimate_job(job, ["cpu"])
    return problem_of(job, profile, local_cluster(workers, usable_cores(), usable_memory_bytes()))


def several_stages(problem: PlanningProblem) -> Plan:
    """The best plan of at least two stages, or of one if there is one worker or one layer."""
    devices, layers = len(problem.cluster.devices), len(problem.profile.layers)
    score = make_score(problem)
    plans = [
        candidate.plan
        for candidate in plans_of_tables(problem)
        if len(candidate.plan.stages) >= min(2, devices, layers)
    ]
    if not plans:
        raise BadInput(
            f"no plan of several stages fits {devices} workers; name one with --plan, or use more "
            f"workers"
        )
    return min(plans, key=score)


def verify_worker(job: Job, plan: Plan, device: str) -> VerifyResult:
    with pipeline_of(job, plan, device) as pipe:
        return pipe.verify(job.example_batch())
