"""The watch says which batch is read, and ends a process whose batch never comes."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import nn

from penstock.errors import BadInput
from penstock.files import in_one_line
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.train.job import Job
from penstock.train.training_loop import nothing_left

SCRIPT = """
import time
from torch import nn
from penstock.train.job import Job

def hanging(split, seed, start_step, batch_size):
    try:
        time.sleep(10_000)
    finally:
        print("the data went on")

Job("small", model=nn.Identity, data=hanging, batch_limit_s=0.5).example_batch()
"""


def where(split: str, seed: int, start_step: int, batch_size: int) -> Iterator[str]:
    """What this process does by its own account; two batches."""
    for _ in range(2):
        yield HEARTBEAT.own().place


def test_a_process_alone_ends_with_one_line_when_its_data_give_no_iterator() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 4
    assert ended.stdout == ""
    assert ended.stderr == (
        "error: rank 0 is reading batch 1 of the data of job 'small', split 'train', from step 1, "
        "which has not come within 0.5 s (batch_limit_s); see what the data wait for, or raise "
        "the limit in the job file\n"
    )


def test_other_ranks_are_told_that_this_one_is_reading() -> None:
    job, before = Job("small", model=nn.Identity, data=where), HEARTBEAT.phase
    for limit_s in (60.0, 0.0):
        read = list(replace(job, batch_limit_s=limit_s).batches("held-out", 4))
        text = "is reading batch {} of the data of job 'small', split 'held-out', from step 5"
        assert read == [text.format(1), text.format(2)]
        assert HEARTBEAT.phase == before


def test_a_limit_below_zero_is_refused() -> None:
    words = r"batch_limit_s is -1.*; it must be >= 0"
    with pytest.raises(BadInput, match=words), in_one_line():
        Job("small", model=nn.Identity, data=where, batch_limit_s=-1)


def test_a_run_without_a_step_left_says_whether_steps_or_data_are_missing() -> None:
    job = Job("small", model=nn.Identity, data=where, steps=5)
    assert "has taken 5 steps already and is to take 5" in nothing_left(job, 5)
    assert "the data of job 'small' end after 4 steps" in nothing_left(job, 4)
