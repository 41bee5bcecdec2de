"""The picture of a comparison: iteration times as bars, and the timeline of each plan.

All panels share one time axis, on which the lower bound is marked.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import inf
from pathlib import Path
from typing import TypeAlias

from penstock.document import write_text
from penstock.errors import BadInput, shortened
from penstock.plan.plan import Plan
from penstock.report.device_rows import (
    DeviceRow,
    DrawnEvent,
    GanttRows,
    gantt_rows,
    row_ends,
    stage_names,
)
from penstock.report.drawing import Curve, Drawing, Ink, Mark, Rule, Slab, Words
from penstock.report.drawing_svg import drawing_svg
from penstock.report.gantt_drawing import (
    blocks_of,
    grid_marks,
    row_heights,
    row_marks,
    shade_words,
)
from penstock.report.palette import KIND_WORDS, Style
from penstock.report.tables import ComparisonRow
from penstock.report.time_axis import TimeAxis, tick_text, ticks
from penstock.report.timelines_html import asset, html_page
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Timeline
from penstock.words import percent_text, seconds_text

__all__ = [
    "ComparedPlan",
    "PictureHead",
    "check_picture_path",
    "compare_drawing",
    "plan_rows",
    "write_picture",
]

WIDTH, MARGIN, GUTTER, RIGHT = 1360, 28, 176, 330
PLOT = WIDTH - RIGHT - GUTTER
SMALL = 11.5
BAR_ROW, BAR = 36, 20
BLOCK_HEAD, BLOCK_GAP = 26, 18
FAR = 2.6
"""Plans that take more than this many times the fastest are cut off at the right."""

FEW_BLOCKS = 800
"""Up to this many blocks of a plan, each block has a tooltip."""

MOST_ROWS = 32
"""Of longer pipelines the first and last groups are shown."""


@dataclass(frozen=True)
class ComparedPlan:
    """A row of the comparison with all that is drawn for it, such as its `plan_rows`.

    ``shares`` are the seconds of its critical path by kind, in drawing order.
    """

    row: ComparisonRow
    plan: Plan
    chart: GanttRows
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
    marks += [*bars, *panel_title("One iteration, stage by stage", top + 26, kind_legend(blocks))]
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


def kind_legend(blocks: Sequence[Sequence[ComparedPlan]]) -> list[tuple[str, Ink | Style]]:
    """The kinds of event that the rows show."""
    shown = {style.kind for block in blocks for style in block[0].chart.styles}
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


def plan_rows(timeline: Timeline, plan: Plan) -> GanttRows:
    """A row for each device group of ``plan``: its replica that computes longest."""
    busy_s: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in COMPUTE:
            busy_s[event.device] += event.end_s - event.start_s
    groups = plan.device_groups
    head, tail = row_ends(len(groups), MOST_ROWS)
    shown = (*groups[:head], *groups[len(groups) - tail :])
    chosen = {max(group, key=lambda device: busy_s[device]) for group in shown}
    events = tuple(event for event in timeline.events if event.device in chosen)
    return gantt_rows(replace(timeline, events=events, memory=()))


def plan_block(block: Sequence[ComparedPlan], axis: TimeAxis, bound_s: float, top: float) -> Panel:
    """The timeline of one plan, stage by stage; its planners are the title."""
    first = block[0]
    row, plan, rows = first.row, first.plan, first.chart.rows
    names = " = ".join(dict.fromkeys(one.row.planner for one in block))
    about = (
        f"{row.schedule} · {counted(len(plan.stages), 'stage', 's')}, layers x replicas "
        f"{row.stages} · {counted(plan.micro_batches, 'micro-batch', 'es')} of "
        f"{plan.micro_batch_size} · bubble {percent_text(row.bubble)}"
    )
    if first.chart.shades > 1:
        about += f" · {shade_words(first.chart)}"
    if len(rows) < len(plan.device_groups):
        about += f" · {len(plan.device_groups) - len(rows)} rows in the middle are left out"
    tail = Words(shortened(about, 180), 0, 0, 12.5, "quiet")
    # Half as high as in a chart of its own.
    heights = row_heights(2 * len(rows), first.chart.has_transfers)
    with_labels = sum(map(blocks_of, rows)) <= FEW_BLOCKS
    rows_top = top + BLOCK_HEAD
    bottom = rows_top + len(rows) * heights.pitch - heights.gap
    marks: list[Mark] = [
        Words(names, MARGIN, top + 15, 13.5, bold=True, tail=tail),
        *grid_marks(axis, rows_top - 3, bottom + 1),
    ]
    cut = is_beyond(axis, row.iteration_s)
    for index, device in enumerate(rows):
        y = rows_top + index * heights.pitch
        if index % (1 if len(rows) <= 16 else 4) == 0:
            name = (row_name(device, plan), GUTTER - 10.0, y + heights.compute / 2 + 4)
            marks.append(Words(*name, SMALL, "quiet", "end"))
        drawn = until(device, axis.end_s) if cut else device
        marks += row_marks(drawn, axis, y, heights, with_labels, first.chart.has_transfers)
    end = place(axis, row.iteration_s)
    marks += bound_marks(axis, bound_s, rows_top - 3, bottom + 1)
    marks.append(Rule(end, rows_top - 3, end, bottom + 1, "ink", 1.4))
    if cut:
        marks += cut_marks(end - 22, rows_top - 3, bottom + 4 - rows_top)
    marks.append(Words(seconds_text(row.iteration_s), end + 9, rows_top + 11, 13, bold=True))
    return marks, bottom + BLOCK_GAP


def row_name(row: DeviceRow, plan: Plan) -> str:
    """The stages of a device, and how many others hold the same one."""
    replicas = len(next(group for group in plan.device_groups if row.device in group))
    shared = f"  on {replicas} devices" if replicas > 1 and len(row.stages) == 1 else ""
    return stage_names(row.stages, most=20) + shared


def until(row: DeviceRow, end_s: float) -> DeviceRow:
    """What a row shows of the time up to ``end_s``."""

    def cut(blocks: Sequence[DrawnEvent]) -> tuple[DrawnEvent, ...]:
        return tuple(
            replace(block, event=replace(block.event, end_s=min(block.end_s, end_s)))
            for block in blocks
            if block.start_s < end_s
        )

    lanes = tuple(map(cut, row.compute))
    return replace(row, compute=lanes, sends=cut(row.sends), receives=cut(row.receives))


def cut_marks(x: float, y: float, height: float) -> list[Mark]:
    """Two slanted strokes that show that the bar is cut off."""
    corners = ((x, y + height), (x + 8, y), (x + 14, y), (x + 6, y + height))
    return [
        Curve(corners, "paper", filled=True),
        Curve(corners[:2], "quiet", width=0.8),
        Curve(corners[2:], "quiet", width=0.8),
    ]


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


FORMATS = (".svg", ".html")


def check_picture_path(path: str) -> None:
    """Raise for a picture that cannot be written; an empty ``path`` means no picture.

    Raises:
        BadInput: the path ends neither in .svg nor in .html.
    """
    if path and Path(path).suffix not in FORMATS:
        raise BadInput(
            f"picture '{path}' must end in {' or '.join(FORMATS)}; for a bitmap, open the .svg in "
            f"a browser"
        )


def write_picture(
    path: str, plans: Sequence[ComparedPlan], head: PictureHead, words: Sequence[str]
) -> None:
    """Write the picture; on an HTML page the paragraphs ``words`` follow it.

    Raises:
        BadInput: the file cannot be written.
    """
    picture = drawing_svg(compare_drawing(plans, head), "comparison")
    if path.endswith(".html"):
        paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in words if text)
        below = f"<section>\n{paragraphs}\n</section>\n" if paragraphs else ""
        body = (
            f'<main class="compare">\n<section class="wide">\n{picture}</section>\n{below}</main>'
        )
        picture = html_page(head.title, body, asset("page.css"))
    write_text(path, picture)
