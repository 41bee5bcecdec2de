"""`penstock train`, from a job file to a run directory, and everything that can go wrong in it."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from host_jobs import PENSTOCK
from small_runs import TWO_STAGES, losses, rows_of, train
from training_jobs import job_file

from penstock.cluster.cluster import Device
from penstock.cluster.toml_file import read_cluster, write_cluster
from penstock.errors import BadInput, Infeasible, LossNotFinite, Stalled, WorkerLost
from penstock.machine import usable_cores
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage
from penstock.runtime.checkpoints.checkpoint import latest_checkpoint
from penstock.timeline.json_file import read_timeline
from penstock.train import train as train_module
from penstock.train.job_file import find_job
from penstock.train.rank_program import last_checkpoint_said
from penstock.train.run_directory import RunDirectory
from penstock.train.train import TrainRequest, train_job

pytestmark = pytest.mark.timeout(180)

REPLICAS = Plan((Stage(range(0, 3), (0, 1), (3, 1)), Stage(range(3, 4), (2,), (4,))), 4, 4, "gpipe")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with profile and cluster of the small job, measured once."""
    folder = tmp_path_factory.mktemp("costs")
    result = train(folder, Plan((Stage(range(0, 4), (2,), (4,)),), 4, 4, "gpipe"), workers=3)
    return result.run_directory


def test_a_run_plans_trains_and_leaves_a_whole_directory(tmp_path: Path) -> None:
    result = train(tmp_path, None, workers=2)
    run = result.run_directory
    for name in ("plan.json", "profile.json", "cluster.toml", "predicted.json", "measured.json"):
        assert (run / name).is_file()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == result.steps == 6
    assert "data_ended_after" not in summary
    assert summary["workers"] == 2
    assert summary["planner"] == "search"
    assert 0 < summary["measured_s"] < 10
    assert 0 < summary["predicted_s"] < 10
    assert read_plan(result.plan).global_batch == 16
    assert len(summary["measured_peak_memory_bytes"]) == len(read_plan(result.plan).devices)
    ran = summary["circumstances"]
    assert ran["versions"]["torch"] == torch.__version__ and ran["cores"] == usable_cores()
    assert ran["load_during"] > 0 and ran["hosts"] == 1
    assert any(event.kind == "F" for event in read_timeline(run / "measured.json").events)
    assert result.report.read_text().startswith("<!")
    assert list((run / "tensorboard").iterdir())
    rows = rows_of(run)
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [3, 6]
    assert all(row["samples_per_s"] > 0 for row in rows if "loss" in row)
    first, second = (row["evaluation_loss"] for row in rows if "evaluation_loss" in row)
    assert second < first
    assert result.checkpoint.name == "step-00000006"


def test_resuming_under_another_plan_continues_the_loss_curve(tmp_path: Path, costs: Path) -> None:
    whole = train(tmp_path, TWO_STAGES, costs, out="whole", steps=8)
    train(tmp_path, TWO_STAGES, costs, out="parts", steps=4)
    parts = train(tmp_path, REPLICAS, costs, out="parts", steps=8, workers=3, resume=True)
    expected, found = losses(whole.run_directory), losses(parts.run_directory)
    assert list(found) == list(range(1, 9))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5)


def test_data_that_end_early_end_the_training_and_are_told(
    tmp_path: Path, costs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, TWO_STAGES, costs, data="count_batches", shown=True, steps=100)
    assert result.steps == 5
    assert result.checkpoint.name == "step-00000005"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data_ended_after"] == 5
    told = capfd.readouterr().err
    assert "the data of job 'small' ended after 5 of 100 steps, and the training with them" in told
    assert "the others idle" not in told


@pytest.mark.parametrize("data", ["blocks_after_three", "blocks_on_rank_one"])
def test_data_that_never_come_end_the_run_with_one_line(
    tmp_path: Path, costs: Path, data: str
) -> None:
    start_s = time.monotonic()
    with pytest.raises(Stalled) as error:
        train(tmp_path, TWO_STAGES, costs, data=data, batch_limit_s=2)
    assert time.monotonic() - start_s < 60
    rank = r"rank 1" if data == "blocks_on_rank_one" else r"rank [01]"
    assert re.fullmatch(
        rank + r" is reading batch 4 of the data of job 'small', split 'train', from step 1, which "
        r"has not come within 2 s \(batch_limit_s\); see what the data wait for, or raise the "
        r"limit in the job file",
        str(error.value),
    )
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-00000002"


def test_a_nan_loss_ends_the_run_and_keeps_the_checkpoint(tmp_path: Path, costs: Path) -> None:
    with pytest.raises(LossNotFinite, match=r"nan at step 4 .* lower the learning rate"):
        train(tmp_path, TWO_STAGES, costs, data="nan_after_three")
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-00000002"
    resumed = train(tmp_path, TWO_STAGES, costs, resume=True)
    assert all(math.isfinite(loss) for loss in losses(resumed.run_directory).values())
    assert resumed.steps == 6


