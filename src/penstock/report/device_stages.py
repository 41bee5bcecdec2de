"""Which stages each device of a plan holds, and their names in words."""

from collections import defaultdict
from collections.abc import Sequence

from penstock.plan.plan import Plan

__all__ = ["stage_names", "stages_by_device", "stages_by_rank"]


def stages_by_device(plan: Plan) -> dict[int, tuple[int, ...]]:
    """For each device in use the stages that it holds, including copies in a mirrored schedule.

    >>> from penstock.plan.plan import Stage
    >>> stages = tuple(Stage(range(s, s + 1), (s % 2,), (1,)) for s in range(4))
    >>> stages_by_device(Plan(stages, 2, 1, "interleaved"))
    {0: (0, 2), 1: (1, 3)}
    """
    held: dict[int, list[int]] = defaultdict(list)
    for stage in range(len(plan.stages)):
        for device in plan.devices_of(stage):
            held[device].append(stage)
    return {device: tuple(held[device]) for device in plan.devices}


def stages_by_rank(plan: Plan) -> dict[int, tuple[int, ...]]:
    """The same for each rank in use; the ranks of a tensor group hold parts of the same stages.

    >>> from penstock.plan.plan import Stage
    >>> stages = Stage(range(2), (0,), (1,)), Stage(range(2, 3), (1,), (1,))
    >>> stages_by_rank(Plan(stages, 2, 1, "1f1b", tensor_groups=((0, 1), (2,))))
    {0: (0,), 1: (0,), 2: (1,)}
    """
    held = stages_by_device(plan)
    return {rank: held[plan.device_of(rank)] for rank in plan.ranks}


def stage_names(stages: Sequence[int], most: int = 14) -> str:
    """Some stages in words of at most ``most`` characters.

    >>> stage_names((3,)), stage_names((0, 4, 8)), stage_names((0, 64, 128, 192))
    ('stage 3', 'stages 0, 4, 8', '4 stages')
    """
    if len(stages) <= 1:
        return f"stage {stages[0]}" if stages else ""
    words = f"stages {', '.join(map(str, stages))}"
    return words if len(words) <= most else f"{len(stages)} stages"
