"""Whether a schedule can be played: complete, in place, free of deadlock, within its limits."""

from collections import deque
from collections.abc import Iterator

from penstock.errors import BadInput
from penstock.schedule.action import Action, ActionKind
from penstock.schedule.dependencies import predecessors
from penstock.schedule.schedule import PipelineShape, Schedule

__all__ = ["in_flight_peaks", "validate"]

ONCE: tuple[ActionKind, ...] = ("F", "B", "I", "W")
WHOLE: frozenset[ActionKind] = frozenset({"F", "B"})
SPLIT: frozenset[ActionKind] = frozenset({"F", "I", "W"})


def validate(schedule: Schedule, shape: PipelineShape) -> None:
    """Return if every rank can play ``schedule`` to its end; explain the first violation else.

    Checked are: each stage's work is on its device group, every micro-batch passes every stage
    forward and backward once, recomputes stand where they are needed, no action waits in a
    circle, and no stage holds more micro-batches than its limit.

    Raises:
        BadInput: the first violation, with the cycle where actions wait for one another.
    """
    check_places(schedule, shape)
    check_complete(schedule, shape)
    check_deadlock_free(schedule, shape)
    for stage, peak in enumerate(in_flight_peaks(schedule, shape)):
        if peak > shape.limit(stage):
            raise BadInput(
                f"stage {stage} holds {peak} micro-batches in flight, its limit is "
                f"{shape.limit(stage)}; use a schedule with fewer warm-up forwards or recompute"
            )


def check_places(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless every action names a stage of its group and a micro-batch, once."""
    if len(schedule.orders) != shape.groups:
        raise BadInput(
            f"the schedule orders {len(schedule.orders)} device groups, the pipeline has "
            f"{shape.groups}; give one order for each"
        )
    for group, order in enumerate(schedule.orders):
        seen: set[Action] = set()
        for action in order:
            if not (
                0 <= action.stage < shape.stages and 0 <= action.micro_batch < shape.micro_batches
            ):
                raise BadInput(
                    f"action {action} of group {group} is outside {shape.stages} stages and "
                    f"{shape.micro_batches} micro-batches; both are numbered from 0"
                )
            if shape.group_of(action.stage) != group:
                raise BadInput(
                    f"action {action} stands in the order of group {group}, but stage "
                    f"{action.stage} is on group {shape.group_of(action.stage)}; move it there"
                )
            if action in seen:
                raise BadInput(
                    f"action {action} stands twice in the order of group {group}; once is allowed"
                )
            seen.add(action)


def check_complete(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless every stage has each micro-batch's forward, backward and needed recompute."""
    present = {action for order in schedule.orders for action in order}
    for stage in range(shape.stages):
        for m in range(shape.micro_batches):
            kinds = frozenset(kind for kind in ONCE if Action(kind, stage, m) in present)
            if kinds not in (WHOLE, SPLIT):
                raise BadInput(
                    f"stage {stage}, micro-batch {m} has the actions "
                    f"{' '.join(sorted(kinds)) or 'none'}; it needs F and either B or both I and W"
                )
    needed = {action for order in schedule.orders for action in needed_recomputes(order, shape)}
    recomputes = {action for action in present if action.kind == "R"}
    for action in sorted(needed - recomputes):
        raise BadInput(
            f"stage {action.stage} recomputes, but {action} is missing before the backward of "
            f"micro-batch {action.micro_batch}; insert it"
        )
    for action in sorted(recomputes - needed):
        raise BadInput(
            f"{action} is not needed: stage {action.stage} "
            + ("has only just run its forward" if shape.recomputes(action.stage) else "keeps all")
            + "; leave it out"
        )


def needed_recomputes(order: tuple[Action, ...], shape: PipelineShape) -> Iterator[Action]:
    """The R actions of one order: for each backward that its forward does not directly precede."""
    without = [action for action in order if action.kind != "R"]
    for before, action in zip([None, *without], without, strict=False):
        if action.kind in "BI" and shape.recomputes(action.stage):
            forward = Action("F", action.stage, action.micro_batch)
            if before != forward:
                yield Action("R", action.stage, action.micro_batch)


def check_deadlock_free(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless the orders and the dependencies together have no cycle (Kahn's algorithm)."""
    waits_for = wait_graph(schedule, shape)
    followers: dict[Action, list[Action]] = {action: [] for action in waits_for}
    for action, before in waits_for.items():
        for earlier in before:
            followers[earlier].append(action)
    missing = {action: len(before) for action, before in waits_for.items()}
    ready = deque(action for action, count in missing.items() if count == 0)
    while ready:
        done = ready.popleft()
        del missing[done]
        for follower in followers[done]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    if missing:
        stuck = {action: [w for w in waits_for[action] if w in missing] for action in missing}
        raise BadInput(
            f"the schedule deadlocks: {describe_cycle(cycle_of(stuck))}; reorder these actions "
            f"(warm-up depths must not grow from one stage to the next)"
        )


def wait_graph(schedule: Schedule, shape: PipelineShape) -> dict[Action, list[Action]]:
    """For each action those it waits for: the one before it in its order, and its dependencies."""
    present = {action for order in schedule.orders for action in order}
    graph: dict[Action, list[Action]] = {}
    for order in schedule.orders:
        for position, action in enumerate(order):
            before = [a for a in predecessors(action, shape) if a in present]
            graph[action] = [*order[position - 1 : position], *before] if position else before
    return graph


def cycle_of(stuck: dict[Action, list[Action]]) -> list[Action]:
    """A cycle in a graph whose every node waits for another node of it; its least action first."""
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(stuck[path[-1]][-1])
    cycle = path[path.index(path[-1]) : -1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def describe_cycle(cycle: list[Action]) -> str:
    """The cycle as a sentence that starts and ends at the same action."""
    return " waits for ".join(str(action) for action in [*cycle, cycle[0]])


def in_flight_peaks(schedule: Schedule, shape: PipelineShape) -> tuple[int, ...]:
    """For each stage the most micro-batches between forward and the end of backward (B or W).

    >>> from penstock.schedule.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=3, micro_batches=8)
    >>> in_flight_peaks(one_f_one_b(shape), shape)
    (3, 2, 1)
    """
    held = [0] * shape.stages
    peaks = [0] * shape.stages
    for order in schedule.orders:
        for action in order:
            match action.kind:
                case "F":
                    held[action.stage] += 1
                    peaks[action.stage] = max(peaks[action.stage], held[action.stage])
                case "B" | "W":
                    held[action.stage] -= 1
                case "I" | "R":
                    pass
    return tuple(peaks)
