"""The table of what excludes what: its rows can be met, and jobs and `Pipeline` refuse alike."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_training import plain_step
from torch import nn

from penstock.errors import BadInput
from penstock.plan.choices import CHOICES
from penstock.plan.plan import Plan, Stage
from penstock.runtime.conflicts import (
    CONFLICTS,
    SETTINGS,
    check_conflicts,
    uses_of,
    uses_of_training,
)
from penstock.runtime.options import Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.tables import Constraints
from penstock.train.job import Job, OptimizerSettings, TensorSettings

PLAN = Plan((Stage(range(2), (0,), (2,)),), 2, 2, "pipedream")

ASYNCHRONOUS: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": None}, "needs an optimizer"),
    "loss scaling": ({"autocast": torch.float16}, "autocast=torch.float16 does not work with"),
    "sharded": (
        {"constraints": Constraints(sharding="optimizer")},
        "needs one update of all stages",
    ),
    "host state": ({"update": Update(state_on="host")}, "each stage steps between passes"),
    "skipping": ({"update": Update(on_non_finite="skip")}, "a step cannot be left out afterwards"),
}


def test_every_use_of_the_table_has_words_somewhere() -> None:
    """A misspelt use would never be met."""
    own = {*SETTINGS, *uses_of(PLAN), "kinds", "newer weights"}
    own |= {"whole loss", "early backward", "one slice"}
    own |= {"tied stages", "tied", "thawed", *CHOICES, *uses_of_training(None)}
    assert {use for rule in CONFLICTS for use in (rule.this, rule.that)} == own


USED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor groups": (
        {"tensor_parallel": TensorSettings(ranks=(2, 4))},
        "tensor_parallel.ranks = [2, 4]",
    ),
    "autocast": ({"autocast": "bfloat16"}, 'autocast = "bfloat16"'),
    "loss_scaling": ({"autocast": "float16"}, 'autocast = "float16"'),
    "optimizer": (
        {"constraints": Constraints(sharding="optimizer")},
        'constraints.sharding = "optimizer"',
    ),
    "compile": ({"compile": True}, "compile = true"),
    "whole parameters": ({"optimizer": OptimizerSettings("muon")}, 'optimizer.name = "muon"'),
    "accumulate": ({"accumulate": 2}, "accumulate = 2"),
    "skip": ({"on_non_finite": "skip"}, 'on_non_finite = "skip"'),
    "roll-back": ({"on_non_finite": "roll-back"}, 'on_non_finite = "roll-back"'),
    "meetings": ({"meet_every": 5}, "meet_every = 5"),
    "average": ({"average_decay": 0.9}, "average_decay = 0.9"),
    "host state": (
        {"constraints": Constraints(state_on="host")},
        'constraints.state_on = "host"',
    ),
    "no checkpoints": ({"checkpoint_every": 0}, "checkpoint_every = 0"),
    "no evaluations": ({"evaluate_every": 0}, "evaluate_every = 0"),
    "stop early": ({"stop_early": 3}, "stop_early = 3"),
    "keep best": ({"keep_best": True}, "keep_best = true"),
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
        Pipeline(nn.Sequential(nn.Linear(4, 4)), torch.zeros(4, 4), plan=PLAN, **settings)
    assert message in str(refused.value)


def test_copies_of_the_forwards_weights_are_refused_only_where_backwards_use_newer_ones() -> None:
    newest = replace(PLAN, schedule="spectrain")
    check_conflicts(uses_of(PLAN) | {"compile": "compile=True"})
    with pytest.raises(BadInput, match=r"compile=True does not work with schedule 'spectrain'"):
        check_conflicts(uses_of(newest) | {"compile": "compile=True"})


class Normed(torch.optim.SGD):
    """Divides every step by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm() if own else torch.ones(())
        for parameter in own:
            parameter.grad /= norm
        return super().step(closure)


@pytest.mark.parametrize(
    "kind",
    [
        name
        for name in dir(torch.optim)
        if isinstance(kind := getattr(torch.optim, name), type)
        and issubclass(kind, torch.optim.Optimizer)
        and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    ],
)
def test_a_trial_tells_rules_that_look_at_all_parameters_from_torchs(kind: str) -> None:
    made = getattr(torch.optim, kind)([nn.Parameter(torch.ones(3, 3))], lr=0.01)
    assert uses_of_training(made)["all parameters"] == ""
    normed = uses_of_training(Normed([nn.Parameter(torch.ones(2))], lr=0.01))
    assert normed["all parameters"] == "optimizer Normed"
    check_conflicts(normed | uses_of(replace(PLAN, stages=PLAN.stages[:1])))
    two = Plan((Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))), 4, 1, "1f1b")
    with pytest.raises(BadInput, match=r"optimizer Normed.*a trial on two small ones"):
        check_conflicts(normed | uses_of(two))


def test_a_factory_is_given_names_if_it_asks_for_them() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    theirs = copy.deepcopy(ours)
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randint(2, (8,))

    def by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        plain = [p for name, p in named if name.endswith("bias") or name.startswith("1.")]
        rest = [p for name, p in named if not (name.endswith("bias") or name.startswith("1."))]
        groups = [{"params": rest, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.1)

    plan = Plan((Stage(range(2), (0,), (4,)), Stage(range(2, 3), (0,), (4,))), 2, 4, "interleaved")
    loss = nn.functional.cross_entropy
    with Pipeline(ours, batch, plan=plan, loss=loss, optimizer=by_name) as pipe:
        for _ in range(3):
            pipe.step(batch)
        pipe.close(gather=True)
    reference = by_name(list(theirs.named_parameters()))
    for _ in range(3):
        plain_step(reference, loss(theirs(batch[0]), batch[1]))
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