def test_a_batch_of_another_shape_is_refused_by_every_worker(tmp_path: Path, costs: Path) -> None:
    with pytest.raises(BadInput, match=r"dimension 1 is 17, but was 16"):
        train(tmp_path, TWO_STAGES, costs, data="wider_after_three")


@pytest.mark.parametrize(
    ("plan", "settings", "message"),
    [
        (REPLICAS, {}, r"uses device 2, but there are 2 workers .*start 3"),
        (TWO_STAGES, {"batch_size": 24}, r"batches of 16 samples .* has batches of 24"),
        (Plan((Stage(range(9), (1,), (4,)),), 4, 4, "gpipe"), {}, r"9 layers, but .* has 4"),
    ],
)
def test_a_plan_for_something_else_says_for_what(
    tmp_path: Path, costs: Path, plan: Plan, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        train(tmp_path, plan, costs, **settings)


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    request = TrainRequest(plan=tmp_path / "no.json", out=tmp_path / "run", shown=False)
    with pytest.raises(BadInput, match=r"no\.json' does not exist"):
        train_job(find_job(job_file(tmp_path)), request)


def test_a_run_is_not_overwritten(tmp_path: Path, costs: Path) -> None:
    request = TrainRequest(out=costs, shown=False)
    with pytest.raises(BadInput, match="holds a run already; add --resume"):
        train_job(find_job(job_file(tmp_path)), request)


def test_there_must_be_something_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = find_job(job_file(tmp_path))
    with pytest.raises(BadInput, match="no run of job 'small' under 'runs' to resume"):
        train_job(job, TrainRequest(resume=True, shown=False))
    with pytest.raises(BadInput, match="holds no run to resume"):
        train_job(job, TrainRequest(resume=True, out=tmp_path / "nothing", shown=False))


def test_a_model_too_big_for_the_memory_says_so(tmp_path: Path, costs: Path) -> None:
    (small := tmp_path / "small").mkdir()
    shutil.copy(costs / "profile.json", small)
    cluster = read_cluster(costs / "cluster.toml")
    host = replace(cluster.hosts[0], devices=(Device("cpu", 500.0),) * 2)
    write_cluster(replace(cluster, hosts=(host,)), small / "cluster.toml")
    with pytest.raises(
        Infeasible,
        match=r"no plan fits.*needs .* and cpu has 475 B beside a .* reserve of 25 B; use",
    ):
        train(tmp_path, None, small)


def test_a_plan_for_fewer_workers_is_refused_unless_it_passes_over_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_module, "launch_workers", lambda *asked, **more: sys.exit())
    place = tmp_path / "plan.json"
    request = TrainRequest(workers=3, plan=place, out=tmp_path / "run")
    write_plan(TWO_STAGES, place)
    with pytest.raises(BadInput) as refused:
        train_job(find_job(job_file(tmp_path)), request)
    assert str(refused.value) == (
        f"plan '{place}' uses 2 of 3 workers, and the others would idle; start 2 with --workers, "
        f"or plan for 3"
    )
    first, second = TWO_STAGES.stages
    write_plan(replace(TWO_STAGES, stages=(first, replace(second, devices=(2,)))), place)
    with pytest.raises(SystemExit):
        train_job(find_job(job_file(tmp_path)), request)
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"plan '{place}' uses 2 of 3 ranks, and the others idle",
        "starting 3 workers",
    ]


@pytest.mark.parametrize(
    ("failure", "is_told"),
    [
        (KeyboardInterrupt(), True),
        (SystemExit(143), True),
        (WorkerLost("killed"), True),
        (BadInput("no"), False),
    ],
)
def test_a_run_that_ends_before_its_first_checkpoint_names_resume_where_that_works(
    tmp_path: Path, failure: BaseException, is_told: bool
) -> None:
    said: list[str] = []
    with (
        pytest.raises(type(failure)),
        last_checkpoint_said(RunDirectory(tmp_path), said.append, goes_on=False),
    ):
        raise failure
    told = f"there is no checkpoint yet; --resume --out {tmp_path} starts at the first step again"
    assert said == [told] * is_told


def test_a_run_that_goes_on_by_itself_names_no_remedy(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        pytest.raises(WorkerLost),
        last_checkpoint_said(RunDirectory(tmp_path), said.append, goes_on=True),
    ):
        raise WorkerLost("killed")
    assert said == []


