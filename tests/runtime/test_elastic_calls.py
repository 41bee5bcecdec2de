"""What a script under an elastic agent needs: a plan for its ranks, and an end by SIGTERM."""

from pathlib import Path

from runtime.elastic_cases import ask_for_plans, end_by

from penstock.plan.json_file import read_plan
from penstock.runtime.processes.launch import launch_workers


def test_rank_0_plans_for_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = launch_workers(ask_for_plans, (run, 9), workers=2)
    assert first == ([2], [], 2)
    assert second == ([], [], 2)
    assert len(read_plan(run / "plan-2.json").stages) == 2


def test_a_restart_reads_what_was_planned(tmp_path: Path) -> None:
    launch_workers(ask_for_plans, (tmp_path, 9), workers=2)
    assert [made for made, _, _ in launch_workers(ask_for_plans, (tmp_path, 9), workers=2)] == [
        [],
        [],
    ]
    assert launch_workers(ask_for_plans, (tmp_path, 9), workers=1)[0] == ([1], [], 1)


def test_every_rank_is_told_why_there_is_no_plan(tmp_path: Path) -> None:
    found = launch_workers(ask_for_plans, (tmp_path, 1), workers=2)
    refusal = ["Infeasible", "2 ranks have too little memory; use more"]
    assert found == (([2], refusal, 0), ([], refusal, 0))
    (tmp_path / "plan-2.json").write_text("{}")
    for made, (kind, message), _ in launch_workers(ask_for_plans, (tmp_path, 9), workers=2):
        assert (made, kind) == ([], "BadInput")
        assert "plan-2.json" in message


def test_sigterm_on_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    assert launch_workers(end_by, ("signal", tmp_path), workers=2) == ((143, 4), (143, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_callback_that_stops_the_training_is_no_sigterm(tmp_path: Path) -> None:
    found = launch_workers(end_by, ("stop", tmp_path), workers=2)
    assert found == (("stopped", 4), ("stopped", 4))
    assert list(tmp_path.iterdir()) == []
