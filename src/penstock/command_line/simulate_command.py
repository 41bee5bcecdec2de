"""``penstock simulate``: simulates a plan as it is or with changes, and draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from typer import Option

from penstock.command_line.options import (
    AsJson,
    Csv,
    Optimizer,
    Out,
    PlanPath,
    PlansCluster,
    PlansProfile,
    Plugins,
    ProfileBatch,
    Quiet,
)
from penstock.command_line.terminal import Terminal, collect_garbage_rarely
from penstock.errors import Infeasible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.cluster.cluster import Cluster
    from penstock.planning.what_if import PlayedPlan
    from penstock.timeline.timeline import Timeline

__all__ = ["simulate"]

MOST_ITERATIONS = 1000

LinkBandwidth: TypeAlias = Annotated[
    str, Option(metavar="CHANGE", help="What if: bandwidth of all links, such as x0.5 or 10GB/s.")
]
DeviceSpeeds: TypeAlias = Annotated[
    list[str] | None,
    Option(
        metavar="CHANGE", help="What if: a device's speed, such as '3 slower 20 %'; repeatable."
    ),
]
MicroBatches: TypeAlias = Annotated[
    int,
    Option(
        min=0, metavar="N", help="What if: number of micro-batches, of the same size (0: as is)."
    ),
]
Iterations: TypeAlias = Annotated[
    int,
    Option(
        min=1, max=MOST_ITERATIONS, metavar="N", help="Number of iterations to simulate in a row."
    ),
]


def simulate(
    plan: PlanPath,
    profile: PlansProfile = "",
    cluster: PlansCluster = "",
    profile_batch: ProfileBatch = 0,
    link_bandwidth: LinkBandwidth = "",
    link_latency: Annotated[
        str, Option(metavar="CHANGE", help="What if: latency of all links, such as x0.5 or 5us.")
    ] = "",
    device: DeviceSpeeds = None,
    micro_batches: MicroBatches = 0,
    schedule: Annotated[str, Option(metavar="NAME", help="What if: another schedule.")] = "",
    optimizer: Optimizer = "",
    iterations: Iterations = 1,
    optimizer_sync: Annotated[
        Literal["before", "after"],
        Option(help="With several iterations: whether ranks agree on a step before or after it."),
    ] = "before",
    timeline: Annotated[
        bool, Option("--timeline", help="Add the timeline to the JSON output.")
    ] = False,
    trace: Annotated[str, Option(metavar="PATH", help="Write a trace for ui.perfetto.dev.")] = "",
    picture: Annotated[
        str, Option(metavar="PATH", help="Draw the timeline: .svg, .html, .json or .txt.")
    ] = "",
    plugin: Plugins = None,
    csv: Csv = "",
    out: Out = "",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Simulate PLAN, as it is or with changes; -o writes the timeline."""
    collect_garbage_rarely()
    from penstock.command_line.shown_plan import (
        groups_line,
        show_planned,
        stage_rows,
        too_full_words,
    )
    from penstock.plan.in_words import micro_batch_words
    from penstock.plan.json_file import read_plan
    from penstock.plan.optimizer_state import optimizer_state
    from penstock.plan.problem import other_kinds_words
    from penstock.planning.plan_files import PlanInputs, inputs_of_plan
    from penstock.planning.what_if import play, play_changed, read_what_if
    from penstock.timeline.json_file import timeline_to_json

    terminal, files = Terminal(as_json, quiet), TimelineFiles(out, trace, picture)
    files.check()
    terminal.check_places(csv)
    asked = read_what_if(link_bandwidth, link_latency, device or (), micro_batches, schedule)
    given = read_plan(plan)
    inputs = inputs_of_plan(plan, PlanInputs(profile, cluster, profile_batch))
    state = optimizer_state(optimizer) if optimizer else inputs.optimizer_state
    costs, machines = inputs.read_profile(), inputs.read_cluster()
    terminal.note(other_kinds_words(costs, machines))
    start_s = perf_counter()
    before = play(given, costs, machines, iterations, optimizer_sync, inputs.memory_reserve, state)
    after = play_changed(before, asked) if asked.words else before
    values = values_of(before, after, asked.words, perf_counter() - start_s)
    if timeline:
        values |= {"timeline": timeline_to_json(after.timeline)}
    drawn = after.planned.plan
    title = f"{drawn.schedule}: {micro_batch_words(drawn)}"
    files.write(after.timeline, after.problem.cluster, title)
    parts: list[RenderableType] = []
    if not as_json:
        parts = [*change_parts(before, after, asked.words), *iteration_lines(after), ""]
        if before.tensor_groups:
            parts.insert(0, groups_line(before.tensor_groups))
        parts.append(terminal.chart(after.timeline))
    terminal.save_csv(stage_rows(after.planned, costs), csv)
    show_planned(terminal, after.planned, costs, after.problem.cluster, values, parts)
    files.tell(terminal)
    if after.too_full:
        raise Infeasible(too_full_words(after.too_full))


