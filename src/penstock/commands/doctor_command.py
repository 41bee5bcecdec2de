"""``penstock doctor``: what this machine has, and what is missing for which commands."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock import __version__
from penstock.commands import options
from penstock.commands.terminal import Terminal
from penstock.errors import TRAINING_PACKAGES, PenstockError
from penstock.machine import free_host_memory, usable_cores
from penstock.text import size_text

USEFUL = {
    "transformers": "models of Hugging Face",
    "tokenizers": "text in a tokenizer's tokens",
    "scikit-learn": "the jobs digits and resnet-digits",
}
"""Packages that some jobs need."""

LEAST_SHARED_BYTES = 1 << 30
"""Bytes of /dev/shm below which there is a remedy; Docker gives 64 MiB by default."""

BUSY = 0.5
"""Load per core above which what is measured here takes longer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing of the machine: what was found, and the remedy, empty where nothing is wrong."""

    what: str
    found: str
    remedy: str = ""


def doctor(*, out: options.Out = "", terminal: Terminal) -> None:
    """Show what this machine has, and what is missing for training.

    It measures nothing and starts nothing. -o writes the findings as JSON.
    """
    from rich.table import Table

    found = [*of_system(), *of_packages(), *of_devices(), *of_network()]
    values = {"findings": [asdict(one) for one in found]}
    terminal.save(values, out)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for one in found:
        table.add_row("!" if one.remedy else "", one.what, one.found, one.remedy)
    missing = sum(bool(one.remedy) for one in found)
    words = f"{missing} remark(s), marked with !" if missing else "nothing is missing"
    terminal.show(values, table, words)


def of_system() -> Iterator[Finding]:
    """Versions, cores, memory and disk."""
    yield Finding("penstock", f"{__version__}, in {Path(__file__).parents[1]}")
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("system", system, "" if sys.platform == "linux" else "training needs Linux")
    cores, load = usable_cores(), os.getloadavg()[0]
    busy = f"busy: what is measured now is too long, by up to x {1 + load / cores:.1f}"
    yield Finding("cores", f"{cores}, load {load:.1f}", busy if load > BUSY * cores else "")
    free = free_host_memory()
    yield Finding("memory", f"{size_text(free.bytes)} ({free.limit})")
    shared = Path("/dev/shm")
    if shared.is_dir():
        left = shutil.disk_usage(shared).free
        short = "workers of one host exchange messages there; docker run --shm-size 8g"
        small = left < LEAST_SHARED_BYTES
        yield Finding("/dev/shm", f"{size_text(left)} free", short if small else "")
    here = Path.cwd()
    writable = "" if os.access(here, os.W_OK) else "cannot be written to; name a run directory, -o"
    yield Finding("disk", f"{size_text(shutil.disk_usage(here).free)} free in {here}", writable)


def installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def of_packages() -> Iterator[Finding]:
    """The compiled core, and packages that training or some jobs need."""
    try:
        from penstock.core import native

        yield Finding("compiled core", Path(str(native.__file__)).name)
    except (ImportError, PenstockError) as cause:
        remedy = "nothing is planned without it; install penstock again"
        yield Finding("compiled core", f"cannot be loaded: {cause}", remedy)
    for package in TRAINING_PACKAGES:
        remedy = "" if installed(package) else "training needs it: pip install 'penstock[train]'"
        yield Finding(package, installed(package) or "not installed", remedy)
    for package, use in USEFUL.items():
        yield Finding(package, installed(package) or f"not installed; for {use}")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or ""
    yield Finding("C++ compiler", compiler or "none; a job with compile = true needs one")


def of_devices() -> Iterator[Finding]:
    """The GPUs that torch sees, each with its free memory."""
    if not installed("torch"):
        return
    import torch

    from penstock.device import device_kind, free_memory, seen_gpus

    gpus = seen_gpus()
    if not gpus:
        yield Finding("GPUs", f"none that torch {torch.__version__} sees; ranks compute on cores")
    for gpu in gpus:
        left = size_text(free_memory(gpu).bytes)
        yield Finding(f"GPU {gpu.index}", f"{device_kind(gpu)}, {left} free")
    if gpus:
        has = torch.distributed.is_nccl_available()
        remedy = "" if has else "this torch lacks it; install a build with NCCL for several GPUs"
        yield Finding("NCCL", "yes" if has else "no", remedy)


def of_network() -> Iterator[Finding]:
    """Findings on the rendezvous of ranks: a port, the host's name, and what is set about them."""
    name = socket.gethostname()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Finding("ports", f"127.0.0.1:{server.getsockname()[1]} can be opened")
    except OSError as cause:
        yield Finding("ports", f"none can be opened: {cause}", "workers meet there; allow it")
    try:
        yield Finding("host name", f"{name}, {socket.gethostbyname(name)}")
    except OSError:
        remedy = f"other hosts cannot meet here by name; add '127.0.1.1 {name}' to /etc/hosts"
        yield Finding("host name", f"{name}, which has no address", remedy)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    set_here = [f"{one}={os.environ[one]}" for one in names if one in os.environ]
    yield Finding("variables", ", ".join(set_here) or "none that changes a run")
