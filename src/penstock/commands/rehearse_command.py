"""``penstock rehearse``: carries out a plan with emulated devices and links, on this machine."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.commands import options
from penstock.commands.terminal import Terminal
from penstock.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from penstock.rehearse.rehearsal import Rehearsal


def rehearse(
    *,
    plan: options.PlanPath,
    profile: options.PlansProfile = "",
    cluster: options.PlansCluster = "",
    profile_batch: options.ProfileBatch = None,
    time_scale: Annotated[
        float | None,
        Option(
            min=0.001,
            metavar="K",
            help="Take K seconds here for one of the plan (default: chosen).",
        ),
    ] = None,
    iterations: Annotated[
        int, Option(min=1, max=100, metavar="N", help="Carry out N iterations.")
    ] = 2,
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
    from penstock.advice.plan_files import PlanInputs, inputs_of_plan, recorded_origin
    from penstock.plan.json_file import read_plan
    from penstock.rehearse.emulation import emulation_of
    from penstock.rehearse.rehearsal import differences
    from penstock.rehearse.rehearsal import rehearse as carry_out

    if picture and not picture.endswith(".html"):
        raise BadInput(f"picture '{picture}' must end in .html: a page with both timelines")
    terminal.check_places(out, picture)
    inputs = inputs_of_plan(plan, PlanInputs(profile, cluster, profile_batch))
    emulation = emulation_of(
        read_plan(plan),
        inputs.read_profile(),
        inputs.read_cluster(),
        time_scale=time_scale or 0.0,
        iterations=iterations,
    )
    terminal.note(
        f"{emulation.ranks} processes; one second of the plan takes {emulation.time_scale:.3g} s"
    )
    rehearsal = carry_out(emulation)
    promised_s, found = recorded_origin(plan).iteration_s, differences(rehearsal)
    values = rehearsal_values(rehearsal, promised_s, found)
    if picture:
        write_page(picture, rehearsal)
        terminal.note(f"wrote {picture}")
    terminal.save(values, out)
    terminal.show(values, *rehearsal_in_words(rehearsal, promised_s))
    judge(rehearsal, found, promised_s, tolerance)


def rehearsal_values(
    rehearsal: "Rehearsal", promised_s: float, differences: list[str]
) -> dict[str, object]:
    from penstock.timeline.metrics import bubble_fraction

    emulation = rehearsal.emulation
    return {
        "simulated_s": rehearsal.simulated_s,
        "rehearsed_s": rehearsal.rehearsed_s,
        "error": rehearsal.error,
        "promised_s": promised_s,
        "simulated_bubble": bubble_fraction(rehearsal.prediction.timeline),
        "rehearsed_bubble": bubble_fraction(rehearsal.timeline),
        "differences": differences,
        "iterations": emulation.iterations,
        "time_scale": emulation.time_scale,
        "byte_scale": emulation.byte_scale,
        "start_s": rehearsal.start_s,
        "mean_late_s": rehearsal.mean_late_s,
    }


def rehearsal_in_words(rehearsal: "Rehearsal", promised_s: float) -> list[str]:
    from penstock.text import percent_text, seconds_text
    from penstock.timeline.metrics import bubble_fraction

    scale = rehearsal.emulation.time_scale
    bubbles = [bubble_fraction(t) for t in (rehearsal.prediction.timeline, rehearsal.timeline)]
    promise = f", promised {seconds_text(promised_s)}" if promised_s else ""
    return [
        f"iteration {seconds_text(rehearsal.rehearsed_s)}, simulated "
        f"{seconds_text(rehearsal.simulated_s)} ({100 * rehearsal.error:+.1f} %){promise}",
        f"bubble {percent_text(bubbles[1])}, simulated {percent_text(bubbles[0])}",
        f"{len(rehearsal.ranks)} processes started in {seconds_text(rehearsal.start_s)}",
        f"waits ended {seconds_text(rehearsal.mean_late_s)} late on average, "
        f"{seconds_text(rehearsal.mean_late_s / scale)} of the plan's time",
    ]


def write_page(path: str, rehearsal: "Rehearsal") -> None:
    from penstock.files import write_text
    from penstock.report.timelines_html import timeline_panel, timelines_page

    emulation = rehearsal.emulation
    slowly = f"the last iteration, {emulation.time_scale:.3g} times as slowly"
    panels = (
        timeline_panel("Simulated", "one iteration", rehearsal.prediction.timeline),
        timeline_panel("Rehearsed", slowly, rehearsal.timeline),
    )
    title = f"Rehearsal of {emulation.profile.name} on {emulation.cluster.name}"
    note = f"{emulation.plan.schedule}, {emulation.ranks} processes"
    write_text(path, timelines_page(panels, title, note))


def judge(
    rehearsal: "Rehearsal", differences: list[str], promised_s: float, tolerance: float
) -> None:
    """Raise unless the rehearsal did what the plan says, in the time that was predicted."""
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
