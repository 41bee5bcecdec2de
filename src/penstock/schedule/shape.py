"""The shape of a pipeline: its stages, their placement, and their costs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from penstock.errors import BadInput
from penstock.schedule.action import ActionKind

ROUNDING = 1 + 1e-9
"""Factor by which a group may exceed its memory: sums of bytes have rounding errors."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one micro-batch on one stage.

    A whole backward B takes ``input_backward_s`` (I) plus ``weight_backward_s`` (W). The forward
    saves ``saved_bytes``, of which ``kept_bytes`` stay between I and W (None: all of them).
    ``transfer_s`` is the time to send the stage's output to the next stage, and also its gradient
    back; on devices that stream, what is left of it after the pass. It counts only if the two
    stages are on different device groups.
    """

    forward_s: float = 1.0
    input_backward_s: float = 1.0
    weight_backward_s: float = 1.0
    transfer_s: float = 0.0
    saved_bytes: float = 1.0
    kept_bytes: float | None = None

    @property
    def backward_s(self) -> float:
        """Seconds of a whole backward."""
        return self.input_backward_s + self.weight_backward_s

    def seconds(self, kind: ActionKind) -> float:
        """Seconds of an action that runs alone on its device."""
        match kind:
            case "F" | "R":
                return self.forward_s
            case "B":
                return self.backward_s
            case "I":
                return self.input_backward_s
            case "W":
                return self.weight_backward_s

    @property
    def bytes_until_weight_backward(self) -> float:
        """Bytes of a micro-batch that stay in memory between I and W."""
        return self.saved_bytes if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True)
class PipelineShape:
    """The input of a schedule function: all that it needs of a pipeline.

    The replicas of a stage run the same order; together they are a *device group*.
    ``placement[stage]`` is the group that holds the stage (empty: group ``s`` holds stage ``s``).
    If ``mirrored``, every stage is held twice. Odd micro-batches pass the groups in the opposite
    direction: for them stage ``s`` is on group ``groups - 1 - placement[s]``.

    ``in_flight_limit[stage]`` is the most micro-batches whose saved activations fit (empty: no
    limit). If ``recompute[stage]``, the stage's forward runs again before its backward.

    ``costs[stage]`` are for schedules that adapt to costs (empty: `StageCost()` for all).
    ``memory_bytes[group]`` is the memory of the group for what its stages save (empty: no limit).
    """

    stages: int
    micro_batches: int
    placement: tuple[int, ...] = ()
    in_flight_limit: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()
    costs: tuple[StageCost, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    mirrored: bool = False

    def __post_init__(self) -> None:
        check_shape(self)

    def __hash__(self) -> int:
        """Computed once: the orders of a shape are looked up for many plans."""
        return self.known_hash

    @cached_property
    def known_hash(self) -> int:
        """The hash of the fields by which shapes differ."""
        numbers = self.stages, self.micro_batches, self.placement, self.in_flight_limit
        return hash((*numbers, self.recompute, self.costs, self.memory_bytes, self.mirrored))

    @cached_property
    def groups(self) -> int:
        """The number of device groups."""
        return max(self.placement) + 1 if self.placement else self.stages

    def group_of(self, stage: int, micro_batch: int = 0) -> int:
        """The device group on which ``stage`` works on ``micro_batch``.

        >>> shape = PipelineShape(stages=4, micro_batches=2, mirrored=True)
        >>> [shape.group_of(stage, micro_batch=1) for stage in range(4)]
        [3, 2, 1, 0]
        """
        group = self.placement[stage] if self.placement else stage
        return self.groups - 1 - group if self.mirrored and micro_batch % 2 else group

    def stages_of(self, group: int) -> tuple[int, ...]:
        """The stages that ``group`` holds, in ascending order.

        >>> PipelineShape(stages=4, micro_batches=1, placement=(0, 1, 1, 0)).stages_of(0)
        (0, 3)
        """
        return tuple(s for s in range(self.stages) if any(way[s] == group for way in self.ways))

    @cached_property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """The device group of every stage: for all micro-batches, or for the even and the odd.

        >>> PipelineShape(stages=3, micro_batches=2, mirrored=True).ways
        ((0, 1, 2), (2, 1, 0))
        """
        directions = (0, 1) if self.mirrored else (0,)
        return tuple(tuple(self.group_of(s, way) for s in range(self.stages)) for way in directions)

    def limit(self, stage: int) -> int:
        """The most micro-batches that may be in flight on ``stage``."""
        return self.in_flight_limit[stage] if self.in_flight_limit else self.micro_batches

    def recomputes(self, stage: int) -> bool:
        """Return whether ``stage`` keeps only its inputs and runs its forward again."""
        return bool(self.recompute) and self.recompute[stage]

    def cost(self, stage: int) -> StageCost:
        """The cost of a micro-batch on ``stage``."""
        return self.costs[stage] if self.costs else ALIKE


ALIKE = StageCost()


def check_shape(shape: PipelineShape) -> None:
    """Raise `BadInput` for a shape that is not possible."""
    if shape.stages < 1 or shape.micro_batches < 1:
        raise BadInput(
            f"a pipeline of {shape.stages} stages and {shape.micro_batches} micro-batches; both "
            f"must be >= 1"
        )
    for name in ("placement", "in_flight_limit", "recompute", "costs"):
        given = len(getattr(shape, name))
        if given not in (0, shape.stages):
            raise BadInput(
                f"{name} has {given} entries for {shape.stages} stages; give one a stage, or none"
            )
    if shape.placement and set(shape.placement) != set(range(shape.groups)):
        raise BadInput(
            f"the stages are on device groups {list(shape.placement)}; number the groups from 0 "
            f"and give each at least one stage"
        )
    if len(shape.memory_bytes) not in (0, shape.groups):
        raise BadInput(
            f"memory_bytes has {len(shape.memory_bytes)} entries for {shape.groups} device "
            f"groups; give one a group, or none"
        )


PlacementStyle: TypeAlias = Literal["straight", "looped", "folded", "mirrored"]
"""straight: one stage a group. looped: round after round in one direction. folded: down the groups
and up again. mirrored: every stage twice, for micro-batches of either direction."""


def looped(groups: int, rounds: int) -> tuple[int, ...]:
    """Round after round from the first group to the last (Megatron-LM, SC 2021, section 2.2).

    >>> looped(groups=3, rounds=2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(groups)) * rounds


def folded(groups: int, rounds: int) -> tuple[int, ...]:
    """Down and up, so that the stages at a turn share a group (Zero Bubble's V; Hanayo's waves).

    >>> folded(groups=3, rounds=2)
    (0, 1, 2, 2, 1, 0)
    >>> folded(groups=2, rounds=3)
    (0, 1, 1, 0, 0, 1)
    """
    there = tuple(range(groups))
    return tuple(g for round_ in range(rounds) for g in (there[::-1] if round_ % 2 else there))


def placement_of_style(style: PlacementStyle, groups: int, rounds: int) -> tuple[int, ...]:
    """The placement of ``groups * rounds`` stages; straight and mirrored ones have one round."""
    match style:
        case "straight" | "mirrored":
            return tuple(range(groups))
        case "looped":
            return looped(groups, rounds)
        case "folded":
            return folded(groups, rounds)
