"""The table of ``penstock compare``, of plans of which all numbers are known."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.advice.assessment import Baselines, PlannedPipeline
from penstock.advice.compare import Comparison
from penstock.cluster.cluster import Cluster
from penstock.commands.shown_comparison import (
    ComparedLine,
    comparison_table,
    line_text,
    parts,
)
from penstock.costs.lower_bound import LowerBound
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.simulation import simulate_plan

REFUSED = ComparedLine(Comparison("a", "b", Infeasible("too [big]"), 0.001))


@pytest.fixture
def planned(
    small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster
) -> PlannedPipeline:
    prediction = replace(
        simulate_plan(small_plan, small_profile, small_cluster),
        iteration_s=0.1,
        bubble=0.25,
        peak_memory_bytes=(1e9, 3e9),
    )
    return PlannedPipeline(
        small_plan,
        prediction,
        LowerBound(0.1 / 1.05, "work"),
        Baselines(0.35),
        spp_bound_s=float("inf"),
    )


def line_of(planned: PlannedPipeline) -> ComparedLine:
    return ComparedLine(Comparison("search", "auto", planned, 0.25))


def text_of(lines: list[ComparedLine]) -> str:
    console = Console(file=io.StringIO(), width=180)
    console.print(comparison_table(lines))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_comparison_shows_every_figure_and_reasons_apart(planned: PlannedPipeline) -> None:
    plan = planned.plan
    text = text_of([line_of(planned), REFUSED])
    search, other = text.splitlines()[2:4]
    batches = f"{plan.micro_batches} of {plan.micro_batch_size}"
    for figure in (batches, "100 ms", "5.0 %", "25.0 %", "3.00 GB", "3.50", "250 ms", " - "):
        assert figure in search
    assert search.startswith(f"search   {plan.schedule}")
    assert "no plan" in other and "1.00 ms" in other and "too" not in text
    assert "a, b: too [big]" in parts([line_of(planned), REFUSED])
    assert line_text(REFUSED) == "a: too [big] (planned in 1.00 ms)"
    assert "SPP's" not in text
    assert "SPP's" in text_of([line_of(replace(planned, spp_bound_s=0.3))])
