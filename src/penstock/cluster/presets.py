"""Clusters by name: those of the papers, and this machine's workers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import read_cluster
from penstock.errors import BadInput

__all__ = ["CLUSTERS", "find_cluster", "local_cluster"]

V100_16GB = Device("V100-16GB", memory_bytes=16e9)
"""Profiles of the papers were taken on this device, so its speed is 1."""

NVLINK_BYTES_PER_S = 25e9
"""Point to point, the rate that DAPPLE's released planner counts with."""

ETHERNET_LATENCY_S = 30e-6
NVLINK_LATENCY_S = 5e-6

LOOPBACK_BYTES_PER_S = 2e9
LOOPBACK_LATENCY_S = 100e-6


def v100_cluster(name: str, *, hosts: int, devices_per_host: int, port_gbit_per_s: int) -> Cluster:
    """Equal hosts of V100s on one Ethernet switch (DAPPLE, PPoPP 2021, table of configurations)."""
    return Cluster(
        name,
        tuple(
            Host(
                name=f"host{i}",
                devices=(V100_16GB,) * devices_per_host,
                link_bytes_per_s=NVLINK_BYTES_PER_S,
                link_latency_s=NVLINK_LATENCY_S,
                port_bytes_per_s=port_gbit_per_s * 1e9 / 8,
                port_latency_s=ETHERNET_LATENCY_S,
            )
            for i in range(hosts)
        ),
    )


def local_cluster(workers: int, cores: int, memory_bytes: float) -> Cluster:
    """``workers`` processes of this machine, which share its cores and talk over loopback.

    ``memory_bytes`` is what all of them may use together; a worker gets its equal share. The
    link figures are for Gloo over loopback on an ordinary server; measure your own for better
    predictions.

    Raises:
        BadInput: no workers, no cores or no memory.
    """
    if workers < 1 or cores < 1 or not memory_bytes > 0:
        raise BadInput(
            f"{workers} local workers on {cores} cores with {memory_bytes} B of memory: all three "
            f"must be > 0"
        )
    host = Host(
        name="localhost",
        devices=(Device("cpu", memory_bytes / workers),) * workers,
        link_bytes_per_s=LOOPBACK_BYTES_PER_S,
        link_latency_s=LOOPBACK_LATENCY_S,
        full_speed_devices=cores if cores < workers else 0,
    )
    return Cluster(f"local-{workers}", (host,))


CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "dapple-a": partial(v100_cluster, "dapple-a", hosts=2, devices_per_host=8, port_gbit_per_s=25),
    "dapple-b": partial(v100_cluster, "dapple-b", hosts=16, devices_per_host=1, port_gbit_per_s=25),
    "dapple-c": partial(v100_cluster, "dapple-c", hosts=16, devices_per_host=1, port_gbit_per_s=10),
}


def find_cluster(name_or_path: str | Path) -> Cluster:
    """A cluster by the name of a preset or by the path of a TOML file.

    Raises:
        BadInput: neither a preset nor a file, or a file that describes no cluster.
    """
    if preset := CLUSTERS.get(str(name_or_path)):
        return preset()
    if not Path(name_or_path).exists():
        raise BadInput(
            f"cluster '{name_or_path}' is neither a preset ({', '.join(CLUSTERS)}) nor an "
            f"existing TOML file; use one of them"
        )
    return read_cluster(name_or_path)
