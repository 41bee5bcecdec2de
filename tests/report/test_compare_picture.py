from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from opened_page import OpenedPage

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile
from penstock.report.compare_picture import (
    MOST_ROWS,
    NARROW,
    WIDE,
    ComparedPlan,
    Layout,
    compare_drawing,
    plan_rows,
    write_picture,
)
from penstock.report.device_rows import DeviceRow, DrawnEvent
from penstock.report.drawing import Curve, Drawing, Mark, Rule, Run, Slab, Words, drawing_svg
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.timeline import Event, Timeline


def compared(plan: Plan, timeline: Timeline, iteration_s: float, name: str) -> ComparedPlan:
    shares = (("compute", iteration_s),)
    return ComparedPlan(name, plan, plan_rows(timeline, plan), iteration_s, 0.1, shares)


def drawing_of(plans: list[ComparedPlan], layout: Layout = WIDE) -> Drawing:
    return compare_drawing(plans, "model <a> & b", "on 4 devices", 0.02, ": its work", layout)


@pytest.fixture
def drawn(small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster) -> ComparedPlan:
    prediction = simulate_plan(small_plan, small_profile, small_cluster)
    return compared(small_plan, prediction.timeline, prediction.iteration_s, "first")


def marks_of(plans: list[ComparedPlan]) -> Sequence[Mark]:
    return drawing_of(plans).marks


def words(marks: Sequence[Mark]) -> list[str]:
    return [mark.words for mark in marks if isinstance(mark, Words)]


def tails(marks: Sequence[Mark]) -> list[str]:
    return [mark.tail for mark in marks if isinstance(mark, Words)]


def rules(marks: Sequence[Mark], ink: str) -> list[float]:
    """The places of all lines of this colour."""
    return [mark.x1 for mark in marks if isinstance(mark, Rule) and mark.ink == ink]


def cut_ends(marks: Sequence[Mark]) -> int:
    return sum(isinstance(mark, Curve) and mark.filled for mark in marks)


def work_of(row: DeviceRow) -> list[DrawnEvent]:
    return [block for lane in row.compute for block in lane if block.event.kind != "STEP"]


def test_every_stage_has_a_row_with_all_its_work(drawn: ComparedPlan, small_plan: Plan) -> None:
    assert [row.stages for row in drawn.chart.rows] == [(s,) for s in range(len(small_plan.stages))]
    told = words(marks_of([drawn]))
    for row, stage in zip(drawn.chart.rows, small_plan.stages, strict=True):
        per_micro_batch = 3 if stage.recompute else 2
        assert len(work_of(row)) == per_micro_batch * small_plan.micro_batches
        number = row.stages[0]
        name = f"stage {number}" + (f"  on {stage.replicas} devices" if stage.replicas > 1 else "")
        assert name in told


def test_one_axis_for_all_so_that_a_slower_plan_reaches_further(drawn: ComparedPlan) -> None:
    seconds = drawn.iteration_s
    slower = replace(
        drawn,
        planner="second",
        iteration_s=1.5 * seconds,
        plan=replace(drawn.plan, schedule="gpipe"),
    )
    marks = marks_of([drawn, slower])
    ends = rules(marks, "ink")
    left = 176.0
    assert len(ends) == 2
    assert (ends[1] - left) / (ends[0] - left) == pytest.approx(1.5, rel=1e-3)
    (bound,) = set(rules(marks, "limit"))
    assert (bound - left) / (ends[0] - left) == pytest.approx(0.02 / seconds, rel=1e-2)


def test_names_are_escaped_and_the_bound_says_its_argument(drawn: ComparedPlan) -> None:
    told = words(marks_of([drawn]))
    assert "model &lt;a&gt; &amp; b" in drawing_svg(drawing_of([drawn]))
    assert "dashed: the bound; no plan takes less than 20.0 ms: its work" in told


def test_planners_with_the_same_plan_share_a_block(drawn: ComparedPlan) -> None:
    twin = replace(
        drawn,
        planner="twin",
        plan=replace(drawn.plan, planner="twin"),
    )
    marks = marks_of([drawn, twin])
    assert "first = twin" in words(marks)
    assert len(rules(marks, "ink")) == 1


def test_a_plan_far_behind_is_cut_off(drawn: ComparedPlan) -> None:
    far = replace(
        drawn,
        planner="far",
        iteration_s=20 * drawn.iteration_s,
        plan=replace(drawn.plan, schedule="gpipe"),
    )
    assert cut_ends(marks_of([drawn, far])) == 2
    assert cut_ends(marks_of([drawn])) == 0


def deep(stages: int, micro_batches: int) -> tuple[Plan, Timeline]:
    """Every stage forwards, then backwards, all micro-batches at once."""
    plan = Plan(
        tuple(Stage(range(i, i + 1), (i,), (1,)) for i in range(stages)), micro_batches, 1, "gpipe"
    )
    events = [
        Event(stage, kind, stage, m, start + 0.5 * m, start + 0.5 * m + 0.5)
        for stage in range(stages)
        for kind, start in (("F", 0.0), ("B", 0.5 * micro_batches))
        for m in range(micro_batches)
    ]
    return plan, Timeline(tuple(events), stages)


