"""The optimizer's state in host memory: no loss changes, and no GPU has any of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.update.host_state_cases import (
    OPTIMIZERS,
    all_trained,
    on_cpus,
    plain_losses,
    without_room,
)
from torch import nn

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.conflicts import check_conflicts, uses_of
from penstock.runtime.options import Options, Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.update.training import made_of

KINDS = ("stages", "replicas", "optimizer", "parameters")
CASES = (
    *((kind, "AdamW", place) for kind in KINDS for place in ("device", "host")),
    *(("stages", name, "host") for name in OPTIMIZERS if name != "AdamW"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("states")
    ranks = launch_workers(all_trained, (CASES, folder), workers=2, threads=1)
    return {case: [own[n] for own in ranks] for n, case in enumerate(CASES)}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_last_bit(kind: str, found: dict[Any, list[dict[str, Any]]]) -> None:
    on_device, on_host = (found[kind, "AdamW", place] for place in ("device", "host"))
    for kept, own in zip(on_device, on_host, strict=True):
        assert own["losses"] == kept["losses"]
        assert (own["on"], kept["on"]) == ({"cpu"}, {"cuda"})
        assert "equal" in own["verified"]
        assert own["bytes"] < kept["bytes"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_plain_training(name: str, found: dict[Any, list[dict[str, Any]]]) -> None:
    for own in found["stages", name, "host"]:
        assert own["losses"] == pytest.approx(plain_losses(name), rel=1e-9)
        assert own["on"] == {"cpu"}


def test_on_cpus_nothing_changes(tmp_path: Path) -> None:
    for own in launch_workers(on_cpus, (tmp_path,), workers=2, threads=1):
        assert own["losses"] == pytest.approx(plain_losses("AdamW"), rel=1e-9)


def test_a_host_that_is_too_small_is_refused_before_the_run() -> None:
    for said in launch_workers(without_room, (), workers=2, threads=1):
        assert "optimizer state in host memory takes" in said
        assert "for 2 ranks of the host of rank" in said
        assert "10.0 kB are left (free memory of the host)" in said


def test_schedules_without_a_flush_are_refused() -> None:
    options = Options(update=Update(state_on="host"))
    plan = Plan((Stage(range(1), (0,), (2,)), Stage(range(1, 2), (1,), (2,))), 2, 2, "pipedream")
    with pytest.raises(BadInput, match=r'state_on="host" does not work with schedule .pipedream.'):
        check_conflicts(options.uses | uses_of(plan))


def test_another_place_is_refused() -> None:
    with pytest.raises(BadInput, match='state_on is "disk"; it must be "device" or "host"'):
        Update(state_on="disk")  # type: ignore[arg-type]


class CPUOffloadOptimizer(torch.optim.AdamW):
    """Has the name of torchao's, which needs a GPU to be made."""


def test_the_optimizer_of_torchao_is_refused() -> None:
    own = [("weight", nn.Parameter(torch.ones(2)))]
    with pytest.raises(BadInput, match=r"CPUOffloadOptimizer takes the gradient of 'weight'.*host"):
        made_of(CPUOffloadOptimizer, own)


def test_a_pipeline_of_one_process() -> None:
    model = nn.Linear(3, 2)
    with Pipeline(
        model,
        (torch.ones(4, 3), torch.ones(4, 2)),
        plan=Plan((Stage(range(2), (0,), (2,)),), 2, 2, "1f1b"),
        loss=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        update=Update(state_on="host"),
    ) as pipe:
        first, second = (pipe.step((torch.ones(4, 3), torch.ones(4, 2))).loss for _ in range(2))
    assert second < first
