"""The picture of a comparison: iteration times as bars, and the timeline of each plan.

All panels share one time axis, on which the lower bound is marked. A page has the picture twice:
for wide and for narrow screens.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap

from penstock.document import write_text
from penstock.errors import BadInput, shortened
from penstock.plan.plan import Plan
from penstock.report.device_rows import DeviceRow, GanttRows, gantt_rows, stage_names
from penstock.report.drawing import Curve, Drawing, Mark, Rule, Slab, Words, drawing_svg
from penstock.report.gantt_drawing import LegendEntry, legend_marks, row_heights, rows_panel
from penstock.report.palette import Ink, Style, legend_entries
from penstock.report.tables import stages_text
from penstock.report.time_axis import TimeAxis, axis_marks, grid_marks
from penstock.report.timelines_html import asset, html_page
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Timeline
from penstock.words import counted, percent_text, seconds_text

__all__ = [
    "NARROW",
    "WIDE",
    "ComparedPlan",
    "check_picture_path",
    "compare_drawing",
    "plan_rows",
    "write_picture",
]

BAR, BLOCK_GAP, LINE = 20, 18, 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are, in pixels: the axis is from ``gutter`` to ``right``.

    ``bar_top`` is how far below the top of its row a bar begins, and ``row`` the row's height. A
    legend begins at ``legend``, beside its title or a line below it. Lines have at most so many
    ``letters``.
    """

    width: float
    margin: float
    gutter: float
    right: float
    legend: float
    row: float
    bar_top: float
    letters: int

    @property
    def is_narrow(self) -> bool:
        """Whether words stand above what they are about, and some are left out."""
        return self.legend == self.margin


WIDE = Layout(1360.0, 28.0, 176.0, 1030.0, 344.0, 36, 8, 180)
NARROW = Layout(420.0, 12.0, 78.0, 340.0, 12.0, 50, 20, 60)
FAR = 2.6
"""Plans that take more than this many times the fastest are cut off at the right."""

FEW_BLOCKS = 800
"""Up to this many blocks of a plan, each block has a tooltip."""

MOST_ROWS = 32
"""Of longer pipelines the first and last groups are shown."""


@dataclass(frozen=True)
class ComparedPlan:
    """A plan with all that is drawn of it, such as its `plan_rows`.

    ``shares`` are the seconds of its critical path by kind, in drawing order. ``numbers`` are words
    that stand behind its bar.
    """

    planner: str
    plan: Plan
    chart: GanttRows
    iteration_s: float
    bubble: float
    shares: tuple[tuple[str, float], ...]
    numbers: str = ""


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


def plan_rows(timeline: Timeline, plan: Plan) -> GanttRows:
    """A row for each device group of ``plan``: its replica that computes longest."""
    busy_s: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in COMPUTE:
            busy_s[event.device] += event.end_s - event.start_s
    chosen = {max(group, key=lambda device: busy_s[device]) for group in plan.device_groups}
    events = tuple(event for event in timeline.events if event.device in chosen)
    return gantt_rows(replace(timeline, events=events, memory=())).without_middle(MOST_ROWS)


