"""What stands on disk: damage of every kind is found and named, and reading executes nothing."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.machine import FreeMemory
from penstock.plan.plan import Plan, Stage
from penstock.runtime.checkpoints import checkpoint
from penstock.runtime.checkpoints.checkpoint import damage_of, latest_checkpoint, read_state
from penstock.runtime.pipeline import Pipeline

X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.ones(4, 1)


def pipeline() -> Pipeline:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    graph = capture_model(model, (X, Y), loss=nn.functional.mse_loss)
    layers = range(len(graph.layer_names))
    return Pipeline(
        graph,
        (X, Y),
        plan=Plan((Stage(layers, (0,), (4,)),), 1, 4, "1f1b"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with checkpoints after one and after two steps."""
    with pipeline() as pipe:
        for _ in range(2):
            pipe.step((X, Y))
            pipe.save(tmp_path, extra={"seen": 4})
    return tmp_path


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def replaced_by(text: str) -> Any:
    return lambda path: path.write_text(text)


def changed_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 2', '"step": 7'))


DAMAGE = [
    *((name, harm) for name in ("rank-00000.safetensors",) for harm in (truncate, empty, flip)),
    ("rank-00000.safetensors", Path.unlink),
    *(("state.json", harm) for harm in (truncate, empty, changed_step)),
    *(("state.json", replaced_by(text)) for text in ("[1]", "{}", '{"schema": 2}', "[" * 10**5)),
]


@pytest.mark.parametrize(("name", "harm"), DAMAGE)
def test_a_damaged_checkpoint_is_named_and_stepped_over(run: Path, name: str, harm: Any) -> None:
    newest = latest_checkpoint(run)
    assert not damage_of(newest)
    harm(newest / name)
    assert str(newest) in damage_of(newest)
    with pipeline() as pipe:
        with pytest.warns(UserWarning, match="step-00000002' is left out"):
            assert pipe.load(run) == 1
        with pytest.raises(BadInput, match="step-00000002"):
            pipe.load(newest)


def test_a_directory_of_damaged_ones_only_is_refused(run: Path) -> None:
    for path in run.iterdir():
        flip(path / "rank-00000.safetensors")
    with pipeline() as pipe, pytest.warns(UserWarning), pytest.raises(BadInput, match="no whole"):
        pipe.load(run)


def test_every_tensor_comes_back(run: Path) -> None:
    with pipeline() as through:
        expected = [through.step((X, Y)).loss for _ in range(4)]
    with pipeline() as pipe:
        assert pipe.load(run) == 2
        assert [pipe.step((X, Y)).loss for _ in range(2)] == expected[2:]
    assert read_state(latest_checkpoint(run))["extra"] == {"seen": 4}


def test_what_is_written_while_training_goes_on_is_that_of_its_step(tmp_path: Path) -> None:
    with pipeline() as pipe:
        pipe.step((X, Y))
        pipe.save(tmp_path / "waited")
        pipe.save(tmp_path / "background", wait=False)
        for _ in range(3):
            pipe.step((X, Y))
        pipe.save(tmp_path / "background", wait=False)
    stored = [
        read_state(path)["files"]["rank-00000.safetensors"]["sha256"]
        for path in (
            tmp_path / "waited" / "step-00000001",
            tmp_path / "background" / "step-00000001",
            tmp_path / "background" / "step-00000004",
        )
    ]
    assert stored[0] == stored[1] != stored[2]
    assert not list((tmp_path / "background").glob(".*"))


def test_without_room_for_a_copy_training_waits_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "free_host_memory", lambda: FreeMemory(100.0, "made up"))
    with pipeline() as pipe:
        pipe.step((X, Y))
        with pytest.warns(UserWarning, match=r"before the training goes on: .* has 100 B free"):
            pipe.save(tmp_path, wait=False)
        assert latest_checkpoint(tmp_path).name == "step-00000001"


def test_a_run_that_goes_on_from_an_earlier_step_abandons_the_later_ones(run: Path) -> None:
    with pipeline() as pipe:
        for _ in range(3):
            pipe.step((X, Y))
        pipe.save(run, keep=9)
        pipe.load(run / "step-00000001")
        pipe.step((X, Y))
        assert pipe.steps == 2
        saved = pipe.save(run, keep=1)
        assert latest_checkpoint(run) == saved == run / "step-00000002"
        assert pipe.load(run) == 2
    assert sorted(path.name for path in run.iterdir()) == [
        "abandoned-step-00000003",
        "step-00000002",
    ]


@pytest.mark.parametrize("keep", [0, -1])
def test_to_keep_no_checkpoint_is_refused(tmp_path: Path, keep: int) -> None:
    with pipeline() as pipe, pytest.raises(BadInput, match=f"keep is {keep}; it must be >= 1"):
        pipe.save(tmp_path, keep=keep)


@pytest.mark.parametrize("renames", [0, 1])
def test_an_interruption_while_a_checkpoint_is_replaced_loses_none(
    run: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename after so many others of directories fails, as if the process was killed there."""
    newest, rename, left = latest_checkpoint(run), Path.rename, [renames]

    def interrupted(path: Path, target: Path) -> Path:
        if path.is_dir() and not left[0]:
            raise OSError("killed")
        left[0] -= path.is_dir()
        return rename(path, target)

    with pipeline() as pipe:
        pipe.load(run)
        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(BadInput, match="cannot be written"):
            pipe.save(run, extra={"seen": 5})
        monkeypatch.undo()
        assert read_state(latest_checkpoint(run))["step"] == 2
        assert not damage_of(latest_checkpoint(run))
        pipe.save(run, extra={"seen": 6})
    assert latest_checkpoint(run) == newest
    assert read_state(newest)["extra"] == {"seen": 6}
    assert len(list(run.iterdir())) == 2


def test_a_full_disk_is_told_by_the_next_save(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pipeline() as pipe:
        pipe.step((X, Y))
        pipe.save(tmp_path)
        pipe.step((X, Y))
        try:
            # A write beyond this size fails, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
            pipe.save(tmp_path, wait=False)
            pipe._connection.checkpoints._own_part_written()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        with pytest.raises(BadInput, match=r"step-00000002' cannot be written .*File too large"):
            pipe.save(tmp_path)
        assert latest_checkpoint(tmp_path).name == "step-00000001"
        assert not damage_of(latest_checkpoint(tmp_path))
