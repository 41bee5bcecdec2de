"""Profiles, clusters and plans as tables for the terminal."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table

from penstock.cluster.cluster import HOST_HEADS, Cluster
from penstock.plan.plan import Plan, recompute_text
from penstock.profile.model_profile import COST_HEADS, ModelProfile
from penstock.text import layers_text, numbers_text, size_text


def plain_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without lines, with these heads; columns of names, then columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in left:
        table.add_column(head)
    for head in right:
        table.add_column(head, justify="right")
    return table


def cluster_table(cluster: Cluster) -> Table:
    """One row for each host: its devices, the links between them, and its port."""
    table = plain_table(HOST_HEADS[:2], HOST_HEADS[2:])
    for row in cluster.host_rows():
        table.add_row(*row)
    return table


def profile_table(profile: ModelProfile) -> Table:
    """One row for each layer, with its costs for the largest batch that was measured."""
    table = plain_table(COST_HEADS[:2], COST_HEADS[2:])
    for row in profile.cost_rows():
        table.add_row(*row)
    return table


def plan_table(
    plan: Plan, profile: ModelProfile, cluster: Cluster, peak_memory_bytes: Sequence[float]
) -> Table:
    """One row for each stage; ``peak_memory_bytes`` has an entry for each device of the cluster."""
    table = plain_table(
        ("stage", "layers", "devices", "rows", "recompute"),
        ("parameters", "peak\nmemory", "limit"),
    )
    table.add_column("names", overflow="fold")
    for index, stage in enumerate(plan.stages):
        names = [profile.layers[i].name for i in stage.layers]
        table.add_row(
            str(index),
            f"[{stage.layers.start}, {stage.layers.stop})",
            numbers_text(stage.devices),
            numbers_text(stage.slices),
            recompute_text(stage),
            size_text(profile.parameter_bytes(stage.layers)),
            size_text(max(peak_memory_bytes[device] for device in stage.devices)),
            size_text(min(cluster.devices[device].memory_bytes for device in stage.devices)),
            layers_text(names),
        )
    return table


def stages_text(plan: Plan, most: int = 4) -> str:
    """Stages as layers x replicas, with runs of equal ones and at most ``most`` parts.

    >>> from penstock.plan.plan import Stage
    >>> def stage(first, last, devices):
    ...     return Stage(range(first, last), tuple(devices), (1,) * len(devices))
    >>> two = Plan((stage(0, 30, range(8)), stage(30, 53, range(8, 16))), 8, 8, "1f1b")
    >>> stages_text(two)
    '30x8 : 23x8'
    >>> deep = tuple(stage(3 * i, 3 * i + 3, [i]) for i in range(32))
    >>> stages_text(Plan((*deep, stage(96, 97, [32])), 8, 1, "1f1b"))
    '32 of 3x1 : 1x1'
    """
    parts = [f"{len(stage.layers)}x{stage.replicas}" for stage in plan.stages]
    runs = [(part, len(list(same))) for part, same in groupby(parts)]
    texts = [part if times == 1 else f"{times} of {part}" for part, times in runs]
    if len(parts) <= most:
        texts = parts
    if len(texts) > most:
        texts = [*texts[: most - 2], f"... {len(parts)} stages ...", texts[-1]]
    return " : ".join(texts)


BOUNDLESS = 10_000


@dataclass(frozen=True)
class NarrowTable:
    """``table``, cut into pieces that fit; each begins with its first ``keys`` columns."""

    table: Table
    keys: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        wide = options.update(max_width=BOUNDLESS)
        if Measurement.get(console, wide, self.table).maximum <= options.max_width:
            yield self.table
            return
        keys, others = self.table.columns[: self.keys], self.table.columns[self.keys :]
        shown: list[Column] = []
        for column in others:
            piece = self.piece([*keys, *shown, column])
            if shown and Measurement.get(console, wide, piece).maximum > options.max_width:
                yield self.piece([*keys, *shown])
                shown = []
            shown.append(column)
        yield self.piece([*keys, *shown])

    def piece(self, columns: list[Column]) -> Table:
        piece = copy(self.table)
        piece.columns = [replace(column, _index=k) for k, column in enumerate(columns)]
        return piece
