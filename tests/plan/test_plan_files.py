"""Plans on disk, and what is said of wrong ones."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from planning_strategies import problems
from reference.every_plan import every_plan

from penstock.errors import BadInput
from penstock.plan.json_file import plan_from_json, plan_to_json, read_plan, write_plan
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.schedule.registry import FAMILIES

PLAN = Plan(
    stages=(Stage(range(0, 3), (0, 1), (2, 2)), Stage(range(3, 4), (2,), (4,), recompute=True)),
    micro_batches=3,
    micro_batch_size=4,
    schedule="1f1b",
    in_flight_limit=(2, 1),
)


@settings(max_examples=20, deadline=None)
@given(problems())
def test_every_plan_survives_a_round_trip(problem: PlanningProblem):
    plans = every_plan(problem, tuple(range(len(problem.cluster.devices))))
    for plan in [PLAN, *list(plans)[:20]]:
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "p.json") == plan


def test_a_plan_is_found_again_in_another_process():
    assert hash(PLAN) == hash(replace(PLAN))
    code = (
        "import pickle, sys; from dataclasses import replace; "
        "plan = pickle.load(sys.stdin.buffer); assert {replace(plan): 1}[plan] == 1"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(PLAN), env=environment, check=True
    )


def test_what_the_devices_of_a_stage_divide_survives_a_round_trip():
    for sharding in ("optimizer", "parameters"):
        divided = replace(PLAN.stages[0], sharding=sharding)
        plan = replace(PLAN, stages=(divided, PLAN.stages[1]))
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "p.json") == plan
    assert replace(PLAN.stages[1], sharding="optimizer").sharding == ""  # one device has all
    with pytest.raises(BadInput, match="stage 0 has sharding 'half'"):
        replace(PLAN, stages=(replace(divided, sharding="half"), PLAN.stages[1]))


COSTS = {"forward_s": 1.0, "input_backward_s": 1.0, "weight_backward_s": 1.0}


def test_a_file_shows_layers_as_half_open_ranges_one_stage_a_line(tmp_path: Path):
    write_plan(PLAN, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    line = '    {"layers": [0, 3], "devices": [0, 1], "slices": [2, 2], "recompute": false},'
    assert line in text.splitlines()
    assert read_plan(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shedule": "x"}, ["shedule", "did you mean 'schedule'"]),
        ({"schema_version": 1}, ["schema_version is 1", "plan again"]),
        ({"schema_version": 9}, ["schema_version is 9", "must be 2"]),
        ({"micro_batches": "three"}, ["micro_batches", "three", "integer"]),
        ({"micro_batches": 0}, ["0 micro-batches", ">= 1"]),
        ({"stages": []}, ["no stages", "at least one"]),
        ({"costs": [COSTS | {"forward_s": inf}]}, ["costs[0].forward_s is inf", "finite"]),
        ({"costs": [COSTS | {"transfer_s": nan}]}, ["costs[0].transfer_s is nan", "finite"]),
        ({"costs": [COSTS | {"saved_bytes": -1.0}]}, ["costs[0].saved_bytes is -1.0", ">= 0"]),
        ({"memory_bytes": [nan]}, ["memory_bytes[0] is nan"]),
        ({"stages": [{"layers": [0], "devices": [0], "slices": [4]}]}, ["stages[0].layers", "[0]"]),
        ({"stages": [{"layers": [0, 2], "devices": [0]}]}, ["stages[0].slices", "missing"]),
        (
            {"stages": [{"layers": [1, 2], "devices": [0], "slices": [4]}], "in_flight_limit": []},
            ["[1, 2)", "start at layer 0"],
        ),
        (
            {"stages": [{"layers": [0, 2], "devices": [0], "slices": [3]}], "in_flight_limit": []},
            ["[3]", "add up to", "4"],
        ),
    ],
)
def test_a_wrong_plan_is_answered_with_place_value_and_remedy(
    change: dict[str, Any], words: list[str]
):
    with pytest.raises(BadInput) as caught:
        plan_from_json({**plan_to_json(PLAN), **change}, "folder/p.json")
    message = str(caught.value)
    assert all(word in message for word in ["folder/p.json", *words]), message
    assert "\n" not in message


def test_broken_files_are_named(tmp_path: Path):
    with pytest.raises(BadInput, match=r"'.*none\.json' does not exist"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"stages": [')
    with pytest.raises(BadInput, match=r"half\.json' is not valid JSON: .*line 1 column"):
        read_plan(tmp_path / "half.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.json' is not text"):
        read_plan(tmp_path / "binary.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(BadInput, match="must be a table"):
        read_plan(tmp_path / "list.json")
    with pytest.raises(BadInput, match="cannot write"):
        write_plan(PLAN, tmp_path / "no" / "folder.json")


def test_the_order_of_a_plan_is_its_schedules():
    unlimited = Plan(PLAN.stages, 3, 4, "gpipe")
    assert str(order_of(unlimited)).splitlines()[0] == "stage 0   F0 F1 F2 B0 B1 B2"


def test_an_unknown_schedule_is_answered_with_those_there_are():
    with pytest.raises(BadInput, match=rf"'zigzag' is unknown; .*{len(FAMILIES)} .*penstock list"):
        order_of(Plan(PLAN.stages, 3, 4, "zigzag"))


GROUPED = replace(PLAN, tensor_groups=((0, 3), (1, 4), (2,)))


def test_tensor_groups_are_written_only_where_there_are_some(tmp_path: Path) -> None:
    write_plan(GROUPED, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == GROUPED
    assert '"tensor_groups": [[0, 3], [1, 4], [2]]' in (tmp_path / "plan.json").read_text()
    assert "tensor_groups" not in plan_to_json(PLAN)


def test_the_ranks_of_a_plan_are_those_of_its_groups() -> None:
    assert GROUPED.ranks == (0, 3, 1, 4, 2) and GROUPED.ranks_of(1) == (1, 4)
    assert [GROUPED.device_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, -1]
    assert PLAN.ranks == PLAN.devices and PLAN.device_of(2) == 2 and PLAN.device_of(3) == -1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (((0,), (1,)), "has 2 entries, and the plan uses device 2"),
        (((0, 1), (1, 2), (3,)), "each rank must be >= 0 and in one group"),
        (((0,), (), (3,)), "each device needs at least one rank"),
        (((0,), (-1,), (3,)), "each rank must be >= 0"),
        (((1, 0), (2, 3), (4,)), "in ascending order"),
        (((0, 1), (2,), (3,)), r"stage 0 have tensor groups of \[2, 1\] ranks; all replicas"),
    ],
)
def test_groups_that_no_run_could_follow_are_refused(
    groups: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        replace(PLAN, tensor_groups=groups)
