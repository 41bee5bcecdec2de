"""The shape of pipeline that orders are made for: stages, where they are, what they cost."""

from dataclasses import dataclass
from functools import cached_property

from penstock.errors import BadInput
from penstock.schedule.action import ActionKind

__all__ = ["ROUNDING", "PipelineShape", "StageCost"]

ROUNDING = 1 + 1e-9
"""How much more than its memory a group may save: sums of bytes are sums of rounded figures."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one micro-batch costs on one stage.

    ``input_backward_s`` and ``weight_backward_s`` are the seconds of the two halves of the
    backward, I and W; a whole backward B takes both. ``saved_bytes`` are kept from the forward on,
    of which ``kept_bytes`` stay between I and W (none given: all of them).
    ``transfer_s`` is how long the stage's output travels to the next stage, and its gradient back;
    it counts only where the two are on different device groups.
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
        """Seconds of an action that has its device to itself."""
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
        """What of a micro-batch stays in memory between I and W."""
        return self.saved_bytes if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True)
class PipelineShape:
    """All that a schedule function needs to know of a pipeline.

    The replicas of a stage play the same order side by side: together they are a *device group*.
    ``placement[stage]`` is the group that holds the stage (empty: group ``s`` holds stage ``s``).
    With ``mirrored`` every stage is held twice: micro-batches of odd number pass the groups the
    other way round, so that stage ``s`` works for them on group ``groups - 1 - placement[s]``.

    ``in_flight_limit[stage]`` is the most micro-batches whose saved activations fit (empty: no
    limit). ``recompute[stage]`` says that the stage's forward runs again before its backward.

    ``costs[stage]`` are for orders that adapt to them (empty: `StageCost()`, all alike), and
    ``memory_bytes[group]`` is what the group has left for what its stages save (empty: no limit).

    Raises:
        BadInput: a field has another length than there are stages or groups, or a group no stage.
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
        """The stages that ``group`` holds, upstream first.

        >>> PipelineShape(stages=4, micro_batches=1, placement=(0, 1, 1, 0)).stages_of(0)
        (0, 3)
        """
        ways = (0, 1) if self.mirrored else (0,)
        return tuple(
            s for s in range(self.stages) if any(self.group_of(s, way) == group for way in ways)
        )

    def limit(self, stage: int) -> int:
        """The most micro-batches that may be in flight on ``stage``."""
        return self.in_flight_limit[stage] if self.in_flight_limit else self.micro_batches

    def recomputes(self, stage: int) -> bool:
        """Whether ``stage`` keeps only its inputs and runs its forward again."""
        return bool(self.recompute) and self.recompute[stage]

    def cost(self, stage: int) -> StageCost:
        """What a micro-batch costs on ``stage``."""
        return self.costs[stage] if self.costs else ALIKE


ALIKE = StageCost()


def check_shape(shape: PipelineShape) -> None:
    """Raise `BadInput` for a shape that no pipeline has."""
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
