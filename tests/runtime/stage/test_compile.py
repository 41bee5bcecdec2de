"""Compiled stages compute what the others do, to rounding."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from runtime.pipeline_cases import normal
from runtime.stage.compile_cases import (
    MODELS,
    ROWS,
    WIDTH,
    Block,
    Perceptron,
    compiled_and_not,
    trained,
    trained_at_lengths,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stage.compiled_call import StageCompiler

# torch's own compiler warns of what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYERS = 5
ALONE = Plan((Stage(range(LAYERS), (0,), (4,), recompute=True),), 3, 4, "gpipe")


def assert_same(compiled: dict[str, Any], plain: dict[str, Any], tolerance: float = 1e-11) -> None:
    ours, theirs = compiled["tensors"], plain["tensors"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


# Of the sequences two (one kernel needs no compiling); of the blocks the first, whose input has
# no gradient, and the others, which are alike.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "graphs"), [("sequences", 2), ("blocks", 2)])
def test_a_compiled_stage_trains_like_another_with_dropout_recompute_and_short_batches(
    model: str, graphs: int
) -> None:
    plain = trained(ALONE, model=model, compile=False)
    before = counters["stats"]["unique_graphs"]
    compiled = trained(ALONE, model=model, compile=True)
    # For the planned number of rows: neither short batches nor recompute nor evaluation add any.
    assert counters["stats"]["unique_graphs"] == before + graphs
    assert (compiled["graphs"], plain["graphs"]) == (graphs, 0)
    assert_same(compiled, plain)


class Checkpointed(nn.Module):
    """A unit within a checkpoint, and one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Perceptron(), Perceptron()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False) + x
        return self.blocks[1](x) + x


class Counting(Perceptron):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / (1 + self.calls)


def pipeline(model: nn.Module, *, compile: bool) -> tuple[Pipeline, Any]:
    """One stage in three micro-batches, and its batch."""
    torch._dynamo.reset()
    batch = normal(ROWS, WIDTH, 1), normal(ROWS, WIDTH, 2)
    graph = capture_model(model, batch, loss=nn.MSELoss(), compile=compile)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (4,)),), 3, 4, "gpipe")
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Pipeline(graph, batch, plan=plan, optimizer=sgd, verify="off"), batch


@pytest.mark.timeout(600)
def test_hooks_that_the_user_adds_later_run() -> None:
    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)).double()
    called = list[str]()
    pipe, batch = pipeline(model, compile=True)
    with pipe:
        pipe.step(batch)
        for name in ("0.inner.up", "0"):
            module = model.get_submodule(name)
            module.register_forward_hook(lambda *_, name=name: called.append(name))
        pipe.step(batch)
    assert called == ["0.inner.up", "0"] * 3


def replaced_forward(model: nn.Module) -> nn.Module:
    """One of the blocks has a forward that the user has put there."""
    block = model.get_submodule("0")
    block.forward = lambda x: 2 * x + block.get_submodule("inner")(x)
    return model


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("made", "graphs"),
    [
        (Checkpointed, 1),  # the backward runs what is in the checkpoint again, without a stage
        (lambda: nn.Sequential(Counting(), nn.Sequential(Perceptron(), nn.Tanh())), 1),
        (
            lambda: replaced_forward(nn.Sequential(Block(), Block())),
            2,
        ),  # of it only the unit inside
    ],
    ids=["checkpoint", "python state", "forward of the user's own"],
)
def test_what_cannot_be_compiled_runs_as_it_is(made: Any, graphs: int) -> None:
    models, losses, found = list[nn.Module](), list[list[float]](), list[int]()
    for compile in (True, False):
        torch.manual_seed(0)
        models.append(made().double())
        pipe, batch = pipeline(models[-1], compile=compile)
        with pipe:
            losses.append([pipe.step(batch).loss for _ in range(3)])
            found.append(pipe.compiled_graphs)
    assert found == [graphs, 0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)
    for ours, theirs in zip(models[0].modules(), models[1].modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert getattr(ours, "calls", 0) == getattr(theirs, "calls", 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_statistics_of_micro_batches_in_flight_are_written_while_the_first_step_is_checked(
    model: str,
) -> None:
    """The check runs each stage uncompiled, and autograd rejects a buffer that was written to."""
    stage = Stage(range(LAYERS), (0,), (4,))
    options: dict[str, Any] = {"model": model, "sizes": (ROWS, ROWS)}
    plan = replace(ALONE, stages=(stage,))
    assert_same(trained(plan, compile=True, **options), trained(plan, compile=False, **options))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_batches_of_another_length_than_the_example_run_as_they_are() -> None:
    plain = trained_at_lengths((5, 3, 7, 5), compile=False)
    graphs = counters["stats"]["unique_graphs"]
    compiled = trained_at_lengths((5, 3, 7, 5), compile=True)
    assert counters["stats"]["unique_graphs"] == graphs + 1
    assert_same(compiled, plain)


def test_without_a_compiler_the_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BadInput, match=r"needs a C\+\+ compiler.*g\+\+.*leave compile out"):
        StageCompiler(torch.device("cpu"))
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.raises(BadInput, match="my-compiler"):
        StageCompiler(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_replicas_split_backwards_and_parts_of_stages_are_the_same(model: str) -> None:
    stages = (Stage(range(2), (0, 1), (3, 1)), Stage(range(2, LAYERS), (2,), (4,)))
    plan = Plan(stages, 3, 4, "1f1b")
    divided = tuple(replace(stage, sharding="optimizer") for stage in stages)
    plans = [
        plan,
        replace(plan, schedule="zb-h1"),
        with_recompute(replace(plan, schedule="gpipe"), True),
        with_recompute(replace(plan, stages=divided), False, by_block=True),
    ]
    for found in launch_workers(compiled_and_not, (plans, {"model": model}), workers=3, threads=1):
        for compiled, plain in found:
            assert_same(compiled, plain)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bfloat16_autocast_is_compiled_with_the_stage() -> None:
    one = replace(ALONE, stages=(Stage(range(LAYERS), (0,), (4,)),))
    options: dict[str, Any] = {"model": "sequences", "autocast": torch.bfloat16, "sizes": (12,)}
    # A compiled chain of operators rounds to bfloat16 less often than one by one.
    assert_same(trained(one, compile=True, **options), trained(one, compile=False, **options), 2e-2)
