"""What a script under an elastic agent needs: a plan for its ranks, and an end by SIGTERM."""

import warnings
from pathlib import Path

import pytest
from runtime.elastic_cases import ask_for_plans, end_by, stages_on

from penstock.errors import Infeasible
from penstock.plan.json_file import read_plan
from penstock.plan.plan import Plan
from penstock.runtime.plan_for_ranks import plan_for_ranks
from penstock.runtime.processes.launch import launch_workers


def test_rank_0_plans_for_all_ranks_and_for_the_loss_of_a_host(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = launch_workers(ask_for_plans, (run, 9), workers=2)
    assert first == ([2, 1], [], 2)
    assert second == ([], [], 2)
    assert len(read_plan(run / "plan-2.json").stages) == 2
    assert len(read_plan(run / "plan-1.json").stages) == 1


def test_a_restart_reads_what_was_planned(tmp_path: Path) -> None:
    launch_workers(ask_for_plans, (tmp_path, 9), workers=2)
    (tmp_path / "plan-1.json").unlink()
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


def test_it_warns_if_the_ranks_left_after_a_loss_could_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is alone here, so that its warning is seen; the others would be on other hosts."""

    def make(ranks: int) -> Plan:
        if ranks < 2:
            raise Infeasible("1 rank has too little memory; use more")
        return stages_on(ranks, 6)

    from penstock.runtime import plan_for_ranks as module

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.warns(UserWarning, match="after the loss of a host 1 ranks cannot go on: 1 rank"):
        module.prepare_for_a_loss(make, tmp_path, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.prepare_for_a_loss(make, tmp_path, 3)
    assert plan_for_ranks(lambda ranks: stages_on(ranks, 6), tmp_path).devices == (0,)


def test_sigterm_on_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    assert launch_workers(end_by, ("signal", tmp_path), workers=2) == ((143, 4), (143, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_callback_that_stops_the_training_is_no_sigterm(tmp_path: Path) -> None:
    found = launch_workers(end_by, ("stop", tmp_path), workers=2)
    assert found == (("stopped", 4), ("stopped", 4))
    assert list(tmp_path.iterdir()) == []
