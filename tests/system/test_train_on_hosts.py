"""`penstock train` on several hosts: the same command, the same losses, and clear refusals."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from host_jobs import LIMIT_S, PENSTOCK, ended, job_of, of_ranks, plain_losses, started_ranks
from namespaces import host_networks, needs_namespaces

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import read_cluster, write_cluster
from penstock.errors import BadInput
from penstock.plan.json_file import read_plan
from penstock.runtime.processes.world import World
from penstock.train.rank_program import check_equal, check_seen, goes_on
from penstock.train.run_directory import RunDirectory
from penstock.train.train_request import TrainRequest

pytestmark = pytest.mark.timeout(600)

GIGABIT = 125e6
# The loss is computed in float32 by the models, and micro-batches are summed in another order.
RELATIVE_TOLERANCE = 2e-6


def on_hosts(hosts: int, ranks: int, command: Sequence[str]) -> list[tuple[int, str]]:
    """Run a command of penstock by a torchrun on each of several hosts, joined at 1 Gb/s."""
    names = [f"host{number}" for number in range(hosts)]
    with host_networks.joined_hosts(names, [GIGABIT] * hosts) as networks:
        agents = [
            subprocess.Popen(
                [
                    *network.host_prefix,
                    *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"),
                    *(f"--node-rank={number}", f"--nproc-per-node={ranks}"),
                    *(f"--master-addr={networks[0].address}", "--master-port=29500"),
                    *("--no-python", PENSTOCK, *command),
                ],
                env=of_ranks(GLOO_SOCKET_IFNAME=host_networks.PORT),
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, network in enumerate(networks)
        ]
        return ended(agents)


def train_on_hosts(hosts: int, ranks: int, command: Sequence[str]) -> None:
    """Train on several hosts; all must end well."""
    found = on_hosts(hosts, ranks, ["train", *command])
    assert [code for code, _ in found] == [0] * hosts, found


def train_here(command: Sequence[str]) -> None:
    """Run ``penstock train`` on this host."""
    subprocess.run([PENSTOCK, "train", *command], env=of_ranks(), check=True, timeout=LIMIT_S)


def losses(run: Path) -> list[float]:
    """The recorded losses, step by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@needs_namespaces
@pytest.mark.parametrize(
    ("name", "hosts", "ranks"),
    [
        pytest.param("gpt2", 2, 2, marks=pytest.mark.slow),
        pytest.param("t5", 2, 2, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, 1, marks=pytest.mark.slow),
        pytest.param("t5", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_hosts_train_as_one_device_does(name: str, hosts: int, ranks: int, tmp_path: Path) -> None:
    run, job = tmp_path / "run", job_of(name, tmp_path, steps=5)
    train_on_hosts(hosts, ranks, [str(job), "-o", str(run)])
    assert losses(run) == pytest.approx(plain_losses(name, 5), rel=RELATIVE_TOLERANCE)
    cluster = read_cluster(run / "cluster.toml")
    assert [host.name for host in cluster.hosts] == [f"host{n}" for n in range(hosts)]
    assert all(len(host.devices) == ranks for host in cluster.hosts)
    # A busy machine can only make a port look slower. Small messages pass in a burst.
    assert all(0 < host.port_bytes_per_s < 2 * GIGABIT for host in cluster.hosts)
    assert (run / "report.html").exists()


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("name", ["line", "gpt2"])
def test_a_run_moves_from_one_host_to_three(name: str, tmp_path: Path) -> None:
    run, job = tmp_path / "run", job_of(name, tmp_path, steps=6)
    train_here([str(job), "--workers", "4", "--steps", "3", "-o", str(run)])
    before = read_plan(run / "plan.json")
    assert max(before.devices) < 4
    train_on_hosts(3, 2, [str(job), "--resume", "-o", str(run)])
    assert losses(run) == pytest.approx(plain_losses(name, 6), rel=RELATIVE_TOLERANCE)
    assert len(read_cluster(run / "cluster.toml").devices) == 6


@needs_namespaces
def test_live_hosts_are_measured(tmp_path: Path) -> None:
    saved = tmp_path / "saved.toml"
    measured = on_hosts(2, 1, ["cluster", "-o", str(saved)])
    assert [code for code, _ in measured] == [0, 0], measured
    first, second = read_cluster(saved).hosts
    assert (first.name, second.name) == ("host0", "host1")
    assert 0 < first.port_bytes_per_s < 2 * GIGABIT


def test_the_script_for_torchrun_starts_the_job(tmp_path: Path) -> None:
    job, run, script = job_of("line", tmp_path, steps=3), tmp_path / "run", tmp_path / "start.sh"
    write_cluster(
        Cluster("one", (Host("127.0.0.1", (Device("cpu", 4e9),) * 2, 1e9),)), tmp_path / "c.toml"
    )
    asked = ["--torchrun", "--cluster", str(tmp_path / "c.toml"), "--run", str(run)]
    subprocess.run(
        [PENSTOCK, "launch", str(job), *asked, "-o", str(script)], check=True, timeout=LIMIT_S
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for steps in (3, 5):
        job_of("line", tmp_path, steps)
        subprocess.run(["bash", str(script), "0"], env=of_ranks(PATH=path), check=True)
    assert losses(run) == pytest.approx(plain_losses("line", 5), rel=RELATIVE_TOLERANCE)


def test_a_launch_resumes_its_own_run_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun does not count a start after a change of members as a restart."""
    request = TrainRequest(out=tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with RunDirectory(tmp_path).held():
        assert not goes_on(request)  # nothing was planned yet
        (tmp_path / "plan.json").touch()
    assert goes_on(request)
    for other in ("another", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        assert not goes_on(request)
    # Torchrun says "none" if it was given no name, and then two launches cannot be told apart.
    with RunDirectory(tmp_path).held():
        assert not goes_on(request)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert goes_on(request)


@pytest.mark.slow
def test_a_run_goes_on_when_members_have_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    again = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0"}
    for ranks, steps in ((2, 3), (3, 5)):
        command = ("train", job_of("line", tmp_path, steps), "-o", run)
        found = started_ranks(*[command] * ranks, **again)
        assert [code for code, _ in found] == [0] * ranks, found
    assert losses(run) == pytest.approx(plain_losses("line", 5), rel=RELATIVE_TOLERANCE)


def test_ranks_with_another_job_end_with_one_message(tmp_path: Path) -> None:
    command = ("train", job_of("line", tmp_path, steps=5), "-o", tmp_path / "run", "--steps")
    (first, said), (second, silent) = started_ranks((*command, 5), (*command, 7))
    assert (first, second) == (2, 2)
    assert "rank 1 on host" in said
    assert "7 steps of 16 samples, but rank 0 on host" in said
    assert "error" not in silent


def test_other_versions_name_the_host() -> None:
    own = ("a", {"torch": "2.13.0"})
    check_equal([own, ("b", {"torch": "2.13.0"})])
    other = ("b", {"torch": "2.12.0"})
    with pytest.raises(BadInput, match=r"rank 2 on host 'b' has torch 2\.12\.0, but rank 0 on"):
        check_equal([own, own, other])


def test_a_host_that_does_not_see_the_run_says_so(tmp_path: Path) -> None:
    """Rank 0, which does see it, beside a rank on host 'b' that does not."""

    def world(other: str) -> World:
        found = {"all_gather": lambda own: [own, other], "broadcast": lambda told: told, "rank": 0}
        return cast("World", SimpleNamespace(**found))

    check_seen(world(""), tmp_path)
    with pytest.raises(BadInput, match=rf"host 'b' has no '{tmp_path}'; put the run directory on"):
        check_seen(world("b"), tmp_path)
