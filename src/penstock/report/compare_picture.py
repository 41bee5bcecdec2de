"""The picture of a comparison: iteration times as bars, and what each plan does all the time.

Self-contained SVG, light and dark; all panels share one time axis with the lower bound on it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import inf

from penstock.plan.plan import Plan
from penstock.report.palette import KIND_WORDS
from penstock.report.stage_lanes import Bar, StageLane
from penstock.report.svg import cut_mark, line, rect, shortened, text, tick_text, ticks
from penstock.report.tables import ComparisonRow
from penstock.words import percent_text, seconds_text

__all__ = ["ComparedPlan", "PictureHead", "compare_svg"]

WIDTH, MARGIN, GUTTER, RIGHT = 1360, 28, 176, 262
PLOT = WIDTH - RIGHT - GUTTER
BAR_ROW, BAR = 36, 20
BLOCK_HEAD, BLOCK_GAP = 26, 18
FAR = 2.6
"""Plans that take more than so many times the fastest are cut off at the right."""

FEW_BARS = 800
"""Up to so many bars of a plan each says, when pointed at, what it is."""


@dataclass(frozen=True)
class ComparedPlan:
    """A row of the comparison with what is drawn of it.

    ``shares`` are the seconds of its critical path by kind, in the order drawn.
    """

    row: ComparisonRow
    plan: Plan
    lanes: tuple[StageLane, ...]
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PictureHead:
    """The title, what was asked, and the bound with its argument."""

    title: str
    subtitle: str
    bound_s: float
    bound_argument: str = ""
    bound_covers: str = ""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """From seconds to places on the picture."""

    end_s: float

    def x(self, time_s: float) -> float:
        """The place of a time, at most the right end."""
        return GUTTER + min(time_s / self.end_s, 1.0) * PLOT

    def cuts(self, time_s: float) -> bool:
        """Whether a time lies beyond the right end."""
        return time_s > self.end_s * (1 + 1e-9)


def compare_svg(plans: Sequence[ComparedPlan], head: PictureHead) -> str:
    """The picture of ``plans``, drawn in the order given; those of the same plan share a block."""
    axis = time_axis([plan.row.iteration_s for plan in plans], head.bound_s)
    top, parts = 76.0, [title_text(head)]
    top, bars = bars_panel(plans, head, axis, top)
    parts.append(bars)
    blocks = same_plans(plans)
    parts.append(section_title("One iteration, stage by stage", top + 26, legend_kinds(blocks)))
    blocks_top = top = top + 52
    for block in blocks:
        top, drawn = plan_block(block, axis, head.bound_s, top)
        parts.append(drawn)
    bottom = top - BLOCK_GAP + 4
    parts.insert(2, grid(axis, blocks_top + BLOCK_HEAD - 6, bottom))
    parts.append(axis_labels(axis, bottom + 15))
    height = bottom + 34
    style = (files("penstock.report") / "assets" / "compare.css").read_text(encoding="utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'class="comparison" role="img" aria-label="{escape(head.title)}">\n'
        f"<style>\n{style}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def time_axis(iterations_s: Sequence[float], bound_s: float) -> TimeAxis:
    """An axis for all iterations that are not far beyond the shortest."""
    shortest_s = min(iterations_s)
    near_s = max(s for s in iterations_s if s <= FAR * shortest_s)
    is_cut = max(iterations_s) > near_s
    return TimeAxis(max(near_s, bound_s) * (1.12 if is_cut else 1.02))


def same_plans(plans: Sequence[ComparedPlan]) -> list[list[ComparedPlan]]:
    """Plans that differ in their planner only, together; in the order of the first of each."""
    found: dict[object, list[ComparedPlan]] = {}
    for one in plans:
        plan = one.plan
        key = (plan.stages, plan.micro_batches, plan.schedule, plan.in_flight_limit)
        found.setdefault(key, []).append(one)
    return list(found.values())


def title_text(head: PictureHead) -> str:
    """Title and subtitle."""
    return text(head.title, MARGIN, 38, "title") + text(head.subtitle, MARGIN, 60, "quiet")


def section_title(words: str, y: float, legend: str = "") -> str:
    """The title of a panel, with its legend at the right."""
    return text(words, MARGIN, y, "section") + f'<g transform="translate(0 {y:.0f})">{legend}</g>'


def bars_panel(
    plans: Sequence[ComparedPlan], head: PictureHead, axis: TimeAxis, top: float
) -> tuple[float, str]:
    """A bar for each row, made of its critical path; and the bottom of the panel."""
    kinds = list(dict.fromkeys(kind for plan in plans for kind, _ in plan.shares))
    parts = [section_title("Iteration time and its critical path", top + 22, share_legend(kinds))]
    rows_top = top + 40
    bottom = rows_top + BAR_ROW * len(plans)
    parts.append(grid(axis, rows_top, bottom))
    for index, one in enumerate(plans):
        parts.append(bar_row(one, axis, rows_top + index * BAR_ROW, index == 0))
    parts.append(bound_line(axis, head.bound_s, rows_top - 4, bottom))
    proof = f": {head.bound_argument}" if head.bound_argument else ""
    parts.append(axis_labels(axis, bottom + 14))
    covers = f" ({head.bound_covers})" if head.bound_covers else ""
    note = f"dashed: no plan takes less than {seconds_text(head.bound_s)}{covers}{proof}"
    parts.append(text(shortened(note, 190), GUTTER, bottom + 34, "bound-note"))
    return bottom + 38, "\n".join(parts)


def bar_row(one: ComparedPlan, axis: TimeAxis, y: float, is_best: bool) -> str:
    """One planner: its name, its bar, its figures."""
    row, middle = one.row, y + BAR_ROW / 2
    parts = [
        text(row.planner, MARGIN, middle - 2, "name best" if is_best else "name"),
        text(row.schedule, MARGIN, middle + 13, "small"),
    ]
    start_s = 0.0
    for kind, seconds in one.shares:
        left, right = axis.x(start_s), axis.x(start_s + seconds)
        if right - left > 0.05:
            label = f"{kind}: {seconds_text(seconds)} ({percent_text(seconds / row.iteration_s)})"
            parts.append(rect(left, y + 8, right - left, BAR, f"share {class_of(kind)}", label))
        start_s += seconds
    end = axis.x(row.iteration_s)
    if axis.cuts(row.iteration_s):
        parts.append(cut_mark(end - 22, y + 5, BAR + 6))
    figures = gap_text(row.gap)
    if row.speedup_over_data_parallel < inf:
        figures += f" · {row.speedup_over_data_parallel:.2f}x data parallel"
    x = end + 9
    parts.append(
        f'<text x="{x:.1f}" y="{middle + 4:.1f}"><tspan class="figure">'
        f"{escape(seconds_text(row.iteration_s))}</tspan>"
        f'<tspan class="small" dx="7">{escape(figures)}</tspan></text>'
    )
    return "\n".join(parts)


def gap_text(gap: float) -> str:
    """How far above the bound.

    >>> gap_text(0.167), gap_text(15.0)
    ('16.7 % above', '16.0x the bound')
    """
    return f"{percent_text(gap)} above" if gap < 2 else f"{1 + gap:.1f}x the bound"


def plan_block(
    block: Sequence[ComparedPlan], axis: TimeAxis, bound_s: float, top: float
) -> tuple[float, str]:
    """One plan stage by stage, with its planners as title; and where the next block starts."""
    first = block[0]
    row, plan = first.row, first.plan
    names = " = ".join(dict.fromkeys(one.row.planner for one in block))
    stages = counted(len(plan.stages), "stage", "s")
    about = (
        f"{row.schedule} · {stages}, layers x replicas {row.stages} · "
        f"{counted(plan.micro_batches, 'micro-batch', 'es')} of {plan.micro_batch_size} · bubble "
        f"{percent_text(row.bubble)}"
    )
    parts = [
        f'<text class="halo" x="{MARGIN}" y="{top + 15:.1f}">'
        f'<tspan class="name">{escape(names)}</tspan>'
        f'<tspan class="quiet" dx="10">{escape(shortened(about, 150))}</tspan></text>'
    ]
    compute, transfers, gap = lane_heights(len(first.lanes))
    is_small = sum(len(lane.compute) + len(lane.transfers) for lane in first.lanes) <= FEW_BARS
    y = top + BLOCK_HEAD
    every = 1 if len(first.lanes) <= 16 else 4
    for index, lane in enumerate(first.lanes):
        if index % every == 0:
            parts.append(lane_label(lane, y, compute))
        parts.append(rect(GUTTER, y, PLOT, compute, "row"))
        parts.append(lane_bars(lane.compute, axis, y, compute, is_small))
        parts.append(lane_bars(lane.transfers, axis, y + compute + 1, transfers, is_small))
        y += compute + transfers + gap
    end = axis.x(row.iteration_s)
    parts.append(bound_line(axis, bound_s, top + BLOCK_HEAD - 3, y - gap + 1))
    parts.append(line(end, top + BLOCK_HEAD - 3, end, y - gap + 1, "end"))
    if axis.cuts(row.iteration_s):
        parts.append(cut_mark(end - 22, top + BLOCK_HEAD - 3, y - gap + 4 - top - BLOCK_HEAD))
    parts.append(text(seconds_text(row.iteration_s), end + 9, top + BLOCK_HEAD + 11, "figure"))
    return y - gap + BLOCK_GAP, "\n".join(part for part in parts if part)


def lane_heights(lanes: int) -> tuple[float, float, float]:
    """Height of computing, of transfers and of the gap below, by the number of lanes."""
    if lanes <= 8:
        return 18, 5, 7
    if lanes <= 16:
        return 12, 3, 4
    return 7, 2, 2


def lane_label(lane: StageLane, y: float, height: float) -> str:
    """The stages of a lane."""
    name = lane.name
    if lane.replicas > 1 and lane.last_stage == lane.first_stage:
        name += f"  on {lane.replicas} devices"
    return text(name, GUTTER - 10, y + height / 2 + 4, "small end-anchor")


def lane_bars(
    bars: Sequence[Bar], axis: TimeAxis, y: float, height: float, with_labels: bool
) -> str:
    """The bars of a lane: each with its label, or one path for all of a style; then numbers."""
    paths: dict[str, list[str]] = defaultdict(list)
    parts: list[str] = []
    for bar in bars:
        left, right = axis.x(bar.start_s), axis.x(bar.end_s)
        if right <= left:
            continue
        width = max(right - left - (0.7 if right - left > 3 else 0.0), 0.4)
        style = f"bar {bar.kind}" + (f" s{round(4 * bar.strength)}" if bar.strength < 1 else "")
        if with_labels:
            parts.append(rect(left, y, width, height, style, bar_label(bar)))
        else:
            paths[style].append(f"M{left:.1f} {y:.1f}h{width:.1f}v{height:g}h-{width:.1f}z")
        number = str(bar.micro_batch)
        if bar.micro_batch >= 0 and height >= 12 and width >= 8 + 6 * len(number):
            parts.append(
                text(number, left + width / 2, y + height / 2 + 3.8, f"number on-{bar.kind}")
            )
    drawn = [f'<path class="{style}" d="{"".join(path)}"/>' for style, path in paths.items()]
    return "".join([*drawn, *parts])


def bar_label(bar: Bar) -> str:
    """What a bar is and when."""
    words = KIND_WORDS[bar.kind]
    if bar.micro_batch >= 0:
        words += f" of micro-batch {bar.micro_batch}"
    return f"{words}: {seconds_text(bar.start_s)} to {seconds_text(bar.end_s)}"


def legend_kinds(blocks: Sequence[Sequence[ComparedPlan]]) -> str:
    """The colours of what the lanes show."""
    shown = {bar.kind for block in blocks for lane in block[0].lanes for bar in lane.compute} | {
        bar.kind for block in blocks for lane in block[0].lanes for bar in lane.transfers
    }
    return legend([(word, f"bar {kind}") for kind, word in KIND_WORDS.items() if kind in shown])


def share_legend(kinds: Sequence[str]) -> str:
    """The colours of the critical path."""
    return legend([(kind, f"share {class_of(kind)}") for kind in kinds])


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Swatches with words, right-aligned on one line."""
    widths = [22 + 6.4 * len(word) + 14 for word, _ in entries]
    x, parts = WIDTH - MARGIN - sum(widths) + 14, list[str]()
    for (word, style), width in zip(entries, widths, strict=True):
        parts.append(rect(x, -10, 11, 11, style) + text(word, x + 17, 0, "small"))
        x += width
    return "".join(parts)


def grid(axis: TimeAxis, top: float, bottom: float) -> str:
    """A line at every tick."""
    return "".join(line(axis.x(t), top, axis.x(t), bottom, "grid") for t in ticks(axis.end_s))


def axis_labels(axis: TimeAxis, y: float) -> str:
    """The times under the ticks."""
    return "".join(
        text(tick_text(t, axis.end_s), axis.x(t), y, "small middle") for t in ticks(axis.end_s)
    )


def bound_line(axis: TimeAxis, bound_s: float, top: float, bottom: float) -> str:
    """The lower bound, over everything."""
    return line(axis.x(bound_s), top, axis.x(bound_s), bottom, "bound") if bound_s > 0 else ""


def counted(number: int, thing: str, ending: str) -> str:
    """A number of things.

    >>> counted(1, "stage", "s"), counted(2, "micro-batch", "es")
    ('1 stage', '2 micro-batches')
    """
    return f"{number} {thing}{'' if number == 1 else ending}"


def class_of(kind: str) -> str:
    """The style of a share of the critical path."""
    return kind.replace(" ", "-")
