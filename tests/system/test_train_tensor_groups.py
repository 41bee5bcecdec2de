"""`penstock train` with plans whose devices are tensor groups."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, train
from torch.nn import functional
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine
from penstock.timeline.json_file import read_timeline
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.optimizers import learning_rate_schedule, optimizer_factory
from penstock.train.profile_job import built_model
from penstock.train.run_directory import RunDirectory
from penstock.train.train import TrainResult

pytestmark = pytest.mark.timeout(280)

LAYERS = '{ "0" = "colwise", "2" = "rowwise" }'
"""Of the job's model; its first two layers hold them."""

GROUP_FIRST = Plan(
    (Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))),
    *(4, 4, "1f1b"),
    tensor_groups=((0, 1), (2,)),
)
GROUP_LAST = Plan(
    (Stage(range(0, 1), (0,), (4,)), Stage(range(1, 4), (1,), (4,))),
    *(4, 4, "gpipe"),
    tensor_groups=((2,), (0, 1)),
)


def on_one_device(job: Job) -> tuple[list[float], float]:
    """The losses of plain training, and the loss on held-out data after it."""
    model = built_model(job)
    optimizer = optimizer_factory(job.optimizer)(model.named_parameters())
    schedule = learning_rate_schedule(job.optimizer, job.steps)(optimizer)
    losses: list[float] = []
    for x, y in islice(job.batches("train"), job.steps):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    held_out = islice(job.batches("held-out"), job.evaluation_batches)
    with torch.no_grad():
        evaluated = [float(functional.mse_loss(model(x), y)) for x, y in held_out]
    return losses, sum(evaluated) / len(evaluated)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """A run of four steps under a plan with a group, continued under another one."""
    folder = tmp_path_factory.mktemp("groups")
    table = f"{{ layers = {LAYERS} }}"
    first = train(folder, GROUP_FIRST, workers=3, steps=4, tensor_parallel=table)
    assert first.steps == 4 and first.verified.startswith("equal to your module on the whole batch")
    return folder, train(folder, GROUP_LAST, workers=3, resume=True, tensor_parallel=table)


def test_losses_are_those_of_one_device_also_after_resuming(
    trained: tuple[Path, TrainResult],
) -> None:
    folder, result = trained
    losses, evaluated = on_one_device(find_job(folder / "small.toml"))
    rows = rows_of(result.run_directory)
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, rel=1e-5)
    found = [row["evaluation_loss"] for row in rows if "evaluation_loss" in row]
    assert len(found) == 2 and found[-1] == pytest.approx(evaluated, rel=1e-5)


def test_prediction_and_report_show_every_rank(trained: tuple[Path, TrainResult]) -> None:
    _, result = trained
    run = result.run_directory
    for name in ("predicted.json", "measured.json"):
        timeline = read_timeline(run / name)
        stages = {(e.device, e.stage) for e in timeline.events if e.kind == "F"}
        assert stages == {(2, 0), (0, 1), (1, 1)}, name
        messages = {(e.device, e.peer) for e in timeline.events if e.kind == "SEND"}
        assert messages == {(2, 0), (2, 1), (0, 2)}, name
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["measured_peak_memory_bytes"]) == 3
    assert min(summary["measured_peak_memory_bytes"]) > 0
    page = result.report.read_text()
    for rank in range(3):
        assert f'id="memory-{rank}"' in page
    assert "on 3 devices of" in page


def test_the_planner_chooses_groups_where_they_are_faster(
    trained: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    """A single sample cannot be shared by replicas, and stages would wait for one another."""
    _, result = trained
    profile, cluster = RunDirectory(result.run_directory).read_costs()
    assert profile.tensor_parallel is not None
    # How large it is, is a wall-clock time of layers that take microseconds; any is possible.
    assert [ranks for ranks, _ in profile.tensor_parallel.factors] == [2]
    (tmp_path / "run").mkdir()
    second = Affine(0.0, 1.0)
    slow = {"forward_s": second, "backward_input_s": second, "backward_weight_s": second}
    divided = (replace(layer, **slow) for layer in profile.layers[:2])
    RunDirectory(tmp_path / "run").write_costs(
        replace(
            profile,
            layers=(*divided, *profile.layers[2:]),
            tensor_parallel=replace(profile.tensor_parallel, factors=()),
        ),
        replace(cluster, hosts=(replace(cluster.hosts[0], devices=cluster.hosts[0].devices[:2]),)),
    )
    settings = {"batch_size": 1, "micro_batch_sizes": [1], "steps": 2}
    groups = f"{{ ranks = 2, layers = {LAYERS} }}"
    found = train(tmp_path, None, workers=2, tensor_parallel=groups, **settings)
    plan = read_plan(found.plan)
    assert plan.tensor_groups == ((0, 1),) and plan.planner == "search"
    losses, _ = on_one_device(find_job(tmp_path / "small.toml"))
    rows = rows_of(found.run_directory)
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, rel=1e-5)


def test_ranks_that_torchrun_has_started_measure_groups_and_train_by_the_jobs_function(
    tmp_path: Path,
) -> None:
    function = '{ function = "training_jobs:parallelize" }'
    job = job_file(tmp_path, steps=2, tensor_parallel=function)
    whole = Plan((Stage(range(4), (0,), (4,)),), 4, 4, "1f1b", tensor_groups=((0, 1),))
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    write_plan(whole, plan)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--no-python", Path(sys.executable).with_name("penstock"), "train", job),
            *("--plan", plan, "-o", run),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
    )
    costs = RunDirectory(run).read_costs()[0].tensor_parallel
    assert costs is not None and [share > 0.9 for share in costs.divided] == [
        True,
        True,
        False,
        False,
    ]
    assert [ranks for ranks, _ in costs.factors] == [2]
    losses, _ = on_one_device(find_job(job))
    assert [row["loss"] for row in rows_of(run)] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "settings", "message"),
    [
        (None, {"tensor_parallel": 4}, "has groups of [4] ranks, but there are 3 workers; start"),
        (None, {"tensor_parallel": [2, 65]}, "tensor_parallel.ranks[1] is 65; it must be <= 64"),
        (
            None,
            {"tensor_parallel": 2, "compile": "true"},
            "compile = true does not work with tensor_parallel.ranks = [2]",
        ),
        (None, {"tensor_parallel": "{ rank = 2 }"}, "tensor_parallel: unknown key 'rank'; did you"),
        (None, {"tensor_parallel": '{ layers = { "0" = "both" } }'}, "tensor_parallel.layers.0"),
        (
            None,
            {"tensor_parallel": f'{{ layers = {LAYERS}, function = "training_jobs:parallelize" }}'},
            "tensor_parallel has both layers and function; leave one of them out",
        ),
        (
            None,
            {"tensor_parallel": '{ function = "training_jobs:build" }'},
            "it takes (), but is called as tensor_parallel(model, mesh): too many",
        ),
        (
            GROUP_FIRST,
            {"constraints": '{ sharding = "optimizer" }'},
            'constraints.sharding = "optimizer" does not work with the',
        ),
        (replace(GROUP_FIRST, schedule="pipedream"), {}, "schedule 'pipedream' (it has no flush)"),
        (
            replace(GROUP_FIRST, tensor_groups=((0, 1), (3,))),
            {},
            "uses rank 3, but there are 3 workers",
        ),
    ],
)
def test_what_does_not_work_is_refused_before_anything_starts(
    tmp_path: Path, plan: Plan | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        train(tmp_path, plan, workers=3, **settings)
    assert message in str(refusal.value)
    assert not (tmp_path / "run").exists()
