"""Channels: receive the inputs of an action, and send its results to other ranks.

`messages` decides what is sent, and the transport moves the bytes. The channels connect the two:
they cut rows out of a stage's results, and assemble the inputs of a stage from received rows.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int16, c_int32, c_int64
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from penstock.capture.contract import TensorSpec
from penstock.capture.forward.stage_module import StageProgram
from penstock.runtime.clock import StepClock
from penstock.runtime.stage.runner import Tensors
from penstock.runtime.transport.messages import Message, MessagePart, RankMessages
from penstock.runtime.transport.transport import Inlet, Transport, position_code
from penstock.schedule.action import Action


@dataclass(slots=True, eq=False)
class Arrival:
    """One message to this rank, with its tensors from their arrival until an action takes them.

    ``inlet`` receives it from another rank (``None``: it comes from a stage of this rank).
    """

    message: Message
    inlet: Inlet | None = None
    stream: "PeerMessages | None" = None
    tensors: list[torch.Tensor | None] | None = None


@dataclass
class PeerMessages:
    """The messages of one peer in the order in which it sends them, and how many have arrived."""

    arrivals: list[Arrival]
    taken: int = 0


class PipelineChannels:
    """The messages of one rank in one kind of iteration, over a transport.

    The stages of this rank, whose ``programs`` these are, pass tensors to one another without
    copying. Without a transport there is only this rank. ``memory`` is where this rank's
    tensors are.
    """

    def __init__(
        self,
        device: int,
        transport: Transport | None,
        programs: Mapping[int, StageProgram],
        clock: StepClock,
        messages: RankMessages,
        memory: torch.device,
    ) -> None:
        self.device = device
        self._memory = memory
        self.transport = transport
        self._programs = programs
        self._clock = clock
        self._messages = messages
        self._streams: dict[int, PeerMessages] = {}
        self._arrivals: dict[Message, Arrival] = {}
        for message in messages.planned:
            if isinstance(message, Message) and message.sender != device:
                assert transport is not None
                stream = self._streams.setdefault(message.sender, PeerMessages([]))
                arrival = Arrival(message, transport.inlet(message), stream)
                self._arrivals[message] = arrival
                stream.arrivals.append(arrival)
        for message in chain.from_iterable(messages.incoming.values()):
            if message.sender == device:
                self._arrivals[message] = Arrival(message)

    def begin(self) -> None:
        """Open the channels for one iteration; `proceed` then announces its messages."""
        for stream in self._streams.values():
            stream.taken = 0
        for arrival in self._arrivals.values():
            arrival.tensors = None
        if self.transport is not None:
            self.transport.begin()

    def proceed(self, planned: Sequence[Message | Action]) -> None:
        """Announce more messages; after a peer's last message its first comes again."""
        if self.transport is not None:
            self.transport.proceed(planned)

    def receiver(self, action: Action) -> Callable[[], Tensors]:
        """A function that receives what ``action`` needs: tensors for F, gradients for B and I.

        It is looked up once and called in every iteration.
        """
        gather = self._gatherer(action)
        if self.transport is None:
            return gather
        at, position = self.transport.at, position_code(action)

        def receive() -> Tensors:
            at(position)
            return gather()

        return receive

    def sender(self, action: Action) -> Callable[[Tensors], None] | None:
        """A function that sends the results of ``action`` at once; ``None``: no receiver."""
        messages = self._messages.outgoing.get(action)
        if not messages:
            return None
        program = self._programs[action.stage]
        slots = slots_of(program.sent if action.kind == "F" else program.received)
        senders = [self._sender_of(message, slots) for message in messages]
        if len(senders) == 1:
            return senders[0]

        def send(result: Tensors) -> None:
            for send_one in senders:
                send_one(result)

        return send

    def drain(self) -> None:
        """Wait until everything is sent."""
        if self.transport is not None:
            self.transport.drain()

    def _gatherer(self, action: Action) -> Callable[[], Tensors]:
        if action.kind in "RW":
            return tuple
        program = self._programs[action.stage]
        slots = slots_of(program.received if action.kind == "F" else program.sent)
        arrivals = [self._arrivals[m] for m in self._messages.incoming.get(action, ())]
        take = self._take
        if not arrivals:
            return lambda: [None] * len(slots)
        if len(arrivals) == 1 and all(part.fills_target for part in arrivals[0].message.parts):
            only = arrivals[0]
            if [slots[part.spec.name] for part in only.message.parts] == list(range(len(slots))):
                return lambda: take(only)
        return lambda: self._gathered(arrivals, slots)

    def _gathered(self, arrivals: Sequence[Arrival], slots: Mapping[str, int]) -> Tensors:
        tensors: list[torch.Tensor | None] = [None] * len(slots)
        borrowed: set[int] = set()
        for arrival in arrivals:
            message = arrival.message
            for part, tensor in zip(message.parts, self._take(arrival), strict=True):
                place = slots[part.spec.name]
                before = tensors[place]
                if tensor is None:
                    continue
                if before is not None and place in borrowed:
                    # Another stage of this rank may use the same tensor, so copy before adding.
                    before = before.clone()
                    borrowed.discard(place)
                elif before is None and message.sender == self.device:
                    borrowed.add(place)
                tensors[place] = joined_rows(before, part, tensor, message.kind)
        return tensors

    def _take(self, wanted: Arrival) -> list[torch.Tensor | None]:
        """The tensors of a message; earlier messages of the same sender are stored for later."""
        if (kept := wanted.tensors) is not None:
            wanted.tensors = None
            return kept
        stream = wanted.stream
        assert stream is not None
        while True:
            first = stream.arrivals[stream.taken]
            stream.taken = (stream.taken + 1) % len(stream.arrivals)
            inlet, message = first.inlet, first.message
            assert inlet is not None
            inlet.wait()
            start = self._clock.now()
            given = inlet.take()
            made = map(gradient_in, given) if message.kind == "B" else given
            tensors: list[torch.Tensor | None] = [*made]
            self._clock.add(
                "RECV",
                message.receiver_stage,
                message.micro_batch,
                start,
                self._clock.now(),
                message.sender,
                message.bytes,
            )
            if first is wanted:
                return tensors
            first.tensors = tensors

    def _sender_of(self, message: Message, slots: Mapping[str, int]) -> Callable[[Tensors], None]:
        parts, memory = [(slots[part.spec.name], part) for part in message.parts], self._memory
        if message.receiver == self.device:
            arrival = self._arrivals[message]

            def hand_over(result: Tensors) -> None:
                # Detached, so that each stage's backward ends at its own inputs.
                arrival.tensors = [
                    None
                    if result[place] is None
                    else rows_of_part(result[place], part, memory).detach()
                    for place, part in parts
                ]

            return hand_over
        assert self.transport is not None
        outlet, now, add = self.transport.outlet(message), self._clock.now, self._clock.add
        stage, micro_batch = message.sender_stage, message.micro_batch
        peer, size = message.receiver, message.bytes

        def send(result: Tensors) -> None:
            start = now()
            outlet([rows_of_part(result[place], part, memory) for place, part in parts])
            add("SEND", stage, micro_batch, start, now(), peer, size)

        return send


