"""The store listens where it must, and its connections do not wait for ever."""

import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from runtime.processes.workers_under_test import (
    limits_of_connections_to_the_store,
)

from penstock.errors import RunFailed
from penstock.runtime.processes import store
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.store import RunStore, limited_silence, meet, serve_store

# Linux answers to all of 127.0.0.0/8, so a store on all interfaces would be found at both.
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"


def reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def outer_address() -> str:
    """The address from which this machine would speak to others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ELSEWHERE  # the machine has no network
        return probe.getsockname()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_store_is_reached_at_the_address_that_it_was_given_only() -> None:
    on_loopback, named = serve_store(HERE), serve_store(ELSEWHERE)
    assert reachable(HERE, on_loopback.port)
    assert not reachable(ELSEWHERE, on_loopback.port)
    assert not reachable(outer_address(), on_loopback.port)
    assert reachable(ELSEWHERE, named.port)
    assert not reachable(HERE, named.port)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_a_request_over_a_link_that_is_cut_ends_after_half_a_minute() -> None:
    for limits in launch_workers(limits_of_connections_to_the_store, workers=2):
        # The store itself, and the two connections of the heartbeat.
        assert limits == [30_000] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_a_connection_of_somebody_else_to_the_same_port_keeps_its_limits() -> None:
    with socket.create_server((HERE, 0)) as server:
        place = server.getsockname()[:2]
        with socket.create_connection(place) as foreign:
            with limited_silence(place[1]):
                own = socket.create_connection(place)
            with own:
                limits = [
                    each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    for each in (foreign, own)
                ]
    assert limits == [0, 30_000]


def test_a_rank_whose_agent_serves_no_store_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=rf"the run's store at {HERE}:{port} cannot be reached"):
        meet(HERE, str(port), timedelta(seconds=1))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs namespaces of networks")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to make namespaces")
def test_without_a_network_no_store_is_served() -> None:
    serve = f"from penstock.runtime.processes.store import serve_store as s; s('{HERE}')"
    command = ["unshare", "--net", sys.executable, "-c", serve]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr.splitlines()[-1]
    assert "whether the network is up ('ip link')" in done.stderr


class Minutes:
    """A clock on which only sleeping takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class LateStore:
    """An inner store whose value comes after some seconds; counts how often it is asked."""

    def __init__(self, clock: Minutes, after_s: float) -> None:
        self.asked, self._clock, self._after_s = 0, clock, after_s

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return self._clock.now_s >= self._after_s

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise RuntimeError("timed out")


def test_the_longer_a_wait_the_rarer_are_the_looks_at_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that waits while rank 0 plans asks some times a second, not fifty."""
    for after_s, looks in ((0.05, 60), (60.0, 400)):
        clock = Minutes()
        monkeypatch.setattr(store, "time", clock)
        inner: Any = LateStore(clock, after_s)
        RunStore(inner).wait(["plan"])
        assert inner.asked < looks
        assert clock.now_s - after_s <= max(0.001, after_s / 20)


def test_a_wait_that_fails_is_over() -> None:
    inner: Any = LateStore(Minutes(), 60.0)
    with pytest.raises(RuntimeError, match="timed out"):
        RunStore(inner).wait(["plan"], timedelta(seconds=-1))
    assert HEARTBEAT.wait is None
