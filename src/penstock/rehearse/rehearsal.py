"""Carry out a plan with one process for each device, and compare what it does with the plan."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from penstock.plan.ordering import order_of
from penstock.rehearse.emulated_links import LinkTransfer, Started
from penstock.rehearse.emulation import Emulation, check_can_be_rehearsed
from penstock.rehearse.link_server import LinkServer, serve_links
from penstock.rehearse.rehearsing_rank import RankRecord, rehearse_rank
from penstock.runtime.processes.launch import launch_workers
from penstock.schedule.action import ACTION_KINDS, Action
from penstock.simulate.catalogue import workload_of
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.simulate.workload import Workload
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Event, Timeline

PLANNED_S_A_STEP = 60.0
"""Least seconds that ranks wait for each other before they report that one does not answer."""

ROUNDING = 1e-6
"""Relative tolerance of the bytes that were sent or summed."""


@dataclass(frozen=True)
class Rehearsal:
    """Records of the ranks, and the simulator's prediction for one iteration.

    All seconds are those of the plan: times here divided by the time scale. ``start_s`` is how long
    the processes took to start and to join, in seconds here.
    """

    emulation: Emulation
    prediction: Prediction
    ranks: tuple[RankRecord, ...]
    transfers: tuple[Started, ...]
    start_s: float

    @cached_property
    def begins_s(self) -> tuple[float, ...]:
        """Moments at which the first rank began each iteration, by the clock of this machine."""
        return tuple(map(min, zip(*(rank.starts_s for rank in self.ranks), strict=True)))

    @cached_property
    def ends_s(self) -> tuple[float, ...]:
        """Seconds from the beginning of the first iteration to the end of each."""
        ends = [
            max(record.end_s for rank in self.ranks for record in rank.records[k])
            for k in range(self.emulation.iterations)
        ]
        return tuple((end - self.begins_s[0]) / self.emulation.time_scale for end in ends)

    @property
    def rehearsed_s(self) -> float:
        """Seconds of an iteration: what each one after the first adds, or the only one."""
        first_s, further = self.ends_s[0], len(self.ends_s) - 1
        return (self.ends_s[-1] - first_s) / further if further else first_s

    @property
    def simulated_s(self) -> float:
        """Predicted seconds: of one iteration, since ranks agree before each step."""
        return self.prediction.iteration_s

    @property
    def error(self) -> float:
        """The excess over the simulated time, as a share of it."""
        return self.rehearsed_s / self.simulated_s - 1

    @property
    def mean_late_s(self) -> float:
        """Mean delay of the end of a wait, in seconds here."""
        return sum(r.late_s for r in self.ranks) / max(1, sum(r.waits for r in self.ranks))

    @cached_property
    def timeline(self) -> Timeline:
        """The last iteration: compute as the ranks did it, transfers as the links carried them.

        The first one may wait for what happens once, such as connections.
        """
        last = self.emulation.iterations - 1
        scale = self.emulation.time_scale

        def planned(moment_s: float) -> float:
            return max(0.0, (moment_s - self.begins_s[last]) / scale)

        events = [
            Event(rank, r.kind, r.stage, r.micro_batch, planned(r.start_s), planned(r.end_s))
            for rank, record in enumerate(self.ranks)
            for r in record.records[last]
            if r.kind in COMPUTE
        ]
        for started in self.transfers_of(last):
            transfer, span = started.transfer, (planned(started.start_s), planned(started.end_s))
            stage, reader, micro_batch = transfer.label
            if transfer.members:
                events += [
                    Event(member, "REDUCE", stage, -1, *span, bytes=transfer.bytes)
                    for member in transfer.members
                ]
            elif started.end_s > started.start_s:
                ends = transfer.source, transfer.target
                events += [
                    Event(ends[0], "SEND", stage, micro_batch, *span, ends[1], transfer.bytes),
                    Event(ends[1], "RECV", reader, micro_batch, *span, ends[0], transfer.bytes),
                ]
        events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
        return Timeline(tuple(events), len(self.emulation.cluster.devices), title="rehearsed")

    def transfers_of(self, iteration: int) -> list[Started]:
        """The transfers of one iteration; none is ready before all ranks have begun it."""
        begins = *self.begins_s, float("inf")
        return [t for t in self.transfers if begins[iteration] <= t.ready_s < begins[iteration + 1]]


def rehearse(
    emulation: Emulation,
    rank_function: Callable[[Emulation, str, float], RankRecord] = rehearse_rank,
) -> Rehearsal:
    """Carry out a plan on emulated devices and links.

    ``rank_function`` is what each process runs.
    """
    plan, cluster = emulation.plan, emulation.cluster
    check_can_be_rehearsed(plan, emulation.profile, cluster)
    prediction = simulate_plan(plan, emulation.profile, cluster)
    limit_s = PLANNED_S_A_STEP + 3 * prediction.iteration_s * emulation.time_scale
    server = LinkServer()
    with serve_links(server) as name:
        begun_s = time.perf_counter()
        arguments = (emulation, name, limit_s)
        ranks = launch_workers(
            rank_function,
            arguments,
            workers=emulation.ranks,
            threads=1,
            imports=(rehearse_rank.__module__,),
        )
    start_s = max(rank.ready_s for rank in ranks) - begun_s
    return Rehearsal(emulation, prediction, ranks, tuple(server.begun), start_s)


def differences(rehearsal: Rehearsal) -> list[str]:
    """Deviations from the plan in what was done, a line each; times are not compared."""
    emulation = rehearsal.emulation
    schedule = order_of(emulation.plan)
    workload = workload_of(emulation.plan, emulation.profile, emulation.cluster, schedule)
    orders = {d.device: tuple(schedule.of(d.group)) for d in workload.devices}
    planned, found = planned_bytes(workload), list[str]()
    for iteration in range(emulation.iterations):
        for number, rank in enumerate(rehearsal.ranks):
            done = (
                Action(record.kind, record.stage, record.micro_batch)
                for record in rank.records[iteration]
                if record.kind in ACTION_KINDS
            )
            pairs = zip_longest(done, orders.get(number, ()), fillvalue="nothing")
            first = next((entry for entry in enumerate(pairs) if len({*entry[1]}) > 1), None)
            if first is not None:
                position, (one, other) = first
                found.append(
                    f"iteration {iteration}: action {position} of rank {number} was {one} where "
                    f"the schedule has {other}"
                )
        moved = defaultdict[str, float](float)
        for started in rehearsal.transfers_of(iteration):
            moved[moved_by(started.transfer)] += started.transfer.bytes
        for what in sorted(planned.keys() | moved.keys()):
            one, other = moved[what], planned.get(what, 0.0)
            if abs(one - other) > ROUNDING * max(one, other):
                found.append(
                    f"iteration {iteration}: {what} {one:.0f} bytes where the plan has {other:.0f}"
                )
    return found


def moved_by(transfer: LinkTransfer) -> str:
    """The ranks that sent or summed, in words."""
    if transfer.members:
        return f"ranks {sorted(transfer.members)} summed gradients of"
    return f"rank {transfer.source} sent rank {transfer.target}"


def planned_bytes(workload: Workload) -> dict[str, float]:
    """The bytes that the simulator counts, by `moved_by`."""
    planned = defaultdict[str, float](float)
    for message in workload.messages:
        ends = [workload.replicas[end] for end in (message.sender, message.receiver)]
        source, target = (workload.devices[end.position].device for end in ends)
        if source != target:
            both = frozenset.intersection(*(workload.works_on[end.instance] for end in ends))
            moved = message.bytes * len(both) * workload.iterations
            planned[f"rank {source} sent rank {target}"] += moved
    for reduction in workload.reductions:
        held = (workload.replicas[m].position for m in reduction.members)
        devices = sorted({workload.devices[position].device for position in held})
        moved = sum(bucket.bytes for bucket in reduction.buckets)
        planned[f"ranks {devices} summed gradients of"] += moved
    return planned
