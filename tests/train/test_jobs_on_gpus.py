"""Jobs on GPUs, as far as a stand-in shows: whatever carries messages, the loss is the same."""

import shutil
from pathlib import Path

import pytest
import torch
from train.gpu_job_cases import trained

from penstock.capture.capture import capture_model
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage
from penstock.runtime.processes.launch import launch_workers
from penstock.train.job_file import find_job
from penstock.train.run_directory import new_run

TRANSPORTS = {2: "GroupTransport", 1: "StagedTransport"}

pytestmark = pytest.mark.slow


def test_two_ranks_train_on_two_gpus_by_nccl_and_on_one_by_shared_memory(tmp_path: Path) -> None:
    small = find_job("digits")
    torch.manual_seed(small.seed)
    example = next(small.data("training", 0, 0, 96))
    layers = len(capture_model(small.model(), example, loss=small.loss).layer_names)
    halves = range(layers // 2), range(layers // 2, layers)
    stages = tuple(Stage(half, (rank,), (24,)) for rank, half in enumerate(halves))
    plan = tmp_path / "plan.json"
    write_plan(Plan(stages, 4, 24, "1f1b"), plan)
    losses: list[float] = []
    for gpus, transport in TRANSPORTS.items():
        out = new_run("digits", tmp_path / f"run-{gpus}").path
        if losses:
            for measured in ("profile.json", "cluster.toml"):
                shutil.copy(tmp_path / "run-2" / measured, out / measured)
        ranks = launch_workers(trained, (gpus, plan, out), workers=2)
        assert [opened for _, opened in ranks] == [{transport}] * 2
        losses.append(ranks[0][0])
    assert losses[0] == losses[1] > 0
