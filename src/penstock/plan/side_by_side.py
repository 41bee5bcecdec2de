"""A plan as pipelines side by side: replica r of every stage belongs to pipeline r."""

from penstock.errors import BadInput
from penstock.plan.plan import Plan


def pipelines_in(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline, whose micro-batches then pass no rank of another.

    >>> from penstock.plan.plan import Stage
    >>> stages = Stage(range(1), (0, 1), (2, 2)), Stage(range(1, 2), (2, 3), (2, 2))
    >>> pipelines_in(Plan(stages, 3, 4, "1f1b"))
    ((0, 2), (1, 3))
    """
    first, *others = plan.stages
    if any(stage.in_turn for stage in plan.stages):
        raise BadInput(
            "pipelines that meet divide each micro-batch, and replicas of the plan take whole ones "
            "in turn; give every stage slices instead"
        )
    for number, stage in enumerate(others, 1):
        if stage.slices != first.slices:
            raise BadInput(
                f"the plan is not several pipelines side by side: stage 0 has slices "
                f"{list(first.slices)} and stage {number} {list(stage.slices)}; give all stages "
                f"the same number of replicas and the same slices"
            )
    if first.replicas < 2:
        raise BadInput(
            "the plan is one pipeline, which has no other to meet; give every stage two or more "
            "replicas, or leave meet_every out"
        )
    columns = zip(*plan.device_groups, strict=True)
    return tuple(tuple(r for device in own for r in plan.ranks_of(device)) for own in columns)
