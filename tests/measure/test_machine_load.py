"""Other programs on the machine: they lengthen no measured time, and are counted by themselves."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.machine import core_seconds
from penstock.measure import clock
from penstock.measure.machine_load import Spread, other_load, slowed
from penstock.measure.workers import median_profile
from penstock.profile.model_profile import ModelProfile


@pytest.mark.parametrize(("slowest", "warning"), [(1.4, ""), (3.0, "times vary by x 3;")])
def test_times_that_vary_are_not_to_be_trusted(slowest: float, warning: str) -> None:
    """One layer of 1 s, and a tiny one, whose times always vary."""
    spread = Spread()
    spread.add([1.0, slowest, 1.01])
    spread.add([1e-6, 9e-6])
    assert warning in "".join(spread.warnings()) and bool(spread.warnings()) == bool(warning)


def test_what_one_of_several_workers_saw_is_in_the_profile(small_profile: ModelProfile) -> None:
    busy = replace(small_profile, notes=("unsteady",), other_load=0.5)
    merged = median_profile([small_profile, busy, replace(busy, other_load=0.25)])
    assert merged.notes == ("unsteady",) and merged.other_load == 0.25


def test_the_variation_of_the_usual_rank_counts(small_profile: ModelProfile) -> None:
    ranks = [replace(small_profile, variation=share) for share in (0.3, 0.01, 0.05)]
    assert median_profile(ranks).variation == 0.05


@pytest.mark.parametrize(("ranks", "above_mean"), [(1, 0.0), (2, 0.564), (3, 0.846), (4, 1.029)])
def test_ranks_that_vary_wait_for_the_slowest_of_them(
    small_profile: ModelProfile, small_cluster: Cluster, ranks: int, above_mean: float
) -> None:
    """The mean of the largest of normal numbers is known from tables, in deviations."""
    varied = replace(small_profile, variation=0.1, other_load=0.5)
    for before, after in zip(
        small_cluster.devices, slowed(small_cluster, varied, range(ranks)).devices, strict=True
    ):
        slower = 1.5 * (1 + 0.1 * above_mean)
        assert after == replace(before, speed=pytest.approx(before.speed / slower, rel=0.005))


@pytest.mark.parametrize(("ranks", "slower"), [((0, 1, 2), 4 / 3), ((0, 2), 1.5), ((1,), 1.0)])
def test_fewer_ranks_lose_a_larger_part_of_cores_that_they_share(
    small_profile: ModelProfile, ranks: tuple[int, ...], slower: float
) -> None:
    """Three ranks were measured on two cores beside one busy program."""
    host = Host("two cores", (Device("cpu", 1e9),) * 3, 1e9, full_speed_devices=2)
    busy = replace(small_profile, other_load=1 / 3)
    found = slowed(Cluster("one", (host,)), busy, ranks).devices
    assert [device.speed for device in found] == pytest.approx([1 / slower] * 3)


@pytest.mark.parametrize(
    ("waited_s", "workers", "load"),
    [(0.0, 1, 0.0), (5.0, 2, 0.5), (10.0, 4, 0.0), (15.0, 4, 0.25), (2.0, 4, 0.0)],
)
def test_workers_that_share_cores_wait_for_one_another(
    waited_s: float, workers: int, load: float
) -> None:
    assert other_load((1.0, 2.0), (11.0, 2.0 + waited_s), workers, cores=2) == load


def test_a_thread_that_has_not_run_has_no_load() -> None:
    assert other_load((1.0, 2.0), (1.0, 3.0), 1, 1) == 0.0


def test_the_kernel_counts_the_seconds_of_a_thread(tmp_path: Path) -> None:
    assert core_seconds(tmp_path) == (pytest.approx(time.thread_time(), abs=0.1), 0.0)
    (tmp_path / "proc" / "thread-self").mkdir(parents=True)
    (tmp_path / "proc" / "thread-self" / "schedstat").write_text("1500000000 250000000 7\n")
    assert core_seconds(tmp_path) == (1.5, 0.25)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
def test_beside_a_busy_program_half_of_the_time_is_waited_and_not_measured() -> None:
    """Both on one core. The work takes a known CPU time, and as much again by the wall clock."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, cpu_s, wall_s = core_seconds(), time.thread_time(), time.perf_counter()
        seconds = clock.work_s(torch.device("cpu"))(lambda: sum(range(20_000_000)))
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cores)
    assert 0.9 * cpu_s < seconds < 0.75 * wall_s
    assert other_load(before, core_seconds(), 1, 1) > 0.5


@pytest.mark.parametrize("threads", [1, 2])
def test_seconds_of_waiting_for_a_core_are_not_those_of_work(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The work takes three seconds, in one of which another program has the core."""
    now_s, waited_s = 10.0, 4.0

    def work() -> None:
        nonlocal now_s, waited_s
        now_s, waited_s = now_s + 3, waited_s + 1

    class Time:
        perf_counter = staticmethod(lambda: now_s)
        process_time = staticmethod(lambda: now_s - waited_s)

    monkeypatch.setattr(clock, "time", Time)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(clock, "core_seconds", lambda: (0.0, waited_s))
    cpu = torch.device("cpu")
    assert clock.work_s(cpu)(work) == 2.0
    assert clock.work_s(cpu, with_waits=True)(work) == 3.0