def values_of(
    before: "PlayedPlan", after: "PlayedPlan", changes: Sequence[str], seconds: float
) -> dict[str, object]:
    """The JSON output: the plan; if there are changes, these and the plan without them."""
    values: dict[str, object] = {**after.to_json(seconds, explained=bool(changes))}
    if changes:
        values |= {"changes": list(changes), "before": before.to_json(0.0, explained=True)}
    return values


def iteration_lines(played: "PlayedPlan") -> list[str]:
    """The time of several iterations, if several were simulated."""
    from penstock.timeline.metrics import iteration_s
    from penstock.words import seconds_text, size_text

    if played.repeated is None:
        return []
    each_s = played.repeated.steady_s
    rate = played.planned.plan.global_batch / each_s if each_s > 0 else 0.0
    lines = [
        f"{played.iterations} iterations in a row: {seconds_text(iteration_s(played.timeline))}, "
        f"{seconds_text(each_s)} for each after the first, {rate:.4g} samples a second"
    ]
    if played.optimizer_sync == "after":
        peak = size_text(max(played.repeated.peak_memory_bytes))
        room = "" if played.repeated.fits else ", more than there is"
        lines.append(f"Steps are checked afterwards and kept until then: peak memory {peak}{room}")
    return lines


@dataclass(frozen=True, slots=True)
class TimelineFiles:
    """Where to write the simulated timeline; an empty path means not to write."""

    timeline: str
    trace: str
    picture: str

    def check(self) -> None:
        """Raise for a path that cannot be written to, before any work is done.

        Raises:
            BadInput: the folder does not exist, or the picture's format is unknown.
        """
        from penstock.document import check_place
        from penstock.report.timeline_files import check_timeline_path

        if self.picture:
            check_timeline_path(self.picture)
        for place in filter(None, (self.timeline, self.trace, self.picture)):
            check_place(place)

    def write(self, timeline: "Timeline", cluster: "Cluster", title: str) -> None:
        """Write the requested files."""
        from penstock.report import timeline_files
        from penstock.report.perfetto import write_trace
        from penstock.timeline.json_file import write_timeline

        if self.timeline:
            write_timeline(timeline, self.timeline)
        if self.trace:
            write_trace([timeline], self.trace)
        if self.picture:
            limits = [device.memory_bytes for device in cluster.devices]
            timeline_files.write_timeline(self.picture, timeline, cluster.name, limits, title)

    def tell(self, terminal: Terminal) -> None:
        """Print what was written."""
        for place in filter(None, (self.timeline, self.trace, self.picture)):
            terminal.note(f"wrote {place}")


def change_parts(
    before: "PlayedPlan", after: "PlayedPlan", changes: Sequence[str]
) -> list["RenderableType"]:
    """A table of numbers before and after, and what limits each plan; empty without changes."""
    from penstock.planning.explanation import explanation_words
    from penstock.report.tables import plain_table
    from penstock.words import percent_text, seconds_text, size_text

    if not changes:
        return []
    table = plain_table((f"with {', '.join(changes)}",), ("before", "after", "change"))
    figures = [
        ("iteration", [x.planned.prediction.iteration_s for x in (before, after)], seconds_text),
        ("samples a second", [x.samples_per_s for x in (before, after)], "{:.4g}".format),
        ("bubble", [x.planned.prediction.bubble for x in (before, after)], percent_text),
        ("peak memory", [x.peak_memory_bytes for x in (before, after)], size_text),
    ]
    for name, (old, new), text in figures:
        relative = percent_text(new / old - 1) if old > 0 and name != "bubble" else ""
        signed = f"+{relative}" if relative and new > old else relative
        table.add_row(name, text(old), text(new), signed)
    words = [explanation_words(x.explanation)[0] for x in (before, after)]
    return ["", table, f"Before: {words[0]}", f"After: {words[1]}"]
