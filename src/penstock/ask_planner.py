"""Planning as one call from Python; unlike `penstock.planning` it reads the clock."""

from collections.abc import Sequence
from time import perf_counter

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.plan.problem import MEMORY_RESERVE, RecomputeChoice
from penstock.planning.answers import TimeLimit, find_plan
from penstock.planning.planning_problem import planning_problem
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.score import make_score

__all__ = ["plan_pipeline"]


def plan_pipeline(
    profile: ModelProfile,
    cluster: Cluster,
    batch: int,
    *,
    planner: str = "search",
    micro_batch_size: int = 0,
    schedule: str = "auto",
    recompute: RecomputeChoice = "auto",
    optimizer_bytes_per_parameter_byte: float = 2.0,
    max_stages: int = 0,
    memory_reserve: float = MEMORY_RESERVE,
    time_limit_s: float = 0.0,
    pins: Sequence[str] = (),
) -> Plan:
    """The best plan that a planner finds for training ``profile`` on ``cluster``.

    ``batch`` is the number of samples of an iteration. ``micro_batch_size`` 0 tries every divisor
    of it. `penstock.planning.planning_problem.schedules_named` explains ``schedule``.
    ``max_stages`` 0 allows any number of stages. ``optimizer_bytes_per_parameter_byte`` is the
    state of the optimizer, 2 for Adam. ``memory_reserve`` is the share of each device's memory that
    the plan leaves free. ``pins`` are parts of the plan that are fixed, such as "lm_head: alone"
    (`penstock.plan.pins.read_pin`).

    After ``time_limit_s`` (0: no limit) no further plan is simulated, and the best one so far is
    the answer. A plan that fits is found first, however long that takes.

    Raises:
        BadInput: an unknown planner or schedule, a reserve of all memory, sizes that do not go
            together, or pins that no plan keeps.
        Infeasible: nothing fits, or nothing that keeps the pins; the message says what would.
    """
    problem = planning_problem(
        profile,
        cluster,
        batch,
        micro_batch_size=micro_batch_size,
        planner=planner,
        schedule=schedule,
        recompute=recompute,
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        max_stages=max_stages,
        memory_reserve=memory_reserve,
        pins=pins,
    )
    limit = TimeLimit(time_limit_s, perf_counter) if time_limit_s else None
    return find_plan(problem, planner, make_score(problem), limit=limit)
