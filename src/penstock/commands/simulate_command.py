"""``penstock simulate``: simulates a plan as it is or with changes, and draws it."""

from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.commands import options
from penstock.commands.terminal import Terminal, collect_garbage_rarely
from penstock.errors import Infeasible

if TYPE_CHECKING:
    from rich.console import RenderableType


def simulate(
    *,
    plan: options.PlanPath,
    profile: options.PlansProfile = "",
    cluster: options.PlansCluster = "",
    profile_batch: options.ProfileBatch = None,
    micro_batches: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Change the number of micro-batches, of the same size."),
    ] = None,
    schedule: Annotated[str, Option(metavar="NAME", help="Change the schedule.")] = "",
    optimizer: options.Optimizer = "",
    iterations: Annotated[
        int, Option(min=1, max=1000, metavar="N", help="Simulate N iterations in a row.")
    ] = 1,
    meet_every: Annotated[
        int | None, Option(min=1, metavar="N", help="Price pipelines that meet every N steps.")
    ] = None,
    timeline: Annotated[
        bool, Option("--timeline", help="Add the timeline to the JSON output.")
    ] = False,
    picture: Annotated[
        str,
        Option(metavar="PATH", help="Draw the timeline: .svg, .pdf, .png, .html, .json or .txt."),
    ] = "",
    csv: options.Csv = "",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Simulate PLAN, as it is or with changes; -o writes the timeline."""
    collect_garbage_rarely()
    from penstock.advice.plan_files import PlanInputs, inputs_of_plan
    from penstock.advice.what_if import WhatIf, play_changed, play_plan
    from penstock.commands import shown_plan as shown
    from penstock.plan.json_file import read_plan
    from penstock.plan.optimizer_state import optimizer_state
    from penstock.plan.plan import micro_batch_words
    from penstock.plan.problem import other_kinds_words
    from penstock.report.timeline_files import check_timeline_path, write_timeline
    from penstock.simulate.local_sgd import meeting_price
    from penstock.timeline.json_file import timeline_to_json, write_timeline_json

    if picture:
        check_timeline_path(picture)
    terminal.check_places(out, picture, csv)
    wanted = WhatIf(micro_batches or 0, schedule)
    given = read_plan(plan)
    inputs = inputs_of_plan(plan, PlanInputs(profile, cluster, profile_batch))
    state = optimizer_state(optimizer) if optimizer else inputs.optimizer_state
    costs, machines = inputs.read_profile(), inputs.read_cluster()
    terminal.note(other_kinds_words(costs, machines))
    start_s = perf_counter()
    before = play_plan(given, costs, machines, iterations, inputs.memory_reserve, state)
    after = play_changed(before, wanted) if wanted.words else before
    values: dict[str, object] = {
        **after.to_json(perf_counter() - start_s, explained=bool(wanted.words))
    }
    if wanted.words:
        values["changes"] = list(wanted.words)
        values["before"] = before.to_json(0.0, explained=True)
    price = meeting_price(after.problem, after.planned.plan, meet_every) if meet_every else None
    if price is not None:
        values["meetings"] = price.to_json()
    if timeline:
        values["timeline"] = timeline_to_json(after.timeline)
    if out:
        write_timeline_json(after.timeline, out)
    machines = after.problem.cluster
    if picture:
        drawn = after.planned.plan
        limits = [device.memory_bytes for device in machines.devices]
        title = f"{drawn.schedule}: {micro_batch_words(drawn)}"
        write_timeline(picture, after.timeline, machines.name, limits, title)
    parts: list[RenderableType] = []
    if not terminal.as_json:
        parts = [*shown.played_parts(before, after, wanted.words), terminal.chart(after.timeline)]
        if price is not None:
            parts.append(price.words(after.planned.prediction.iteration_s))
    terminal.save_csv(shown.stage_rows(after.planned, costs), csv)
    shown.show_planned(terminal, after.planned, costs, machines, values, parts)
    for place in filter(None, (out, picture)):
        terminal.note(f"wrote {place}")
    if after.too_full:
        raise Infeasible(shown.too_full_words(after.too_full))
