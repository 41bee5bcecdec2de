"""Output of ``penstock compare``: the plans for a problem as lines, a table, a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from math import inf
from time import perf_counter

from rich.console import RenderableType
from rich.table import Table

from penstock.advice.assessment import PlannedPipeline
from penstock.advice.baselines import Rival
from penstock.advice.compare import (
    Comparison,
    Comparisons,
    best_first,
    compare_plans,
    require_a_plan,
)
from penstock.advice.explain import (
    Explanation,
    explain_plan,
    explanation_cells,
    explanation_words,
    why_slower,
)
from penstock.commands.progress import PlanningProgress
from penstock.commands.shown_plan import bound_words, reserve_lines, rivals_table
from penstock.files import write_text
from penstock.plan.plan import Plan, plan_words
from penstock.plan.problem import PlanningProblem
from penstock.plan.throughput import Throughput, rate_words
from penstock.planners.problem import AUTO, synchronous_schedules
from penstock.planners.search.search import PLANNERS
from penstock.report.tables import NarrowTable, plain_table, stages_text
from penstock.report.timelines_html import (
    TimelinePanel,
    html_page,
    table_element,
    timelines_data,
    timelines_html,
)
from penstock.text import percent_text, seconds_text, size_text
from penstock.timeline.device_rows import GanttRows, gantt_rows
from penstock.timeline.metrics import busy_s
from penstock.timeline.plot import FAR, write_picture
from penstock.timeline.timeline import Timeline


@dataclass(frozen=True)
class ComparedLine:
    """One row of the comparison, with its explanation and chart but without its timeline."""

    comparison: Comparison
    explanation: Explanation | None = None
    chart: GanttRows | None = None

    @property
    def planned(self) -> PlannedPipeline | None:
        return self.comparison.planned

    def to_json(self, with_explanation: bool) -> dict[str, object]:
        values: dict[str, object] = {**self.comparison.to_json()}
        if with_explanation and self.explanation:
            values["explanation"] = self.explanation.to_json()
        return values


def compared_lines(
    problem: PlanningProblem,
    planners: Sequence[str],
    schedules: Sequence[str],
    limit_s: float,
    details: Callable[[Comparison], ComparedLine],
    progress: PlanningProgress,
) -> list[ComparedLine]:
    """All rows, the best first; each is printed as soon as it is known.

    Without names all planners are compared; ``all`` means each synchronous schedule.
    """
    chosen = list(planners) or list(PLANNERS)
    orders = [
        order
        for name in list(schedules) or [AUTO]
        for order in (synchronous_schedules() if name == "all" else (name,))
    ]
    lines: dict[int, ComparedLine] = {}
    for found in compare_plans(
        problem,
        chosen,
        orders,
        perf_counter,
        limit_s=limit_s,
        on_step=lambda planner, step: progress.show_step(step, planner),
    ):
        line = details(found)
        progress.note(line_text(line))
        lines[id(line.comparison)] = line
    comparisons = [line.comparison for line in lines.values()]
    require_a_plan(comparisons)
    return [lines[id(comparison)] for comparison in best_first(comparisons, chosen)]


def with_details(
    found: Comparison, problem: PlanningProblem, explain: bool, draws: bool
) -> ComparedLine:
    """A comparison with everything that needs its timeline, which is large, and dropped here."""
    planned = found.planned
    if planned is None:
        return ComparedLine(found)
    timeline, prediction = planned.prediction.timeline, planned.prediction
    explanation = explain_plan(planned, problem) if explain else None
    chart = plan_rows(timeline, planned.plan) if draws else None
    prediction = replace(prediction, timeline=Timeline((), timeline.devices))
    slim = replace(found, outcome=replace(planned, prediction=prediction))
    return ComparedLine(slim, explanation, chart)


def plan_rows(timeline: Timeline, plan: Plan) -> GanttRows:
    """A row for each device group of ``plan``: its replica that computes longest."""
    chosen = {max(group, key=partial(busy_s, timeline)) for group in plan.device_groups}
    events = tuple(event for event in timeline.events if event.device in chosen)
    return gantt_rows(replace(timeline, events=events, memory=()))


def line_text(line: ComparedLine) -> str:
    """A plan in one line, or why there is none."""
    found, words = line.comparison, line.comparison.words
    if line.planned:
        words += f", {plan_words(line.planned.plan)}"
    return f"{found.planner}: {words} (planned in {seconds_text(found.planning_s)})"


def parts(lines: Sequence[ComparedLine], best_plans: Sequence[Rival] = ()) -> list[RenderableType]:
    """The fastest plan, the bound that all gaps refer to, the table, and reasons without a plan.

    Then the ways to train without a pipeline, after ``best_plans``.
    """
    refused = (line.comparison for line in lines if not line.planned)
    refusals = (f"{found.planner}, {found.schedule}: {found.words}" for found in refused)
    shown: list[RenderableType] = [NarrowTable(comparison_table(lines), keys=2), *refusals]
    planned = lines[0].planned
    if planned is None:
        return shown
    bound = f"no plan takes less than {seconds_text(planned.lower_bound_s)}{bound_words(planned)}"
    ways = rivals_table(best_plans, planned)
    reserve = reserve_lines(planned.memory_reserve)
    return [line_text(lines[0]), bound, *reserve, "", *shown, "", ways]


def comparison_table(lines: Sequence[ComparedLine]) -> Table:
    """One row for each plan, in the given order, and for each planner without one."""
    plans = [line.planned for line in lines if line.planned]
    has_spp = any(planned.spp_bound_s < inf for planned in plans)
    rates = [head for head, *cells in rate_columns([p.throughput for p in plans]) if any(cells)]
    heads = ["iteration", *rates, "x DDP", "x 1\ndevice", "above\nbound", "bubble"]
    heads += ["peak\nmemory", *(["SPP's\nbound"] if has_spp else []), "planned\nin"]
    table = plain_table(("planner", "schedule"), heads)
    for column in table.columns[:2]:
        column.no_wrap = True
    for head in ("stages", "micro-batches"):
        table.add_column(head, overflow="fold")
    for line in lines:
        found, planned = line.comparison, line.planned
        took = seconds_text(found.planning_s)
        if planned is None:
            cells = ["no plan", *[""] * (len(heads) - 2), took]
            table.add_row(found.planner, found.schedule, *cells, style="dim")
            continue
        prediction, plan = planned.prediction, planned.plan
        table.add_row(
            found.planner,
            found.schedule,
            seconds_text(prediction.iteration_s),
            *(cell or "-" for head, cell in rate_columns([planned.throughput]) if head in rates),
            factor_text(planned.speedup_over_data_parallel),
            factor_text(planned.speedup_over_one_device),
            percent_text(planned.gap),
            percent_text(prediction.bubble),
            size_text(max(prediction.peak_memory_bytes)),
            *([bound_text(planned.spp_bound_s)] if has_spp else []),
            took,
            stages_text(plan),
            f"{plan.micro_batches} of {plan.micro_batch_size}",
        )
    return table


def rate_columns(rates: Sequence[Throughput]) -> list[list[str]]:
    """Throughput and price of plans: a head and cells, empty for what is unknown."""
    thing = "tokens" if any(rate.tokens_per_s for rate in rates) else "samples"
    return [
        [f"{thing}/s", *(rate_words(rate.tokens_per_s or rate.samples_per_s) for rate in rates)],
        ["MFU", *(percent_text(rate.mfu) if rate.mfu else "" for rate in rates)],
        [
            f"price of\n1 M {thing}",
            *(f"{r.price_per_million:.3g}" if r.price_per_hour else "" for r in rates),
        ],
    ]


def factor_text(factor: float) -> str:
    return f"{factor:.2f}" if factor < inf else "-"


def bound_text(seconds: float) -> str:
    return seconds_text(seconds) if seconds < inf else "-"


def reasons_of(lines: Sequence[ComparedLine]) -> list[str]:
    """Reasons why the first row beats the next slower one, and data parallelism."""
    known = [line.explanation for line in lines if line.explanation]
    if not known:
        return []
    winner = known[0]
    slower = [e for e in known if e.iteration_s > winner.iteration_s * (1 + 1e-9)]
    explained = slower[:1] + [e for e in slower[1:] if e.planner == "data-parallel"]
    return [why_slower(winner, other) for other in explained]


def explained_comparison(lines: Sequence[ComparedLine]) -> list[str]:
    """The limits of each plan, in paragraphs, then why the winner won."""
    planners: dict[str, list[str]] = {}
    for line in lines:
        if line.explanation:
            text = f"({line.comparison.schedule}): {' '.join(explanation_words(line.explanation))}"
            planners.setdefault(text, []).append(line.comparison.planner)
    words: list[str] = []
    for text, names in planners.items():
        words += ["", f"{' = '.join(dict.fromkeys(names))} {text}"]
    for reason in reasons_of(lines):
        words += ["", f"Why {lines[0].comparison.planner} won: {reason}"]
    return words


def draw_comparison(path: str, lines: Sequence[ComparedLine], problem: PlanningProblem) -> None:
    """Write the picture of all plans to ``path``, or a page with the timeline of each."""
    profile, cluster = problem.profile, problem.cluster
    title = f"{profile.name} on {cluster.name}"
    note = (
        f"{len(profile.layers)} layers, {len(cluster.devices)} devices, "
        f"{problem.global_batch} samples an iteration; all plans simulated by the same rules"
    )
    if path.endswith(".html"):
        write_text(path, comparison_page(lines, title, note))
        return
    ax = Comparisons(line.comparison for line in lines).plot()
    ax.set_title(f"{title}\n{note}", loc="left")  # pyright: ignore[reportUnknownMemberType]
    write_picture(ax, path)


def comparison_page(lines: Sequence[ComparedLine], title: str, note: str) -> str:
    """The page with all timelines on one axis, and below them what limits each plan."""
    planned, panels = lines[0].planned, timeline_panels(lines)
    if planned:
        bound = f"No plan takes less than {seconds_text(planned.lower_bound_s)}"
        note = f"{note}. {bound}{bound_words(planned)}"
    reasons = reasons_of(lines)
    won = f"<h2>Why {lines[0].comparison.planner} won</h2>" if reasons else ""
    why = "".join(f"<p>{escape(reason)}</p>" for reason in reasons)
    shown = timelines_html(panels, f"{title}: {note}", with_memory=False, fills_window=False)
    body = (
        f'<main class="compare">\n<header><h1>{escape(title)}</h1>'
        f'<p class="facts">{escape(note)}</p></header>\n<section>\n{shown}</section>\n'
        f"<section>\n<h2>What limits each plan</h2>{limits_table(lines)}{won}{why}\n</section>\n"
        f"</main>"
    )
    return html_page(title, body, timelines_data(panels))


def timeline_panels(lines: Sequence[ComparedLine]) -> list[TimelinePanel]:
    """A panel for each plan that is not far behind; the planners that found it are its title."""
    longest_s = FAR * min(line.comparison.iteration_s for line in lines)
    planners: dict[Plan, list[str]] = {}
    panels: dict[Plan, TimelinePanel] = {}
    for line in lines:
        if line.planned and line.chart and line.comparison.iteration_s <= longest_s:
            plan, time = line.planned.plan, line.comparison.words
            planners.setdefault(plan, []).append(line.comparison.planner)
            names = " = ".join(dict.fromkeys(planners[plan]))
            panels[plan] = TimelinePanel(line.chart, f"{names}: {time}", plan_words(plan))
    return list(panels.values())


def limits_table(lines: Sequence[ComparedLine]) -> str:
    """One row for each plan, with the planners that found it."""
    planners: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        if line.explanation:
            cells = (line.comparison.schedule, *explanation_cells(line.explanation))
            planners.setdefault(cells, []).append(line.comparison.planner)
    rows = [
        [escape(text) for text in (" = ".join(dict.fromkeys(names)), *cells)]
        for cells, names in planners.items()
    ]
    names = ("Planner", "Schedule", "Iteration", "Limited by", "Then", "Busiest")
    return table_element((*names, "Fullest device", "Remarks"), (), rows)
