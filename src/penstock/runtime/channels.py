"""Tensors between ranks: what an action takes is received, what it makes is sent.

All that is sent is in `penstock.runtime.messages`; how the bytes travel is the transport's. Here
the two meet: rows are cut out of what a stage made, and put together to what a stage takes.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import torch

from penstock.capture.layer_graph import TensorSpec
from penstock.errors import BadInput
from penstock.runtime.clock import Clock
from penstock.runtime.group_transport import GroupTransport
from penstock.runtime.messages import Message, Part, RankMessages
from penstock.runtime.segment_opening import join_segments, supported
from penstock.runtime.shared_memory import SharedMemoryTransport, ring_size
from penstock.runtime.stage_runner import Tensors
from penstock.runtime.transport import Transport
from penstock.runtime.world import World
from penstock.schedule.action import Action

__all__ = ["Channels", "PipelineChannels", "Places", "TransportChoice", "open_transport"]

TransportChoice: TypeAlias = Literal["auto", "shared-memory", "process-groups"]

SPIN_S = 2e-3
SHORT_SPIN_S = 20e-6


class Channels(Protocol):
    """What the action loop asks of the network; a rehearsal answers with delays."""

    @property
    def device(self) -> int:
        """This rank."""
        ...

    def receive(self, action: Action) -> Tensors:
        """What ``action`` takes: the tensors for F, the gradients for B and I, nothing else."""
        ...

    def send(self, action: Action, result: Tensors) -> None:
        """Send what ``action`` made to those who need it; returns at once."""
        ...

    def drain(self) -> None:
        """Wait until everything sent is on its way."""
        ...


class Places:
    """Where in a stage's arguments and results each boundary tensor stands, by its name."""

    def __init__(self, received: Sequence[TensorSpec], sent: Sequence[TensorSpec]) -> None:
        self.received = {spec.name: place for place, spec in enumerate(received)}
        self.sent = {spec.name: place for place, spec in enumerate(sent)}


