"""Simulate a plan as it is, or with other micro-batches or another schedule."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from penstock.advice.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.advice.explain import Explanation, explain_plan
from penstock.cluster.cluster import Cluster
from penstock.costs.schedule_costs import priced
from penstock.errors import BadInput
from penstock.files import Json
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score, micro_batch_sizes_of
from penstock.planners.bapipe.bapipe import inter_layer_cuts
from penstock.planners.problem import member_named, problem_of_plan
from penstock.planners.tensor_groups import Groups, on_groups
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PlacementStyle, placement_of_style
from penstock.simulate.score import make_score, predict_plan
from penstock.simulate.simulation import Prediction
from penstock.timeline.timeline import Timeline


@dataclass(frozen=True)
class WhatIf:
    """The number of micro-batches (0: as is) and the schedule (empty: as is) to simulate.

    >>> WhatIf(8, "zb-h1").words
    ('8 micro-batches', 'schedule zb-h1')
    """

    micro_batches: int = 0
    schedule: str = ""

    def __post_init__(self) -> None:
        if self.schedule:
            member_named(FAMILIES, self.schedule, "schedule")

    @property
    def words(self) -> tuple[str, ...]:
        """Each change; none for the plan as it is."""
        batches = [f"{self.micro_batches} micro-batches"] if self.micro_batches else []
        return (*batches, *([f"schedule {self.schedule}"] if self.schedule else []))


def changed_plan(problem: PlanningProblem, plan: Plan, changes: WhatIf) -> Plan:
    """The plan after the changes; ``problem`` gives the costs for another schedule's order.

    Micro-batches keep their size, so more of them are a larger batch. Under another schedule the
    plan keeps its layers and devices, and loses its limit of micro-batches in flight. Where that
    schedule has another number of stages on a device, the layers are cut again. Devices that
    recomputed activations then do so in all their stages.
    """
    if changes.micro_batches:
        plan = replace(plan, micro_batches=changes.micro_batches)
    if not changes.schedule or changes.schedule == plan.schedule:
        return plan
    placed = placed_for(problem, plan, changes.schedule)
    return priced(problem, replace(placed, schedule=changes.schedule, in_flight_limit=()))


def placed_for(problem: PlanningProblem, plan: Plan, schedule: str) -> Plan:
    """The plan with the stages per device of ``schedule``; cut again if it had another number."""
    family = FAMILIES[schedule]
    style = family.placement
    groups, stages = len(plan.device_groups), len(plan.stages)
    if family.is_searched:
        return plan
    rounds = 1 if style in ("straight", "mirrored") else max(2, stages // groups)
    rounds = family.rounds or rounds
    needed, layers = rounds * groups, len(problem.profile.layers)
    if needed > layers:
        raise BadInput(
            f"schedule '{schedule}' holds {rounds} stages on each of {groups} devices, which needs "
            f"{needed} layers, and profile '{problem.profile.name}' has {layers}; choose a "
            f"schedule with one stage a device, such as '1f1b'"
        )
    if plan.placement == placement_of_style(style, groups, rounds):
        return plan
    if rounds == 1 and not plan.placement:
        return plan
    recomputing = {stage.devices: (stage.recompute, stage.by_block) for stage in plan.stages}
    cut = recut(problem, plan, style, rounds)
    ways = [recomputing[stage.devices] for stage in cut.stages]
    stages = tuple(
        replace(stage, recompute=whole, by_block=by_block)
        for stage, (whole, by_block) in zip(cut.stages, ways, strict=True)
    )
    return replace(cut, stages=stages)


def in_micro_batches(problem: PlanningProblem, plan: Plan, score: Score) -> Plan:
    """The fastest plan with the stages of ``plan``, each on one device, and some micro-batches."""
    plans: list[Plan] = []
    sizes = micro_batch_sizes_of(plan.global_batch)
    for size in [own for own in sizes if own < plan.global_batch] or sizes:
        stages = tuple(replace(stage, slices=(size,)) for stage in plan.stages)
        for schedule in (plan.schedule,) if plan.placement else ("gpipe", "1f1b"):
            cut = Plan(stages, plan.global_batch // size, size, schedule)
            plans.append(priced(problem, cut))
    return min(plans, key=score)


def recut(problem: PlanningProblem, plan: Plan, style: PlacementStyle, rounds: int) -> Plan:
    """Return the same sets of devices, each with ``rounds`` stages of about equal time."""
    groups = plan.device_groups
    placement = placement_of_style(style, len(groups), rounds)
    slices = {stage.devices: stage.slices for stage in plan.stages}
    speeds = [
        plan.micro_batch_size
        * min(
            problem.cluster.devices[device].speed / rows
            for device, rows in zip(devices, slices[devices], strict=True)
        )
        for devices in groups
    ]
    seconds = [layer.work_s.at(plan.micro_batch_size) for layer in problem.profile.layers]
    shares = [speeds[group] for group in placement]
    cuts = inter_layer_cuts(seconds, shares, range(1, len(seconds)))
    stages = tuple(
        Stage(range(lo, hi), groups[group], slices[groups[group]])
        for (lo, hi), group in zip(pairwise(cuts), placement, strict=True)
    )
    return replace(plan, stages=stages, in_flight_limit=(), costs=(), memory_bytes=())


@dataclass(frozen=True)
class PlayedPlan:
    """A simulated plan with its problem.

    ``repeated`` is the prediction of several iterations in a row, where they are requested.
    ``tensor_groups`` are the ranks of each device, if the plan had groups; the plan has none here.
    """

    problem: PlanningProblem
    planned: PlannedPipeline
    iterations: int = 1
    repeated: Prediction | None = None
    tensor_groups: Groups = ()

    @property
    def timeline(self) -> Timeline:
        """That of all iterations."""
        return (self.repeated or self.planned.prediction).timeline

    @property
    def samples_per_s(self) -> float:
        """Samples of the batch over seconds of the iteration."""
        return self.planned.plan.global_batch / self.planned.prediction.iteration_s

    @property
    def peak_memory_bytes(self) -> float:
        """The highest peak of any device in one iteration."""
        return max(self.planned.prediction.peak_memory_bytes)

    @property
    def too_full(self) -> tuple[int, ...]:
        """The devices with too little memory, for one iteration or for several in a row."""
        several = self.repeated.too_full if self.repeated else ()
        return tuple(sorted({*self.planned.prediction.too_full, *several}))

    @cached_property
    def explanation(self) -> Explanation:
        """The explanation of what limits the plan."""
        return explain_plan(self.planned, self.problem)

    def to_json(self, seconds: float, explained: bool) -> dict[str, Json]:
        """The keys of a plan, and of several iterations; what limits it if ``explained``."""
        values = self.planned.to_json(seconds) | {"fits": not self.too_full}
        if self.tensor_groups:
            values |= {"tensor_groups": [list(group) for group in self.tensor_groups]}
        if self.repeated:
            values |= {
                "iterations": self.iterations,
                "steady_s": self.repeated.steady_s,
            }
        if explained:
            values |= {"explanation": self.explanation.to_json()}
        return values


def play_plan(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    iterations: int = 1,
    memory_reserve: float = 0.0,
    optimizer_state: float = 2.0,
) -> PlayedPlan:
    """Simulate one iteration of a plan on a cluster, and ``iterations`` in a row if more than one.

    The plan fits if it leaves ``memory_reserve`` free, with ``optimizer_state`` bytes for each byte
    of parameters. Its tensor groups are the devices of the result.
    """
    bare = replace(plan, tensor_groups=())
    problem = problem_of_plan(bare, profile, cluster, memory_reserve, optimizer_state)
    baselines = baselines_of(problem, make_score(problem))
    plan, problem = on_groups(plan, problem)
    groups, plan = plan.tensor_groups, replace(plan, tensor_groups=())
    planned = assess_plan(plan, problem, baselines)
    repeated = None
    if iterations > 1:
        repeated = predict_plan(problem, plan, iterations=iterations)
    return PlayedPlan(problem, planned, iterations, repeated, groups)


def play_changed(before: PlayedPlan, changes: WhatIf) -> PlayedPlan:
    """Simulate the same plan with ``changes``."""
    problem = before.problem
    return play_plan(
        changed_plan(problem, before.planned.plan, changes),
        problem.profile,
        problem.cluster,
        before.iterations,
        problem.memory_reserve,
        problem.optimizer_bytes_per_parameter_byte,
    )
