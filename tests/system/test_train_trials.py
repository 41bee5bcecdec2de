"""`penstock train --try` measures several plans before a run, which is as if it had not."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import losses, weights_in
from training_jobs import job_file
from trial_cases import try_in_turn

from penstock.errors import BadInput
from penstock.plan.plan import Plan, plan_words
from penstock.plan.problem import PlanningProblem
from penstock.runtime.processes.launch import launch_workers
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.run_directory import RunDirectory
from penstock.train.train import TrainRequest, estimated_problem, train_job
from penstock.train.trials import plans_to_try

pytestmark = pytest.mark.timeout(280)


def heavy_problem(job: Job) -> PlanningProblem:
    """The problem of the job on two workers, if its layers took so long that several plans pay."""
    problem = estimated_problem(job, 2)
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s.scaled(3e4),
            backward_input_s=layer.backward_input_s.scaled(3e4),
            backward_weight_s=layer.backward_weight_s.scaled(3e4),
        )
        for layer in problem.profile.layers
    )
    return replace(problem, profile=replace(problem.profile, layers=layers))


def test_a_run_after_trials_is_as_if_nothing_had_been_tried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = job_file(
        tmp_path,
        model="build_dropping",
        micro_batch_sizes=[2, 4],
        callbacks='["training_jobs:log_and_stop"]',
    )
    job = replace(find_job(place), save_weights=tmp_path / "weights")
    run = RunDirectory(tmp_path / "run")
    problem = heavy_problem(job)
    run.path.mkdir()
    run.write_costs(problem.profile, problem.cluster)
    tried = train_job(job, TrainRequest(workers=2, out=run.path, tries=2))
    said = capfd.readouterr().err.splitlines()
    events = Path("events.txt").read_text()
    Path("events.txt").unlink()
    plain = train_job(
        replace(job, save_weights=tmp_path / "plain_weights"),
        TrainRequest(workers=2, out=tmp_path / "plain", plan=tried.plan, shown=False),
    )

    assert len(losses(run.path)) == 5
    assert losses(run.path) == losses(plain.run_directory)
    ours, others = map(weights_in, (tmp_path / "weights", tmp_path / "plain_weights"))
    assert ours and ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    assert events == Path("events.txt").read_text()

    quick, slow = tried.tried
    assert 0 < quick.measured_s <= slow.measured_s and quick.plan != slow.plan
    summary = json.loads((run.path / "summary.json").read_text())
    assert [each["plan"] for each in summary["tried"]] == [quick.plan, slow.plan]
    heads = "predicted", "measured", "plan"
    rows = [(*each.cells[1:], each.plan) for each in tried.tried]
    table = [f"  {one:>9}  {two:>9}  {plan}" for one, two, plan in (heads, *rows)]
    (at,) = (n for n, line in enumerate(said) if line == table[0])
    assert said[at : at + 3] == table
    assert said[at + 3].startswith(f"plan: {quick.plan}; predicted ")
    page = tried.report.read_text()
    assert "Plans that were tried" in page and slow.plan in page


def tried(job: Job, tries: int) -> list[Plan]:
    return plans_to_try(job, TrainRequest(workers=2, tries=tries), heavy_problem(job))


def test_plans_to_try_differ_in_words_and_the_first_is_the_planner_s(tmp_path: Path) -> None:
    job = find_job(job_file(tmp_path, micro_batch_sizes=[2, 4]))
    every = tried(job, 9)
    words = [plan_words(plan) for plan in every]
    assert 2 <= len(words) == len(set(words)) <= 9
    assert tried(job, 1) == every[:1]


def test_plans_to_try_have_allowed_schedules(tmp_path: Path) -> None:
    allowed = '{ schedule = "2bw,pipedream" }'
    job = find_job(job_file(tmp_path, micro_batch_sizes=[2, 4], constraints=allowed))
    plans = tried(job, 9)
    assert len(plans) > 1 and {plan.schedule for plan in plans} <= {"2bw", "pipedream"}


def test_a_plan_that_fails_on_one_rank_is_named_and_the_next_is_tried(tmp_path: Path) -> None:
    job = find_job(job_file(tmp_path, model="build_failing_on_four_rows"))
    (failed, alone, last), is_as_before = launch_workers(try_in_turn, (job,), workers=2)[0]
    assert is_as_before
    assert failed[0] == 0 and re.search(r"rank 1\b.*no room for 4 rows", failed[1])
    assert alone[0] > 0 and alone[1] == ""
    assert last[0] > 0 and last[1] == ""


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (TrainRequest(tries=3, plan=Path("p.json")), "--try 3 .* with --plan .* leave out one"),
        (TrainRequest(tries=3, resume=True), "--try 3 .* with --resume .* leave out one"),
    ],
)
def test_refused_before_anything_runs(tmp_path: Path, request_: TrainRequest, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        train_job(find_job(job_file(tmp_path)), replace(request_, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