@pytest.mark.parametrize(("stages", "micro_batches"), [(32, 16), (33, 4), (256, 512)])
def test_a_picture_stays_small_however_deep_the_pipeline(stages: int, micro_batches: int) -> None:
    plan, timeline = deep(stages, micro_batches)
    one = compared(plan, timeline, float(micro_batches), "deep")
    rows = one.chart.rows
    assert len(rows) == min(stages, MOST_ROWS)
    assert (rows[0].stages, rows[-1].stages) == ((0,), (stages - 1,))
    left_out = f"... {stages - MOST_ROWS} more rows ..."
    assert (left_out in words(marks_of([one]))) == (stages > MOST_ROWS)
    assert len(drawing_svg(drawing_of([one]))) < 400_000


def test_narrow_blocks_keep_the_time_of_every_kind() -> None:
    plan, timeline = deep(8, 2000)
    one = compared(plan, timeline, 2000.0, "deep")
    runs = [mark for mark in marks_of([one]) if isinstance(mark, Run)]
    shown = {"F": 0.0, "B": 0.0}
    for run in runs:
        shown[run.fill.kind] += run.strength * sum(width for _, width in run.spans) / 8
    # Each kind fills half of the iteration, which is 854 pixels of an axis that is 2 % longer.
    assert shown == pytest.approx({"F": 854 / 1.02 / 2, "B": 854 / 1.02 / 2}, rel=0.05)


def test_a_plan_far_behind_is_drawn_up_to_the_end_of_the_axis() -> None:
    plan, timeline = deep(2, 4)
    near = compared(plan, timeline, 4.0, "near")
    far_plan, far_timeline = deep(2, 40)
    far = compared(far_plan, far_timeline, 40.0, "far")
    blocks = [m for m in marks_of([near, far]) if isinstance(m, Slab) and m.label.startswith("dev")]
    assert len(blocks) > 16
    assert max(block.x + block.width for block in blocks) <= 1360 - 330


def test_the_style_of_the_page_leaves_the_picture_as_it_is(
    open_page: Callable[..., OpenedPage], tmp_path: Path
) -> None:
    plan, timeline = deep(32, 16)
    path = tmp_path / "compare.html"
    drawing = drawing_of([compared(plan, timeline, 16.0, "deep")])
    write_picture(str(path), drawing, drawing, "<p>Bound by work.</p>")
    opened = open_page(path)
    assert opened.complaints == [] and "Bound by work." in opened.page.inner_text("main")
    drawn = opened.page.evaluate(
        """() => [...document.querySelectorAll(".comparison [stroke-width]")].map((one) =>
            [one.getAttribute("stroke-width") + "px", getComputedStyle(one).strokeWidth])"""
    )
    assert len(drawn) > 60
    assert all(said == done for said, done in drawn)


def test_a_narrow_screen_shows_a_picture_of_which_nothing_is_cut(
    open_page: Callable[..., OpenedPage], tmp_path: Path
) -> None:
    plan, timeline = deep(32, 16)
    path = tmp_path / "compare.html"
    one = compared(plan, timeline, 16.0, "dynamic-program")
    write_picture(str(path), drawing_of([one]), drawing_of([one], NARROW))
    page = open_page(path).page
    for width, shown, hidden in (
        (1280, ".comparison", ".comparison-narrow"),
        (420, ".comparison-narrow", ".comparison"),
    ):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.is_visible(shown) and not page.is_visible(hidden)
        cut = page.evaluate(
            """(shown) => [...document.querySelectorAll(`${shown} text, ${shown} rect`)]
                .map((one) => one.getBoundingClientRect())
                .filter((box) => box.left < 0 || box.right > window.innerWidth).length""",
            shown,
        )
        assert cut == 0 and page.evaluate("document.documentElement.scrollWidth") == width
    # Letters are as large as on the page around it.
    height = page.evaluate(
        "document.querySelector('.comparison-narrow text').getBoundingClientRect().height"
    )
    assert height > 10


def test_stages_that_share_devices_share_a_row(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    stages = tuple(Stage(range(2 * s, 2 * s + 2), (s % 2,), (2,)) for s in range(4))
    plan = Plan(stages, 4, 2, "interleaved")
    prediction = simulate_plan(plan, small_profile, small_cluster)
    one = compared(plan, prediction.timeline, prediction.iteration_s, "looped")
    for row in one.chart.rows:
        assert len(work_of(row)) == 2 * 2 * 4
    assert {"stages 0, 2", "stages 1, 3"} <= set(words(marks_of([one])))
    shades = "dark to light: the 2 stages of a device, upstream first"
    assert any(shades in text for text in tails(marks_of([one])))
