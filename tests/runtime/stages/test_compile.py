"""Compiled stages compute what the others do, to rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from runtime.stages.compile_cases import compiled_and_not, trained, trained_at_lengths
from torch._dynamo.utils import counters

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stages.compiled_call import StageCompiler

# torch's own compiler warns of what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ALONE = Plan((Stage(range(5), (0,), (4,), recompute=True),), 3, 4, "gpipe")


def assert_same(compiled: dict[str, Any], plain: dict[str, Any], tolerance: float = 1e-11) -> None:
    assert compiled.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.timeout(600)
def test_a_compiled_stage_trains_like_another_with_dropout_recompute_and_short_batches() -> None:
    plain = trained(ALONE, traced=True, compile=False)
    graphs = counters["stats"]["unique_graphs"]
    compiled = trained(ALONE, traced=True, compile=True)
    # One graph for the planned number of rows: neither short batches nor recompute make another.
    assert counters["stats"]["unique_graphs"] == graphs + 1
    assert_same(compiled, plain)


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
@pytest.mark.parametrize("traced", [False, True])
def test_replicas_split_backwards_and_parts_of_stages_are_the_same(traced: bool) -> None:
    layers = 5 if traced else 4
    stages = (Stage(range(2), (0, 1), (3, 1)), Stage(range(2, layers), (2,), (4,)))
    plan = Plan(stages, 3, 4, "1f1b")
    some = tuple(
        replace(stage, recompute=True, recompute_layers=(stage.layers.start,)) for stage in stages
    )
    plans = [plan, replace(plan, schedule="zb-h1"), replace(plan, stages=some, schedule="gpipe")]
    for found in launch_workers(
        compiled_and_not, (plans, {"traced": traced}), workers=3, threads=1
    ):
        for compiled, plain in found:
            assert_same(compiled, plain)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bfloat16_autocast_is_compiled_with_the_stage() -> None:
    one = replace(ALONE, stages=(Stage(range(5), (0,), (4,)),))
    options: dict[str, Any] = {"traced": True, "autocast": torch.bfloat16, "sizes": (12,)}
    # A compiled chain of operators rounds to bfloat16 less often than one by one.
    assert_same(trained(one, compile=True, **options), trained(one, compile=False, **options), 2e-2)