@pytest.fixture
def endless_run(tmp_path: Path, costs: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A training of three workers, in a process of its own, that has written a checkpoint."""
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    write_plan(REPLICAS, plan)
    run.mkdir()
    for name in ("profile.json", "cluster.toml"):
        shutil.copy(costs / name, run)
    job = job_file(tmp_path, steps=1_000_000, checkpoint_every=20, evaluate_every=0)
    command = [PENSTOCK, "train", job, "--workers", "3", "--plan", plan, "-o", run]
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        wait_until(lambda: any((run / "checkpoints").glob("step-*")), 90)
        yield process, run
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for a condition; fail the test after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {limit_s} s"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below ``pid`` that are not zombies."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def workers_of(pid: int) -> list[int]:
    """The descendants that run Python workers: the forks of multiprocessing's server."""
    servers = [
        child
        for child in descendants(pid)
        if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    # A fork has the command line of the server.
    return [child for server in servers for child in descendants(server)]


def ends_within(process: subprocess.Popen[bytes], everyone: list[int], limit_s: float) -> int:
    """The exit code, once the process and all its descendants have ended within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    code = process.wait(limit_s)
    for pid in everyone:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} is an orphan"
            time.sleep(0.05)
    return code


@pytest.mark.parametrize(
    "victim", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_killed_worker_ends_the_run_with_one_message(
    endless_run: tuple[subprocess.Popen[bytes], Path], victim: int
) -> None:
    process, run = endless_run
    everyone = descendants(process.pid)
    workers = workers_of(process.pid)
    assert len(workers) == 3
    os.kill(workers[victim], signal.SIGKILL)
    assert ends_within(process, everyone, 15) == 4
    message = (run.parent / "stderr").read_text()
    errors = [line for line in message.splitlines() if line.startswith("penstock: error:")]
    assert len(errors) == 1
    assert "was killed by SIGKILL" in errors[0]
    assert "Traceback" not in message
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert f"the last checkpoint is {checkpoint}; --resume" in message


def test_sigterm_ends_a_run_after_a_step_with_a_checkpoint_of_it(
    endless_run: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, run = endless_run
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    assert ends_within(process, everyone, 60) == 143
    step = int(latest_checkpoint(run / "checkpoints").name.removeprefix("step-"))
    assert list(losses(run))[-1] == step
    told = (run.parent / "stderr").read_text()
    assert f"stopped by SIGTERM after step {step}" in told
    assert f"step-{step:08d}; --resume" in told


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (signal.SIGINT, 1, 130),
        # A second SIGTERM ends at once, without a new checkpoint.
        pytest.param(signal.SIGTERM, 2, 143, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_stops_and_can_be_resumed(
    endless_run: tuple[subprocess.Popen[bytes], Path],
    costs: Path,
    number: signal.Signals,
    times: int,
    code: int,
) -> None:
    process, run = endless_run
    everyone = descendants(process.pid)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.2)
    assert ends_within(process, everyone, 15) == code
    step = int(latest_checkpoint(run / "checkpoints").name.removeprefix("step-"))
    resumed = train(run.parent, None, workers=3, resume=True, steps=step + 2)
    assert resumed.steps == step + 2
    assert read_plan(resumed.plan) == REPLICAS
    assert list(losses(run))[-2:] == [step + 1, step + 2]


def test_a_dry_run_prints_the_job_and_the_plan_and_trains_nothing(
    tmp_path: Path, costs: Path, penstock: Callable[..., Any]
) -> None:
    job = job_file(tmp_path, constraints='{ schedule = "gpipe", max_stages = 1 }')
    (run := tmp_path / "run").mkdir()
    for name in ("profile.json", "cluster.toml"):
        shutil.copy(costs / name, run)
    choices = ["--pin", "stages: 2", "--max-stages", 2, "--micro-batch", 8, "--recompute", "on"]
    others = ["--steps", 3, "--precision", "bf16", "--workers", 2, "--dry-run", "-o", run]
    answer = penstock("train", job, *choices, *others, "--json")
    assert answer.code == 0, answer.errors
    found = json.loads(answer.output)
    assert (found["job"]["steps"], found["job"]["autocast"]) == (3, "bfloat16")
    plan = read_plan(found["plan"])
    assert (plan.schedule, len(plan.stages), plan.micro_batch_size) == ("gpipe", 2, 8)
    assert all(stage.recompute for stage in plan.stages) and found["predicted_s"] > 0
    assert not (run / "metrics.jsonl").exists() and not list(run.glob("checkpoints/*"))

    old = (run / "profile.json").read_bytes()
    assert old == (costs / "profile.json").read_bytes()
    again = penstock("train", job, *others, "--resume", "--remeasure", "--json")
    assert again.code == 0, again.errors
    assert (run / "profile.json").read_bytes() != old
    assert len(read_plan(json.loads(again.output)["plan"]).stages) == 1
