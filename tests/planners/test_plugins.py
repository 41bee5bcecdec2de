"""Planners and schedules from outside: what they may be, and one line for what they may not."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.advice.plan_pipeline import compare_planners, plan_pipeline
from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput, PluginFailed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.plugins import add_planner
from penstock.planners.problem import planning_problem
from penstock.planners.search.search import PLANNERS
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.action import Action
from penstock.schedule.family import Family
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape
from penstock.simulate.simulation import simulate_plan


@pytest.fixture(autouse=True)
def names_of_before() -> Iterator[None]:
    """What a test adds is gone after it."""
    planners, schedules = dict(PLANNERS), dict(FAMILIES.known)
    yield
    for registry, before in ((PLANNERS, planners), (FAMILIES.known, schedules)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


def two_halves(problem: PlanningProblem, score: Score) -> Plan:
    layers, size = len(problem.profile.layers), min(problem.micro_batch_sizes)
    runs = range(layers // 2), range(layers // 2, layers)
    stages = tuple(Stage(run, (device,), (size,)) for device, run in enumerate(runs))
    return Plan(stages, problem.global_batch // size, size, problem.schedules[0])


def one_by_one(shape: PipelineShape) -> Schedule:
    return schedule_from_actions(
        [Action(kind, stage, m) for m in range(shape.micro_batches) for kind in ("F", "B")]
        for stage in range(shape.stages)
    )


def backwards_first(shape: PipelineShape) -> Schedule:
    return schedule_from_actions(
        [Action(kind, stage, m) for m in range(shape.micro_batches) for kind in ("B", "F")]
        for stage in range(shape.stages)
    )


def test_functions_take_the_place_of_names(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    plan = plan_pipeline(small_profile, small_cluster, 16, planner=two_halves, schedule=one_by_one)
    assert (plan.planner, plan.schedule, len(plan.stages)) == ("two-halves", "one-by-one", 2)
    # One micro-batch at a time: no two stages compute together.
    alone = plan_pipeline(small_profile, small_cluster, 16, planner="single-device")
    own, other = (simulate_plan(p, small_profile, small_cluster) for p in (plan, alone))
    assert own.iteration_s > other.iteration_s
    searched = plan_pipeline(small_profile, small_cluster, 16, schedule=one_by_one)
    assert searched.schedule == "one-by-one"


def test_a_family_says_which_placement_it_needs() -> None:
    name = "folded-one-by-one"

    def folded(shape: PipelineShape) -> Schedule:
        return schedule_from_actions(
            [
                Action(kind, stage, m)
                for m in range(shape.micro_batches)
                for kind in ("F", "B")
                for stage in sorted(shape.stages_of(group), reverse=kind == "B")
            ]
            for group in range(shape.groups)
        )

    FAMILIES.add(name, Family(folded, "folded", rounds=2))
    assert FAMILIES[name].rounds == 2 and name in FAMILIES and name in list(FAMILIES)


@pytest.mark.parametrize(
    ("planner", "told"),
    [
        (lambda problem, score: 1 / 0, r"raised ZeroDivisionError: .*test_plugins.py:\d+\)"),
        (lambda problem, score: None, "returned NoneType; let it return a Plan"),
        (
            lambda problem, score: Plan((Stage(range(3), (0,), (1,)),), 16, 1, "1f1b"),
            "covers layers .0, 3.",
        ),
        (
            lambda problem, score: Plan((Stage(range(8), (0,), (1,)),), 4, 1, "1f1b"),
            "a plan for batches of 4 samples, not 16",
        ),
        (
            lambda problem, score: Plan((Stage(range(8), (0,), (1,)),), 16, 1, "fbp-as"),
            "a plan with schedule 'fbp-as', which is not allowed",
        ),
        (
            lambda problem, score: Plan((Stage(range(8), (0,), (16,)),), 1, 16, "1f1b"),
            "a plan that does not fit in memory or breaks a pin",
        ),
    ],
)
def test_a_planner_that_fails_is_one_line(
    small_profile: ModelProfile, small_cluster: Cluster, planner: Any, told: str
) -> None:
    with pytest.raises(PluginFailed, match=told) as failed:
        plan_pipeline(small_profile, small_cluster, 16, planner=planner, pins=["micro-batch: 1"])
    assert str(failed.value).startswith("planner 'lambda'") and "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("schedule", "error", "told"),
    [
        (backwards_first, BadInput, "'backwards-first' with 2 stages and 4 micro-batches: "),
        (lambda shape: shape.nothing, PluginFailed, "'lambda' raised AttributeError"),
        (lambda shape: [], PluginFailed, "'lambda' returned list; let it return a Schedule"),
    ],
)
def test_a_schedule_that_fails_is_one_line(
    small_profile: ModelProfile, small_cluster: Cluster, schedule: Any, error: Any, told: str
) -> None:
    with pytest.raises(error, match=told):
        plan_pipeline(small_profile, small_cluster, 16, planner="gpipe", schedule=schedule)
    assert "backwards-first" not in FAMILIES


@pytest.mark.parametrize(
    ("add", "name", "told"),
    [
        (add_planner, "dapple", "planner 'dapple' is one of the package"),
        (FAMILIES.add, "1f1b", "schedule '1f1b' is one of the package"),
        (add_planner, "mine", "planner 'mine' is a int, not a function"),
        (FAMILIES.add, "mine", "schedule 'mine' is a int, not a function"),
    ],
)
def test_names_of_the_package_cannot_be_taken(add: Any, name: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        add(name, 3)


def test_a_comparison_has_a_row_for_a_planner_that_fails(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    def failing(problem: PlanningProblem, score: Score) -> Plan:
        raise ValueError("no <idea>")

    table = compare_planners(small_profile, small_cluster, 16, planners=[failing, two_halves])
    assert [row.planner for row in table] == ["two-halves", "failing"]
    html = table._repr_html_()
    assert "no &lt;idea&gt;" in html and "2 stages, 1f1b" in html


def test_what_a_notebook_shows_is_short(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    problem = planning_problem(small_profile, small_cluster, 16, pins=["stages: 2"])
    plan = two_halves(problem, lambda plan: 1.0)
    prediction = simulate_plan(plan, small_profile, small_cluster)
    assert repr(plan) == "Plan(2 stages, 1f1b; 16 micro-batches of 1 sample)"
    rows = compare_planners(small_profile, small_cluster, 16, planners=("gpipe", two_halves))
    for shown in (problem, plan, prediction, rows, small_profile, small_cluster):
        assert len(repr(shown)) < 120 and "\n" not in repr(shown)
        assert shown._repr_html_().startswith(("<table>", "<svg"))
    assert "[4, 8)" in plan._repr_html_() and "stages: 2" in problem._repr_html_()
    assert "<td>blocks.5</td>" in small_profile._repr_html_()
    assert f"<td>{small_cluster.hosts[0].name}</td>" in small_cluster._repr_html_()


def test_entry_points_of_another_package_are_found(tmp_path: Path) -> None:
    (tmp_path / "other_package.py").write_text(
        "from tests_of_plugins import two_halves, one_by_one\n"
    )
    (tmp_path / "tests_of_plugins.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    info = tmp_path / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[penstock.planners]\nhalves = other_package:two_halves\n"
        "[penstock.schedules]\nits-order = other_package:one_by_one\n"
    )
    program = (
        "from penstock import plan_pipeline, find_profile, find_cluster, simulate_plan\n"
        "profile, cluster = find_profile('vgg-19'), find_cluster('dapple-c')\n"
        "plan = plan_pipeline(profile, cluster, 8, planner='halves', schedule='its-order')\n"
        "print(plan.planner, plan.schedule, len(plan.stages))\n"
        "from penstock.commands.job_commands import catalogue\n"
        "from penstock.commands.terminal import Terminal\n"
        "catalogue(terminal=Terminal())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *listed = done.stdout.splitlines()
    assert first == "halves its-order 2"
    assert any("halves" in line for line in listed) and any("its-order" in line for line in listed)


def test_compare_and_plan_write_tables(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = ("vgg-19", "--cluster", "dapple-c", "--batch", "256", "--quiet")
    wanted = ("--planners", "single-device,gpipe", "--csv", "compared.csv")
    answer = penstock("compare", *problem, *wanted)
    assert answer.code == 0, answer.errors
    with (tmp_path / "compared.csv").open(encoding="utf-8", newline="") as opened:
        rows = {row["planner"]: row for row in csv.DictReader(opened)}
    assert set(rows) == {"single-device", "gpipe"}
    assert all(float(row["iteration_s"]) > 0 for row in rows.values())
    assert penstock("plan", *problem, "--planner", "gpipe", "--csv", "p.csv").code == 0
    assert (tmp_path / "p.csv").read_text().startswith("stage,first_layer,last_layer,devices,rows,")
