"""``penstock rehearse`` as people use it: a result, a page, mistakes that end in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands.refusals import Penstock, refused
from rehearse.rehearsal_cases import layered, straight, two_hosts

from penstock.advice.plan_files import prediction_path
from penstock.cluster.toml_file import write_cluster
from penstock.files import json_text
from penstock.plan.json_file import write_plan
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.simulation import simulate_plan

PROFILE = layered(8)
QUICK = ("--time-scale", 3, "--iterations", 2)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan with its inputs beside it."""
    write_plan(straight("1f1b"), tmp_path / "plan.json")
    write_profile(PROFILE, tmp_path / "profile.json")
    write_cluster(two_hosts(), tmp_path / "cluster.toml")
    return tmp_path / "plan.json"


def promise(plan: Path, profile: ModelProfile) -> None:
    """What ``penstock plan`` would have written beside the plan for this profile."""
    predicted = simulate_plan(straight("1f1b"), profile, two_hosts())
    document = {"format": "penstock-prediction", "iteration_s": predicted.iteration_s}
    prediction_path(plan).write_text(json_text(document))


def test_it_says_what_was_simulated_and_rehearsed_and_draws_both(
    penstock: Penstock, plan: Path, tmp_path: Path
) -> None:
    promise(plan, PROFILE)
    page = tmp_path / "both.html"
    found = penstock("rehearse", plan, *QUICK, "--tolerance", 9, "--picture", page, "--json")
    assert found.code == 0, found.errors
    values = json.loads(found.output)
    assert values["differences"] == []
    assert values["promised_s"] == pytest.approx(values["simulated_s"], rel=0.1)
    assert values["rehearsed_s"] > 0
    text = page.read_text(encoding="utf-8")
    assert "Simulated: " in text
    assert "Rehearsed: " in text


def test_a_profile_that_lied_when_the_plan_was_made_is_found_out(
    penstock: Penstock, plan: Path
) -> None:
    halved = (replace(layer, forward_s=layer.forward_s.scaled(0.2)) for layer in PROFILE.layers)
    promise(plan, replace(PROFILE, layers=tuple(halved)))
    found = penstock("rehearse", plan, *QUICK, "--tolerance", 0.25)
    assert found.code == 4
    assert "s promised with the plan; plan again with this profile" in found.errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--network", "namespaces"), "No such option: --network"),
        (("--picture", "both.png"), "must end in .html"),
        (("--cluster", "dapple-z"), "dapple-z"),
    ],
)
def test_bad_input_ends_in_a_line(
    penstock: Penstock, plan: Path, options: tuple[str, ...], words: str
) -> None:
    refused(penstock("rehearse", plan, *QUICK, *options), 2, words)


def test_a_plan_for_more_ranks_than_memory_holds_is_refused(
    penstock: Penstock, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rehearse.emulation.RANK_BYTES", 1 << 50)
    refused(penstock("rehearse", plan, *QUICK), 2, "4 ranks need about")
