"""Makes a planning problem from the names and sizes that people give."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TypeVar

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.ordering import NOT_AS_SIMULATED, schedule_refusal
from penstock.plan.pins import read_pin
from penstock.plan.plan import Plan
from penstock.plan.problem import (
    AS_FAST,
    MEMORY_RESERVE,
    BlockChoice,
    PlanningProblem,
    RecomputeChoice,
    RecomputeOption,
    ShardingChoice,
    StateChoice,
    micro_batch_sizes_of,
)
from penstock.planners.pinned import check_pins
from penstock.planners.registry import OWN_SCHEDULES
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.simulate.simulation import check_plan_fits_inputs

Value = TypeVar("Value")

AUTO, ANY, WHOLE = "auto", "any", "whole-backwards"
"""Names that represent schedules: those that a planner chooses among by itself, all synchronous
ones, and those that the runtime carries out and that never split a backward."""

RECOMPUTE: dict[RecomputeOption, tuple[RecomputeChoice, BlockChoice]] = {
    "auto": ("auto", "allowed"),
    "stage": ("auto", "no"),
    "on": ("on", "no"),
    "blocks": ("off", "always"),
    "off": ("off", "no"),
}

SETS = (AUTO, ANY, WHOLE)
"""Names that represent several schedules."""


def member_named(registry: Mapping[str, Value], name: str, thing: str) -> Value:
    """The member of a registry that has a name.

    >>> member_named({"1f1b": 1, "gpipe": 2}, "gpipe", "schedule")
    2
    """
    if name not in registry and thing == "planner":
        from penstock.planners.plugins import add_installed

        add_installed()
    if name in registry:
        return registry[name]
    near = get_close_matches(name.lower(), registry, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "use one that 'penstock list' names"
    raise BadInput(f"{thing} '{name}' is unknown; {hint}")


def planning_problem(
    profile: ModelProfile,
    cluster: Cluster,
    batch: int,
    *,
    micro_batch_size: int = 0,
    micro_batch_sizes: Sequence[int] = (),
    planner: str = "",
    schedule: str = "auto",
    recompute: RecomputeOption = "auto",
    sharding: ShardingChoice = "auto",
    state_on: StateChoice = "device",
    kept_on_device: float = 0.0,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    max_stages: int = 0,
    memory_reserve: float = MEMORY_RESERVE,
    as_fast: float = AS_FAST,
    pins: Sequence[str] = (),
) -> PlanningProblem:
    """The problem for a planner.

    ``micro_batch_size`` 0 tries all ``micro_batch_sizes``, or every divisor of the batch.

    ``recompute``: "auto" lets stages recompute as a whole or by block, "stage" only as a whole.
    With "on" all stages recompute as a whole, with "blocks" by block, with "off" none does.
    ``sharding``: what the devices of a stage may divide, as `penstock.costs.sharding` explains;
    with "optimizer" or "parameters" those of all stages do. Of its own accord only `search`
    divides. ``state_on`` is where the optimizer's state is, but for ``kept_on_device`` (see
    `PlanningProblem`). `schedules_named` explains ``schedule``. ``planner`` counts for schedule
    "auto" only: `search` chooses among more than the others. ``max_stages`` 0 allows any number of
    stages. ``memory_reserve`` is the share of each device's memory that plans leave free. `search`
    returns the simplest of the plans that are slower than the fastest by at most the share
    ``as_fast``. ``pins`` are parts of the plan to keep, as `penstock.plan.pins.read_pin` reads
    them.
    """
    schedules = schedules_named(
        schedule, planner, norms=profile.has_norms, whole_loss=profile.whole_loss
    )
    sizes = tuple(micro_batch_sizes) or micro_batch_sizes_of(batch)
    sizes = (micro_batch_size,) if micro_batch_size else sizes
    whole, blocks = RECOMPUTE[recompute]
    problem = PlanningProblem(
        profile=profile,
        cluster=cluster,
        global_batch=batch,
        micro_batch_sizes=sizes,
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        recompute=whole,
        blocks=blocks,
        sharding=sharding,
        state_on=state_on,
        kept_on_device=kept_on_device,
        schedules=schedules,
        max_stages=max_stages,
        memory_reserve=memory_reserve,
        as_fast=as_fast,
    )
    return with_pins(problem, pins)


def with_pins(problem: PlanningProblem, texts: Sequence[str]) -> PlanningProblem:
    """The problem whose plans keep the pins that ``texts`` say."""
    if not texts:
        return problem
    pins = tuple(read_pin(text, problem.profile, problem.cluster) for text in texts)
    sizes = {pin.micro_batch_size for pin in pins if pin.micro_batch_size}
    for size in sizes - set(problem.micro_batch_sizes):
        raise BadInput(
            f"pin 'micro-batch: {size}' is none of the sizes that the problem allows, "
            f"{list(problem.micro_batch_sizes[::-1][:12])}; name one of these"
        )
    pinned = replace(problem, pins=pins)
    check_pins(pinned)
    return replace(pinned, micro_batch_sizes=tuple(sizes)) if sizes else pinned


def schedules_named(
    schedule: str, planner: str = "", *, norms: bool = False, whole_loss: bool = False
) -> tuple[str, ...]:
    """The schedules that a plan of ``planner`` may use where ``schedule`` is requested.

    ``norms``: the model has batch normalisation, with which the runtime carries out fewer; so it
    does with a ``whole_loss``, one of all samples of a step at once.

    ``schedule`` is one name, or several with commas between them. Three names represent several:

    - "auto": those that the planner chooses among by itself. `search` uses all that the runtime
      carries out and that give the gradients of one device. Any other planner uses those of its
      paper that the runtime carries out, or `PlanningProblem.schedules`.
    - "whole-backwards": those of `search` that never split a backward.
    - "any": all that give the gradients of one device.
    """
    found: list[str] = []
    for name in (part.strip() for part in schedule.split(",")):
        if name == AUTO and planner != "search":
            own = OWN_SCHEDULES.get(planner, PlanningProblem.schedules)
            run = [one for one in own if not schedule_refusal(one, whole_loss=whole_loss)]
            found += run or ["gpipe"]
        elif name in SETS:
            every = (*PlanningProblem.schedules, *synchronous_schedules())
            met = {"norms": norms, "whole_loss": whole_loss}
            refused = {one for one in every if schedule_refusal(one, **met)}
            left_out = {*refused, *NOT_AS_SIMULATED} if name != ANY else frozenset[str]()
            run = [one for one in every if one not in left_out]
            found += [one for one in run if name != WHOLE or not FAMILIES[one].splits]
        else:
            check_schedule(name)
            found.append(name)
    return tuple(dict.fromkeys(found))


def check_schedule(name: str) -> None:
    """Raise `BadInput` unless a schedule, or one of `SETS`, has the name."""
    # Called first, so that schedules of other packages are found.
    if name not in FAMILIES:
        member_named(dict.fromkeys((*SETS, *FAMILIES)), name, "schedule")


def synchronous_schedules() -> tuple[str, ...]:
    """Every schedule that flushes before it updates weights."""
    return tuple(n for n, family in FAMILIES.items() if family.flushes)


def problem_of_plan(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory_reserve: float = 0.0,
    optimizer_state: float = 2.0,
) -> PlanningProblem:
    """The problem that ``plan`` solves: any micro-batch size, the schedules of its planner.

    Where nothing is said of a reserve it keeps none: a plan may use all memory that there is.
    """
    check_plan_fits_inputs(plan, profile, cluster)
    problem = planning_problem(
        profile,
        cluster,
        plan.global_batch,
        planner=plan.planner,
        memory_reserve=memory_reserve,
        optimizer_bytes_per_parameter_byte=optimizer_state,
        state_on=plan.state_on,
    )
    # The bound of the problem must hold for the plan.
    return replace(problem, schedules=tuple(dict.fromkeys((*problem.schedules, plan.schedule))))
