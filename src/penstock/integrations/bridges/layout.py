"""A plan in the terms of other frameworks: stages on pipeline ranks, the same in each replica.

Other frameworks build one pipeline and run copies of it for data parallelism. So all stages of a
plan that is written or read have the same number of replicas.
"""

from dataclasses import dataclass

from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import looped

MOST_DEVICES = 65_536
"""The most devices of a plan that is read."""


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Stages as runs of layers, on the ranks of a pipeline that is copied ``replicas`` times.

    ``ranks[stage]`` is the pipeline rank of a stage. Each replica computes ``rows`` samples of each
    of ``micro_batches`` micro-batches. Each pipeline rank is a tensor group of ``group_size``.
    0 and "" mean that a layout does not say it.
    """

    stages: tuple[range, ...]
    ranks: tuple[int, ...]
    replicas: int = 0
    micro_batches: int = 0
    rows: int = 0
    schedule: str = ""
    group_size: int = 1

    @property
    def pipeline_size(self) -> int:
        return max(self.ranks) + 1

    @property
    def is_looped(self) -> bool:
        """Return whether stages go round after round from the first rank to the last."""
        rounds, rest = divmod(len(self.ranks), self.pipeline_size)
        return not rest and self.ranks == looped(self.pipeline_size, rounds)


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """The user's settings for a layout that is read; None and "" where none is given.

    ``batch`` is the global batch and ``micro_batch`` the samples of a micro-batch over all
    replicas, both as in a plan. They replace the layout's own.
    """

    batch: int | None = None
    micro_batch: int | None = None
    schedule: str = ""
    ranks: int | None = None
    replicas: int | None = None


def layout_of_plan(plan: Plan, target: str) -> PipelineLayout:
    """The layout of a plan for the framework ``target``."""
    # No other framework has replicas that differ, stages that are held twice, or no flush.
    order_of(plan)
    family, first = FAMILIES[plan.schedule], plan.stages[0]
    if plan.mirrored:
        raise BadInput(
            f"schedule '{plan.schedule}' holds every stage on two devices, which {target} cannot "
            f"express; plan with another, such as --schedule zb-v"
        )
    if not family.flushes:
        raise BadInput(
            f"schedule '{plan.schedule}' trains without a flush, which {target} cannot express; "
            f"plan with one that flushes, such as --schedule 1f1b"
        )
    for index, stage in enumerate(plan.stages):
        if stage.replicas != first.replicas:
            raise BadInput(
                f"stages 0 and {index} have {first.replicas} and {stage.replicas} replicas; "
                f"{target} runs copies of the whole pipeline; plan with --planner gpipe, which "
                f"makes no replicas, or train this plan with 'penstock train'"
            )
        if len(set(stage.slices)) > 1:
            raise BadInput(
                f"the replicas of stage {index} take {list(stage.slices)} rows of a micro-batch; "
                f"{target} gives as many to each; make them equal, or train this plan with "
                f"'penstock train'"
            )
    sizes = sorted({len(plan.ranks_of(device)) for device in plan.devices})
    if len(sizes) > 1:
        raise BadInput(
            f"the plan has tensor groups of {sizes} ranks; {target} has groups of one size; plan "
            f"with devices of one size, or train this plan with 'penstock train'"
        )
    return PipelineLayout(
        stages=tuple(stage.layers for stage in plan.stages),
        ranks=plan.placement or tuple(range(len(plan.stages))),
        replicas=first.replicas,
        micro_batches=plan.micro_batches,
        rows=first.slices[0],
        schedule=plan.schedule,
        group_size=sizes[0],
    )


def plan_of_layout(layout: PipelineLayout, options: LayoutOptions) -> Plan:
    """The plan of a layout, completed and changed by the user's settings.

    Devices are numbered as the frameworks number ranks: the replicas of a pipeline rank follow one
    another. Without a schedule, the plan has 1F1B, or its interleaved form for stages that go
    round after round.
    """
    replicas = options.replicas or layout.replicas or 1
    micro_batches, size = micro_batches_of(layout, options, replicas)
    if size % replicas:
        raise BadInput(
            f"a micro-batch of {size} samples cannot be divided among {replicas} replicas; give "
            f"a multiple of {replicas} with --micro-batch"
        )
    if replicas * layout.pipeline_size > MOST_DEVICES:
        raise BadInput(
            f"{replicas} copies of a pipeline of {layout.pipeline_size} ranks are more than "
            f"{MOST_DEVICES} devices; give fewer with --replicas"
        )
    devices = [tuple(range(r * replicas, (r + 1) * replicas)) for r in range(layout.pipeline_size)]
    plan = Plan(
        stages=tuple(
            Stage(layers, devices[rank], (size // replicas,) * replicas)
            for layers, rank in zip(layout.stages, layout.ranks, strict=True)
        ),
        micro_batches=micro_batches,
        micro_batch_size=size,
        schedule=options.schedule or layout.schedule or usual_schedule(layout),
    )
    order_of(plan)
    return plan


def micro_batches_of(
    layout: PipelineLayout, options: LayoutOptions, replicas: int
) -> tuple[int, int]:
    """The number of micro-batches, and the samples of one over all replicas."""
    size = options.micro_batch or layout.rows * replicas
    batch, many = options.batch or 0, layout.micro_batches
    if not size and batch and many and not batch % many:
        size = batch // many
    if not size or not (batch or many):
        raise BadInput(
            "the layout does not say how many micro-batches there are, and of how many samples; "
            "give --batch, the samples of an iteration, and --micro-batch"
        )
    if batch % size:
        raise BadInput(
            f"a batch of {batch} samples is no multiple of the micro-batch of {size}; change "
            f"--batch or --micro-batch"
        )
    return (batch // size if batch else many), size


def usual_schedule(layout: PipelineLayout) -> str:
    """The schedule that the frameworks run on these ranks by default."""
    if not layout.is_looped:
        raise BadInput(
            f"the layout does not name its schedule, and its stages are on ranks "
            f"{list(layout.ranks)}; name one with --schedule, such as zb-v"
        )
    return "1f1b" if len(layout.stages) == layout.pipeline_size else "interleaved"
