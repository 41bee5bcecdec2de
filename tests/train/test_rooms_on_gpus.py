"""A plan's ranks must fit into what other processes have left of their GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.plan.plan import Plan, Stage
from penstock.train import rank_program
from penstock.train.training_loop import RunPart


def world(rank: int, devices: tuple[str, ...]) -> Any:
    return SimpleNamespace(
        rank=rank,
        hosts=("a", "a", "b", "b"),
        devices=devices,
        device=torch.device("cuda", 0),
        all_succeed=lambda make: make(),
    )


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [(("0", "1", "0", "1"), [1.0, 2.0, 4.0, 0.0]), (("0",) * 4, [3.0, 3.0, 4.0, 4.0])],
)
def test_a_gpu_must_have_room_for_all_ranks_that_share_it(
    devices: tuple[str, ...], wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth rank is not used by the plan."""
    asked: list[float] = []
    monkeypatch.setattr(rank_program, "release_unused", lambda device: None)
    monkeypatch.setattr(
        rank_program, "check_free_memory", lambda at, size, what: asked.append(size)
    )
    plan = Plan(tuple(Stage(range(n, n + 1), (n,), (2,)) for n in range(3)), 2, 2, "1f1b")
    part = RunPart(plan, 1.0, (1.0, 2.0, 4.0, 8.0))
    for rank in range(4):
        rank_program.check_rooms(world(rank, devices), part)
    assert asked == wanted
