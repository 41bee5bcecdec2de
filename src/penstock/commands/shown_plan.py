"""Output of a plan: its main numbers in a few lines, and its stages in a table."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from penstock.advice.assessment import PlannedPipeline
from penstock.advice.baselines import Rival
from penstock.cluster.cluster import Cluster
from penstock.commands.terminal import Terminal
from penstock.plan.plan import plan_words
from penstock.profile.model_profile import ModelProfile
from penstock.report.tables import plain_table, plan_table
from penstock.simulate.by_length import expected_s
from penstock.text import numbered, percent_text, seconds_text, size_text
from penstock.timeline.metrics import iteration_s

if TYPE_CHECKING:
    from penstock.advice.what_if import PlayedPlan


def show_planned(
    terminal: Terminal,
    planned: PlannedPipeline,
    profile: ModelProfile,
    cluster: Cluster,
    values: Mapping[str, object],
    parts: Sequence[RenderableType] = (),
) -> None:
    """Print a plan with its prediction and ``parts``."""
    prediction = planned.prediction
    table = plan_table(planned.plan, profile, cluster, prediction.peak_memory_bytes)
    terminal.show(values, *headline(planned), table, *parts)


def rivals_table(best_plans: Sequence[Rival], planned: PlannedPipeline) -> Table:
    """Ways to train the same: ``best_plans``, and a plan's baselines without a pipeline."""
    table = plain_table(("way to train",), ("iteration", "peak\nmemory"))
    for way in (*best_plans, *planned.baselines.rivals):
        fits = way.iteration_s < inf
        time, peak = seconds_text(way.iteration_s), size_text(way.peak_memory_bytes)
        table.add_row(way.name, *((time, peak) if fits else ("does not fit", "")))
    return table


def stage_rows(planned: PlannedPipeline, profile: ModelProfile) -> Iterator[dict[str, object]]:
    """A row for each stage, for a table elsewhere."""
    for index, stage in enumerate(planned.plan.stages):
        peaks = planned.prediction.peak_memory_bytes
        yield {
            "stage": index,
            "first_layer": stage.layers.start,
            "last_layer": stage.layers.stop - 1,
            "devices": stage.devices,
            "rows": stage.slices,
            "recompute": stage.recompute,
            "sharding": stage.sharding,
            "parameter_bytes": profile.parameter_bytes(stage.layers),
            "peak_memory_bytes": max(peaks[device] for device in stage.devices),
        }


def too_full_words(devices: Sequence[int]) -> str:
    """The message that a plan does not fit, and where."""
    where = numbered("device", devices)
    return f"the plan does not fit in the memory of {where}; plan again, or recompute activations"


def reserve_lines(share: float) -> list[str]:
    """The share of memory that plans leave free, in words, if any."""
    words = f"{100 * share:g} % of each device's memory is kept free (--memory-reserve)"
    return [words] if share else []


def groups_line(groups: Sequence[Sequence[int]]) -> str:
    """The ranks that each device of a plan represents.

    >>> groups_line([(0, 1), (2,)])
    'tensor groups: device 0 is ranks 0, 1; device 1 is rank 2'
    """
    named = (f"device {device} is {numbered('rank', r)}" for device, r in enumerate(groups))
    return f"tensor groups: {'; '.join(named)}"


def headline(planned: PlannedPipeline) -> list[str]:
    """The main numbers of a plan, in a few lines."""
    plan, prediction = planned.plan, planned.prediction
    is_bounded = isfinite(planned.gap)
    parts = [
        f"iteration {seconds_text(prediction.iteration_s)}",
        *([f"{percent_text(planned.gap)} above the bound"] if is_bounded else []),
        f"bubble {percent_text(prediction.bubble)}",
        f"{planned.speedup_over_one_device:.2f}x one device",
    ]
    parts.append(planned.rival_words())
    lines = [
        f"{plan.planner}: {plan_words(plan)}",
        ", ".join(parts),
        str(planned.throughput),
    ]
    if plan.tensor_groups:
        lines.append(groups_line(plan.tensor_groups))
    if planned.on_host is not None:
        lines.append(f"{planned.on_host} an iteration")
    lines += reserve_lines(planned.memory_reserve)
    if planned.by_length:
        mean_s = seconds_text(expected_s(planned.by_length))
        lines.append(f"mean over lengths {mean_s} ({', '.join(map(str, planned.by_length))})")
    if is_bounded and planned.bound.argument:
        lines.append(f"bound {seconds_text(planned.lower_bound_s)}{bound_words(planned)}")
    return lines


def bound_words(planned: PlannedPipeline) -> str:
    """The plans that a bound covers, and its proof."""
    covers = f" ({planned.bound.covers})" if planned.bound.covers else ""
    return covers + (f": {planned.bound.argument}" if planned.bound.argument else "")


def played_parts(
    before: "PlayedPlan", after: "PlayedPlan", changes: Sequence[str]
) -> list[RenderableType]:
    """The output between a simulated plan and its timeline.

    The ranks of tensor groups; a table of numbers before and after ``changes``, and what limits
    each plan; the time of several iterations.
    """
    parts: list[RenderableType] = []
    if before.tensor_groups:
        parts.append(groups_line(before.tensor_groups))
    if changes:
        from penstock.advice.explain import explanation_words

        words = [explanation_words(played.explanation)[0] for played in (before, after)]
        table = change_table(before, after, changes)
        parts += ["", table, f"Before: {words[0]}", f"After: {words[1]}"]
    repeated = after.repeated
    if repeated is not None:
        each_s = repeated.steady_s
        rate = after.planned.plan.global_batch / each_s if each_s > 0 else 0.0
        parts.append(
            f"{after.iterations} iterations in a row: {seconds_text(iteration_s(after.timeline))}, "
            f"{seconds_text(each_s)} for each after the first, {rate:.4g} samples a second"
        )
    return [*parts, ""]


def change_table(before: "PlayedPlan", after: "PlayedPlan", changes: Sequence[str]) -> Table:
    """Numbers before and after, and by how much they changed."""
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
    return table
