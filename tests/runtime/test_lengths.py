"""Lengths that change from batch to batch: real ranks, and the same training as on one device."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runtime.length_cases import run_all, run_resumed, run_without_flush

from penstock.runtime.processes.launch import launch_workers

TRANSPORTS = ("shared-memory", "process-groups")


def trained_equally(
    lengths: Sequence[int], replicas: Sequence[int], *more: Any
) -> list[list[list[str]]]:
    """The refusals of every rank, all of which have trained as the user's module does."""
    arguments = (lengths, replicas, *more)
    found = launch_workers(run_all, arguments, workers=sum(replicas), threads=1)
    for rank, (wrong, _) in enumerate(found):
        assert not wrong, f"rank {rank}: {wrong}"
    return [refused for _, refused in found]


def test_batches_of_many_lengths_train_as_on_one_device_and_others_are_refused() -> None:
    lengths = (16, 64, 23, 37, 1, 64)
    for by_transport in trained_equally(lengths, (1, 1, 1), "1f1b", TRANSPORTS, (6,), True):
        assert len(by_transport) == len(TRANSPORTS)
        for too_long, uneven, unlike, unchanged in by_transport:
            assert "dimension 1 of batch['tokens'] is 600, but 'length' is declared to be at" in (
                too_long
            )
            assert "'length' is declared to be one length, but" in uneven
            assert "dimension 1 of batch['labels'] is 11" in uneven
            assert (
                "the ranks were given different batches: length is 20 on rank 1 and 16 on rank 0"
                in unlike
            )
            assert unchanged == "unchanged: True"


def test_replicas_cut_batches_of_many_lengths_by_rows() -> None:
    trained_equally((16, 41, 30, 16), (2, 1), "zb-h1", TRANSPORTS[:1], (6, 5, 1))


def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    differing = launch_workers(
        run_resumed, ((16, 64, 23, 37, 16, 50), str(tmp_path)), workers=2, threads=1
    )
    assert differing == ([], [])


def test_a_schedule_without_a_flush_runs_empty_before_another_length() -> None:
    assert launch_workers(run_without_flush, ("pipedream",), workers=2, threads=1) == ([], [])


@pytest.mark.slow
def test_lengths_from_16_to_512_train_as_on_one_device() -> None:
    lengths = [16, 512, *random.Random(3).choices(range(16, 513), k=22)]
    trained_equally(lengths, (1, 1, 1), "1f1b", TRANSPORTS)
