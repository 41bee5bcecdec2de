"""The program of each process of a rehearsal: the engine's parts on emulated stages and links.

The real transport and the real sums carry the tensors. What is added is only a wait: a message is
taken, and a sum is complete, when the emulated links say so.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from penstock.plan.ordering import order_of
from penstock.rehearse.emulated_links import LinkTransfer, message_between, sum_among
from penstock.rehearse.emulated_stage import (
    EmulatedStage,
    boundaries_of_crossings,
    last_parts,
    parameter_of,
    planned_size,
    program_of,
)
from penstock.rehearse.emulation import Crossings, Emulation, crossings_of, shared_pieces
from penstock.rehearse.link_server import LinkClient
from penstock.runtime.clock import Record, StepClock
from penstock.runtime.gradients.buckets import (
    GradientBucket,
    GradientBuckets,
    GradientSum,
    make_groups,
)
from penstock.runtime.metrics import RankNumbers
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.processes.world import World, join_world
from penstock.runtime.program import RankStages, places_of_rank
from penstock.runtime.transport.messages import Message, messages_by_rank
from penstock.runtime.transport.open_transport import open_transport
from penstock.runtime.transport.transport import Inlet, Transport
from penstock.schedule.action import ACTION_KINDS
from penstock.simulate.catalogue import workload_of


class HeldBackTransport:
    """A real transport whose messages are held back; see `Transport`.

    ``on_links`` gives a message as a transfer on the emulated links.
    """

    def __init__(
        self,
        transport: Transport,
        client: LinkClient,
        on_links: Callable[[Message], LinkTransfer],
    ) -> None:
        self._transport, self._client, self._on_links = transport, client, on_links
        self.begin, self.proceed = transport.begin, transport.proceed
        self.position = transport.position
        self.at, self.drain, self.announce = transport.at, transport.drain, transport.announce
        self.share_sums = transport.share_sums
        self.abort, self.close = transport.abort, transport.close

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends the parts of ``message`` and says so."""
        send, client = self._transport.outlet(message), self._client
        transfer = self._on_links(message)

        def outgoing(parts: Sequence[torch.Tensor]) -> None:
            client.offer(transfer)
            send(parts)

        return outgoing

    def inlet(self, message: Message) -> Inlet:
        """The receiving end of ``message``, which is not here before it would be on the links."""
        inlet, client = self._transport.inlet(message), self._client
        key = self._on_links(message).key

        def wait() -> None:
            inlet.wait()
            client.wait_for(key)

        return Inlet(wait, inlet.take)


@dataclass
class HeldBackSum:
    """The real sum of a bucket, which ends no sooner than ``transfer`` on the emulated links."""

    real: GradientSum
    client: LinkClient
    transfer: LinkTransfer

    def __post_init__(self) -> None:
        self.settle, self.close = self.real.settle, self.real.close

    def start(self) -> None:
        """This rank's gradients are complete."""
        self.client.offer(self.transfer)
        self.real.start()

    def wait(self) -> None:
        """Wait until the bucket holds the sum, and would on the emulated links."""
        self.real.wait()
        self.client.wait_for(self.transfer.key)


def transfer_of(message: Message, crossings: Crossings, emulation: Emulation) -> LinkTransfer:
    """A message with the size that it has in the plan."""
    return message_between(
        emulation.cluster,
        (message.sender, message.receiver),
        *planned_size(message, crossings),
        (message.sender_stage, message.receiver_stage, message.micro_batch),
        f"{message} to stage {message.receiver_stage}",
        emulation.time_scale,
    )


def hold_back_sums(
    buckets: Sequence[GradientBucket],
    planned_bytes: Mapping[nn.Parameter, float],
    emulation: Emulation,
    client: LinkClient,
) -> None:
    """End each sum of gradients as the emulated links say."""
    numbers = Counter[object]()
    for bucket in buckets:
        sharers = f"of stages {bucket.stages} on ranks {bucket.holders}"
        numbers[sharers] += 1
        transfer = sum_among(
            emulation.cluster,
            bucket.holders,
            sum(planned_bytes[parameter] for parameter in bucket.parameters),
            bucket.stage,
            f"sum {numbers[sharers]} {sharers}",
            emulation.time_scale,
        )
        assert bucket.sum is not None
        bucket.sum = HeldBackSum(bucket.sum, client, transfer)


class RankRecord(NamedTuple):
    """The record of one rank, by iteration. Times are of `time.perf_counter`, which ranks share.

    ``ready_s`` is when it had joined the others. ``waits`` and ``late_s`` are those of its
    `LinkClient`.
    """

    ready_s: float
    starts_s: tuple[float, ...]
    records: tuple[tuple[Record, ...], ...]
    waits: int
    late_s: float


