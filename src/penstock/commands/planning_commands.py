"""``penstock plan``; it needs neither torch nor a running job."""

from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Annotated

from rich.console import RenderableType
from typer import Option

from penstock.commands import options
from penstock.commands.progress import planning_progress
from penstock.commands.terminal import Terminal, collect_garbage_rarely


def plan(
    *,
    given: options.ProblemOptions,
    planner: options.PlannerName = "search",
    schedule: options.ScheduleNames = "auto",
    tensor_parallel: Annotated[
        str,
        Option(
            metavar="SIZES",
            help="Try tensor groups of these numbers of devices of a host, too, such as 2,4; the "
            "profile must have their costs.",
        ),
    ] = "",
    time_limit: Annotated[
        float, Option(min=0, metavar="S", help="Stop searching after S seconds (inf: never).")
    ] = inf,
    effort: Annotated[
        float, Option(min=0.01, metavar="N", help="Search N times as long as by default.")
    ] = 1.0,
    explain: Annotated[
        bool, Option("--explain", help="Say which resource limits the plan.")
    ] = False,
    csv: options.Csv = "",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Find the fastest plan for PROFILE on a cluster; -o writes it."""
    collect_garbage_rarely()
    from penstock.advice.assessment import assess_plan, baselines_of
    from penstock.advice.baselines import best_plans
    from penstock.advice.plan_files import write_planned
    from penstock.cluster.cluster import unknown_memory_words
    from penstock.commands.shown_plan import rivals_table, show_planned, stage_rows
    from penstock.costs.lower_bound import lower_bound
    from penstock.plan.problem import other_kinds_words
    from penstock.planners.find_plan import TimeLimit, find_plan
    from penstock.planners.problem import member_named
    from penstock.planners.search.search import PLANNERS
    from penstock.planners.tensor_groups import group_sizes, on_groups, without_groups
    from penstock.simulate.score import make_score

    member_named(PLANNERS, planner, "planner")
    terminal.check_places(out, csv)
    problem = given.problem(planner, schedule)
    costs = problem.profile
    terminal.note(other_kinds_words(costs, problem.cluster))
    terminal.note(unknown_memory_words(problem.cluster))
    sizes = group_sizes(tensor_parallel)
    with planning_progress(terminal) as progress:
        start_s, score = perf_counter(), make_score(problem)
        progress.bound_s = (bound := lower_bound(problem)).seconds
        # The bound takes a part of the time, but leaves the planners half of it.
        left_s = max(time_limit / 2, start_s + time_limit - perf_counter())
        found, own = on_groups(
            find_plan(
                problem,
                planner,
                score,
                sizes=sizes,
                limit=TimeLimit(left_s, perf_counter) if time_limit < inf else None,
                effort=effort,
                on_step=progress.show_step,
            ),
            problem,
        )
        planning_s = perf_counter() - start_s
        # Without its tensor groups, and then with them.
        assessed = assess_plan(
            without_groups(found),
            own,
            baselines_of(problem, score),
            bound if own is problem else lower_bound(own),
            with_timeline=explain,
        )
    planned = replace(assessed, plan=found)
    if out:
        write_planned(planned, out, given.inputs, planning_s)
    terminal.save_csv(stage_rows(planned, costs), csv)
    values: dict[str, object] = {**planned.to_json(planning_s)}
    parts: list[RenderableType] = []
    if explain:
        from penstock.advice.explain import explain_plan, explanation_words

        explanation = explain_plan(assessed, own)
        values["explanation"] = explanation.to_json()
        parts += explanation_words(explanation)
    if ways := best_plans(problem, assessed.plan):
        values["best_plans"] = [way.to_json() for way in ways]
        parts += ["", rivals_table(ways, planned)]
    show_planned(terminal, planned, costs, own.cluster, values, parts)
    terminal.note(f"wrote {out}" if out else "not saved; add -o plan.json")
