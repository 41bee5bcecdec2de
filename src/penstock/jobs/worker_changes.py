"""A run whose workers change: they are lost and come back, or turn out slower than planned.

Between two changes the same workers follow the same plan, which is a part of the run. Each part
starts at the newest checkpoint, and takes the steps after it with the same samples.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.errors import Infeasible, RunFailed
from penstock.jobs.job import Job
from penstock.jobs.replanning import LEAST_GAIN, replan
from penstock.jobs.run_directory import RunDirectory
from penstock.jobs.run_workers import RunWorkers
from penstock.jobs.train_part import LOST, RunPart, train_part
from penstock.jobs.train_request import Log, TrainRequest
from penstock.jobs.worker import Pauses
from penstock.plan.plan import Plan
from penstock.runtime.checkpoints.checkpoint import latest_checkpoint
from penstock.waiting import notice_if_long

__all__ = ["Course", "train_through_changes"]


@dataclass
class Course:
    """What has happened to a run so far.

    ``plans`` are those in use, by the number of workers. ``lost`` counts workers. ``patience`` is
    the number of checkpoints after which the place of a lost worker is taken again. It last was
    ``back_with`` this one.
    """

    plans: dict[int, Plan]
    lost: int = 0
    patience: int = 1
    back_with: Path | None = None
    drift: tuple[str, ...] = ()
    verified: str = ""
    left_out: set[int] = field(default_factory=set[int])


def train_through_changes(
    directory: RunDirectory,
    job: Job,
    request: TrainRequest,
    given: Plan | None,
    crew: RunWorkers,
    say: Log,
) -> tuple[RunPart, Course]:
    """Train to the end, with another plan after each change; returns the last part too.

    Raises:
        RunFailed: a worker raised an error; or more are missing than the request allows, or those
            that are left cannot go on.
    """
    workers = request.workers
    course = Course({} if given is None else {workers: given})
    part = request
    while True:
        missing = workers - part.workers
        pauses = Pauses(checkpoints=course.patience if missing else 0, drift=request.replan)
        try:
            done = train_part(directory, job, part, course.plans, pauses, crew, say)
        except LOST as cause:
            if not part.may_lose:
                raise
            part = without_one(directory, part, course)
            say(f"{cause}; the run goes on with {part.workers} worker(s)")
            continue
        except Infeasible as none:
            if not missing:
                raise
            raise RunFailed(f"{part.workers} worker(s) cannot go on alone: {none}") from none
        course.verified = course.verified or done.first.verified
        course.left_out.update(done.first.left_out)
        if not done.first.paused:
            return done, course
        if missing:
            course.back_with = latest_checkpoint(directory.checkpoints)
            say(f"step {done.first.steps}: the places of {missing} lost worker(s) are taken again")
        if done.first.drifts:
            follow_drift(directory, job, part, done, course, say)
        part = replace(part, workers=workers, may_lose=request.may_lose, resume=True)


def without_one(directory: RunDirectory, part: TrainRequest, course: Course) -> TrainRequest:
    """The request for the workers that are left.

    One that is lost again before the next checkpoint takes its place later: it may break down each
    time.
    """
    back_with = course.back_with
    lost_at_once = back_with is not None and back_with == latest_checkpoint(directory.checkpoints)
    course.patience = 2 * course.patience if lost_at_once else 1
    course.lost += 1
    known = (directory.path / "plan.json").exists()
    return replace(
        part, workers=part.workers - 1, may_lose=part.may_lose - 1, plan=None, resume=known
    )


def follow_drift(
    directory: RunDirectory,
    job: Job,
    part: TrainRequest,
    done: RunPart,
    course: Course,
    say: Log,
) -> None:
    """Plan again with the times found, and follow the new plan if it gains enough.

    In both cases the rest of the run is compared with the times found.
    """
    costs = directory.read_costs()
    with notice_if_long(say, "planning again, since ranks or links were slower than planned"):
        replanned, found = replan(job, part, done.plan, costs, done.first.drifts)
    directory.write_costs(*found)
    # Plans for other numbers of workers were made with the old times.
    course.plans.clear()
    course.plans[part.workers] = replanned.plan if replanned.gain >= LEAST_GAIN else done.plan
    text = f"step {done.first.steps}: {replanned}; the run follows the new plan"
    if replanned.gain < LEAST_GAIN:
        text = f"step {done.first.steps}: planning again would bring nothing; the plan stays"
    course.drift += (*map(str, done.first.drifts), text)
    say(text)
