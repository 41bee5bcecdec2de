"""Plans and comparisons as tables for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.words import layers_text, percent_text, seconds_text, size_text

__all__ = ["ComparisonRow", "comparison_table", "plan_table", "profile_table"]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A plan in a comparison, or why there is none (then the figures mean nothing)."""

    planner: str
    schedule: str
    stages: str = ""
    iteration_s: float = 0.0
    gap: float = 0.0
    bubble: float = 0.0
    peak_memory_bytes: float = 0.0
    speedup_over_one_device: float = 0.0
    refusal: str = ""


def profile_table(profile: ModelProfile) -> Table:
    """One row for each layer: its costs for the largest batch that was measured."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("name")
    for head in ("forward", "backward", "parameters", "saved"):
        table.add_column(head, justify="right")
    samples = profile.batch_size
    for index, layer in enumerate(profile.layers):
        table.add_row(
            str(index),
            layer.name.replace("[", r"\["),
            seconds_text(layer.forward_s.at(samples)),
            seconds_text(layer.backward_s.at(samples)),
            size_text(layer.parameter_bytes),
            size_text(layer.saved_bytes.at(samples)),
        )
    return table


def plan_table(
    plan: Plan, profile: ModelProfile, cluster: Cluster, peak_memory_bytes: Sequence[float]
) -> Table:
    """One row for each stage; ``peak_memory_bytes`` has an entry for each device of the cluster."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("stage", "layers", "devices", "rows", "recompute"):
        table.add_column(head)
    for head in ("parameters", "peak memory", "limit"):
        table.add_column(head, justify="right")
    for index, stage in enumerate(plan.stages):
        names = [profile.layers[i].name for i in stage.layers]
        table.add_row(
            str(index),
            f"{layers_text(names)}  [{stage.layers.start}, {stage.layers.stop})".replace(
                "[", r"\["
            ),
            listed(stage.devices),
            listed(stage.slices),
            "yes" if stage.recompute else "no",
            size_text(profile.parameter_bytes(stage.layers)),
            size_text(max(peak_memory_bytes[device] for device in stage.devices)),
            size_text(min(cluster.devices[device].memory_bytes for device in stage.devices)),
        )
    return table


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """One row for each planner and schedule, in the order given."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("planner", "schedule", "stages"):
        table.add_column(head)
    for head in ("iteration", "above bound", "bubble", "peak memory", "over one device"):
        table.add_column(head, justify="right")
    for row in rows:
        if row.refusal:
            table.add_row(row.planner, row.schedule, row.refusal.replace("[", r"\["))
            continue
        table.add_row(
            row.planner,
            row.schedule,
            row.stages.replace("[", r"\["),
            seconds_text(row.iteration_s),
            percent_text(row.gap),
            percent_text(row.bubble),
            size_text(row.peak_memory_bytes),
            f"{row.speedup_over_one_device:.2f}x",
        )
    return table


def listed(numbers: Sequence[int]) -> str:
    """Numbers as a short list; a run of neighbours by its ends.

    >>> listed((3,)), listed((0, 1, 2, 3, 4)), listed((2, 2, 1))
    ('3', '0-4', '2, 2, 1')
    """
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and tuple(numbers) == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"{len(numbers)} x {first}"
    return ", ".join(map(str, numbers))
