"""The table of what excludes what: its rows can be met, and jobs and `Pipeline` refuse alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BadInput
from penstock.jobs.job import Job, OptimizerSettings, TensorSettings
from penstock.plan.choices import CHOICES
from penstock.plan.plan import Plan, Stage
from penstock.runtime.conflicts import CONFLICTS, SETTINGS, check_conflicts, uses_of
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Update

PLAN = Plan((Stage(range(2), (0,), (2,)),), 2, 2, "pipedream")

ASYNCHRONOUS: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": None}, "needs an optimizer"),
    "loss scaling": ({"autocast": torch.float16}, "autocast=torch.float16 does not work with"),
    "sharded": ({"shard_optimizer": True}, "needs one update of all stages"),
    "skipping": ({"update": Update(on_non_finite="skip")}, "a step cannot be left out afterwards"),
    "undoing": ({"update": Update(optimizer_sync="after")}, 'leave it "before"'),
}


def test_every_use_of_the_table_has_words_somewhere() -> None:
    """A misspelt use would never be met."""
    own = {*SETTINGS, *uses_of(PLAN), "lengths", "kinds", "newer weights"}
    own |= {"tied stages", "tied", "thawed", *CHOICES}
    assert {use for rule in CONFLICTS for use in (rule.this, rule.that)} == own


USED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor groups": (
        {"tensor_parallel": TensorSettings(ranks=(2, 4))},
        "tensor_parallel.ranks = [2, 4]",
    ),
    "autocast": ({"autocast": "bfloat16"}, 'autocast = "bfloat16"'),
    "loss_scaling": ({"autocast": "float16"}, 'autocast = "float16"'),
    "optimizer": ({"shard_optimizer": True}, "shard_optimizer = true"),
    "compile": ({"compile": True}, "compile = true"),
    "undoing": ({"optimizer_sync": "after"}, 'optimizer_sync = "after"'),
    "whole parameters": ({"optimizer": OptimizerSettings("muon")}, 'optimizer.name = "muon"'),
    "accumulate": ({"accumulate": 2}, "accumulate = 2"),
    "skip": ({"on_non_finite": "skip"}, 'on_non_finite = "skip"'),
    "roll-back": ({"on_non_finite": "roll-back"}, 'on_non_finite = "roll-back"'),
    "meetings": ({"meet_every": 5}, "meet_every = 5"),
    "no checkpoints": ({"checkpoint_every": 0}, "checkpoint_every = 0"),
}


def test_a_job_uses_what_its_keys_say_and_nothing_by_default() -> None:
    # A job has an optimizer, and no keys for the others.
    left = {"no optimizer", "verified later", "one process"}
    assert {*SETTINGS} - {*USED} == left
    plain = Job("small", model=nn.Identity, data=lambda *asked: iter(()))
    assert plain.uses == {}
    for use, (keys, words) in USED.items():
        found = replace(plain, **keys).uses
        assert found[use] == words
        assert {*found} - {use} <= {"autocast"}, use


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_what_needs_a_flush_is_refused_before_anything_is_built(case: str) -> None:
    options, message = ASYNCHRONOUS[case]
    settings = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **options}
    with pytest.raises(BadInput, match=r"schedule 'pipedream' \(it has no flush\)") as refused:
        Pipeline(nn.Sequential(nn.Linear(4, 4)), PLAN, torch.zeros(4, 4), **settings)
    assert message in str(refused.value)


def test_copies_of_the_forwards_weights_are_refused_only_where_backwards_use_newer_ones() -> None:
    newest = replace(PLAN, schedule="spectrain")
    check_conflicts(uses_of(PLAN) | {"compile": "compile=True"})
    with pytest.raises(BadInput, match=r"compile=True does not work with schedule 'spectrain'"):
        check_conflicts(uses_of(newest) | {"compile": "compile=True"})
