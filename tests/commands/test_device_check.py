"""A device that layers cannot run on is refused in one line, before anything is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.commands.job_commands import LOADING

JOB = "gpt-text"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["profile", JOB], "torch 2"),
        (["train", JOB, "--workers", "1"], "finds no CUDA device here"),
        (["verify", JOB, "--workers", "1"], "finds no CUDA device here"),
        (["cluster"], "finds no CUDA device here"),
        (["verify", JOB], "finds no CUDA device here"),
    ],
)
def test_cuda_is_refused_before_anything_is_measured(
    penstock: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    answer = penstock(*arguments, "--device", "cuda", "-o", out)
    # A busy machine is told why it waits.
    (line,) = answer.errors.removeprefix(f"{LOADING}\n").splitlines()
    assert (answer.code, answer.output) == (2, "")
    assert line.startswith("penstock: error: --device cuda") and told in line
    assert not out.exists()


def test_an_estimate_needs_no_device(
    penstock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["profile", "gpt-text", "--estimate", "A100-80GB", "--device", "cuda", "--json"]
    assert penstock(*asked).code == 0
