"""Times of the actions of a concurrent schedule, with two actions sharing a device.

BaPipe (arXiv 2012.12544, FBP-AS) gives a forward and a backward that run at once compute units in
proportion to their work. For a stage whose passes take ``F`` and ``B`` seconds, the forward runs at
the rate ``F / (F + B)`` and the backward at ``B / (F + B)``. One that is alone has the whole
device.
"""

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.order import Order
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, StageCost

Span = tuple[float, float]


@dataclass(slots=True)
class GroupStream:
    """The forwards of a group, or all its other actions.

    Action ``i`` starts after ``after[i]`` actions of the other stream have ended. While an action
    runs, ``left`` is the fraction of it that was still to do at ``since_s``.
    """

    actions: list[Action] = field(default_factory=list[Action])
    after: list[int] = field(default_factory=list[int])
    ended: int = 0
    runs: bool = False
    start_s: float = 0.0
    left: float = 0.0
    since_s: float = 0.0
    end_s: float = 0.0

    @property
    def action(self) -> Action:
        """The action that runs, or else the next one."""
        return self.actions[self.ended]


class ConcurrentIteration:
    """One iteration; stream ``2 g`` is the forwards of group ``g``, ``2 g + 1`` all its others."""

    def __init__(self, schedule: Schedule, shape: PipelineShape) -> None:
        self.shape = shape
        self.costs = [shape.cost(stage) for stage in range(shape.stages)]
        self.streams = [stream for order in schedule.orders for stream in two_streams(order)]
        self.present = {action for order in schedule.orders for action in order}
        self.spans: dict[Action, Span] = {}
        self.arriving: dict[Action, list[int]] = {}
        self.heap: list[tuple[float, int]] = []
        self.now_s = 0.0

    def run(self) -> dict[Action, Span]:
        """Play until nothing more can start."""
        for number in range(len(self.streams)):
            self.start_if_ready(number)
        while self.heap:
            self.now_s, number = heappop(self.heap)
            stream = self.streams[number]
            if stream.runs and stream.end_s == self.now_s:
                self.end(number)
            self.start_if_ready(number)
        return self.spans

    def start_if_ready(self, number: int) -> None:
        """Start the next action of an idle stream if everything that it waits for has ended."""
        stream, other = self.streams[number], self.streams[number ^ 1]
        if stream.runs or stream.ended == len(stream.actions):
            return
        if other.ended < stream.after[stream.ended]:
            return
        ready_s = 0.0
        for before in predecessors(stream.action, self.shape):
            if before in self.present:
                if before not in self.spans:
                    self.arriving.setdefault(before, []).append(number)
                    return
                ready_s = max(
                    ready_s, self.spans[before][1] + self.transfer_s(before, stream.action)
                )
        if ready_s > self.now_s:
            heappush(self.heap, (ready_s, number))
            return
        stream.start_s = self.now_s
        self.share(number, begins=True)

    def end(self, number: int) -> None:
        """End the running action of a stream, and start what waited for it."""
        stream = self.streams[number]
        self.share(number, begins=False)
        action = stream.action
        self.spans[action] = (stream.start_s, self.now_s)
        stream.ended += 1
        for waiting in (*self.arriving.pop(action, ()), number & ~1, number | 1):
            self.start_if_ready(waiting)

    def share(self, number: int, *, begins: bool) -> None:
        """Begin or end an action, and update when the group's running actions will end."""
        stream, other = self.streams[number], self.streams[number ^ 1]
        if other.runs:
            whole_s = self.seconds(number ^ 1)
            other.left -= (self.now_s - other.since_s) / whole_s if whole_s else 0.0
            other.since_s = self.now_s
        stream.runs, stream.left, stream.since_s = begins, 1.0, self.now_s
        for each in (number & ~1, number | 1):
            if self.streams[each].runs:
                self.streams[each].end_s = self.now_s + self.streams[each].left * self.seconds(each)
                heappush(self.heap, (self.streams[each].end_s, each))

    def seconds(self, number: int) -> float:
        """Seconds of a stream's whole action at its present share of the device."""
        stream, other = self.streams[number], self.streams[number ^ 1]
        cost = self.costs[stream.action.stage]
        alone_s, claim_s = cost.seconds(stream.action.kind), claim_of(stream.action, cost)
        if not other.runs or claim_s == 0:
            return alone_s
        claims_s = claim_s + claim_of(other.action, self.costs[other.action.stage])
        return alone_s / claim_s * claims_s

    def transfer_s(self, before: Action, after: Action) -> float:
        """Seconds of the transfer between two actions; zero within a group."""
        groups = {self.shape.group_of(each.stage, each.micro_batch) for each in (before, after)}
        first = min(before.stage, after.stage)
        return self.costs[first].transfer_s if len(groups) > 1 else 0.0


def two_streams(order: Order) -> tuple[GroupStream, GroupStream]:
    """A group's forwards and its other actions; a forward waits for those that precede it."""
    forwards, others = GroupStream(), GroupStream()
    for action in order:
        stream = forwards if action.kind == "F" else others
        stream.after.append(len(others.actions) if action.kind == "F" else 0)
        stream.actions.append(action)
    return forwards, others


def claim_of(action: Action, cost: StageCost) -> float:
    """The weight of an action in sharing the device: seconds of a forward or a whole backward."""
    return cost.forward_s if action.kind in ("F", "R") else cost.backward_s


def one_at_a_time(schedule: Schedule, shape: PipelineShape) -> Schedule:
    """Each group's actions in the order in which the concurrent clock starts them.

    A schedule that is not concurrent is returned as it is.

    >>> from penstock.schedule.families.bapipe_orders import fbp_as
    >>> from penstock.schedule.shape import StageCost
    >>> slow, quick = StageCost(2.0, 2.0, 2.0), StageCost(1.0, 1.0, 1.0)
    >>> shape = PipelineShape(stages=2, micro_batches=4, costs=(slow, quick))
    >>> print(fbp_as(shape))
    stage 0   F0 F1 F2 F3 B0 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    >>> print(one_at_a_time(fbp_as(shape), shape))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

    The result cannot deadlock: no dependency points back in time, and actions that start at the
    same moment keep the order of ``schedule``. A forward still follows all that preceded it, so no
    more micro-batches are in flight. Forwards and backwards each keep their order, so messages are
    received in the order in which they are sent. R is inserted again, right before its backward.
    """
    if not schedule.concurrent:
        return schedule
    # R belongs to its backward; the clock need not see it.
    bare = tuple(Order([a for a in order if a.kind != "R"]) for order in schedule.orders)
    plain = ConcurrentIteration(replace(schedule, orders=bare), replace(shape, recompute=()))
    spans = plain.run()
    orders: list[Order] = []
    for order in bare:
        # The sort is stable.
        actions = sorted(order, key=lambda action: spans[action][0])
        orders.append(with_recomputes(Order(actions), shape))
    return replace(schedule, orders=tuple(orders), concurrent=False)
