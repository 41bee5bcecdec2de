"""Steps that are checked afterwards leave what plain steps leave, to the bit, on real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.steps.overlapped_cases import OPTIMIZERS, Case, compare
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.lengths import Length
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.micro_batches import schedule_of
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.program import warm_up_of
from penstock.runtime.settings import Update
from penstock.runtime.steps.overlapped import KeptStep
from penstock.runtime.steps.training import Training
from penstock.schedule.dependencies import predecessors
from penstock.schedule.registry import FAMILIES

SCRIPT = Path(__file__).with_name("torchrun_overlapped.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")
FLUSHING = [name for name in FAMILIES if FAMILIES[name].flushes]


def played(cases: Sequence[Any], ranks: int) -> Mapping[Any, int]:
    """Compare on so many ranks; how many steps each case undid."""
    found = launch_workers(compare, (tuple(cases),), workers=ranks, threads=1)
    wrong = {str(case): what for rank in found for case, (what, _) in rank.items() if what}
    assert not wrong, wrong
    assert all({case: n for case, (_, n) in rank.items()} == undone_of(found[0]) for rank in found)
    return undone_of(found[0])


def undone_of(found: Mapping[Any, tuple[list[str], int]]) -> dict[Any, int]:
    return {case: undone for case, (_, undone) in found.items()}


def test_two_ranks_with_every_optimizer() -> None:
    """Gradients are clipped in half of the steps, so that some steps are not as expected."""
    undone = played([Case("1f1b", (1, 1), name, clip=0.5) for name in OPTIMIZERS], 2)
    assert all(undone.values()), undone


def test_numbers_that_are_not_finite() -> None:
    """Of the first batch, one in the middle and the last; in float16 the scale is lowered."""
    cases = [Case("zb-h2", (1, 1), "momentum", bad=bad) for bad in (0, 4, 7)]
    undone = played([*cases, Case("1f1b", (1, 1), half=True)], 2)
    assert all(undone.values()), undone


def test_forwards_that_are_run_again_draw_and_note_the_same() -> None:
    """Dropout, batch normalisation, recompute; over replicas, and by process groups."""
    noisy = Case("1f1b", (1, 1), clip=0.5, noisy=True)
    undone = played(
        [
            noisy,
            Case("zb-h1", (2,), clip=0.5, noisy=True),
            Case("1f1b", (1, 1), clip=0.5, noisy=True, recompute=True, transport="process-groups"),
        ],
        2,
    )
    assert undone[noisy]


def test_three_ranks_with_replicas_of_one_stage() -> None:
    assert all(played([Case("zb-h2", (1, 2), "momentum", 6, clip=0.5)], 3).values())


def test_four_ranks_under_schedules_of_every_kind() -> None:
    """Also those whose first forwards on one rank wait for later actions of another."""
    straight, several = (1, 1, 1, 1), ("zb-v", "chimera", "dualpipe", "hanayo")
    cases = [Case(name, straight, "adamw", 8, clip=0.5, bad=6) for name in several]
    cases.append(Case("zb-h2", straight, "adamw", 7, clip=0.5, bad=4, transport="process-groups"))
    cases.append(Case("interleaved", (2, 2), "fused", 6, clip=0.5))
    undone = played(cases, 4)
    assert sum(undone.values()) >= len(cases), undone


def test_under_torchrun() -> None:
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert not found["wrong"], found
    assert found["undone"] > 0


@pytest.mark.parametrize("name", FLUSHING)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_warming_up_needs_nothing_but_warming_up(name: str, groups: int) -> None:
    if groups == 1 and FAMILIES[name].placement != "straight":
        return
    plan = Case(name, (1,) * groups, micro_batches=8).plan()
    schedule, shape = schedule_of(plan, 8)
    first = warm_up_of(schedule, shape)
    assert all(first.issuperset(predecessors(action, shape)) for action in first)
    for order in schedule.orders:
        begun = [action in first for action in order]
        assert begun == sorted(begun, reverse=True)
    assert bool(first) == (shape.stages > 1)


def trained(make: Any) -> Training:
    """Two matrices, stepped once by the optimizer that is made of them."""
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    schedule = lambda optimizer: StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    named = [(str(number), p) for number, p in enumerate(own)]
    return Training([named], torch.device("cpu"), make, schedule)


class Forgetful(SGD):
    """Replaces its state in every step, and keeps part of it in lists and numbers."""

    def step(self, closure: Any = None) -> None:
        """Note every step."""
        super().step()
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            old = self.state[parameter].get("trail", [])
            self.state[parameter] = {"last": parameter.clone(), "trail": [*old, 1.0]}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=torch.tensor(0.1)),
        lambda p: SGD(p, lr=0.1, momentum=0.5),
        lambda p: Forgetful(p, lr=0.1),
    ],
)
def test_a_step_is_undone_to_the_bit(make: Any, steps_before: int) -> None:
    """Also the first, which makes the state; twice in a row, as the copies stay."""
    training = trained(make)
    optimizer: Optimizer | None = training.optimizer
    assert optimizer is not None
    own = list(training.names)
    for parameter in own:
        parameter.grad = torch.randn(4, 4)
    for _ in range(steps_before):
        training.step(None)
    keeper = KeptStep(training)
    before = [p.detach().clone() for p in own]
    training_before = json.dumps(training.state(), default=str)
    keeper.keep()
    training.step(None)
    after = [p.detach().clone() for p in own]
    for _ in range(2):
        keeper.undo()
        assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
        assert json.dumps(training.state(), default=str) == training_before
        training.step(None)
        assert all(torch.equal(a, b) for a, b in zip(own, after, strict=True))
        assert not torch.equal(after[0], before[0])


PLAN = Plan((Stage(range(3), (0,), (2,)),), 2, 2, "1f1b")


def alone(plan: Plan = PLAN, lengths: bool = False, **options: Any) -> Pipeline:
    layers: list[nn.Module] = [nn.PReLU(), nn.PReLU()]
    batch = torch.randn(4, 4), torch.randn(4, 4)
    dynamic: Any = {leaf: {1: Length("width")} for leaf in (0, 1)} if lengths else None
    graph = capture_model(Chain(layers, loss=nn.MSELoss()), batch, dynamic=dynamic)
    settings = {
        "optimizer": lambda p: SGD(p, lr=0.1),
        "update": Update(optimizer_sync="after"),
        **options,
    }
    settings.setdefault("verify", "off")
    return Pipeline(graph, plan, batch, **settings)


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(BadInput, match='optimizer_sync is "never"; it must be "before" or "after"'):
        Update(optimizer_sync="never")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="needs an optimizer"):
        alone(optimizer=None)
    with pytest.raises(BadInput, match="shard_optimizer"):
        alone(shard_optimizer=True)
    with pytest.raises(BadInput, match="lengths vary"):
        alone(lengths=True)
    with pytest.raises(BadInput, match=r"not work with schedule 'pipedream' \(it has no flush\)"):
        alone(Plan(PLAN.stages, 2, 2, "pipedream"))


def test_metrics_come_one_batch_late_and_what_needs_weights_at_rest_checks_first() -> None:
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(4)]
    with alone() as pipe:
        stream = pipe.stream(iter(batches))
        assert next(stream).step == 1
        assert pipe.steps == 1
        pipe.evaluate(batches[0])
        assert pipe.steps == 2
        assert [metrics.step for metrics in stream] == [2, 3, 4]
        assert pipe.step(batches[0]).step == 5
