"""``penstock plan``; it needs neither torch nor a running job."""

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.command_line.options import (
    AsJson,
    Batch,
    ClusterName,
    Csv,
    MaxStages,
    MemoryReserve,
    MicroBatch,
    Optimizer,
    Out,
    Pins,
    Plugins,
    ProfileBatch,
    ProfilePath,
    Quiet,
    Recompute,
    ScheduleNames,
    TensorParallel,
)
from penstock.command_line.progress import planning_progress
from penstock.command_line.shown_plan import show_planned, stage_rows
from penstock.command_line.terminal import Terminal, collect_garbage_rarely

if TYPE_CHECKING:
    from penstock.plan.problem import PlanningProblem
    from penstock.planning.answers import TimeLimit
    from penstock.planning.assessment import PlannedPipeline

__all__ = ["plan"]


def plan(
    profile: ProfilePath,
    cluster: ClusterName,
    batch: Batch,
    profile_batch: ProfileBatch = 0,
    micro_batch: MicroBatch = 0,
    planner: Annotated[str, Option(help="Name of a planner (see 'penstock list').")] = "search",
    schedule: ScheduleNames = "auto",
    recompute: Recompute = "auto",
    optimizer: Optimizer = "adamw",
    max_stages: MaxStages = 0,
    memory_reserve: MemoryReserve = 0.05,
    tensor_parallel: TensorParallel = "",
    time_limit: Annotated[
        float, Option(min=0, metavar="S", help="Stop searching after S seconds (0: no limit).")
    ] = 0.0,
    explain: Annotated[
        bool, Option("--explain", help="Say which resource limits the plan.")
    ] = False,
    pin: Pins = None,
    plugin: Plugins = None,
    csv: Csv = "",
    out: Out = "",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find the fastest plan for PROFILE on a cluster; -o writes it."""
    collect_garbage_rarely()
    from penstock.bounds.lower_bound import lower_bound
    from penstock.plan.optimizer_state import optimizer_state
    from penstock.plan.problem import other_kinds_words
    from penstock.planning.answers import find_plan
    from penstock.planning.assessment import assess_plan, baselines_of
    from penstock.planning.plan_files import PlanInputs, write_planned
    from penstock.planning.planning_problem import member_named, planning_problem
    from penstock.planning.tensor_groups import on_groups, sizes_of, without_groups
    from penstock.search.search import PLANNERS
    from penstock.simulate.score import make_score

    terminal = Terminal(as_json, quiet)
    member_named(PLANNERS, planner, "planner")
    terminal.check_places(out, csv)
    inputs = PlanInputs(profile, cluster, profile_batch)
    costs, machines = inputs.read_profile(), inputs.read_cluster()
    problem = planning_problem(
        costs,
        machines,
        batch,
        micro_batch_size=micro_batch,
        planner=planner,
        schedule=schedule,
        recompute=recompute,
        optimizer_bytes_per_parameter_byte=optimizer_state(optimizer),
        max_stages=max_stages,
        memory_reserve=memory_reserve,
        pins=pin or (),
    )
    terminal.note(other_kinds_words(costs, machines))
    sizes = sizes_of(tensor_parallel)
    with planning_progress(terminal) as progress:
        start_s, score = perf_counter(), make_score(problem)
        progress.bound_s = (bound := lower_bound(problem)).seconds
        limit = limit_left(time_limit, start_s)
        found = find_plan(
            problem, planner, score, sizes=sizes, limit=limit, on_step=progress.show_step
        )
        found, own = on_groups(found, problem)
        planning_s = perf_counter() - start_s
        bound = bound if own is problem else lower_bound(own)
        baselines = baselines_of(problem, score)
        plain = without_groups(found)
        assessed = assess_plan(plain, own, baselines, bound, with_timeline=explain)
    planned = replace(assessed, plan=found)
    if out:
        write_planned(planned, out, inputs, planning_s)
    terminal.save_csv(stage_rows(planned, costs), csv)
    more, words = explained(assessed, own) if explain else (dict[str, object](), [])
    values = {**planned.to_json(planning_s), **more}
    show_planned(terminal, planned, costs, own.cluster, values, words)
    terminal.note(f"wrote {out}" if out else "not saved; add -o plan.json")


def limit_left(time_limit: float, start_s: float) -> "TimeLimit | None":
    """The time for the planners: the bound took a part of it, but leaves them half."""
    from penstock.planning.answers import TimeLimit

    left_s = max(time_limit / 2, start_s + time_limit - perf_counter())
    return TimeLimit(left_s, perf_counter) if time_limit else None


def explained(
    planned: "PlannedPipeline", problem: "PlanningProblem"
) -> tuple[dict[str, object], list[str]]:
    """What limits a plan: as a key of the JSON, and in words."""
    from penstock.planning.assumed_split import whole_backwards_words
    from penstock.planning.explanation import explain_plan, explanation_words

    explanation = explain_plan(planned, problem)
    words = list(explanation_words(explanation))
    if planned.assumed_split:
        words.append(whole_backwards_words(problem))
    return {"explanation": explanation.to_json()}, words
