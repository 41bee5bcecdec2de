"""The loops that people have, with Penstock: the losses of the loops that they were.

What each is compared with uses no Penstock: DistributedDataParallel, the library Accelerate, and
a plain loop of one process.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime.processes.workers_under_test import run_script
from scripts import script_at

from penstock.runtime.processes.launch import launch_workers

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINTED = 2e-6
"""Losses are printed with six digits; the sums of a pipeline are in another order."""


def numbers(lines: list[str], word: str) -> list[float]:
    return [float(line.removeprefix(f"{word} ")) for line in lines if line.startswith(word)]


def under_torchrun(name: str, checkpoints: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(EXAMPLES / name), str(checkpoints)],
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


def plain_loop(epochs: int) -> tuple[list[float], list[float]]:
    """Losses and accuracies of `loop_lightning.py`, by torch alone on one process."""
    example = script_at("examples/loop_lightning.py", "loop_lightning")
    loader, (held_out, classes) = example.batches()
    module = example.Classifier()
    optimizer = module.configure_optimizers(module.parameters())
    schedule = module.configure_schedule(optimizer)
    losses: list[float] = []
    accuracies: list[float] = []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = module.training_step(batch, number)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        with torch.no_grad():
            accuracies.append((module(held_out).argmax(1) == classes).float().mean().item())
    return losses, accuracies


@pytest.mark.timeout(600)
def test_the_lightning_style_loop_has_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    found = under_torchrun("loop_lightning.py", tmp_path / "run")
    torch.manual_seed(0)
    losses, accuracies = plain_loop(2)
    assert losses[-1] < 0.3
    assert numbers(found, "loss") == pytest.approx(losses, abs=PRINTED)
    assert numbers(found, "accuracy") == pytest.approx(accuracies, abs=1e-4)
    goes_on("loop_lightning.py", tmp_path / "run", found)
