"""``penstock rehearse``: carries out a plan with emulated devices and links, on this machine."""

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from penstock.command_line import options
from penstock.command_line.terminal import Terminal
from penstock.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.rehearse.rehearsal import Rehearsal

__all__ = ["rehearse"]

SHOWN = 5
"""How many links the table of traffic has."""


def rehearse(
    *,
    plan: options.PlanPath,
    profile: options.PlansProfile = "",
    cluster: options.PlansCluster = "",
    profile_batch: options.ProfileBatch = 0,
    time_scale: Annotated[
        float, Option(min=0, metavar="K", help="Seconds here for one of the plan (0: chosen).")
    ] = 0.0,
    byte_scale: Annotated[
        float,
        Option(min=0, max=1, metavar="K", help="Bytes here for one of the plan (0: chosen)."),
    ] = 0.0,
    iterations: Annotated[
        int, Option(min=1, max=100, metavar="N", help="Number of iterations.")
    ] = 2,
    transport: Annotated[
        Literal["auto", "shared-memory", "process-groups"],
        Option(help="What carries the tensors between the processes."),
    ] = "auto",
    tolerance: Annotated[
        float,
        Option(min=0, metavar="T", help="Fail if it takes longer or shorter by this share."),
    ] = 0.1,
    picture: Annotated[
        str, Option(metavar="PATH", help="Draw the simulated above the rehearsed timeline: .html.")
    ] = "",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Carry out PLAN with one process for each device, which waits in place of computing."""
    from penstock.plan.json_file import read_plan
    from penstock.planning.plan_files import PlanInputs, inputs_of_plan, promised_iteration_s
    from penstock.rehearse.emulation import emulation_of
    from penstock.rehearse.rehearsal import differences, peaks_in_flight
    from penstock.rehearse.rehearsal import rehearse as carry_out

    if picture and not picture.endswith(".html"):
        raise BadInput(f"picture '{picture}' must end in .html: a page with both timelines")
    terminal.check_places(out, picture)
    given = read_plan(plan)
    inputs = inputs_of_plan(plan, PlanInputs(profile, cluster, profile_batch))
    emulation = emulation_of(
        given,
        inputs.read_profile(),
        inputs.read_cluster(),
        time_scale=time_scale,
        byte_scale=byte_scale,
        iterations=iterations,
        transport=transport,
    )
    terminal.note(
        f"{emulation.ranks} processes; one second of the plan takes {emulation.time_scale:.3g} s"
    )
    rehearsal = carry_out(emulation)
    # Without a flush the iterations together are simulated, not one as promised.
    alike = rehearsal.emulation.plan == given
    promised_s = promised_iteration_s(plan) if alike else 0.0
    found, in_flight = differences(rehearsal), peaks_in_flight(rehearsal)
    values = values_of(rehearsal, promised_s, found, in_flight)
    if picture:
        write_page(picture, rehearsal)
        terminal.note(f"wrote {picture}")
    terminal.save(values, out)
    terminal.show(values, *shown(rehearsal, promised_s, max(in_flight)))
    judge(rehearsal, found, promised_s, tolerance)


def values_of(
    rehearsal: "Rehearsal", promised_s: float, differences: list[str], in_flight: list[int]
) -> dict[str, object]:
    from dataclasses import asdict

    from penstock.rehearse.rehearsal import traffic
    from penstock.timeline.metrics import bubble_fraction

    emulation = rehearsal.emulation
    return {
        "simulated_s": rehearsal.simulated_s,
        "rehearsed_s": rehearsal.rehearsed_s,
        "error": rehearsal.error,
        "promised_s": promised_s,
        "simulated_bubble": bubble_fraction(rehearsal.simulated_timeline),
        "rehearsed_bubble": bubble_fraction(rehearsal.timeline),
        "differences": differences,
        "iterations": emulation.iterations,
        "time_scale": emulation.time_scale,
        "byte_scale": emulation.byte_scale,
        "start_s": rehearsal.start_s,
        "mean_late_s": rehearsal.mean_late_s,
        "micro_batches_in_flight": in_flight,
        "rank_memory_bytes": [rank.own_bytes for rank in rehearsal.ranks],
        "traffic": [asdict(link) for link in traffic(rehearsal)],
    }


def shown(rehearsal: "Rehearsal", promised_s: float, most_in_flight: int) -> list["RenderableType"]:
    from rich.table import Table

    from penstock.rehearse.rehearsal import traffic
    from penstock.timeline.metrics import bubble_fraction
    from penstock.words import percent_text, seconds_text, size_text

    scale = rehearsal.emulation.time_scale
    bubbles = [bubble_fraction(t) for t in (rehearsal.simulated_timeline, rehearsal.timeline)]
    memory = max(rank.own_bytes for rank in rehearsal.ranks)
    promise = f", promised {seconds_text(promised_s)}" if promised_s else ""
    lines: list[RenderableType] = [
        f"iteration {seconds_text(rehearsal.rehearsed_s)}, simulated "
        f"{seconds_text(rehearsal.simulated_s)} ({100 * rehearsal.error:+.1f} %){promise}",
        f"bubble {percent_text(bubbles[1])}, simulated {percent_text(bubbles[0])}; at most "
        f"{most_in_flight} micro-batches in flight",
        f"{len(rehearsal.ranks)} processes started in {seconds_text(rehearsal.start_s)}, each with "
        f"up to {size_text(memory)} of its own",
        f"waits ended {seconds_text(rehearsal.mean_late_s)} late on average, "
        f"{seconds_text(rehearsal.mean_late_s / scale)} of the plan's time",
    ]
    links = traffic(rehearsal)
    if links:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ("busiest links", "messages", "bytes", "busy"):
            table.add_column(head, justify="left" if head == "busiest links" else "right")
        for link in links[:SHOWN]:
            share = percent_text(link.busy_s / rehearsal.rehearsed_s)
            ends = f"{link.source} to {link.target}"
            table.add_row(ends, str(link.messages), size_text(link.bytes), share)
        lines += ["", table]
    return lines


def write_page(path: str, rehearsal: "Rehearsal") -> None:
    from penstock.document import write_text
    from penstock.report.timelines_html import timeline_panel, timelines_page

    emulation = rehearsal.emulation
    slowly = f"the last iteration, {emulation.time_scale:.3g} times as slowly"
    panels = (
        timeline_panel("Simulated", "one iteration", rehearsal.simulated_timeline),
        timeline_panel("Rehearsed", slowly, rehearsal.timeline),
    )
    title = f"Rehearsal of {emulation.profile.name} on {emulation.cluster.name}"
    note = f"{emulation.plan.schedule}, {emulation.ranks} processes"
    write_text(path, timelines_page(panels, title, note))


def judge(
    rehearsal: "Rehearsal", differences: list[str], promised_s: float, tolerance: float
) -> None:
    """Raise unless the rehearsal did what the plan says, in the time that was predicted.

    Raises:
        RunFailed: what differs.
    """
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise RunFailed(f"the rehearsal differs from the plan: {differences[0]}{more}")
    for expected_s, by_whom in (
        (rehearsal.simulated_s, "simulated"),
        (promised_s, "promised with the plan; plan again with this profile and cluster"),
    ):
        error = rehearsal.rehearsed_s / expected_s - 1 if expected_s else 0.0
        if abs(error) > tolerance:
            raise RunFailed(
                f"an iteration took {rehearsal.rehearsed_s:.4g} s of the plan's time, "
                f"{100 * error:+.1f} % against the {expected_s:.4g} s {by_whom}; waits ended "
                f"{1e3 * rehearsal.mean_late_s:.2g} ms late: where that is much, use a larger "
                f"--time-scale than {rehearsal.emulation.time_scale:.3g}"
            )
