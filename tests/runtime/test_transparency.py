"""The theorem of the runtime: whatever the plan, the result is that of one device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadInput
from penstock.runtime.launch import launch_workers
from penstock.schedule.placement import placement_of_style
from penstock.schedule.registry import PLACEMENT_STYLES, SCHEDULES
from penstock.schedule.shape import PipelineShape
from penstock.schedule.weight_rule import SYNCHRONOUS


def is_runnable(name: str) -> bool:
    """Whether a family updates weights after a flush."""
    style = PLACEMENT_STYLES.get(name, "straight")
    rounds = 2 if style in ("looped", "folded") else 1
    placement = placement_of_style(style, 2, rounds)
    shape = PipelineShape(len(placement), 4, placement, mirrored=style == "mirrored")
    schedule = SCHEDULES[name](shape)
    return schedule.weights == SYNCHRONOUS


RUNNABLE = [name for name in SCHEDULES if is_runnable(name)]
REPLICATIONS = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (3, 1), (2, 2))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def assert_all_equal(
    names: Sequence[str], replications: Sequence[Sequence[int]], **options: Any
) -> None:
    """Nothing differs on any rank in any case; and the cases did run."""
    from pipeline_cases import run_cases

    workers = max(sum(replicas) for replicas in replications)
    results = launch_workers(run_cases, (names, replications, options), workers=workers, threads=1)
    schedules = len(options.get("schedules", ("gpipe", "1f1b")))
    for rank, found in enumerate(results):
        assert len(found) == len(names) * len(replications) * schedules
        wrong = {case: what for case, what in found.items() if what}
        assert not wrong, f"rank {rank}: {wrong}"


def test_chains_equal_one_device_for_every_schedule_and_replication() -> None:
    assert_all_equal(["mlp", "convolutions"], REPLICATIONS)


def test_tied_weights_and_skip_tensors_equal_one_device() -> None:
    assert_all_equal(["gpt2", "t5"], [(1, 1, 1, 1), (2, 1), (1, 3)], schedules=("1f1b",))


def test_batch_norm_of_a_traced_net_equals_one_device() -> None:
    assert_all_equal(["resnet"], [(2, 2), (1, 1)], schedules=("1f1b",))


def test_recompute_changes_nothing() -> None:
    assert_all_equal(["convolutions", "mlp"], [(2, 1), (1, 1, 1)], recompute=True)


def test_every_schedule_equals_one_device() -> None:
    assert_all_equal(["mlp"], [(1,), (1, 1), (2, 1)], schedules=RUNNABLE)


def test_stages_that_share_a_rank_share_tied_weights() -> None:
    folded = ("interleaved", "zb-v")
    assert_all_equal(["gpt2", "t5"], [(1,), (1, 1), (2, 1)], schedules=folded)
    assert_all_equal(["convolutions"], [(2,), (1, 1)], schedules=folded, recompute=True)


def test_copies_of_a_stage_cannot_share_statistics_and_are_refused() -> None:
    from pipeline_cases import run_cases

    options = {"schedules": ("chimera",)}
    with pytest.raises(BadInput, match=r"batch normalisation.*'chimera' holds it twice"):
        launch_workers(run_cases, (["convolutions"], [(1, 1)], options), workers=2, threads=1)


def test_process_groups_carry_what_shared_memory_does() -> None:
    replications = [(2, 1), (1, 1, 1)]
    assert_all_equal(["mlp", "convolutions"], replications, transport="process-groups")


def test_messages_larger_than_slots_and_rings_arrive_whole() -> None:
    assert_all_equal(["mlp", "convolutions"], [(2, 1), (1, 1, 1)], slot_bytes=64, ring_bytes=256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "llama", "qwen2_tied"])
def test_models_equal_one_device_for_every_schedule_and_replication(name: str) -> None:
    assert_all_equal([name], REPLICATIONS)
