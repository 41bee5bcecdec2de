"""Sharded optimizers, steps of several batches, overflows, on four ranks."""

from typing import Any

import pytest
import torch
from runtime.gradients.gradient_cases import accumulated, sharded_against_unsharded, smaller_cases

from penstock.runtime.gradients.buckets import square_sum
from penstock.runtime.processes.launch import launch_workers

Found = tuple[dict[str, Any], ...]


@pytest.fixture(scope="module")
def sharded() -> Found:
    """What `sharded_against_unsharded` gave on each rank."""
    return launch_workers(sharded_against_unsharded, (3,), workers=4, threads=1)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What `smaller_cases` gave on each rank."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return launch_workers(smaller_cases, (directory,), workers=4, threads=1)


def test_a_sharded_optimizer_steps_as_an_unsharded_one(sharded: Found) -> None:
    for found in sharded:
        assert len(found) == 6
        for case, result in found.items():
            assert result["from unsharded"] < 1e-12, case
            ours, theirs = result["norms"]
            assert ours == pytest.approx(theirs, rel=1e-9), case
            assert result["verified"].startswith("equal to your module on the whole batch"), case


def test_two_replicas_that_share_the_state_change_no_bit(sharded: Found) -> None:
    for found in sharded:
        for case in ("replicas", "replicas of two stages a rank", "mirrored"):
            assert found[case]["from unsharded"] == 0, case


def test_replicas_divide_the_state(sharded: Found) -> None:
    """Of every parameter that several ranks hold, one keeps the moments; Adam has two of them."""
    states = {case: [found[case]["state"] for found in sharded] for case in sharded[0]}
    for ranks, moments in (("replicas", 2), ("three replicas", 2), ("mirrored", 1)):
        holders = 3 if ranks == "three replicas" else 2
        plain, divided, held = zip(*states[ranks][:holders], strict=True)
        assert list(plain) == [moments * size for size in held]
        assert sum(divided) == plain[0]
        assert max(divided) < 0.7 * plain[0]
    for case, rows in states.items():
        assert sum(divided for _, divided, _ in rows) < sum(plain for plain, _, _ in rows), case


def test_a_checkpoint_of_a_sharded_run_continues_under_any_plan_and_the_reverse(
    smaller: Found,
) -> None:
    for found in smaller:
        for name, (through, resumed) in found["resharded"].items():
            assert len(resumed) == 4
            assert resumed == pytest.approx(through, rel=1e-9), name


def test_a_step_on_three_batches_is_one_on_all_their_rows() -> None:
    for found in launch_workers(accumulated, workers=4, threads=1):
        assert len(found) == 8
        wrong = {case: what for case, what in found.items() if what}
        assert not wrong


def test_an_overflow_on_one_rank_skips_the_step_on_all(smaller: Found) -> None:
    expected = [
        (1, False, 65536.0, 0.02 / 3),
        (2, False, 65536.0, 0.02 * 2 / 3),
        (3, True, 65536.0, 0.02),
        (4, True, 32768.0, 0.02),
        (5, False, 16384.0, 0.02),
        (6, False, 16384.0, 0.02),
    ]
    for rank, found in enumerate(smaller):
        metrics = found["overflow"]["metrics"]
        assert [(*row[:3], pytest.approx(row[3])) for row in expected] == metrics
        if rank < 3:
            assert found["overflow"]["kept"] == [row[1] for row in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_millions_of_numbers_is_exact(dtype: torch.dtype) -> None:
    """Added one after another in float32, squares of 8 million numbers lose 0.03 % of their sum."""
    numbers = torch.randn(8_000_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = float(numbers.double().square().sum())
    assert float(square_sum(numbers)) == pytest.approx(expected, rel=1e-5)
