"""What people should know before they trust a profile is said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from penstock.jobs.profile_job import CHECKPOINTS, with_model_notes
from penstock.profile.model_profile import ModelProfile
from penstock.report.page import write_report


@pytest.mark.parametrize("asked", [True, False])
def test_checkpointing_that_the_model_asks_for_is_told(
    small_profile: ModelProfile, asked: bool
) -> None:
    """Models of Hugging Face set the flag on the modules that checkpoint."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].gradient_checkpointing = asked  # type: ignore[assignment]
    graph: Any = SimpleNamespace(model=model)
    noted = with_model_notes(replace(small_profile, notes=("a",)), graph)
    assert noted.notes == (("a", CHECKPOINTS) if asked else ("a",))


def test_profile_says_its_notes_on_standard_error(
    penstock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, small_profile: ModelProfile
) -> None:
    noted = replace(small_profile, notes=("machine busy",))
    monkeypatch.setattr("penstock.jobs.profile_job.profile_job", lambda *_, **__: noted)
    answer = penstock("profile", "gpt-text", "--json")
    assert "machine busy" in answer.errors.splitlines()
    assert "busy" not in answer.output
    assert penstock("profile", "gpt-text", "--json", "--quiet").errors == ""


def test_the_report_says_that_the_machine_was_busy(run_directory: Path) -> None:
    summary = run_directory / "summary.json"
    summary.write_text(summary.read_text().replace("{", '{"busy": "machine busy (load 9 <)",', 1))
    page = write_report(run_directory).read_text()
    assert "slower than predicted; machine busy (load 9 &lt;)</div>" in page
    assert "3 stages on 1 + 2 + 1 workers, 1f1b, activations recomputed in 1" in page
