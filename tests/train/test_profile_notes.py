"""What people should know before they trust a profile is said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.plan.plan import Plan
from penstock.plan_here import tokens_per_sample
from penstock.profile.model_profile import ModelProfile
from penstock.report.page import write_report
from penstock.train.training_loop import RunPart, TrainedPart


def test_profile_says_its_notes_on_standard_error(
    penstock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, small_profile: ModelProfile
) -> None:
    noted = replace(small_profile, notes=("machine busy",))
    monkeypatch.setattr("penstock.train.profile_job.measure_job", lambda *_, **__: noted)
    answer = penstock("profile", "gpt-text", "--json")
    assert "machine busy" in answer.errors.splitlines()
    assert "busy" not in answer.output
    assert penstock("profile", "gpt-text", "--json", "--quiet").errors == ""


@pytest.mark.parametrize(
    ("loads", "why"),
    [([0.0, 0.0, 0.0, 0.0, 3.0], "nothing else"), ([0.0, 0.5, 0.0, 0.0, 3.0], "up to 50 % longer")],
)
def test_a_slow_step_is_explained_by_ranks_that_compute(
    monkeypatch: pytest.MonkeyPatch, small_plan: Plan, loads: list[float], why: str
) -> None:
    """The plan uses four of five ranks; the last waits for a core that the others need."""
    monkeypatch.setattr("penstock.train.training_loop.load_here", lambda *_: 0.0)
    said: list[str] = []
    part: Any = object.__new__(TrainedPart)
    part._run = SimpleNamespace(world=SimpleNamespace(all_gather=lambda own: loads))
    part._part, part._start, part._seconds = RunPart(small_plan, 1.0), (0.0, 0.0), [2.0] * 10
    part._display = SimpleNamespace(note=said.append)
    part._compare()
    assert len(said) == 1 and why in said[0]


def test_the_report_says_that_the_machine_was_busy(run_directory: Path) -> None:
    summary = run_directory / "summary.json"
    summary.write_text(summary.read_text().replace("{", '{"busy": "machine busy (load 9 <)",', 1))
    page = write_report(run_directory).read_text()
    assert "slower than predicted; machine busy (load 9 &lt;)</div>" in page
    assert "3 stages on 1 + 2 + 1 workers, 1f1b, activations recomputed in 1" in page


def test_tokens_are_the_whole_numbers_of_a_sample_in_the_first_input_that_has_several() -> None:
    words, mask = torch.zeros(4, 12, dtype=torch.long), torch.ones(4, 12, dtype=torch.bool)
    images, classes = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    assert tokens_per_sample([mask, words, classes]) == 12
    assert tokens_per_sample([images, classes]) == 0
