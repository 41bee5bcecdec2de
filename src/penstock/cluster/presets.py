"""Clusters by name: those of the papers, and the workers of this machine."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import read_cluster
from penstock.errors import BadInput

__all__ = ["CLUSTERS", "find_cluster", "local_cluster"]

LOOPBACK_BYTES_PER_S = 2e9
LOOPBACK_LATENCY_S = 100e-6


def packaged(name: str) -> Cluster:
    """A cluster that comes with the package; comments in its TOML file name the sources."""
    return read_cluster(Path(__file__).parent / "presets" / f"{name}.toml")


def local_cluster(workers: int, cores: int, memory_bytes: float) -> Cluster:
    """``workers`` processes of this machine, which share its cores and communicate over loopback.

    ``memory_bytes`` is for all workers together; each gets an equal share. The link numbers are
    for Gloo over loopback on an ordinary server; measure your own for better predictions.

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
    "dapple-a": partial(packaged, "dapple-a"),
    "dapple-b": partial(packaged, "dapple-b"),
    "dapple-c": partial(packaged, "dapple-c"),
    "dapple-a-effective": partial(packaged, "dapple-a-effective"),
    "dapple-b-effective": partial(packaged, "dapple-b-effective"),
    "dapple-c-effective": partial(packaged, "dapple-c-effective"),
    "bapipe-gpu": partial(packaged, "bapipe-gpu"),
    "bapipe-gpu-no-overlap": partial(packaged, "bapipe-gpu-no-overlap"),
    "bapipe-vcu118": partial(packaged, "bapipe-vcu118"),
    "bapipe-vcu129": partial(packaged, "bapipe-vcu129"),
    "bapipe-mixed": partial(packaged, "bapipe-mixed"),
    "mixed-gpus": partial(packaged, "mixed-gpus"),
    "slow-host": partial(packaged, "slow-host"),
    "small-memory": partial(packaged, "small-memory"),
    "graph-8": partial(packaged, "graph-8"),
    "h100-pod-16": partial(packaged, "h100-pod-16"),
    "h100-pod-256": partial(packaged, "h100-pod-256"),
    "h100-pod-1024": partial(packaged, "h100-pod-1024"),
}


def find_cluster(name_or_path: str | Path) -> Cluster:
    """The preset of this name, or the cluster in the TOML file at this path.

    Raises:
        BadInput: neither a preset nor a file, or the file does not describe a cluster.
    """
    if preset := CLUSTERS.get(str(name_or_path)):
        return preset()
    if not os.path.exists(name_or_path):
        near = get_close_matches(str(name_or_path).lower(), CLUSTERS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of them"
        raise BadInput(
            f"cluster '{name_or_path}' is neither a preset ({', '.join(CLUSTERS)}) nor an "
            f"existing TOML file; {hint}"
        )
    return read_cluster(name_or_path)
