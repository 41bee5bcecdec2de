"""A pipeline without a plan finds one for its ranks, and keeps it for the next start."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_here_cases import (
    batch,
    made,
    net,
    train_and_resume,
    train_three_times,
    two_stages,
    whole,
)
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from penstock import BadInput, Constraints, Infeasible, Pipeline, Plan, capture_model
from penstock.plan.json_file import write_plan
from penstock.plan_here import load_here, state_of
from penstock.runtime.processes import refusals
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.store import serve_store


def planned(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[Plan, list[str]]:
    """The plan that a pipeline in this process finds, and what it prints before its first step."""
    capsys.readouterr()
    with made(**options) as pipe:
        return pipe.plan, capsys.readouterr().err.splitlines()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "kept"))


def plain_losses(steps: int) -> list[float]:
    model, (x, y) = net(), batch()
    optimizer, losses = AdamW(model.parameters()), list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_ranks_find_a_plan_and_train_as_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = launch_workers(train_three_times, (3,), workers=2, threads=1)
    lines = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("measuring the layers of Sequential") for line in lines) == 1
    assert sum(line.startswith("plan: ") for line in lines) == 3
    first, second, pinned = ranks[0]
    assert [own for _, own in ranks[1]] == [own for _, own in ranks[0]]
    assert first[1] == second[1]
    assert len(pinned[1].stages) == 2
    for losses, _ in ranks[0]:
        assert losses == pytest.approx(plain_losses(3), rel=1e-9)


def test_a_resumed_run_keeps_the_plan_of_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for found in launch_workers(train_and_resume, (tmp_path / "run",), workers=2, threads=1):
        assert found["resumed"] == found["whole"]
        assert [stages for stages, _ in found.values()] == [2, 1, 2]
        assert found["other constraints"][1] == pytest.approx(found["whole"][1], rel=1e-9)
    lines = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("the plan of the checkpoint is kept: ") for line in lines) == 1


def test_what_was_measured_is_kept_by_what_it_depends_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(**options: Any) -> bool:
        return any(line.startswith("measuring") for line in planned(capsys, **options)[1])

    assert measured()
    assert not measured()
    assert not measured(constraints=Constraints(micro_batch_size=2))
    assert measured(rows=4)
    assert measured(optimizer=SGD)
    assert measured(constraints=Constraints(remeasure=True))
    assert not measured()


def test_lines_are_silenced_by_their_logger(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("penstock")
    logger.setLevel(logging.WARNING)
    try:
        assert planned(capsys)[1] == []
    finally:
        logger.setLevel(logging.INFO)


def test_constraints_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    plan, lines = planned(capsys, constraints=Constraints(micro_batch_size=2, schedule="gpipe"))
    assert (plan.micro_batch_size, plan.schedule) == (2, "gpipe")
    assert lines[-1].startswith("plan: the whole model on 1 rank; 4 micro-batches of 2 samples; ")
    with pytest.raises(BadInput, match="pin 'stages: 9'"):
        planned(capsys, constraints=Constraints(pins=("stages: 9",)))
    with pytest.raises((BadInput, Infeasible), match="memory"):
        planned(capsys, constraints=Constraints(memory_reserve=1.0))


def test_nothing_of_the_model_is_changed_by_measuring() -> None:
    model, example = nn.Sequential(net(), nn.BatchNorm1d(3).double()), batch()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    with Pipeline(model, example, loss=functional.cross_entropy, optimizer=AdamW):
        assert torch.equal(torch.get_rng_state(), before)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, values[name]), name
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "bytes_each"),
    [
        (None, 0.0),
        (AdamW, 2.0),
        (SGD, 0.0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda named: AdamW([p for name, p in named if name == "3.weight"]), 2.0),
    ],
)
def test_the_state_of_an_optimizer_is_counted(make: Any, bytes_each: float) -> None:
    model = net()
    graph = capture_model(model, batch(), loss=functional.cross_entropy)
    before = [parameter.clone() for parameter in model.parameters()]
    assert state_of(make, graph)[0] == bytes_each
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_is_a_plan_or_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(whole(), tmp_path / "plan.json")
    assert planned(capsys, plan=str(tmp_path / "plan.json")) == (whole(), [])
    assert planned(capsys, plan=tmp_path / "plan.json") == (whole(), [])
    assert planned(capsys, plan="auto")[1][0].startswith("measuring")
    divided = Constraints(sharding="optimizer")
    assert planned(capsys, plan=whole(), constraints=divided) == (whole(), [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "none.json"}, "plan 'none.json' does not exist"),
        ({"plan": [1]}, r"plan is \[1\]; give a Plan, the path of a plan file, or 'auto'"),
        ({"plan": "broken.json"}, "plan 'broken.json' is not valid JSON: Expecting value: line 3"),
        ({"plan": whole(), "constraints": Constraints(max_stages=2)}, "leave one of them out"),
        (
            {"plan": two_stages(9)},
            r"covers 9 layers, the model Sequential has 5 \(0.0, 1.0, 2.0, 3, loss\); plan again",
        ),
        (
            {"plan": two_stages(5)},
            "the plan uses 2 devices but one worker runs; start with torchrun --nproc-per-node 2",
        ),
        (
            {"optimizer": AdamW([nn.Parameter(torch.ones(2))])},
            r"that makes one of each rank's own: optimizer=lambda p: torch.optim.AdamW\(p, ...\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text('{\n"stages": [\n')
    with pytest.raises(BadInput, match=words) as refused:
        made(**options)
    assert "\n" not in str(refused.value)


REFUSED = """
from plan_here_cases import batch, made, whole
from penstock import Safety
with made(plan=whole(), safety=Safety(idle_ranks=True)) as pipe:
    pipe.step(batch())