def compare_drawing(
    plans: Sequence[ComparedPlan],
    title: str,
    subtitle: str,
    bound_s: float,
    bound_words: str,
    layout: Layout = WIDE,
) -> Drawing:
    """The drawing of ``plans`` in the given order; equal plans share a block."""
    axis = time_axis([plan.iteration_s for plan in plans], bound_s, layout)
    kinds = dict.fromkeys(kind for plan in plans for kind, _ in plan.shares)
    marks, top = lines_of(subtitle, layout.margin, 60, "quiet", layout)
    marks.append(Words(shortened(title, layout.letters // 2), layout.margin, 38, 22, bold=True))
    entries: list[LegendEntry] = [(kind, [SHARES[kind]]) for kind in kinds]
    legend, top = titled("Iteration time and its critical path", entries, top + 22, layout)
    top += 18
    bottom = top + layout.row * len(plans)
    note = f"dashed: the bound; no plan takes less than {seconds_text(bound_s)}{bound_words}"
    left = layout.margin if layout.is_narrow else layout.gutter
    noted, after = lines_of(note, left, bottom + 38, "limit", layout)
    marks += [
        *legend,
        *grid_marks(axis, top, bottom),
        *(
            mark
            for i, one in enumerate(plans)
            for mark in bar_marks(one, axis, top + i * layout.row, layout)
        ),
        *bound_marks(axis, bound_s, top - 4, bottom),
        *axis_marks(axis, bottom, with_end=False),
        *noted,
    ]
    entries = [*legend_entries(Style(style.kind) for one in plans for style in one.chart.styles)]
    legend, top = titled("One iteration, stage by stage", entries, after + 18, layout)
    marks += legend
    top += 26
    for block in same_plans(plans):
        drawn, top = plan_block(block, axis, bound_s, top, layout)
        marks += drawn
    bottom = top - BLOCK_GAP + 4
    marks += axis_marks(axis, bottom, with_end=False)
    return Drawing(layout.width, round(bottom + 38), title, tuple(marks))


def lines_of(text: str, x: float, y: float, ink: Ink, layout: Layout) -> tuple[list[Mark], float]:
    """A text in as many lines as it needs from the baseline ``y`` on; also the next baseline."""
    lines = wrap(text, layout.letters) or [""]
    marks: list[Mark] = [Words(line, x, y + LINE * i, 12, ink) for i, line in enumerate(lines)]
    return marks, y + LINE * len(lines)


def titled(
    title: str, entries: Sequence[LegendEntry], y: float, layout: Layout
) -> tuple[list[Mark], float]:
    """The title of a part, and its legend; also the last baseline."""
    below = y + 22 if layout.is_narrow else y
    marks, end = legend_marks(entries, layout.legend, layout.width - layout.margin, below)
    return [Words(title, layout.margin, y, 15, bold=True), *marks], end


def time_axis(iterations_s: Sequence[float], bound_s: float, layout: Layout) -> TimeAxis:
    """An axis for all iterations that are not much longer than the shortest."""
    near_s = max(s for s in iterations_s if s <= FAR * min(iterations_s))
    is_cut = max(iterations_s) > near_s
    end_s = max(near_s, bound_s) * (1.12 if is_cut else 1.02)
    return TimeAxis(layout.gutter, layout.right, end_s)


def same_plans(plans: Sequence[ComparedPlan]) -> list[list[ComparedPlan]]:
    """Groups of plans that differ only in their planner, in the order of the first of each."""
    found: dict[object, list[ComparedPlan]] = {}
    for one in plans:
        plan = one.plan
        key = (plan.stages, plan.micro_batches, plan.schedule, plan.in_flight_limit)
        found.setdefault(key, []).append(one)
    return list(found.values())


def bar_marks(one: ComparedPlan, axis: TimeAxis, y: float, layout: Layout) -> list[Mark]:
    """The planner, its iteration divided into the shares of its critical path, and numbers."""
    schedule, top = one.plan.schedule, y + layout.bar_top
    marks: list[Mark] = [
        Words(
            one.planner,
            layout.margin,
            y + 16,
            13.5,
            bold=True,
            tail=schedule if layout.is_narrow else "",
        )
    ]
    if not layout.is_narrow:
        marks.append(Words(schedule, layout.margin, y + 31, 11.5, "quiet"))
    start_s = 0.0
    for kind, seconds in one.shares:
        left, right = (min(axis.x(t), axis.right) for t in (start_s, start_s + seconds))
        if right - left > 0.05:
            share = percent_text(seconds / one.iteration_s)
            label = f"{kind}: {seconds_text(seconds)} ({share})"
            marks.append(Slab(left, top, right - left, BAR, SHARES[kind], label))
        start_s += seconds
    numbers = "" if layout.is_narrow else one.numbers
    return [*marks, *end_marks(one.iteration_s, axis, top - 3, top + BAR + 3, numbers)]


def end_marks(
    iteration_s: float, axis: TimeAxis, top: float, bottom: float, numbers: str = ""
) -> list[Mark]:
    """How long an iteration takes, behind its end; two slanted strokes if that is cut off."""
    end = min(axis.x(iteration_s), axis.right)
    words = Words(seconds_text(iteration_s), end + 9, top + 17, 13, bold=True, tail=numbers)
    if iteration_s <= axis.end_s * (1 + 1e-9):
        return [words]
    x = end - 22
    corners = ((x, bottom), (x + 8, top), (x + 14, top), (x + 6, bottom))
    return [
        words,
        Curve(corners, "paper", filled=True),
        Curve(corners[:2], "quiet", width=0.8),
        Curve(corners[2:], "quiet", width=0.8),
    ]


def plan_block(
    block: Sequence[ComparedPlan], axis: TimeAxis, bound_s: float, top: float, layout: Layout
) -> tuple[list[Mark], float]:
    """The timeline of one plan, stage by stage; its planners are the title."""
    one, chart, plan = block[0], block[0].chart, block[0].plan
    about = (
        f"{plan.schedule} · {counted(len(plan.stages), 'stage')}, layers x replicas "
        f"{stages_text(plan)} · {counted(plan.micro_batches, 'micro-batch')} of "
        f"{plan.micro_batch_size} · bubble {percent_text(one.bubble)}"
        f"{' · ' if chart.shade_words else ''}{chart.shade_words}"
    )

    def names(row: DeviceRow) -> tuple[str, str]:
        replicas = len(next(group for group in plan.device_groups if row.device in group))
        shared = f"  on {replicas} devices" if replicas > 1 and len(row.stages) == 1 else ""
        if layout.is_narrow:
            return "", stage_names(row.stages, most=10)
        return "", stage_names(row.stages, most=20) + shared

    # Half as high as in a chart of its own.
    heights = row_heights(2 * len(chart.rows), chart.has_transfers)
    planners = " = ".join(dict.fromkeys(same.planner for same in block))
    tail = "" if layout.is_narrow else shortened(about, 180)
    heads: list[Mark] = [Words(planners, layout.margin, top + 15, 13.5, bold=True, tail=tail)]
    rows_top = top + 26
    if layout.is_narrow:
        more, rows_top = lines_of(about, layout.margin, top + 32, "quiet", layout)
        heads += more
    rows, bottom = rows_panel(chart, axis, rows_top, heights, names, FEW_BLOCKS)
    edges, end = (rows_top - 3, bottom + 1), min(axis.x(one.iteration_s), axis.right)
    marks: list[Mark] = [
        *heads,
        *grid_marks(axis, *edges),
        *rows,
        *bound_marks(axis, bound_s, *edges),
        Rule(end, edges[0], end, edges[1], "ink", 1.4),
        *end_marks(one.iteration_s, axis, *edges),
    ]
    return marks, bottom + BLOCK_GAP


def bound_marks(axis: TimeAxis, bound_s: float, top: float, bottom: float) -> list[Mark]:
    x = axis.x(bound_s)
    return [Rule(x, top, x, bottom, "limit", 1.4, dashed=True)] if bound_s > 0 else []


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


def write_picture(path: str, wide: Drawing, narrow: Drawing, below: str = "") -> None:
    """Write the wide picture; an HTML page has both, and the HTML ``below`` them.

    Raises:
        BadInput: the file cannot be written.
    """
    picture = drawing_svg(wide, "comparison")
    if path.endswith(".html"):
        pictures = picture + drawing_svg(narrow, "comparison-narrow")
        below = f"<section>\n{below}\n</section>\n" if below else ""
        body = f'<main class="compare">\n<section>\n{pictures}</section>\n{below}</main>'
        picture = html_page(wide.title, body, asset("page.css"))
    write_text(path, picture)
