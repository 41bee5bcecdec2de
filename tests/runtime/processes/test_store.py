"""The store listens where it must, and its connections do not wait for ever."""

import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from runtime.processes.workers_under_test import (
    limits_of_connections_to_the_store,
)

from penstock.errors import RunFailed
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.store import limited_silence, meet, serve_store

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
        # The store itself, and the two connections of the watch.
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
