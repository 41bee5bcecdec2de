"""``penstock compare``: compares planners on one problem, as a table and a picture."""

from typing import Annotated

from typer import Option

from penstock.commands import options
from penstock.commands.progress import planning_progress
from penstock.commands.terminal import Terminal, collect_garbage_rarely
from penstock.errors import BadInput


def compare(
    *,
    given: options.ProblemOptions,
    planners: Annotated[
        str, Option(metavar="a,b", help="Compare these planners (default: all).")
    ] = "",
    schedules: Annotated[
        str,
        Option(
            metavar="x,y",
            help="Force these schedules on every planner, separated by commas. 'auto': the "
            "planner's choice; 'all': every schedule in turn.",
        ),
    ] = "auto",
    time_limit: Annotated[
        float, Option(min=0, metavar="S", help="Stop each planner after S seconds (inf: never).")
    ] = 120.0,
    explain: Annotated[
        bool, Option("--explain", help="Say what limits each plan, and why the winner won.")
    ] = False,
    picture: Annotated[
        str, Option(metavar="PATH", help="Draw all plans: .svg, .pdf, .png or .html.")
    ] = "",
    csv: options.Csv = "",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Compare the plans of all planners for PROFILE, fastest first.

    -o writes the result as JSON.
    """
    collect_garbage_rarely()
    from penstock.advice.baselines import best_plans
    from penstock.commands import shown_comparison as shown
    from penstock.plan.problem import other_kinds_words

    check_endings(out, picture)
    terminal.check_places(out, picture, csv)
    problem = given.problem()
    terminal.note(other_kinds_words(problem.profile, problem.cluster))
    on_page = picture.endswith(".html")
    explains = explain or on_page
    with planning_progress(terminal) as progress:
        lines = shown.compared_lines(
            problem,
            options.names_in(planners),
            options.names_in(schedules),
            time_limit,
            lambda found: shown.with_details(found, problem, explains, draws=on_page),
            progress,
        )
    planned = lines[0].planned
    ways = best_plans(problem, planned.plan) if planned else ()
    values: dict[str, object] = {"rows": [line.to_json(explain) for line in lines]}
    if ways:
        values["best_plans"] = [way.to_json() for way in ways]
    if explain:
        values["why"] = shown.reasons_of(lines)
    terminal.save(values, out)
    terminal.save_csv((line.to_json(with_explanation=False) for line in lines), csv)
    words = shown.explained_comparison(lines) if explain else []
    terminal.show(values, *shown.parts(lines, ways), *words)
    if picture:
        shown.draw_comparison(picture, lines, problem)
        terminal.note(f"wrote {picture}")


def check_endings(out: str, picture: str) -> None:
    """Raise `BadInput` unless the files can be written, and hold what their names say."""
    from penstock.timeline.plot import PICTURES, check_matplotlib

    if picture and not picture.endswith(".html"):
        if not picture.endswith(PICTURES):
            raise BadInput(f"picture '{picture}' must end in {', '.join(PICTURES)} or .html")
        check_matplotlib()
    if out.endswith((".csv", ".html", *PICTURES)):
        raise BadInput(
            f"-o '{out}' would hold JSON, whatever its ending says; name a .json file, or --csv"
        )
