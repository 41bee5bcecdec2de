"""Hosts as network namespaces: joined at a rate, apart from this machine, and gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from namespaces import FOLDER, host_networks, needs_namespaces
from rehearse.rehearsal_cases import emulation, layered, straight, two_hosts
from scripts import script_at

from penstock.errors import BadInput
from penstock.rehearse.rehearsal import differences

SENDS = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""

RECEIVES = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    first, start_s = connection.recv(1), time.monotonic()
    while connection.recv(1 << 16):
        pass
    print(time.monotonic() - start_s)
"""

KEEPS = """
import time
import sys
sys.path.insert(0, sys.argv[1])
from host_networks import joined_hosts
with joined_hosts(["a", "b"], [1e6, 1e6]) as hosts:
    print(*(host.process for host in hosts), flush=True)
    time.sleep(600)
"""


def seconds_to_send(source: Any, target: Any, size: int) -> float:
    """How long it takes to send ``size`` bytes from one host to another."""
    receiver = subprocess.Popen(
        [*target.command_prefix, sys.executable, "-c", RECEIVES, target.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert receiver.stdout is not None
    receiver.stdout.readline()
    words = [sys.executable, "-c", SENDS, target.address, str(size)]
    subprocess.run([*source.command_prefix, *words], check=True, timeout=60)
    return float(receiver.communicate(timeout=60)[0])


@needs_namespaces
def test_a_link_carries_what_it_is_given_and_no_more() -> None:
    with host_networks.joined_hosts(["a", "b"], [2e6, 1e6]) as (a, b):
        there_s, back_s = seconds_to_send(a, b, 1_000_000), seconds_to_send(b, a, 1_000_000)
    # The slower port decides in both directions. A busy machine can only be slower.
    assert there_s > 0.95
    assert back_s > 0.95


@needs_namespaces
def test_hosts_do_not_reach_this_machine() -> None:
    with host_networks.joined_hosts(["a"], [1e6]) as (host,):
        listed = subprocess.run(
            [*host.command_prefix, "ip", "route"], capture_output=True, text=True, check=True
        )
    assert "default" not in listed.stdout


@needs_namespaces
def test_nothing_is_left_when_the_maker_is_killed() -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", KEEPS, str(FOLDER)], stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    keepers = [int(word) for word in maker.stdout.readline().split()]
    assert len(keepers) == 2
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=30)
    deadline_s = time.monotonic() + 30
    while any(is_there(keeper) for keeper in keepers):
        assert time.monotonic() < deadline_s, "a namespace is left"
        time.sleep(0.05)


def is_there(process: int) -> bool:
    """Whether a process exists, and has not ended."""
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


@pytest.mark.slow
@needs_namespaces
def test_a_plan_on_two_hosts_is_carried_out_over_the_kernels_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Workers find the benchmark's modules there.
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    slow = two_hosts()
    asked = emulation(straight("1f1b"), layered(8), byte_scale=0.5)
    script = script_at("benchmarks/rehearsal/over_namespaces.py", "over_namespaces")
    found = script.rehearse_over_namespaces(asked)
    assert differences(found) == []
    carried = [t for t in found.transfers if not t.transfer.parts]
    ends = {(t.transfer.source, t.transfer.target) for t in carried}
    assert ends == {(1, 2), (2, 1)}
    for started in carried:
        sent_s = started.transfer.bytes / slow.bandwidth(1, 2) * asked.time_scale
        assert started.end_s - started.ready_s > 0.9 * sent_s


def test_without_the_tools_a_line_names_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(BadInput, match="install iproute2 and util-linux"):
        host_networks.ready_network()
