"""``penstock compare``: compares planners on one problem, as a table and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, TypeAlias

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
    Sharding,
    names_in,
)
from penstock.command_line.progress import PlanningProgress, planning_progress
from penstock.command_line.shown_plan import reserve_lines
from penstock.command_line.terminal import Terminal, collect_garbage_rarely
from penstock.errors import BadInput

if TYPE_CHECKING:
    from penstock.plan.problem import PlanningProblem
    from penstock.planning.comparison import Comparison
    from penstock.planning.explanation import Explanation
    from penstock.report.compare_picture import ComparedPlan, PictureHead
    from penstock.report.tables import ComparisonRow

__all__ = ["compare"]

DEFAULT_LIMIT_S = 120.0

ForcedSchedules: TypeAlias = Annotated[
    str,
    Option(
        metavar="x,y",
        help="Schedules to force on every planner, separated by commas. 'auto': the planner's "
        "choice; 'all': every schedule in turn.",
    ),
]


def compare(
    profile: ProfilePath,
    cluster: ClusterName,
    batch: Batch,
    profile_batch: ProfileBatch = 0,
    micro_batch: MicroBatch = 0,
    planners: Annotated[
        str, Option(metavar="a,b", help="Planners to compare (default: all).")
    ] = "",
    schedules: ForcedSchedules = "auto",
    recompute: Recompute = "auto",
    sharding: Sharding = "auto",
    optimizer: Optimizer = "adamw",
    max_stages: MaxStages = 0,
    memory_reserve: MemoryReserve = 0.05,
    time_limit: Annotated[
        float, Option(min=0, metavar="S", help="Stop each planner after S seconds (0: no limit).")
    ] = DEFAULT_LIMIT_S,
    explain: Annotated[
        bool, Option("--explain", help="Say what limits each plan, and why the winner won.")
    ] = False,
    picture: Annotated[
        str, Option(metavar="PATH", help="Draw all plans: an .svg file, or an .html page.")
    ] = "",
    pin: Pins = None,
    plugin: Plugins = None,
    csv: Csv = "",
    out: Out = "",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare the plans of all planners for PROFILE, fastest first.

    -o writes the result as JSON.
    """
    collect_garbage_rarely()
    from penstock.plan.optimizer_state import optimizer_state
    from penstock.plan.problem import other_kinds_words
    from penstock.planning.comparison import check_names
    from penstock.planning.plan_files import PlanInputs
    from penstock.planning.planning_problem import planning_problem
    from penstock.report.compare_picture import write_picture
    from penstock.report.tables import NarrowTable, comparison_table, refusal_lines

    terminal = Terminal(as_json, quiet)
    check_endings(out, picture)
    terminal.check_places(out, picture, csv)
    inputs = PlanInputs(profile, cluster, profile_batch)
    problem = planning_problem(
        inputs.read_profile(),
        inputs.read_cluster(),
        batch,
        micro_batch_size=micro_batch,
        recompute=recompute,
        sharding=sharding,
        optimizer_bytes_per_parameter_byte=optimizer_state(optimizer),
        max_stages=max_stages,
        memory_reserve=memory_reserve,
        pins=pin or (),
    )
    terminal.note(other_kinds_words(problem.profile, problem.cluster))
    asked, orders = names_in(planners), schedules_in(schedules)
    check_names(asked, orders)
    wanted = Wanted(explain or picture.endswith(".html"), bool(picture), time_limit)
    with planning_progress(terminal) as progress:
        lines = compared_lines(problem, asked, orders, wanted, progress)
    words = explained(lines) if wanted.explanation else []
    values: dict[str, object] = {"rows": [line.to_json(explain) for line in lines]}
    if explain:
        values["why"] = reasons_of(lines)
    terminal.save(values, out)
    terminal.save_csv((line.to_json(with_explanation=False) for line in lines), csv)
    rows = [line.row for line in lines]
    shown, table = words if explain else [], NarrowTable(comparison_table(rows), keys=2)
    terminal.show(values, *bound_lines(lines), table, *refusal_lines(rows), *shown)
    if picture:
        drawn = [line.drawn for line in lines if line.drawn]
        write_picture(picture, drawn, picture_head(lines, problem), words)
        terminal.note(f"wrote {picture}")


