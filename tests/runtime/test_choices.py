"""The table of choices: what is not refused runs like one device, and the page shows the table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines_of_any_plan import Pipeline
from runtime import test_tensor_groups
from runtime.gradients import test_gradients
from runtime.sharding_cases import RUNS, TiedChain, choices_for, choosing, every_run
from runtime.stage import test_compile
from torch import nn
from torch.optim import SGD

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.choices import CHOICES, REFUSED, SCHEDULES, choice_refusal
from penstock.plan.plan import Plan, Stage
from penstock.runtime.conflicts import check_conflicts, uses_of
from penstock.runtime.processes.launch import launch_workers

FEATURES = {
    "whole backwards": "`gpipe`, `1f1b` and all others not named below",
    "interleaved": "several stages on a device (`interleaved`)",
    "split backwards": "split backwards (`zb-h1`, ...)",
    "mirrored": "stages held twice (`chimera`, ...)",
    "no flush": "no flush (`pipedream`, ...)",
    "unequal replicas": "replicas with unequal numbers of rows, or none",
    "tied stages": "parameters tied between stages",
    "norms": "batch normalisation",
    "autocast": "`autocast`",
    "clipping": "`clip_norm`",
    "accumulate": "several batches in a step",
    "frozen": "frozen parameters",
    "thawed": "a change of `requires_grad` between steps",
    "compile": "`compile=True`",
    "other plan": "resume under another plan",
    "first step": "the comparison of the first step with your module",
    "whole parameters": "Muon, Adafactor, LBFGS",
    "tensor groups": "tensor groups",
}
"""What a choice may meet, with the words of the page for it."""

PAGE = Path(__file__).parents[2] / "docs/how-it-works/runtime.md"

COMPILED = test_compile.test_replicas_split_backwards_and_parts_of_stages_are_the_same
CHECKPOINT = (
    test_gradients.test_a_checkpoint_of_a_sharded_run_continues_under_any_plan_and_the_reverse
)
ELSEWHERE = {
    ("optimizer", "compile"): COMPILED,
    ("blocks", "compile"): COMPILED,
    ("optimizer", "other plan"): (
        test_gradients.test_a_checkpoint_of_a_sharded_run_continues_under_any_plan_and_the_reverse
    ),
    ("blocks", "tensor groups"): test_tensor_groups.test_other_transports_and_stages_of_one_group,
}
"""Tests of what `every_run` leaves out."""

EXAMPLES = {"split backwards": "zb-h1", "mirrored": "chimera", "no flush": "pipedream"}

SETTINGS: dict[str, dict[str, Any]] = {}


def test_every_choice_trains_like_one_device_with_all_that_is_not_refused() -> None:
    reports = launch_workers(every_run, workers=4, threads=1)
    micro_batches = 3
    for found, counts in reports:
        refused = found.pop("refused")
        assert len(refused) == 1
        assert "requires_grad of" in refused[0]
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
        # By block, one with two layers is gathered for each of these.
        for (counted, share), units in zip(counts, (6, 8), strict=True):
            # Once in each forward and once in each backward, in which a block runs again.
            assert counted == {
                "gather": 2 * units * micro_batches,
                "reduce": units * micro_batches,
                "most": 2,
                "messages": 2 * units * micro_batches,
                # All but the first of a pass; by block those of a block's second layer are not.
                "ahead": 2 * 5 * micro_batches,
                "left": 0,
            }
            # Rows that are no multiple of four are divided unevenly.
            assert 0.2 < share < 0.3


def test_every_cell_of_the_table_is_run_or_refused() -> None:
    run = {
        (choice, feature)
        for features, _ in RUNS.values()
        for choices in choices_for(features)
        for choice in choices
        for feature in features
    }
    every = {(choice, feature) for choice in CHOICES for feature in FEATURES}
    assert run | ELSEWHERE.keys() == every - set(REFUSED)


@pytest.mark.parametrize(("choice", "feature"), REFUSED)
def test_what_is_refused_is_refused_with_its_reason(choice: str, feature: str) -> None:
    plan = Plan((Stage(range(2), (0, 1), (1, 1)),), 2, 2, EXAMPLES.get(feature, "1f1b"))
    if feature == "tensor groups":
        plan = Plan(plan.stages, 2, 2, "1f1b", tensor_groups=((0, 1), (2, 3)))
    plan = choosing(choice)(plan)
    if feature in SCHEDULES:
        assert REFUSED[choice, feature] in choice_refusal(choice, plan.schedule)
    with pytest.raises(BadInput) as refused:
        if feature in ("thawed", "whole parameters"):
            check_conflicts(uses_of(plan) | {feature: feature})
        elif feature == "tied stages":
            stages = Stage(range(1), (0, 1), (1, 1)), Stage(range(1, 3), (2,), (2,))
            Pipeline(
                TiedChain(), torch.ones(4, 4), plan=choosing(choice)(Plan(stages, 2, 2, "1f1b"))
            )
        else:
            options = {"optimizer": lambda p: SGD(p, lr=0.1), **SETTINGS.get(feature, {})}
            model, batch = nn.Sequential(nn.Linear(4, 4)), (torch.zeros(4, 4), torch.zeros(4, 4))
            graph = capture_model(model, batch, loss=nn.MSELoss(), compile=feature == "compile")
            Pipeline(graph, batch, plan=plan, **options)
    assert REFUSED[choice, feature] in str(refused.value)


def test_the_page_shows_the_table() -> None:
    lines = ["| | " + " | ".join(CHOICES.values()) + " |", "|---|---|---|---|"]
    for feature, words in FEATURES.items():
        cells = (REFUSED.get((choice, feature), "runs") for choice in CHOICES)
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