class PipelineChannels:
    """The messages of one rank over a transport.

    ``places[stage]`` belong to the stages of this rank, which hand each other tensors as they are:
    nothing is copied. Without a transport there is only this rank.
    """

    def __init__(
        self, device: int, transport: Transport | None, places: dict[int, Places], clock: Clock
    ) -> None:
        self.device = device
        self.transport = transport
        self._places = places
        self._clock = clock
        self._messages = RankMessages({}, {}, {})
        self._expected: dict[int, deque[Message]] = {}
        self._early: dict[Message, list[torch.Tensor]] = {}

    def begin(self, messages: RankMessages) -> None:
        """Open the channels for one iteration."""
        self._messages = messages
        self._expected = {peer: deque(stream) for peer, stream in messages.streams.items()}
        self._early.clear()
        if self.transport is not None:
            self.transport.begin(messages.streams)

    def receive(self, action: Action) -> Tensors:
        """Take the messages for ``action`` and put their rows together."""
        if self.transport is not None:
            self.transport.at(action)
        if action.kind in "RW":
            return ()
        places = self._places[action.stage]
        slots = places.received if action.kind == "F" else places.sent
        tensors: list[torch.Tensor | None] = [None] * len(slots)
        borrowed: set[int] = set()
        for message in self._messages.incoming.get(action, ()):
            arrived = self._take(message)
            for part, tensor in zip(message.parts, arrived, strict=True):
                place = slots[part.spec.name]
                before = tensors[place]
                if before is not None and place in borrowed:
                    # What another stage of this rank made may be another gradient as well.
                    before = before.clone()
                    borrowed.discard(place)
                elif before is None and message.sender == self.device:
                    borrowed.add(place)
                tensors[place] = joined(before, part, tensor, message.kind)
        return tensors

    def send(self, action: Action, result: Tensors) -> None:
        """Send the rows that each consumer needs."""
        messages = self._messages.outgoing.get(action)
        if not messages:
            return
        places = self._places[action.stage]
        slots = places.sent if action.kind == "F" else places.received
        for message in messages:
            start = self._clock.now()
            tensors = [rows_of(result[slots[part.spec.name]], part) for part in message.parts]
            if message.receiver == self.device:
                # Detached, so that each stage's backward ends at its own inputs.
                self._early[message] = [tensor.detach() for tensor in tensors]
                continue
            assert self.transport is not None
            self.transport.send(message, tensors)
            self._note("SEND", message, start, message.receiver)

    def drain(self) -> None:
        """Wait until everything sent is on its way."""
        if self.transport is not None:
            self.transport.drain()

    def _take(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``; those that its sender sent before are put aside."""
        if self._early and message in self._early:
            return self._early.pop(message)
        expected = self._expected[message.sender]
        while True:
            first = expected.popleft()
            arrived = self._receive_one(first)
            if first is message:
                return arrived
            self._early[first] = arrived

    def _receive_one(self, message: Message) -> list[torch.Tensor]:
        assert self.transport is not None
        self.transport.await_message(message)
        start = self._clock.now()
        arrived = self.transport.take(message)
        self._note("RECV", message, start, message.sender)
        return arrived

    def _note(
        self, kind: Literal["SEND", "RECV"], message: Message, start_s: float, peer: int
    ) -> None:
        stage = message.sender_stage if kind == "SEND" else message.receiver_stage
        end_s = self._clock.now()
        self._clock.add(kind, stage, message.micro_batch, start_s, end_s, peer, message.bytes)


def rows_of(tensor: torch.Tensor | None, part: Part) -> torch.Tensor:
    """The rows of ``part`` in what the sender made; zeros where it made no gradient."""
    if tensor is None:
        return torch.zeros(part.shape, dtype=part.dtype)
    if part.dim < 0 or tensor.shape[part.dim] == len(part.source_rows):
        return tensor
    return tensor.narrow(part.dim, part.source_rows.start, len(part.source_rows))


def joined(
    before: torch.Tensor | None, part: Part, arrived: torch.Tensor, kind: Literal["F", "B"]
) -> torch.Tensor:
    """``before`` with the arrived rows: put in their place, or added to it for a gradient.

    A gradient comes from every stage that read the tensor, in rows of their own cut; the sum over
    the stages is the gradient. The rows of an activation come once.
    """
    if part.fills_target:
        return arrived if before is None else before.add_(arrived)
    if before is None:
        before = torch.zeros(part.target_shape, dtype=part.dtype, device=arrived.device)
    rows = before.narrow(part.dim, part.target_rows.start, len(part.target_rows))
    if kind == "F":
        rows.copy_(arrived)
    else:
        rows.add_(arrived)
    return before


def open_transport(
    world: World, choice: TransportChoice, outgoing_by_rank: Sequence[Sequence[Message]]
) -> Transport | None:
    """The way that suits: shared memory between CPU ranks of one host, process groups else.

    ``outgoing_by_rank[rank]`` are the messages that a rank sends in a full iteration. ``None``
    where there is only one rank.

    Raises:
        BadInput: shared memory is asked for where it cannot be had.
    """
    if world.size == 1:
        return None
    on_cpu = all(device == "cpu" for device in world.devices)
    possible = supported() and world.one_host
    if choice == "shared-memory" or (choice == "auto" and possible and on_cpu):
        by_sender = {
            sender: [m for m in outgoing_by_rank[sender] if m.receiver == world.rank]
            for sender in range(world.size)
        }
        rings = {sender: ring_size(messages) for sender, messages in by_sender.items() if messages}
        segments = join_segments(world, rings, spin_s=spin_s(world)) if possible else None
        if segments is not None:
            return SharedMemoryTransport(segments, world.device)
        if choice == "shared-memory":
            raise BadInput(
                "transport 'shared-memory' needs all ranks in one Linux container on x86-64, able "
                "to open one another's /proc/<pid>/fd; use transport 'process-groups'"
            )
    pairs = {(m.sender, m.receiver) for messages in outgoing_by_rank for m in messages}
    return GroupTransport(world, sorted(pairs))


def spin_s(world: World) -> float:
    """How long a wait may spin before it sleeps: hardly at all where ranks share too few cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return SPIN_S if world.size * torch.get_num_threads() <= (cores or 1) else SHORT_SPIN_S
