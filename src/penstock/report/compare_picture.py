"""The picture of a comparison: iteration times as bars, and the timeline of each plan.

All panels share one time axis, on which the lower bound is marked.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from penstock.plan.plan import Plan
from penstock.report.drawing import Curve, Drawing, Ink, Mark, Rule, Run, Slab, Words
from penstock.report.palette import KIND_WORDS, Style
from penstock.report.stage_lanes import Bar, StageLane
from penstock.report.tables import ComparisonRow
from penstock.report.time_axis import TimeAxis, tick_text, ticks
from penstock.words import percent_text, seconds_text

__all__ = ["ComparedPlan", "PictureHead", "compare_drawing"]

WIDTH, MARGIN, GUTTER, RIGHT = 1360, 28, 176, 330
PLOT = WIDTH - RIGHT - GUTTER
SMALL = 11.5
BAR_ROW, BAR = 36, 20
BLOCK_HEAD, BLOCK_GAP = 26, 18
FAR = 2.6
"""Plans that take more than this many times the fastest are cut off at the right."""

FEW_BARS = 800
"""Up to this many bars of a plan, each bar has a tooltip."""


@dataclass(frozen=True)
class ComparedPlan:
    """A row of the comparison with all that is drawn for it.

    ``shares`` are the seconds of its critical path by kind, in drawing order.
    """

    row: ComparisonRow
    plan: Plan
    lanes: tuple[StageLane, ...]
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PictureHead:
    """Title, subtitle, and the lower bound with its argument."""

    title: str
    subtitle: str
    bound_s: float
    bound_argument: str = ""
    bound_covers: str = ""


SHARES: dict[str, Ink | Style] = {
    "compute": "compute",
    "fill and drain": "fill",
    "other stages": "other",
    "recompute": Style("R"),
    "transfers": Style("SEND"),
    "all-reduce": Style("REDUCE"),
    "optimizer step": Style("STEP"),
    "waiting": "waiting",
}
"""The colour of each share of a critical path."""

Panel: TypeAlias = tuple[list[Mark], float]
"""The marks of a panel, and the y at which it ends."""


def compare_drawing(plans: Sequence[ComparedPlan], head: PictureHead) -> Drawing:
    """The drawing of ``plans`` in the given order; equal plans share a block."""
    axis = time_axis([plan.row.iteration_s for plan in plans], head.bound_s)
    marks: list[Mark] = [
        Words(head.title, MARGIN, 38, 22, bold=True),
        Words(head.subtitle, MARGIN, 60, 12.5, "quiet"),
    ]
    bars, top = bars_panel(plans, head, axis, 76.0)
    blocks = same_plans(plans)
    marks += [*bars, *panel_title("One iteration, stage by stage", top + 26, lane_legend(blocks))]
    top += 52
    for block in blocks:
        drawn, top = plan_block(block, axis, head.bound_s, top)
        marks += drawn
    bottom = top - BLOCK_GAP + 4
    marks += axis_marks(axis, bottom + 15)
    return Drawing(WIDTH, round(bottom + 34), head.title, tuple(marks))


def time_axis(iterations_s: Sequence[float], bound_s: float) -> TimeAxis:
    """An axis for all iterations that are not much longer than the shortest."""
    shortest_s = min(iterations_s)
    near_s = max(s for s in iterations_s if s <= FAR * shortest_s)
    is_cut = max(iterations_s) > near_s
    return TimeAxis(GUTTER, GUTTER + PLOT, max(near_s, bound_s) * (1.12 if is_cut else 1.02))


def place(axis: TimeAxis, time_s: float) -> float:
    """The x of a time, at most the right end."""
    return min(axis.x(time_s), axis.right)


def is_beyond(axis: TimeAxis, time_s: float) -> bool:
    """Whether a time lies beyond the right end."""
    return time_s > axis.end_s * (1 + 1e-9)


def same_plans(plans: Sequence[ComparedPlan]) -> list[list[ComparedPlan]]:
    """Groups of plans that differ only in their planner, in the order of the first of each."""
    found: dict[object, list[ComparedPlan]] = {}
    for one in plans:
        plan = one.plan
        key = (plan.stages, plan.micro_batches, plan.schedule, plan.in_flight_limit)
        found.setdefault(key, []).append(one)
    return list(found.values())


def panel_title(words: str, y: float, legend: Sequence[tuple[str, Ink | Style]]) -> list[Mark]:
    """The title of a panel, with its legend on the same line at the right."""
    marks: list[Mark] = [Words(words, MARGIN, y, 15, bold=True)]
    widths = [22 + 6.4 * len(word) + 14 for word, _ in legend]
    x = WIDTH - MARGIN - sum(widths) + 14
    for (word, colour), width in zip(legend, widths, strict=True):
        marks += [Slab(x, y - 10, 11, 11, colour), Words(word, x + 17, y, SMALL, "quiet")]
        x += width
    return marks


def lane_legend(blocks: Sequence[Sequence[ComparedPlan]]) -> list[tuple[str, Ink | Style]]:
    """The kinds of event that the lanes show."""
    lanes = [lane for block in blocks for lane in block[0].lanes]
    shown = {bar.kind for lane in lanes for bar in (*lane.compute, *lane.transfers)}
    return [(word, Style(kind)) for kind, word in KIND_WORDS.items() if kind in shown]


def bars_panel(
    plans: Sequence[ComparedPlan], head: PictureHead, axis: TimeAxis, top: float
) -> Panel:
    """A bar for each row, divided into the shares of its critical path."""
    kinds = list(dict.fromkeys(kind for plan in plans for kind, _ in plan.shares))
    legend: list[tuple[str, Ink | Style]] = [(kind, SHARES[kind]) for kind in kinds]
    marks = panel_title("Iteration time and its critical path", top + 22, legend)
    rows_top = top + 40
    bottom = rows_top + BAR_ROW * len(plans)
    marks += grid_marks(axis, rows_top, bottom)
    for index, one in enumerate(plans):
        marks += bar_row(one, axis, rows_top + index * BAR_ROW)
    marks += bound_marks(axis, head.bound_s, rows_top - 4, bottom)
    marks += axis_marks(axis, bottom + 14)
    proof = f": {head.bound_argument}" if head.bound_argument else ""
    covers = f" ({head.bound_covers})" if head.bound_covers else ""
    note = f"dashed: the bound; no plan takes less than {seconds_text(head.bound_s)}{covers}{proof}"
    marks.append(Words(shortened(note, 190), GUTTER, bottom + 34, 12, "limit"))
    return marks, bottom + 38


def bar_row(one: ComparedPlan, axis: TimeAxis, y: float) -> list[Mark]:
    """One row: planner, bar and numbers."""
    row, middle = one.row, y + BAR_ROW / 2
    marks: list[Mark] = [
        Words(row.planner, MARGIN, middle - 2, 13.5, bold=True),
        Words(row.schedule, MARGIN, middle + 13, SMALL, "quiet"),
    ]
    start_s = 0.0
    for kind, seconds in one.shares:
        left, right = place(axis, start_s), place(axis, start_s + seconds)
        if right - left > 0.05:
            label = f"{kind}: {seconds_text(seconds)} ({percent_text(seconds / row.iteration_s)})"
            marks.append(Slab(left, y + 8, right - left, BAR, SHARES[kind], label))
        start_s += seconds
    end = place(axis, row.iteration_s)
    if is_beyond(axis, row.iteration_s):
        marks += cut_marks(end - 22, y + 5, BAR + 6)
    numbers = gap_text(row.gap)
    if row.speedup_over_data_parallel < inf:
        numbers += f" · {row.speedup_over_data_parallel:.2f}x data parallel"
    tail = Words(numbers, 0, 0, SMALL, "quiet")
    seconds = seconds_text(row.iteration_s)
    marks.append(Words(seconds, end + 9, middle + 4, 13, bold=True, tail=tail))
    return marks


def gap_text(gap: float) -> str:
    """The distance from the lower bound in words.

    >>> gap_text(0.167), gap_text(15.0)
    ('16.7 % above the bound', '16.0x the bound')
    """
    return f"{percent_text(gap)} above the bound" if gap < 2 else f"{1 + gap:.1f}x the bound"


def plan_block(block: Sequence[ComparedPlan], axis: TimeAxis, bound_s: float, top: float) -> Panel:
    """The timeline of one plan, stage by stage; its planners are the title."""
    first = block[0]
    row, plan = first.row, first.plan
    names = " = ".join(dict.fromkeys(one.row.planner for one in block))
    about = (
        f"{row.schedule} · {counted(len(plan.stages), 'stage', 's')}, layers x replicas "
        f"{row.stages} · {counted(plan.micro_batches, 'micro-batch', 'es')} of "
        f"{plan.micro_batch_size} · bubble {percent_text(row.bubble)}"
    )
    tail = Words(shortened(about, 150), 0, 0, 12.5, "quiet")
    compute, transfers, gap = lane_heights(len(first.lanes))
    is_small = sum(len(lane.compute) + len(lane.transfers) for lane in first.lanes) <= FEW_BARS
    y = lanes_top = top + BLOCK_HEAD
    bottom = lanes_top + len(first.lanes) * (compute + transfers + gap) - gap
    marks: list[Mark] = [
        Words(names, MARGIN, top + 15, 13.5, bold=True, tail=tail),
        *grid_marks(axis, lanes_top - 3, bottom + 1),
    ]
    every = 1 if len(first.lanes) <= 16 else 4
    for index, lane in enumerate(first.lanes):
        if index % every == 0:
            label = (lane_name(lane), GUTTER - 10.0, y + compute / 2 + 4)
            marks.append(Words(*label, SMALL, "quiet", "end"))
        marks.append(Slab(GUTTER, y, PLOT, compute, "row"))
        marks += lane_bars(lane.compute, axis, y, compute, is_small)
        marks += lane_bars(lane.transfers, axis, y + compute + 1, transfers, is_small)
        y += compute + transfers + gap
    end = place(axis, row.iteration_s)
    marks += bound_marks(axis, bound_s, lanes_top - 3, bottom + 1)
    marks.append(Rule(end, lanes_top - 3, end, bottom + 1, "ink", 1.4))
    if is_beyond(axis, row.iteration_s):
        marks += cut_marks(end - 22, lanes_top - 3, bottom + 4 - lanes_top)
    marks.append(Words(seconds_text(row.iteration_s), end + 9, lanes_top + 11, 13, bold=True))
    return marks, bottom + BLOCK_GAP


def lane_heights(lanes: int) -> tuple[float, float, float]:
    """Heights of compute and transfer bars and of the gap below, by the number of lanes."""
    if lanes <= 8:
        return 18, 5, 7
    if lanes <= 16:
        return 12, 3, 4
    return 7, 2, 2


def lane_name(lane: StageLane) -> str:
    """The stages of a lane."""
    shared = lane.replicas > 1 and lane.last_stage == lane.first_stage
    return f"{lane.name}  on {lane.replicas} devices" if shared else lane.name


def lane_bars(
    bars: Sequence[Bar], axis: TimeAxis, y: float, height: float, with_labels: bool
) -> list[Mark]:
    """The bars of a lane, with tooltips or merged into one run for each style; then numbers."""
    runs: dict[tuple[Style, float], list[tuple[float, float]]] = defaultdict(list)
    marks: list[Mark] = []
    for bar in bars:
        left, right = place(axis, bar.start_s), place(axis, bar.end_s)
        if right <= left:
            continue
        width = max(right - left - (0.7 if right - left > 3 else 0.0), 0.4)
        style = Style(bar.kind)
        if with_labels and bar.strength == 1:
            marks.append(Slab(left, y, width, height, style, bar_label(bar)))
        else:
            runs[style, bar.strength].append((left, width))
        number = str(bar.micro_batch)
        if bar.micro_batch >= 0 and height >= 12 and width >= 8 + 6 * len(number):
            middle = (left + width / 2, y + height / 2 + 3.8)
            marks.append(Words(number, *middle, 10.5, style, "middle"))
    drawn = (
        Run(y, height, style, tuple(spans), strength) for (style, strength), spans in runs.items()
    )
    return [*drawn, *marks]


def bar_label(bar: Bar) -> str:
    """The tooltip of a bar: what it is, and when."""
    words = KIND_WORDS[bar.kind]
    if bar.micro_batch >= 0:
        words += f" of micro-batch {bar.micro_batch}"
    return f"{words}: {seconds_text(bar.start_s)} to {seconds_text(bar.end_s)}"


def cut_marks(x: float, y: float, height: float) -> list[Mark]:
    """Two slanted strokes that show that the bar is cut off."""
    corners = ((x, y + height), (x + 8, y), (x + 14, y), (x + 6, y + height))
    return [
        Curve(corners, "paper", filled=True),
        Curve(corners[:2], "quiet", width=0.8),
        Curve(corners[2:], "quiet", width=0.8),
    ]


def grid_marks(axis: TimeAxis, top: float, bottom: float) -> list[Mark]:
    """A vertical line at every tick."""
    return [Rule(x, top, x, bottom, "grid") for x in map(axis.x, ticks(axis.end_s))]


def axis_marks(axis: TimeAxis, y: float) -> list[Mark]:
    """The times under the ticks."""
    return [
        Words(tick_text(t, axis.end_s), axis.x(t), y, SMALL, "quiet", "middle")
        for t in ticks(axis.end_s)
    ]


def bound_marks(axis: TimeAxis, bound_s: float, top: float, bottom: float) -> list[Mark]:
    """The dashed line of the lower bound."""
    if bound_s <= 0:
        return []
    return [Rule(axis.x(bound_s), top, axis.x(bound_s), bottom, "limit", 1.4, dashed=True)]


def counted(number: int, thing: str, ending: str) -> str:
    """A number with its noun, in the plural if needed.

    >>> counted(1, "stage", "s"), counted(2, "micro-batch", "es")
    ('1 stage', '2 micro-batches')
    """
    return f"{number} {thing}{'' if number == 1 else ending}"


def shortened(words: str, most: int) -> str:
    """``words`` cut to at most ``most`` characters.

    >>> shortened("a long story", 8)
    'a long…'
    """
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"
