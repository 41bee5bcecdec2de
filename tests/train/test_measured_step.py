"""How a job's optimizer step is measured."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock import plan_here
from penstock.plan_here import stepped_layers
from penstock.train import profile_job
from penstock.train.job import Job

MOST = 1_000_000


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(60)))


def layers_on_meta() -> nn.Module:
    with torch.device("meta"):
        return layers()


def rows(split: str, seed: int, start_step: int, batch_size: int) -> Iterator[Any]:
    """The same rows for ever."""
    while True:
        yield torch.ones(batch_size, 128), torch.ones(batch_size, 128)


@pytest.mark.parametrize("build", [layers, layers_on_meta])
def test_a_step_is_measured_with_a_part_of_a_large_model(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[int] = []
    measure = plan_here.measure_step_s_per_byte

    def recorded(module: nn.Module, *given: Any, **options: Any) -> float:
        stepped.append(sum(p.numel() * p.element_size() for p in module.parameters()))
        return measure(module, *given, **options)

    monkeypatch.setattr(plan_here, "measure_step_s_per_byte", recorded)
    monkeypatch.setattr(plan_here, "STEPPED_BYTES", MOST)
    loss = nn.functional.mse_loss
    job = Job("layers", build, rows, batch_size=2, loss=loss)
    profile = profile_job.measure_job(job, "cpu")
    whole = sum(layer.parameter_bytes for layer in profile.layers)
    one = 4 * (128 * 128 + 128)
    assert whole == 60 * one
    assert [MOST <= own < MOST + one < whole / 3 for own in stepped] == [True]
    assert profile.step_s_per_byte > 0


@pytest.mark.parametrize(
    ("millions", "found"),
    [
        ([10, 10, 10], range(3)),  # all fit in a cache
        ([100, 200, 70, 100], range(2, 3)),
        ([10, 40, 30, 20, 90], range(1, 3)),
        ([], range(0)),
    ],
)
def test_the_fewest_bytes_that_exceed_a_cache_are_measured(
    millions: Sequence[int], found: range
) -> None:
    assert stepped_layers([(own * 1_000_000, 0) for own in millions]) == found
