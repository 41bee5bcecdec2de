"""Two hosts as network namespaces, each with a core and a torchrun of its own (Linux, as root)."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from host_networks import PORT, joined_hosts

from penstock.cluster.cluster import Cluster, Device, Host

RANKS_OF_A_HOST = 2
STORE_PORT = 29_500


def two_hosts(bytes_per_s: float, name: str) -> Cluster:
    """Two hosts with two ranks on one core each, and ports of this rate."""
    hosts = tuple(
        Host(
            host,
            (Device("half a core", 8e9),) * RANKS_OF_A_HOST,
            link_bytes_per_s=1e9,
            port_bytes_per_s=bytes_per_s,
            full_speed_devices=1,
        )
        for host in ("first", "second")
    )
    return Cluster(name, hosts)


def run_on_hosts(cluster: Cluster, script: Path, arguments: Sequence[str], limit_s: float) -> None:
    """Run a script on all ranks of the hosts, whose ports have the rates of the cluster.

    Raises:
        SystemExit: a torchrun ended with another code than 0.
    """
    cores = sorted(os.sched_getaffinity(0))
    names = [host.name for host in cluster.hosts]
    with joined_hosts(names, [host.port_bytes_per_s for host in cluster.hosts]) as networks:
        agents = [
            subprocess.Popen(
                [
                    *network.command_prefix,
                    *("taskset", "--cpu-list", str(cores[number % len(cores)])),
                    *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(names)}"),
                    *(f"--node-rank={number}", f"--nproc-per-node={RANKS_OF_A_HOST}"),
                    *(f"--master-addr={networks[0].address}", f"--master-port={STORE_PORT}"),
                    *(str(script), *arguments),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": PORT},
                stdout=sys.stderr,
            )
            for number, network in enumerate(networks)
        ]
        try:
            codes = [agent.wait(limit_s) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    if any(codes):
        raise SystemExit(f"torchrun ended with {codes}; its messages are above")
