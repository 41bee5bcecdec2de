"""The example of an elastic loop under torchrun's real agents, which lose ranks and hosts."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import started_scripts
from runtime.elastic_cases import write_hand_made_plans
from scripts import script_at

from penstock.runtime.checkpoints.checkpoint import latest_checkpoint, read_state

LAYERS = 7
TOLERANCE = 1e-4
"""Relative, after up to 200 steps in float32: another plan adds up in another order."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def elastic() -> ModuleType:
    return script_at("benchmarks/reliability/elastic.py", "elastic")


@pytest.fixture
def agents(elastic: ModuleType) -> Iterator[list]:
    """Agents that a test has started; what is left of them at its end is killed."""
    started = []
    yield started
    for process in started:
        elastic.kill_host(process)


def by_workers(elastic: ModuleType, run: Path, ranks: int, epochs: int) -> list:
    """The same script in forks of a server that has imported torch, which are ready much sooner."""
    printed = started_scripts.by_workers(elastic.EXAMPLE, run, epochs, ranks=ranks)[0]
    log = run.with_name(f"{run.name}-by-workers.log")
    log.write_text(printed)
    return elastic.segments([log])


def test_a_lost_rank_and_a_sigterm_change_no_loss_by_a_bit(
    elastic: ModuleType, agents: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole, log = tmp_path / "run", tmp_path / "whole", tmp_path / "run.log"
    for folder in (run, whole):
        write_hand_made_plans(folder, LAYERS, 2)
    agents.append(process := elastic.one_host(run, log, ranks=2, epochs=2, pause_s=0.1))
    elastic.wait_until(elastic.steps_to(log, 7), process)
    elastic.kill_rank(process, 1)
    elastic.wait_until(elastic.first_step(log, 1), process)
    elastic.wait_until(elastic.steps_to(log, 12), process)
    assert elastic.terminate(process) != 0
    first, second = elastic.segments([log])
    assert (first.after, second.after % 5) == (0, 0)
    saved = read_state(latest_checkpoint(run / "checkpoints"))["step"]
    assert saved == max(second.losses)
    (third,) = by_workers(elastic, run, 2, 2)
    assert third.after == saved
    (undisturbed,) = by_workers(elastic, whole, 2, 2)
    assert len(undisturbed.losses) == 2 * elastic.STEPS_OF_AN_EPOCH
    # No step is missing, and those taken twice have the same loss both times.
    for segment in (first, second, third):
        steps = range(segment.after + 1, max(segment.losses) + 1)
        assert segment.losses == {step: undisturbed.losses[step] for step in steps}
    assert elastic.losses([first, second, third]) == undisturbed.losses


@pytest.mark.slow
def test_four_ranks_lose_one_and_go_on_bit_for_bit(elastic: ModuleType, tmp_path: Path) -> None:
    run, log = elastic.measured(tmp_path / "run"), tmp_path / "run.log"
    found = elastic.lose_a_worker(run, log, 2)
    assert found["all_s"] > 0
    starts = elastic.segments([log])
    assert [start.ranks for start in starts] == [4, 4]
    assert elastic.losses(starts) == elastic.without_disturbance(run, tmp_path)


@pytest.mark.slow
def test_a_lost_host_leaves_two_ranks_until_it_is_back(elastic: ModuleType, tmp_path: Path) -> None:
    run, log = elastic.measured(tmp_path / "run"), tmp_path / "run.log"
    elastic.lose_a_host(run, log)
    starts = elastic.segments([log])
    assert [start.ranks for start in starts][-3:] == [4, 2, 4]
    # What the two ranks had done was saved when the host came back, so no step is taken twice.
    assert starts[-1].after == max(starts[-2].losses)
    assert starts[-2].after == max(starts[-3].losses) // 5 * 5
    whole = elastic.without_disturbance(run, tmp_path, epochs=10)
    found = elastic.losses(starts)
    assert sorted(found) == list(range(1, max(found) + 1))
    assert elastic.apart_from(found, whole) < TOLERANCE


@pytest.mark.slow
def test_a_host_that_is_taken_away_by_sigterm_costs_no_step(
    elastic: ModuleType, agents: list, tmp_path: Path
) -> None:
    run, log, port = elastic.measured(tmp_path / "run"), tmp_path / "run.log", elastic.free_port()
    agents.append(first := elastic.host(run, log, port, 0))
    agents.append(second := elastic.host(run, tmp_path / "second.log", port, 1))
    elastic.wait_until(
        lambda: elastic.steps_to(log, 7)() and elastic.segments([log])[-1].ranks == 4, first
    )
    starts = len(elastic.segments([log]))
    assert elastic.terminate(second) in (1, -signal.SIGTERM)
    elastic.wait_until(elastic.first_step(log, starts), first)
    before, after = elastic.segments([log])[-2:]
    assert after.ranks == 2
    assert after.after == max(before.losses)
