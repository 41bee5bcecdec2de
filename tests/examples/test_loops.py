"""The loops that people have, with Penstock: the losses of the loops that they were.

What each is compared with uses no Penstock: DistributedDataParallel, Accelerate, Lightning.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from docs.test_pages import DOCS, PRINTED, torchrun_of
from runtime.processes.workers_under_test import run_script

from penstock.runtime.processes.launch import launch_workers

EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers(lines: list[str], word: str) -> list[float]:
    return [float(line.removeprefix(f"{word} ")) for line in lines if line.startswith(word)]


def under_torchrun(name: str, *arguments: Path | str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(EXAMPLES / name), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout.splitlines()


def by_workers(name: str, argument: Path, workers: int) -> list[str]:
    """The same in forks of a server that has imported torch, which are ready much sooner."""
    arguments = (str(EXAMPLES / name), [str(argument)])
    return launch_workers(run_script, arguments, workers=workers, threads=1)[0].splitlines()


def goes_on(name: str, checkpoints: Path, whole: list[str]) -> None:
    """After the first epoch, the example must print what it printed in one go."""
    shutil.rmtree(checkpoints / "step-00000020")
    found = by_workers(name, checkpoints, 2)
    assert len(found) >= 10
    assert found == whole[-len(found) :]


@pytest.mark.timeout(600)
def test_the_torchrun_loop_has_the_losses_of_data_parallelism(tmp_path: Path) -> None:
    plain = by_workers("loop_torchrun_before.py", tmp_path / "alone.pt", 1)
    found = under_torchrun("loop_torchrun.py", tmp_path / "run")
    assert len(numbers(plain, "loss")) == 20
    assert numbers(plain, "loss")[-1] < 0.3
    assert numbers(found, "loss") == pytest.approx(numbers(plain, "loss"), abs=PRINTED)
    goes_on("loop_torchrun.py", tmp_path / "run", found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_torchrun_loop_has_the_losses_of_two_ranks(tmp_path: Path) -> None:
    """Once of many times, the loop of data parallelism did not end; no Penstock is in it."""
    two = under_torchrun("loop_torchrun_before.py", tmp_path / "two.pt")
    found = under_torchrun("loop_torchrun.py", tmp_path / "run")
    assert numbers(found, "loss") == pytest.approx(numbers(two, "loss"), abs=PRINTED)


@pytest.mark.timeout(600)
def test_the_accelerate_loop_has_the_losses_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    before = by_workers("loop_accelerate_before.py", tmp_path / "state", 1)
    found = under_torchrun("loop_accelerate.py", tmp_path / "run")
    assert len(numbers(before, "loss")) == 20
    assert numbers(before, "loss")[-1] < 0.3
    assert numbers(found, "loss") == pytest.approx(numbers(before, "loss"), abs=PRINTED)
    assert numbers(found, "accuracy") == numbers(before, "accuracy") != []
    goes_on("loop_accelerate.py", tmp_path / "run", found)


@pytest.mark.timeout(600)
def test_the_lightning_loop_has_the_losses_of_lightning(tmp_path: Path) -> None:
    before = by_workers("loop_lightning_before.py", tmp_path / "one", 1)
    found = torchrun_of(DOCS / "guides" / "loops.md", "loop_lightning.py", tmp_path).splitlines()
    for word, count in (("loss", 20), ("val_loss", 2)):
        assert len(numbers(found, word)) == count
        assert numbers(found, word) == pytest.approx(numbers(before, word), abs=PRINTED)
    assert numbers(found, "loss")[-1] < 0.3
    one, two = (
        torch.load(tmp_path / run / "epoch=1.ckpt", weights_only=False)["state_dict"]
        for run in ("one", "checkpoints")
    )
    torch.testing.assert_close(two, one, rtol=0.0, atol=1e-4)
    again = tmp_path / "again"
    last = under_torchrun(
        "loop_lightning.py", again, str(tmp_path / "checkpoints" / "epoch=0.ckpt")
    )
    assert len(last) == 11
    assert last == found[-11:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_of_ray_train_goes_on_after_a_failure_as_one_process_would(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "loop_ray.py"), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    assert "as a lost machine" in result.stdout + result.stderr
    torch.manual_seed(0)
    points = torch.randn(320, 16)
    classes = (points[:, :8].sum(1) > points[:, 8:].sum(1)).long()
    data = list(zip(points.split(32), classes.split(32), strict=True))
    model = torch.nn.Sequential(
        *(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()),
        torch.nn.Linear(64, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for inputs, target in data * 2:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("step 20 "))
    assert float(line.split()[-1]) == pytest.approx(loss.item(), abs=PRINTED)