def rehearse_rank(emulation: Emulation, server: str, limit_s: float) -> RankRecord:
    """Join the other ranks, and run the plan's iterations on emulated stages and links.

    ``server`` is the name of the `LinkServer`'s socket. ``limit_s`` is how long another rank may
    not answer.
    """
    client = LinkClient(server, int(os.environ["RANK"]), limit_s)
    return rehearse_with(client, emulation, limit_s)


def rehearse_with(client: LinkClient, emulation: Emulation, limit_s: float) -> RankRecord:
    """`rehearse_rank` with a connection to the server, which is closed."""
    world = join_world("cpu", limit_s)
    rank = RehearsingRank(emulation, world, client)
    world.barrier()
    ready_s = time.perf_counter()
    starts, records = zip(*(rank.run() for _ in range(emulation.iterations)), strict=True)
    rank.buckets.close()
    client.close()
    world.leave()
    return RankRecord(ready_s, starts, records, client.waits, client.late_s)


class RehearsingRank:
    """One rank's part: the runtime's stages, gradient buckets and numbers."""

    def __init__(self, emulation: Emulation, world: World, client: LinkClient) -> None:
        plan, profile, time_scale = emulation.plan, emulation.profile, emulation.time_scale
        schedule, self.clock = order_of(plan), StepClock()
        crossings = crossings_of(plan, profile)
        boundaries = boundaries_of_crossings(crossings, emulation.byte_scale)
        ever = messages_by_rank(plan, world.size, boundaries, (), ())
        real, transport = open_transport(world, emulation.transport, ever), None
        if real is not None:
            on_links = partial(transfer_of, crossings=crossings, emulation=emulation)
            transport = HeldBackTransport(real, client, on_links)
        self.failures = Failures(world, transport.abort if transport is not None else lambda: None)
        self.numbers = RankNumbers(transport, self.clock, len(plan.devices))

        held = [place.stage for place in places_of_rank(plan, world.rank)]
        pieces = list(shared_pieces(plan, profile))
        used = (piece for piece in pieces if not set(held).isdisjoint(piece.stages))
        own = {piece: parameter_of(piece, emulation.byte_scale) for piece in used}
        planned_bytes = {parameter: piece.bytes for piece, parameter in own.items()}
        self.buckets = GradientBuckets(
            world,
            {
                stage: {piece.name: own[piece] for piece in own if stage in piece.stages}
                for stage in held
            },
            {piece.name: piece.stages for piece in own},
            {piece.name: piece.holders for piece in own},
            make_groups(world, [piece.holders for piece in pieces]),
            self.clock,
            size_of=planned_bytes.__getitem__,
        )
        if real is not None:
            real.share_sums(self.buckets.shared)
        hold_back_sums(self.buckets.shared, planned_bytes, emulation, client)

        workload = workload_of(plan, profile, emulation.cluster, schedule)
        devices = [device for device in workload.devices if device.device == world.rank]
        step_s = sum(device.step_s for device in devices) * time_scale
        self.take_step = lambda: client.sleep_until(time.perf_counter() + step_s)
        programs = {stage: program_of(stage, boundaries, plan) for stage in held}
        runners: dict[int, EmulatedStage] = {}
        for instance, replica in devices[0].replicas.items() if devices else ():
            stage = replica.stage
            runners[stage] = EmulatedStage(
                programs[stage],
                {kind: replica.work.seconds(kind) * time_scale for kind in ACTION_KINDS},
                last_parts(
                    replica,
                    plan.stages[stage].layers,
                    workload.parts.stages[instance].segment_layers,
                    own,
                    time_scale,
                ),
                partial(self.buckets.launching, stage),
                client.sleep_until,
            )
        self.stages = RankStages(
            plan,
            world,
            transport,
            self.clock,
            boundaries=boundaries,
            programs=programs,
            runners=runners,
            metrics=None,
        )
        self.program = self.stages.program(plan.global_batch)

    @doing("rehearses a step", acts=True)
    def run(self) -> tuple[float, tuple[Record, ...]]:
        """One iteration and its optimizer step; returns when it began, and what was done."""
        self.clock.restart()
        with self.failures.shared():
            self.buckets.zero()
            self.stages.take({}, self.program)
            self.stages.run(self.program)
            self.buckets.finish()
            own = self.numbers.own((), (), None, None)
            self.numbers.exchange(own, "the end of the iteration")
        if self.stages.runners:
            start_s = self.clock.now()
            self.take_step()
            self.clock.add("STEP", min(self.stages.runners), -1, start_s, self.clock.now())
        return self.clock.start_s, tuple(self.clock.records)
