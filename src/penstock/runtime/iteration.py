"""All that is fixed for batches of one size: order, batch cut and messages, computed once.

If batches have variable lengths, their size is the number of samples and the lengths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

import torch

from penstock.capture.batch_part import Leaf, PartialLeaf, sliced
from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import BatchCut, cut_batch, forward_schedule, schedule_of
from penstock.runtime.stages.runner import StageInputs
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    RankMessages,
    messages_between_actions,
    messages_of_rank,
)
from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = [
    "BatchSize",
    "DeviceCopies",
    "Iteration",
    "Place",
    "SizeCache",
    "StageIteration",
    "check_sizes",
    "places_of",
    "prepare_iteration",
    "rows_at",
    "warm_up_of",
]


Made = TypeVar("Made")

BatchSize: TypeAlias = tuple[int, LengthsOf, bool]
"""The number of samples, the lengths, and whether the batch is for training."""

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

    ``rows[m]`` are the rows of the batch that it computes in micro-batch ``m``. ``recomputed`` are
    the micro-batches whose forward runs again before the backward. ``last_backward`` is the
    micro-batch whose backward completes the stage's gradients. ``halved`` are the micro-batches
    with a backward in two halves.
    """

    rows: tuple[range, ...]
    recomputed: frozenset[int]
    last_backward: int
    halved: frozenset[int]


@dataclass(frozen=True)
class Iteration:
    """One rank's work on a batch of a certain size: its actions, and the part of each stage.

    ``warm_up`` are the forwards of all ranks that `warm_up_of` returns.
    """

    cut: BatchCut
    order: tuple[Action, ...]
    messages: RankMessages
    parts: dict[int, StageIteration]
    training: bool
    lengths: LengthsOf = ()
    warm_up: frozenset[Action] = frozenset()

    @property
    def size(self) -> tuple[int, ...]:
        """The number of samples, and the lengths."""
        return (self.cut.micro_batches[-1].stop, *self.lengths)

    def work(
        self,
        stage: int,
        leaves: Sequence[Leaf] | Mapping[int, Leaf],
        batch_inputs: Sequence[int],
        device: "DeviceCopies",
    ) -> StageInputs:
        """The rows that a stage reads of the batch's leaves.

        A replica without rows gets the first rows of the micro-batch, in case it must take part.
        """
        part = self.parts[stage]
        wanted = [leaves[index] for index in batch_inputs]
        rows = zip(part.rows, self.cut.micro_batches, strict=True)
        return StageInputs(
            tuple(tuple(device.rows(leaf, own, whole) for leaf in wanted) for own, whole in rows),
            tuple(len(rows) for rows in part.rows),
            part.recomputed,
            part.last_backward,
            self.training,
            part.halved,
            self.lengths,
        )


class DeviceCopies:
    """The rows of one batch on a rank's device; each slice is copied once for all its stages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[tuple[int, range, range], torch.Tensor] = {}
        self._leaves: dict[int, PartialLeaf] = {}

    def rows(self, leaf: Leaf, own: range, whole: range) -> torch.Tensor:
        """The rows that `sliced` returns, on the device. The leaf must live as long as this."""
        if leaf.device == self._device:
            return sliced(leaf, own, whole)
        if isinstance(leaf, PartialLeaf):
            # It has just the rows that this rank needs.
            if id(leaf) not in self._leaves:
                self._leaves[id(leaf)] = leaf.to(self._device)
            return sliced(self._leaves[id(leaf)], own, whole)
        key = id(leaf), own, whole
        found = self._copies.get(key)
        if found is None:
            rows = sliced(leaf, own, whole)
            # Without a wait only if it comes from pinned memory.
            found = self._copies[key] = rows.to(self._device, non_blocking=True)
        return found


def places_of(plan: Plan, rank: int) -> tuple[Place, ...]:
    """The places of ``rank`` in the plan, in stage order; empty if the plan does not use it."""
    groups = plan.device_groups
    device = plan.device_of(rank)
    if device < 0:
        return ()
    group = next(g for g, devices in enumerate(groups) if device in devices)
    held = plan.shape().stages_of(group)
    return tuple(Place(stage, groups[group].index(device), group) for stage in held)


def prepare_iteration(
    plan: Plan,
    boundaries: Sequence[BoundaryTensors],
    rank: int,
    rows: int,
    training: bool,
    lengths: LengthsOf = (),
) -> Iteration:
    """The work of ``rank`` on a batch of ``rows`` samples with the given lengths.

    Raises:
        BadInput: the plan's schedule is unknown or cannot be run.
    """
    cut = cut_batch(plan, rows)
    micro_batches = len(cut.micro_batches)
    if training:
        schedule, shape = schedule_of(plan, micro_batches)
    else:
        # The plan's training order is not needed: it may take a search, or not fit this batch.
        shape = replace(replace(plan, micro_batches=micro_batches).shape(), recompute=())
        schedule = forward_schedule(shape)
    sized = [boundary.at(lengths) for boundary in boundaries]
    passed = messages_between_actions(plan, sized, schedule, cut)
    places = places_of(plan, rank)
    order = tuple(schedule.of(places[0].group)) if places else ()
    messages = messages_of_rank(rank, schedule, shape, passed, order)
    parts = {place.stage: part_of(place, order, cut, shape) for place in places}
    warm_up = warm_up_of(schedule, shape) if training else frozenset[Action]()
    return Iteration(cut, order, messages, parts, training, lengths, warm_up)


def part_of(
    place: Place, order: Sequence[Action], cut: BatchCut, shape: PipelineShape
) -> StageIteration:
    """What the stage at ``place`` does in the order of its rank."""

    own = [action for action in order if action.stage == place.stage]
    ends = [action.micro_batch for action in own if action.kind in "BW"]
    return StageIteration(
        tuple(rows_at(place, number, cut, shape) for number in range(len(cut.micro_batches))),
        frozenset(action.micro_batch for action in own if action.kind == "R"),
        ends[-1] if ends else -1,
        frozenset(action.micro_batch for action in own if action.kind == "I"),
    )


def rows_at(place: Place, micro_batch: int, cut: BatchCut, shape: PipelineShape) -> range:
    """The rows of the batch that the stage at ``place`` computes of one micro-batch."""
    if shape.group_of(place.stage, micro_batch) != place.group:
        return range(0)
    return cut.rows(micro_batch, place.stage, place.replica)


def warm_up_of(schedule: Schedule, shape: PipelineShape) -> frozenset[Action]:
    """The forwards at the start of every group's order that depend on no other actions.

    They are the first actions of each group, as long as these are forwards of stages before the
    last whose inputs come from such forwards. So all of them can run, and be repeated, before any
    other action has run.

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
    """Keeps what was made for the most recently used sizes, so that memory use is bounded."""

    def __init__(self, kept: int = SIZES_KEPT) -> None:
        self._kept = kept
        self._made: dict[BatchSize, Made] = {}

    def find(self, size: BatchSize, make: Callable[[], Made]) -> Made:
        """What was made for ``size``; calls ``make`` if there is nothing yet."""
        found = self._made.pop(size, None)
        if found is None:
            found = make()
            if len(self._made) >= self._kept:
                del self._made[next(iter(self._made))]
        # A dict keeps the order of insertion: the first key is the least recently used.
        self._made[size] = found
        return found


def check_sizes(sizes_by_rank: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Raise `BadInput` if two ranks have batches of different sizes.

    Each rank gives the sizes called ``names``, for one batch after another.
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