made(plan=whole())
made(plan="none.json")
"""


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (0, "plan 'none.json' does not exist; check the path"),
        (
            2,
            "the plan uses 1 of 2 ranks, and the others would idle; start 1 with torchrun "
            "--nproc-per-node 1, plan for 2, or let them idle with Safety(idle_ranks=True)",
        ),
    ],
)
def test_what_ends_a_script_is_a_line_of_rank_0_alone(
    tmp_path: Path, ranks: int, words: str
) -> None:
    (tmp_path / "script.py").write_text(REFUSED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks else ()), "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert 'script.py", line' not in done.stderr
    assert done.stderr.splitlines().count(f"error: {words}") == 1, done.stderr
    assert done.stderr.count(words) == 1


def test_a_rank_that_is_refused_for_a_reason_of_its_own_prints_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store, refused = serve_store("127.0.0.1"), BadInput("plan 'x' does not exist; check the path")
    environment = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.setattr(refusals, "SAID_WITHIN", timedelta(seconds=0.2))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refusals.print_refusal(sys.excepthook, BadInput, refused, None)
    assert f"error: {refused}\n" in capfd.readouterr().err
    store.set(f"penstock/refused/{refused}", "printed")
    refusals.print_refusal(sys.excepthook, BadInput, refused, None)
    assert capfd.readouterr().err == ""


def test_a_pipeline_with_a_plan_loads_neither_measurements_nor_planners() -> None:
    code = (
        "import sys, torch\n"
        "from torch import nn\n"
        "from penstock import Pipeline, Plan, Stage\n"
        "plan = Plan((Stage(range(2), (0,), (4,)),), 1, 4, '1f1b')\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "batch = torch.randn(4, 4), torch.randn(4, 4)\n"
        "loss = nn.functional.mse_loss\n"
        "plan = Plan((Stage(range(3), (0,), (4,)),), 1, 4, '1f1b')\n"
        "with Pipeline(model, batch, plan=plan, loss=loss, optimizer=torch.optim.SGD) as pipe:\n"
        "    pipe.step(batch)\n"
        "rooms = ('measure', 'planners', 'planning', 'search', 'simulate', 'plan_here')\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'penstock'\n"
        "       and m.split('.')[1:2] and m.split('.')[1] in rooms])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("granted", "ranks", "load"),
    [
        ([2, 1, 2, 2, 9], range(5), 1.0),
        ([1, 1, 1, 1, 9], range(5), 0.0),
        ([2, 1, 2, 2, 9], (0, 1, 4), 3.0),
    ],
)
def test_a_rank_with_a_quota_of_its_own_is_slow_on_a_host_of_more_cores(
    monkeypatch: pytest.MonkeyPatch, granted: list[int], ranks: Sequence[int], load: float
) -> None:
    """Rank 1 of four on a host runs for a quarter of the time: half of what two cores give each.

    Where only two of them compute, each could have a core, and all waits are for other programs.
    """
    monkeypatch.setattr("penstock.plan_here.core_seconds", lambda: (2.0, 4.0))
    world: Any = SimpleNamespace(
        rank=1, size=5, hosts=("here",) * 4 + ("there",), all_gather=lambda own: granted
    )
    assert load_here(world, (1.0, 1.0), ranks) == load
