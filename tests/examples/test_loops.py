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
from started_scripts import by_workers, under_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers(lines: list[str], word: str) -> list[float]:
    return [float(line.removeprefix(f"{word} ")) for line in lines if line.startswith(word)]


def printed(name: str, *arguments: Path, ranks: int = 2) -> list[str]:
    return by_workers(EXAMPLES / name, *arguments, ranks=ranks)[0].splitlines()


def goes_on(name: str, checkpoints: Path, whole: list[str]) -> None:
    """After the first epoch, the example must print what it printed in one go."""
    shutil.rmtree(checkpoints / "step-00000020")
    found = printed(name, checkpoints)
    assert len(found) >= 10
    assert found == whole[-len(found) :]


@pytest.mark.timeout(600)
def test_the_torchrun_loop_has_the_losses_of_data_parallelism(tmp_path: Path) -> None:
    plain = printed("loop_torchrun_before.py", tmp_path / "alone.pt", ranks=1)
    found = under_torchrun(EXAMPLES / "loop_torchrun.py", tmp_path / "run").splitlines()
    assert len(numbers(plain, "loss")) == 20
    assert numbers(plain, "loss")[-1] < 0.3
    assert numbers(found, "loss") == pytest.approx(numbers(plain, "loss"), abs=PRINTED)
    goes_on("loop_torchrun.py", tmp_path / "run", found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_torchrun_loop_has_the_losses_of_two_ranks(tmp_path: Path) -> None:
    """Once of many times, the loop of data parallelism did not end; no Penstock is in it."""
    two = under_torchrun(EXAMPLES / "loop_torchrun_before.py", tmp_path / "two.pt").splitlines()
    found = under_torchrun(EXAMPLES / "loop_torchrun.py", tmp_path / "run").splitlines()
    assert numbers(found, "loss") == pytest.approx(numbers(two, "loss"), abs=PRINTED)


@pytest.mark.timeout(600)
def test_the_accelerate_loop_has_the_losses_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    before = printed("loop_accelerate_before.py", tmp_path / "state", ranks=1)
    found = printed("loop_accelerate.py", tmp_path / "run")
    assert len(numbers(before, "loss")) == 20
    assert numbers(before, "loss")[-1] < 0.3
    assert numbers(found, "loss") == pytest.approx(numbers(before, "loss"), abs=PRINTED)
    assert numbers(found, "accuracy") == numbers(before, "accuracy") != []
    goes_on("loop_accelerate.py", tmp_path / "run", found)


@pytest.mark.timeout(600)
def test_the_lightning_loop_has_the_losses_of_lightning(tmp_path: Path) -> None:
    before = printed("loop_lightning_before.py", tmp_path / "one", ranks=1)
    found = torchrun_of(
        DOCS / "guides" / "your-loop.md", "loop_lightning.py", tmp_path
    ).splitlines()
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
    last = printed("loop_lightning.py", again, tmp_path / "checkpoints" / "epoch=0.ckpt")
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
