"""Run by each rank: joins the others with a device that this machine does not have."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from penstock.errors import BadInput
from penstock.runtime.processes import world
from penstock.runtime.processes.world import join_world


def joined(cases: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The backend on which all agree, or why they cannot, for the hosts and GPUs of each case.

    A GPU is its identity; "cpu" is none, and an empty one that is asked for and not there.
    """
    rank = int(os.environ["RANK"])
    return [outcome(hosts[rank], gpus[rank]) for hosts, gpus in cases]


def outcome(host: str, gpu: str) -> str:
    def own_device(asked: object) -> torch.device:
        if not gpu:
            raise BadInput(f"no GPU on host {host}")
        return torch.device("cpu" if gpu == "cpu" else "cuda:0")

    world.own_device = own_device
    world.identity_of = lambda device: gpu
    world.host_identity = lambda: host
    world.socket.gethostname = lambda: host
    dist.is_nccl_available = lambda: not gpu.endswith("without NCCL")
    try:
        here = join_world("cuda", 60.0)
    except BadInput as refused:
        return str(refused)
    here.leave()
    return here.backend
