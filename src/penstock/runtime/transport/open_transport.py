"""Open the transport that serves the ranks of a run best."""

import os
from collections.abc import Sequence

import torch

from penstock.device import is_gpu
from penstock.errors import BadInput
from penstock.machine import granted_cores
from penstock.runtime.processes.world import World
from penstock.runtime.transport.messages import Message
from penstock.runtime.transport.transport import Transport, TransportChoice

SPIN_S, SHORT_SPIN_S = 2e-3, 20e-6
"""Seconds for which a wait spins before it sleeps; the shorter where ranks share cores."""


def open_transport(
    world: World, choice: TransportChoice, outgoing_by_rank: Sequence[Sequence[Message]]
) -> Transport | None:
    """Open the best transport: process groups, or shared memory between ranks of one host.

    The latter serves ranks on CPUs and ranks that share a GPU, whose messages go through the CPU.

    ``outgoing_by_rank[rank]`` are the messages that a rank sends in a full iteration. Returns
    ``None`` if there is only one rank.
    """
    if world.size == 1:
        return None
    if choice == "in-process":
        raise BadInput(
            f"transport 'in-process' holds all stages in one process, and {world.size} run; start "
            f"the script without torchrun, or leave transport out"
        )
    # Imported here, so that nothing else depends on the transports.
    from penstock.runtime.transport.process_groups import GroupTransport

    by_gloo = world.backend == "gloo"
    if choice == "shared-memory" or (choice == "auto" and world.one_host and by_gloo):
        incoming = {
            sender: [message for message in messages if message.receiver == world.rank]
            for sender, messages in enumerate(outgoing_by_rank)
        }
        opened = None
        if world.one_host and is_gpu(world.device):
            from penstock.runtime.transport.shared_memory.staged import StagedTransport

            # A rank that spins keeps its threads from publishing its copies.
            opened = StagedTransport.opened(world, incoming, SHORT_SPIN_S)
        elif world.one_host:
            from penstock.runtime.transport.shared_memory.rings import SharedMemoryTransport

            opened = SharedMemoryTransport.opened(world, incoming, spin_s(world))
        if opened is not None:
            return opened
        if choice == "shared-memory":
            raise BadInput(
                "transport 'shared-memory' needs all ranks in one Linux container on x86-64, able "
                "to open one another's /proc/<pid>/fd; use transport 'process-groups'"
            )
    if world.sharing:
        raise BadInput(
            f"{world.sharing}, which NCCL refuses and whose memory Gloo cannot send; use transport "
            f"'shared-memory', or start as many ranks as there are GPUs"
        )
    pairs = {(m.sender, m.receiver) for messages in outgoing_by_rank for m in messages}
    return GroupTransport(world, pairs)


def spin_s(world: World) -> float:
    """Seconds that a wait may spin before it sleeps: few if ranks share too few cores.

    The cores of all ranks are counted together: each rank may be bound to its own core.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(set[int]().union(*world.all_gather(os.sched_getaffinity(0))))
    else:
        cores = os.cpu_count() or 1
    threads = world.size * torch.get_num_threads()
    return SPIN_S if threads <= min(cores, granted_cores()) else SHORT_SPIN_S
