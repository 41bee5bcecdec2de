"""Sharded optimizers, steps of several batches, overflows and noise, on four ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.launch import launch_workers

Found = tuple[dict[str, Any], ...]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """What `on_four_ranks` gave on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        from gradient_cases import on_four_ranks

        directory = tmp_path_factory.mktemp("checkpoints")
        yield launch_workers(on_four_ranks, (directory,), workers=4, threads=1)


def test_a_sharded_optimizer_steps_as_an_unsharded_one_and_as_one_process(
    four_ranks: Found,
) -> None:
    for found in four_ranks:
        for case, result in found["sharded"].items():
            assert result["from unsharded"] < 1e-12, case
            # Muon multiplies in bfloat16, where a last bit of float64 may tip a rounding.
            limit = 1e-4 if case == "whole matrices" else 1e-9
            assert result["from one process"] < limit, case
            ours, theirs = result["norms"]
            assert ours == pytest.approx(theirs, rel=limit), case
            assert result["verified"].startswith("equal to one device"), case


def test_two_replicas_that_share_the_state_change_no_bit(four_ranks: Found) -> None:
    for found in four_ranks:
        for case in ("replicas", "replicas of two stages a rank", "mirrored"):
            assert found["sharded"][case]["from unsharded"] == 0, case


def test_replicas_divide_the_state(four_ranks: Found) -> None:
    """Of every parameter that several ranks hold, one keeps the moments; Adam has two of them."""
    states = {
        case: [found["sharded"][case]["state"] for found in four_ranks]
        for case in four_ranks[0]["sharded"]
    }
    for ranks, moments in (("replicas", 2), ("three replicas", 2), ("mirrored", 1)):
        holders = 3 if ranks == "three replicas" else 2
        plain, sharded, held = zip(*states[ranks][:holders], strict=True)
        assert list(plain) == [moments * size for size in held]
        assert sum(sharded) == plain[0]
        assert max(sharded) < 0.7 * plain[0]
    for case, rows in states.items():
        assert sum(sharded for _, sharded, _ in rows) < sum(plain for plain, _, _ in rows), case


def test_a_checkpoint_of_a_sharded_run_continues_under_any_plan_and_the_reverse(
    four_ranks: Found,
) -> None:
    for found in four_ranks:
        for name, (through, resumed) in found["resharded"].items():
            assert len(resumed) == 4
            assert resumed == pytest.approx(through, rel=1e-9), name


def test_a_step_on_three_batches_is_one_on_all_their_rows(four_ranks: Found) -> None:
    for found in four_ranks:
        assert len(found["accumulated"]) == 8
        wrong = {case: what for case, what in found["accumulated"].items() if what}
        assert not wrong


def test_an_overflow_on_one_rank_skips_the_step_on_all(four_ranks: Found) -> None:
    expected = [
        (1, False, 65536.0, 0.02 / 3),
        (2, False, 65536.0, 0.02 * 2 / 3),
        (3, True, 65536.0, 0.02),
        (4, True, 32768.0, 0.02),
        (5, False, 16384.0, 0.02),
        (6, False, 16384.0, 0.02),
    ]
    for rank, found in enumerate(four_ranks):
        metrics = found["overflow"]["metrics"]
        assert [(*row[:3], pytest.approx(row[3])) for row in expected] == metrics
        if rank < 3:
            assert found["overflow"]["kept"] == [row[1] for row in expected]


def test_noise_is_that_of_each_replicas_own_gradient(four_ranks: Found) -> None:
    for found in four_ranks:
        assert found["noise"]["found"] == pytest.approx(found["noise"]["expected"], rel=1e-9)
        assert "'3.0.weight' has one replica" in found["noise"]["refusal"]
