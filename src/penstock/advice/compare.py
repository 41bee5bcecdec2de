"""Planners and schedules against one another, on one problem."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from penstock.advice.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.costs.lower_bound import lower_bound
from penstock.errors import BadInput, Infeasible
from penstock.files import Json
from penstock.plan.plan import Plan, plan_words
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.find_plan import TimeLimit, find_plan
from penstock.planners.problem import check_schedule, member_named, schedules_named
from penstock.planners.search.judge import SearchStep
from penstock.planners.search.search import PLANNERS
from penstock.simulate.score import make_score
from penstock.text import html_table, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Reason for neither a plan nor a refusal of a planner: it failed, or it took too long."""

    reason: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """Outcome of a planner for a problem with one schedule, or with `AUTO`."""

    planner: str
    asked_schedule: str
    outcome: PlannedPipeline | Infeasible | NoAnswer
    planning_s: float

    def __repr__(self) -> str:
        return f"Comparison('{self.planner}', {self.schedule}, {self.words})"

    @property
    def planned(self) -> PlannedPipeline | None:
        """The plan, if there is one."""
        return self.outcome if isinstance(self.outcome, PlannedPipeline) else None

    @property
    def words(self) -> str:
        """The time of an iteration, or why there is none."""
        if self.planned:
            return seconds_text(self.iteration_s)
        return self.outcome.reason if isinstance(self.outcome, NoAnswer) else str(self.outcome)

    @property
    def schedule(self) -> str:
        """The schedule of the plan; the requested one where there is no plan."""
        return self.planned.plan.schedule if self.planned else self.asked_schedule

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration; infinite where there is no plan."""
        return self.planned.prediction.iteration_s if self.planned else inf

    def to_json(self) -> dict[str, Json]:
        """The plan's keys, or the reason why there is no plan."""
        names: dict[str, Json] = {
            "planner": self.planner,
            "schedule": self.schedule,
            "asked_schedule": self.asked_schedule,
        }
        match self.outcome:
            case PlannedPipeline() as planned:
                return names | planned.to_json(self.planning_s) | names
            case Infeasible() as refusal:
                return names | {"infeasible": str(refusal), "planning_s": self.planning_s}
            case NoAnswer(reason):
                return names | {"failed": reason, "planning_s": self.planning_s}


class Comparisons(tuple[Comparison, ...]):
    """Several comparisons, which a notebook shows as a table, with bars if it has matplotlib."""

    __slots__ = ()

    def __repr__(self) -> str:
        first = f", first {self[0]!r}" if self else ""
        return f"Comparisons({len(self)} rows{first})"

    def _repr_html_(self) -> str:
        from penstock.timeline.plot import has_matplotlib, svg_element

        rows = (
            (
                *(one.planner, one.schedule, one.words),
                plan_words(one.planned.plan) if one.planned else "",
            )
            for one in self
        )
        drawn = has_matplotlib() and any(one.iteration_s < inf for one in self)
        bars = svg_element(self.plot()) if drawn else ""
        return html_table(["planner", "schedule", "iteration", "plan"], rows) + bars

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw a bar for each plan on ``ax``, or on a new figure; returns the axes.

        Its dark part is the time in which devices compute, on average; the rest is the bubble. A
        dashed line marks the time that no plan can beat.
        """
        from penstock.timeline.plot import plot_bars

        found = [(one, one.planned) for one in self if one.planned]
        if not found:
            raise BadInput("no planner has a plan, so there is nothing to draw")
        names = [f"{one.planner} ({one.schedule})" for one, _ in found]
        times_s = [one.iteration_s for one, _ in found]
        busy = [1.0 - planned.prediction.bubble for _, planned in found]
        return plot_bars(names, times_s, busy, min(p.lower_bound_s for _, p in found), ax)


def compare_plans(
    problem: PlanningProblem,
    planners: Sequence[str],
    schedules: Sequence[str],
    clock: Callable[[], float],
    *,
    limit_s: float = inf,
    on_step: Callable[[str, SearchStep], None] | None = None,
) -> Iterator[Comparison]:
    """Every planner with every schedule, in order; the default planner, which takes longest, last.

    ``limit_s`` is for each planner. ``on_step`` is called with a planner's name and its steps. A
    planner that fails gives one row without a plan.
    """
    for planner in planners:
        member_named(PLANNERS, planner, "planner")
    for schedule in schedules:
        check_schedule(schedule)
    allowed = {
        (planner, name): schedules_named(
            name,
            planner,
            norms=problem.profile.has_norms,
            whole_loss=problem.profile.whole_loss,
        )
        for planner in planners
        for name in schedules
    }
    every = tuple(dict.fromkeys(name for names in allowed.values() for name in names))
    # One bound, which holds for every row.
    bound = lower_bound(replace(problem, schedules=every))
    baselines = baselines_of(problem, make_score(problem))
    for schedule in schedules:
        score = make_score(problem)
        for planner in sorted(planners, key=lambda name: name == "search"):
            narrowed = replace(problem, schedules=allowed[planner, schedule])
            start_s = clock()
            report = None if on_step is None else partial(on_step, planner)
            limit = TimeLimit(limit_s, clock) if limit_s < inf else None
            found = answer_of(narrowed, planner, score, limit, report)
            planning_s = clock() - start_s
            if isinstance(found, Plan):
                outcome = assess_plan(found, problem, baselines, bound)
            else:
                outcome = found
            yield Comparison(planner, schedule, outcome, planning_s)


def answer_of(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    limit: TimeLimit | None,
    on_step: Callable[[SearchStep], None] | None,
) -> Plan | Infeasible | NoAnswer:
    """A planner's plan, or why there is none; whatever the planner raises becomes a reason."""
    try:
        return find_plan(problem, planner, score, limit=limit, on_step=on_step)
    except Infeasible as refusal:
        return refusal
    except Exception as error:  # one planner must not take the others down
        return NoAnswer(f"{type(error).__name__}: {' '.join(str(error).split())}")


def best_first(comparisons: Sequence[Comparison], planners: Sequence[str]) -> list[Comparison]:
    """The fastest plan first, those without a plan last; equal ones in the order of ``planners``.

    Times that differ only by rounding count as equal.
    """
    in_order = sorted(comparisons, key=lambda c: (c.iteration_s, planners.index(c.planner)))
    ordered: list[Comparison] = []
    while in_order:
        limit_s = in_order[0].iteration_s * (1 + 1e-9)
        tied = [c for c in in_order if c.iteration_s <= limit_s]
        ordered += sorted(tied, key=lambda c: planners.index(c.planner))
        in_order = in_order[len(tied) :]
    return ordered


def require_a_plan(comparisons: Sequence[Comparison]) -> None:
    """Raise the first refusal where no planner found a plan."""
    if any(c.planned for c in comparisons):
        return
    for comparison in comparisons:
        if isinstance(comparison.outcome, Infeasible):
            raise comparison.outcome
    for comparison in comparisons:
        if isinstance(comparison.outcome, NoAnswer):
            raise Infeasible(f"planner '{comparison.planner}': {comparison.outcome.reason}")
