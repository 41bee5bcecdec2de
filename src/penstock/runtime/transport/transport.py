"""Transports, which move the bytes of a message from one rank to another: interface and choice."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

from penstock.device import is_gpu
from penstock.errors import BadInput
from penstock.machine import granted_cores
from penstock.runtime.gradients.buckets import GradientBucket
from penstock.runtime.processes.world import World
from penstock.runtime.transport.messages import Message
from penstock.schedule.action import Action

TransportChoice: TypeAlias = Literal["auto", "shared-memory", "process-groups", "in-process"]
"""Transport of tensors between stages. in-process: one process holds all stages of the plan, for
experiments and under a debugger."""

KINDS = "FBIWR"

SPIN_S = 2e-3
SHORT_SPIN_S = 20e-6

ANNOUNCED_AT_ONCE = 48
"""Number of values that are announced at once; a transport can carry about 60."""


@dataclass(frozen=True, slots=True)
class Inlet:
    """The receiving end of one message; used when it is the next message of its sender.

    ``wait`` waits until the message has arrived, at least its beginning: it raises `Stalled` if
    that takes too long, and `RunFailed` if its sender or another rank failed. ``take``, called
    after it, gives the parts of the message as new tensors.
    """

    wait: Callable[[], None]
    take: Callable[[], list[torch.Tensor]]


class Transport(Protocol):
    """Reliable transport of messages; those from one rank to another arrive in order.

    Both ends know every message beforehand, so messages contain no shapes.
    """

    def begin(self) -> None:
        """Prepare for an iteration, whose messages `proceed` announces."""
        ...

    def proceed(self, planned: Sequence[Message | Action]) -> None:
        """Announce that this rank will send and receive ``planned``, after what was announced.

        They are in the planned order (`penstock.schedule.message_order`), with this rank's actions.
        """
        ...

    def at(self, position: int) -> None:
        """Publish the current action of this rank, for error messages of ranks that wait for it.

        ``position`` is its `position_code`.
        """
        ...

    def position(self) -> str:
        """The current action in words; empty before the first."""
        ...

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends the parts of ``message``; created once, used in every iteration.

        It may wait for the receiver if much is under way to it.
        """
        ...

    def inlet(self, message: Message) -> Inlet:
        """The receiving end of ``message``; created once, used in every iteration."""
        ...

    def drain(self) -> None:
        """Wait until everything is sent, so that nothing is left for the next iteration."""
        ...

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Publish a few numbers. The returned function waits for those of all ranks, by rank.

        Every rank must call it before the next `announce`.
        """
        ...

    def share_sums(self, buckets: Sequence[GradientBucket]) -> None:
        """Sum the gradients of ``buckets`` by this transport from now on, if it can; on all ranks.

        The holders of a bucket must give it in the same order.
        """
        ...

    def abort(self) -> None:
        """Close the connections so that peers notice; nothing can be sent afterwards."""
        ...

    def close(self) -> None:
        """Close the connections without an error; all ranks do so."""
        ...


def announced(
    transport: Transport | None, values: list[float], what: str
) -> Callable[[], list[list[float]]]:
    """`Transport.announce` for any count of numbers; without a transport there is only this rank.

    Numbers over the limit are exchanged when the returned function is called.
    """
    if transport is None:
        return lambda: [values]
    first, rest = values[:ANNOUNCED_AT_ONCE], values[ANNOUNCED_AT_ONCE:]
    of_all = transport.announce(first, what)

    def whole() -> list[list[float]]:
        rows = of_all()
        more = announced(transport, rest, what)() if rest else [[] for _ in rows]
        return [[*row, *others] for row, others in zip(rows, more, strict=True)]

    return whole


def position_code(action: Action) -> int:
    """Encode an action as a number other than 0.

    >>> position_words(position_code(Action("B", 3, 17)))
    'B17 of stage 3'
    """
    return (KINDS.index(action.kind) + 1) << 48 | action.stage << 32 | action.micro_batch


def position_words(code: int) -> str:
    """The action in words; empty before the first."""
    if not code:
        return ""
    return f"{KINDS[(code >> 48) - 1]}{code & 0xFFFFFFFF} of stage {code >> 32 & 0xFFFF}"


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
