"""Nothing grows with the number of steps, and no peak with the number of micro-batches."""

import pytest
from runtime.memory.memory_cases import ROWS, SEQUENCE, WIDTH, growth, peaks_by_micro_batches

from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.transport.process_groups import LEAST_WINDOW

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved")
# The heap settles for a while; a leak of one activation a step would be 24 MiB in 500 steps.
RESIDENT_BYTES = 4 << 20
# The boundary passes a block's input and the wide tensor inside it.
MESSAGE_BYTES = 4 * ROWS * SEQUENCE * (WIDTH + 4 * WIDTH)
# A step that leaves one object behind leaves as many as there are steps.
OBJECTS = 20


def assert_steady(schedules: tuple[str, ...], transport: str, steps: int) -> None:
    results = launch_workers(growth, (schedules, transport, steps, 15), workers=2, threads=1)
    for rank, by_schedule in enumerate(results):
        assert set(by_schedule) == set(schedules)
        for schedule, grown in by_schedule.items():
            case = f"rank {rank}, {schedule}, {transport}: {grown}"
            assert all(grown[what] <= 0 for what in ("files", "threads", "tensors")), case
            assert grown["objects"] <= OBJECTS, case
            assert grown["resident"] <= RESIDENT_BYTES, case


def test_four_times_as_many_micro_batches_need_no_more_memory_over_gloo() -> None:
    """What was sent is let go of: more than a few messages are never held at once."""
    found = launch_workers(peaks_by_micro_batches, ((8, 16, 32),), workers=2, threads=1)
    for rank, peaks in enumerate(found):
        for what, few, more, most in zip(("step", "evaluation"), *peaks.values(), strict=True):
            case = f"rank {rank}, {what}: {few}, {more}, {most} bytes"
            assert few > 0 and most - more < 0.01 * few, case
            assert most - few < LEAST_WINDOW * MESSAGE_BYTES, case


@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_nothing_grows_over_40_steps(transport: str) -> None:
    assert_steady(("gpipe", "zb-h1"), transport, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_nothing_grows_over_500_steps(transport: str) -> None:
    assert_steady(SCHEDULES, transport, steps=500)