def slots_of(specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The index of each boundary tensor among a stage's arguments or results, by its name."""
    return {spec.name: place for place, spec in enumerate(specs)}


INTEGERS = {2: c_int16, 4: c_int32, 8: c_int64, 16: c_int64}
"""Integer types by the bytes of the number that is read as one; of 16, the first 8."""


def gradient_in(arrived: torch.Tensor) -> torch.Tensor | None:
    """The gradient that has arrived; ``None`` where the sender had none (see `rows_of_part`)."""
    kind = INTEGERS.get(arrived.itemsize)
    if kind is None or not arrived.is_cpu or not arrived.numel():
        return arrived
    return None if kind.from_address(arrived.data_ptr()).value == -1 else arrived


def rows_of_part(
    tensor: torch.Tensor | None, part: MessagePart, memory: torch.device
) -> torch.Tensor:
    """The rows of ``part`` in the sender's tensor; without one, a mark in ``memory``.

    It is NaN with all bits set, which no operator makes. For a device, where the host would wait to
    see it, it is zeros.
    """
    if tensor is None:
        mark = torch.zeros(part.shape, dtype=part.dtype, device=memory)
        if mark.is_cpu:
            mark.view(-1).view(torch.uint8).fill_(255)
        return mark
    if part.dim < 0 or tensor.shape[part.dim] == len(part.source_rows):
        return tensor
    return tensor.narrow(part.dim, part.source_rows.start, len(part.source_rows))


def joined_rows(
    before: torch.Tensor | None, part: MessagePart, arrived: torch.Tensor, kind: Literal["F", "B"]
) -> torch.Tensor:
    """``before`` with the arrived rows: inserted, or added in the case of a gradient.

    Every stage that read a tensor sends a gradient, in rows of its own cut; the tensor's gradient
    is their sum. The rows of an activation arrive once.
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
