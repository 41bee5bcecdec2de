"""Schedules under the real torchrun: two, four and eight ranks, both transports, two hosts."""

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from started_scripts import ENVIRONMENT, TORCHRUN, under_torchrun

SCRIPT = Path(__file__).with_name("torchrun_schedules.py")

pytestmark = pytest.mark.timeout(1200)


def answer(output: str, errors: str) -> dict[str, Any]:
    """What rank 0 printed."""
    assert output.strip(), errors
    assert "Traceback" not in errors, errors
    return json.loads(output.strip().splitlines()[-1])


def started(ranks: int, *transports: str) -> dict[str, Any]:
    """What the script finds on ``ranks`` ranks of this host."""
    return answer(under_torchrun(SCRIPT, *transports, ranks=ranks), "")


def assert_as_one_process(found: dict[str, Any], ranks: int, least: int) -> None:
    assert found["ranks"] == ranks
    assert len(set(found["cases"])) == 1 and found["cases"][0] >= least
    assert not found["wrong"], found["wrong"][:10]


def test_two_ranks_over_both_transports() -> None:
    found = started(2, "shared-memory", "process-groups")
    assert_as_one_process(found, 2, 20)


@pytest.mark.slow
def test_four_ranks() -> None:
    assert_as_one_process(started(4, "shared-memory"), 4, 10)


@pytest.mark.slow
def test_four_ranks_over_process_groups() -> None:
    assert_as_one_process(started(4, "process-groups"), 4, 10)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_eight_ranks(transport: str) -> None:
    assert_as_one_process(started(8, transport), 8, 10)


def apart() -> list[str]:
    """A command prefix that gives processes their own process numbers, as on another host."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("needs the right to make namespaces of process numbers")
    return prefix


@pytest.mark.slow
def test_two_hosts_that_cannot_see_one_another_use_process_groups() -> None:
    """Each torchrun lives among processes of its own, so memory cannot be shared between them."""
    prefix = apart()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = [
        subprocess.Popen(
            [
                *prefix,
                str(TORCHRUN),
                "--nnodes=2",
                f"--node-rank={host}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                "--nproc-per-node=2",
                str(SCRIPT),
                "auto",
            ],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        first, _ = (host.communicate(timeout=600) for host in hosts)
    finally:
        for host in hosts:
            host.kill()
    found = answer(*first)
    assert found["hosts"] == 2
    assert_as_one_process(found, 4, 10)
