"""Step after step nothing is left behind: no memory, no tensors, no files, no handles."""

import pytest
from runtime.memory.memory_cases import growth

from penstock.runtime.processes.launch import launch_workers

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved")
# The heap settles for a while; a leak of one activation a step would be 24 MiB in 500 steps.
RESIDENT_BYTES = 4 << 20
# A step that leaves one object behind leaves as many as there are steps.
OBJECTS = 20


def assert_steady(schedules: tuple[str, ...], transport: str, steps: int) -> None:
    results = launch_workers(growth, (schedules, transport, steps, 15), workers=2, threads=1)
    for rank, by_schedule in enumerate(results):
        assert set(by_schedule) == set(schedules)
        for schedule, grown in by_schedule.items():
            case = f"rank {rank}, {schedule}, {transport}: {grown}"
            assert grown["open files"] <= 0, case
            assert grown["threads"] <= 0, case
            assert grown["tensors"] <= 0, case
            assert grown["objects"] <= OBJECTS, case
            assert grown["resident bytes"] <= RESIDENT_BYTES, case


@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_nothing_grows_over_60_steps(transport: str) -> None:
    assert_steady(("gpipe", "zb-h1"), transport, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_nothing_grows_over_500_steps(transport: str) -> None:
    assert_steady(SCHEDULES, transport, steps=500)