def check_endings(out: str, picture: str) -> None:
    """Raise `BadInput` unless the files hold what their names say."""
    from penstock.report.compare_picture import check_picture_path

    check_picture_path(picture)
    if out.endswith((".csv", ".html", ".svg")):
        raise BadInput(
            f"-o '{out}' would hold JSON, whatever its ending says; name a .json file, or --csv"
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make for every plan besides its row, and the time limit of each planner."""

    explanation: bool
    picture: bool
    time_limit_s: float


@dataclass(frozen=True)
class ComparedLine:
    """One row of the comparison, with its explanation and picture but without its timeline."""

    comparison: "Comparison"
    row: "ComparisonRow"
    explanation: "Explanation | None" = None
    drawn: "ComparedPlan | None" = None

    def to_json(self, with_explanation: bool) -> dict[str, object]:
        """The row of the JSON output."""
        values: dict[str, object] = {**self.comparison.to_json()}
        if with_explanation and self.explanation:
            values["explanation"] = self.explanation.to_json()
        return values


def compared_lines(
    problem: "PlanningProblem",
    planners: Sequence[str],
    schedules: Sequence[str],
    wanted: Wanted,
    progress: PlanningProgress,
) -> list[ComparedLine]:
    """All rows, the best first; each is printed as soon as it is known.

    Raises:
        Infeasible: no planner has a plan.
    """
    from math import inf

    from penstock.planning.comparison import best_first, compare_plans, require_a_plan
    from penstock.search.search import PLANNERS

    asked = list(planners) or list(PLANNERS)
    lines: dict[int, ComparedLine] = {}
    comparisons: list[Comparison] = []
    for found in compare_plans(
        problem,
        asked,
        schedules,
        perf_counter,
        limit_s=wanted.time_limit_s or inf,
        on_step=lambda planner, step: progress.show_step(step, planner),
    ):
        line = compared_line(found, problem, wanted)
        progress.note(line_text(line))
        comparisons.append(line.comparison)
        lines[id(line.comparison)] = line
    require_a_plan(comparisons)
    return [lines[id(comparison)] for comparison in best_first(comparisons, asked)]


def compared_line(found: "Comparison", problem: "PlanningProblem", wanted: Wanted) -> ComparedLine:
    """A comparison with everything that needs its timeline."""
    from penstock.planning.assessment import PlannedPipeline
    from penstock.planning.explanation import explain_plan
    from penstock.planning.path_shares import SHARE_KINDS, path_shares
    from penstock.report.compare_picture import ComparedPlan, plan_rows
    from penstock.timeline.timeline import Timeline

    row, planned = row_of(found), found.outcome
    if not isinstance(planned, PlannedPipeline):
        return ComparedLine(found, row)
    timeline = planned.prediction.timeline
    explanation = explain_plan(planned, problem) if wanted.explanation else None
    drawn = None
    if wanted.picture:
        shares = path_shares(timeline, problem.cluster)
        seconds = {share.kind: share.seconds for share in shares}
        in_words = tuple((kind, seconds[kind]) for kind in SHARE_KINDS if kind in seconds)
        drawn = ComparedPlan(row, planned.plan, plan_rows(timeline, planned.plan), in_words)
    # Timelines of large clusters are large: drop this one before the next planner makes its own.
    prediction = replace(planned.prediction, timeline=Timeline((), timeline.devices))
    slim = replace(found, outcome=replace(planned, prediction=prediction))
    return ComparedLine(slim, row, explanation, drawn)


def schedules_in(text: str) -> list[str]:
    """The schedules in a list separated by commas; ``all`` stands for each synchronous one."""
    from penstock.planning.comparison import AUTO
    from penstock.planning.planning_problem import synchronous_schedules

    names = names_in(text) or [AUTO]
    return [
        one for name in names for one in (synchronous_schedules() if name == "all" else (name,))
    ]


def row_of(found: "Comparison") -> "ComparisonRow":
    """A comparison as a row of the table."""
    from penstock.planning.assessment import PlannedPipeline
    from penstock.planning.comparison import NoAnswer
    from penstock.report.tables import ComparisonRow, stages_text

    outcome = found.outcome
    if not isinstance(outcome, PlannedPipeline):
        reason = outcome.reason if isinstance(outcome, NoAnswer) else str(outcome)
        return ComparisonRow(
            found.planner, found.schedule, planning_s=found.planning_s, refusal=reason
        )
    plan = outcome.plan
    return ComparisonRow(
        planner=found.planner,
        schedule=found.schedule,
        stages=stages_text(plan),
        micro_batches=f"{plan.micro_batches} of {plan.micro_batch_size}",
        iteration_s=outcome.prediction.iteration_s,
        gap=outcome.gap,
        bubble=outcome.prediction.bubble,
        peak_memory_bytes=max(outcome.prediction.peak_memory_bytes),
        speedup_over_one_device=outcome.speedup_over_one_device,
        speedup_over_data_parallel=outcome.speedup_over_data_parallel,
        spp_bound_s=outcome.spp_bound_s,
        planning_s=found.planning_s,
        throughput=outcome.throughput,
    )


def line_text(line: ComparedLine) -> str:
    """A plan in one line, printed as soon as it is known, or why there is none."""
    from penstock.plan.in_words import plan_words
    from penstock.planning.assessment import PlannedPipeline
    from penstock.words import seconds_text

    outcome, row = line.comparison.outcome, line.row
    result = row.refusal
    if isinstance(outcome, PlannedPipeline):
        result = f"{seconds_text(row.iteration_s)}, {plan_words(outcome.plan)}"
    return f"{row.planner}: {result} (planned in {seconds_text(row.planning_s)})"


def bound_lines(lines: Sequence[ComparedLine]) -> list[str]:
    """The fastest plan, the lower bound that all gaps refer to, and what proves it."""
    from penstock.planning.assessment import PlannedPipeline
    from penstock.planning.rivals import rivals_line
    from penstock.words import seconds_text

    planned = lines[0].comparison.outcome
    if not isinstance(planned, PlannedPipeline):
        return []
    argument = f": {planned.bound.argument}" if planned.bound.argument else ""
    covers = f" ({planned.bound.covers})" if planned.bound.covers else ""
    bound = f"no plan takes less than {seconds_text(planned.lower_bound_s)}{covers}{argument}"
    rivals = rivals_line(planned.baselines.rivals)
    return [line_text(lines[0]), bound, rivals, *reserve_lines(planned.memory_reserve), ""]


def reasons_of(lines: Sequence[ComparedLine]) -> list[str]:
    """Why the first row beats the next slower one, and data parallelism."""
    from penstock.planning.explanation import why_slower

    known = [line.explanation for line in lines if line.explanation]
    if not known:
        return []
    winner = known[0]
    slower = [e for e in known if e.iteration_s > winner.iteration_s * (1 + 1e-9)]
    asked = slower[:1] + [e for e in slower[1:] if e.planner == "data-parallel"]
    return [why_slower(winner, other) for other in asked]


def explained(lines: Sequence[ComparedLine]) -> list[str]:
    """What limits each plan, in paragraphs, then why the winner won."""
    from penstock.planning.explanation import explanation_words

    planners: dict[str, list[str]] = {}
    for line in lines:
        if line.explanation:
            text = f"({line.row.schedule}): {' '.join(explanation_words(line.explanation))}"
            planners.setdefault(text, []).append(line.row.planner)
    words: list[str] = []
    for text, names in planners.items():
        words += ["", f"{' = '.join(dict.fromkeys(names))} {text}"]
    for reason in reasons_of(lines):
        words += ["", f"Why {lines[0].row.planner} won: {reason}"]
    return words


def picture_head(lines: Sequence[ComparedLine], problem: "PlanningProblem") -> "PictureHead":
    """Title and lower bound of the picture."""
    from penstock.planning.assessment import PlannedPipeline
    from penstock.report.compare_picture import PictureHead

    planned = lines[0].comparison.outcome
    is_planned = isinstance(planned, PlannedPipeline)
    profile, cluster = problem.profile, problem.cluster
    return PictureHead(
        title=f"{profile.name} on {cluster.name}",
        subtitle=(
            f"{len(profile.layers)} layers, {len(cluster.devices)} devices, "
            f"{problem.global_batch} samples an iteration; all plans simulated alike"
        ),
        bound_s=planned.bound.seconds if is_planned else 0.0,
        bound_argument=planned.bound.argument if is_planned else "",
        bound_covers=planned.bound.covers if is_planned else "",
    )
