"""All that is fixed for a batch of a certain size: order, cut and messages, made once.

Where batches have lengths that vary, their size is the number of samples and the lengths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

import torch

from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import BatchCut, cut_batch, forward_schedule, schedule_of
from penstock.runtime.stages.runner import StageInputs
from penstock.runtime.transport.messages import BoundaryTensors, RankMessages, messages_of_rank
from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = [
    "BatchSize",
    "Iteration",
    "Place",
    "SizeCache",
    "StageIteration",
    "check_sizes",
    "places_of",
    "prepare_iteration",
    "warm_up_of",
]


Made = TypeVar("Made")

BatchSize: TypeAlias = tuple[int, LengthsOf, bool]
"""The number of samples, the lengths, and whether it is trained on."""

SIZES_KEPT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank holds: replica ``replica`` of stage ``stage``, on device group ``group``."""

    stage: int
    replica: int
    group: int


@dataclass(frozen=True, slots=True)
class StageIteration:
    """What one stage of a rank does in an iteration.

    ``rows[m]`` are the rows of the batch that it computes of micro-batch ``m``. ``recomputed`` are
    the micro-batches whose forward runs again; ``last_backward`` is the last one that completes
    the stage's gradients; ``halved`` are those whose backward comes in two halves.
    """

    rows: tuple[range, ...]
    recomputed: frozenset[int]
    last_backward: int
    halved: frozenset[int]


@dataclass(frozen=True)
class Iteration:
    """One rank's work on a batch of a certain size: its actions, and each stage's part.

    ``warm_up`` are the forwards of all ranks that `warm_up_of` names.
    """

    cut: BatchCut
    order: tuple[Action, ...]
    messages: RankMessages
    parts: dict[int, StageIteration]
    training: bool
    lengths: LengthsOf = ()
    warm_up: frozenset[Action] = frozenset()

    def work(
        self,
        stage: int,
        leaves: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        batch_inputs: Sequence[int],
        device: torch.device,
    ) -> StageInputs:
        """The rows of the batch's leaves that a stage reads.

        A replica without rows gets the micro-batch's first, in case it must take part anyway.
        """
        part = self.parts[stage]
        wanted = [leaves[index].to(device) for index in batch_inputs]
        bounds = [
            (rows.start, rows.stop) if rows else (whole.start, whole.start + 1)
            for rows, whole in zip(part.rows, self.cut.micro_batches, strict=True)
        ]
        return StageInputs(
            tuple(tuple(leaf[lo:hi] for leaf in wanted) for lo, hi in bounds),
            tuple(len(rows) for rows in part.rows),
            part.recomputed,
            part.last_backward,
            self.training,
            part.halved,
            self.lengths,
        )


def places_of(plan: Plan, rank: int) -> tuple[Place, ...]:
    """Where ``rank`` stands in the plan, upstream first; nowhere if the plan does not use it."""
    groups = plan.device_groups
    group = next((g for g, devices in enumerate(groups) if rank in devices), -1)
    if group < 0:
        return ()
    held = plan.shape().stages_of(group)
    return tuple(Place(stage, groups[group].index(rank), group) for stage in held)


def prepare_iteration(
    plan: Plan,
    boundaries: Sequence[BoundaryTensors],
    rank: int,
    rows: int,
    training: bool,
    lengths: LengthsOf = (),
) -> Iteration:
    """The work of ``rank`` on a batch of ``rows`` samples and certain lengths.

    Raises:
        BadInput: the plan's schedule is unknown or cannot be played.
    """
    cut = cut_batch(plan, rows)
    micro_batches = len(cut.micro_batches)
    if training:
        schedule, shape = schedule_of(plan, micro_batches)
    else:
        # The plan's own order is not made: it may take a search, or not fit another batch.
        shape = replace(replace(plan, micro_batches=micro_batches).shape(), recompute=())
        schedule = forward_schedule(shape)
    sized = [boundary.at(lengths) for boundary in boundaries]
    messages = messages_of_rank(rank, plan, sized, schedule, shape, cut)
    places = places_of(plan, rank)
    order = tuple(schedule.of(places[0].group)) if places else ()
    parts = {place.stage: part_of(place, order, cut, shape) for place in places}
    warm_up = warm_up_of(schedule, shape) if training else frozenset[Action]()
    return Iteration(cut, order, messages, parts, training, lengths, warm_up)


def part_of(
    place: Place, order: Sequence[Action], cut: BatchCut, shape: PipelineShape
) -> StageIteration:
    """What the stage at ``place`` does in its rank's order."""

    def rows(micro_batch: int) -> range:
        if shape.group_of(place.stage, micro_batch) != place.group:
            return range(0)
        return cut.rows(micro_batch, place.stage, place.replica)

    own = [action for action in order if action.stage == place.stage]
    ends = [action.micro_batch for action in own if action.kind in "BW"]
    return StageIteration(
        tuple(map(rows, range(len(cut.micro_batches)))),
        frozenset(action.micro_batch for action in own if action.kind == "R"),
        ends[-1] if ends else -1,
        frozenset(action.micro_batch for action in own if action.kind == "I"),
    )


def warm_up_of(schedule: Schedule, shape: PipelineShape) -> frozenset[Action]:
    """The forwards that every group starts with and that need nothing else, but for the loss.

    Of each group the first actions of its order, as far as they are forwards of stages before the
    last whose own inputs come from such forwards: all of them can run, and be run again, before
    any other action has.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=3, micro_batches=4)
    >>> sorted(map(str, warm_up_of(one_f_one_b(shape), shape)))
    ['0F0', '0F1', '0F2', '1F0', '1F1']
    """
    found = set[Action]()
    ends = [0] * len(schedule.orders)
    before = -1
    while len(found) != before:
        before = len(found)
        for group, order in enumerate(schedule.orders):
            for action in order[ends[group] :]:
                last = action.kind != "F" or action.stage == shape.stages - 1
                if last or not found.issuperset(predecessors(action, shape)):
                    break
                found.add(action)
                ends[group] += 1
    return frozenset(found)


class SizeCache(Generic[Made]):
    """The things made for the sizes used last, so that lengths without end fill no memory."""

    def __init__(self, kept: int = SIZES_KEPT) -> None:
        self._kept = kept
        self._made: dict[BatchSize, Made] = {}

    def find(self, size: BatchSize, make: Callable[[], Made]) -> Made:
        """What was made for ``size``, or what ``make`` makes now."""
        found = self._made.pop(size, None)
        if found is None:
            found = make()
            if len(self._made) >= self._kept:
                del self._made[next(iter(self._made))]
        # A dict keeps the order in which keys were put in: the first is the one not used longest.
        self._made[size] = found
        return found


def check_sizes(sizes_by_rank: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Raise `BadInput` where two ranks have batches of different sizes.

    Each rank gives the sizes with these ``names``, for one batch after another.
    """
    first = sizes_by_rank[0]
    for rank, sizes in enumerate(sizes_by_rank):
        for place, (own, expected) in enumerate(zip(sizes, first, strict=True)):
            if own != expected:
                raise BadInput(
                    f"the ranks were given different batches: {names[place % len(names)]} is "
                    f"{own:g} on rank {rank} and {expected:g} on rank 0; give every rank the same "
                    "batches in the same order"
                )
