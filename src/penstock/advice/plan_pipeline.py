"""Planning as one call from Python; unlike the rest of `penstock.advice` it reads the clock."""

from collections.abc import Sequence
from math import inf
from time import perf_counter

from penstock.advice.compare import Comparisons, best_first, compare_plans
from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.plan.problem import MEMORY_RESERVE, Planner, RecomputeOption, ShardingChoice
from penstock.planners.find_plan import TimeLimit, find_plan
from penstock.planners.plugins import planner_name, schedule_name
from penstock.planners.problem import planning_problem
from penstock.planners.search.search import PLANNERS
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.outside import AnySchedule
from penstock.simulate.score import make_score


def plan_pipeline(
    profile: ModelProfile,
    cluster: Cluster,
    batch: int,
    *,
    planner: str | Planner = "search",
    micro_batch_size: int = 0,
    schedule: str | AnySchedule = "auto",
    recompute: RecomputeOption = "auto",
    sharding: ShardingChoice = "auto",
    optimizer_bytes_per_parameter_byte: float = 2.0,
    max_stages: int = 0,
    memory_reserve: float = MEMORY_RESERVE,
    time_limit_s: float = inf,
    pins: Sequence[str] = (),
) -> Plan:
    """The best plan that a planner finds for training ``profile`` on ``cluster``.

    ``planner`` and ``schedule`` may be functions (`penstock.planners.plugins`), which are known by
    their names from then on. ``batch`` is the number of samples of an iteration.
    ``micro_batch_size`` 0 tries every divisor of it. `penstock.planners.problem` explains
    the names of schedules (`schedules_named`), ``recompute`` and ``sharding`` (`planning_problem`).
    ``max_stages`` 0 allows any number of stages. ``optimizer_bytes_per_parameter_byte`` is the
    state of the optimizer, 2 for Adam. ``memory_reserve`` is the share of each device's memory that
    the plan leaves free. ``pins`` are parts of the plan that are fixed, such as "lm_head: alone"
    (`penstock.plan.pins.read_pin`).

    After ``time_limit_s`` no further plan is simulated, and the best one so far is
    the answer. A plan that fits is found first, however long that takes.

    Raises:
        BadInput: an unknown planner or schedule, a reserve of all memory, sizes that do not go
            together, or pins that no plan keeps.
        PluginFailed: a function raised, or returned no plan or no schedule.
        Infeasible: nothing fits, or nothing that keeps the pins; the message says what would.
    """
    planner, schedule = planner_name(planner), schedule_name(schedule)
    problem = planning_problem(
        profile,
        cluster,
        batch,
        micro_batch_size=micro_batch_size,
        planner=planner,
        schedule=schedule,
        recompute=recompute,
        sharding=sharding,
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        max_stages=max_stages,
        memory_reserve=memory_reserve,
        pins=pins,
    )
    limit = TimeLimit(time_limit_s, perf_counter) if time_limit_s < inf else None
    return find_plan(problem, planner, make_score(problem), limit=limit)


def compare_planners(
    profile: ModelProfile,
    cluster: Cluster,
    batch: int,
    *,
    planners: Sequence[str | Planner] = (),
    schedules: Sequence[str | AnySchedule] = ("auto",),
    micro_batch_size: int = 0,
    time_limit_s: float = inf,
    pins: Sequence[str] = (),
) -> Comparisons:
    """The plans of several planners (all where none is named) for one problem, the best first.

    Every planner runs once with each of ``schedules``, for up to ``time_limit_s`` each. One that
    finds no plan, or fails, has a row that says why.

    Raises:
        BadInput: as `plan_pipeline`.
    """
    names = [planner_name(planner) for planner in planners] or list(PLANNERS)
    problem = planning_problem(
        profile, cluster, batch, micro_batch_size=micro_batch_size, pins=pins
    )
    orders = [schedule_name(schedule) for schedule in schedules]
    rows = compare_plans(problem, names, orders, perf_counter, limit_s=time_limit_s)
    return Comparisons(best_first(list(rows), names))
