"""Plans of DAPPLE's released planner, scored by our simulator: none is better than `search`'s.

The plans were made by the released Rust planner, with its own constants, on clusters A, B and C
(C: those of B times 0.4), each written there as the last state of every stage and its devices.
Left out are those whose stages were not recorded (16 stages) and those of GNMT-16, whose states
are antichains that no layer corresponds to.
"""

from functools import cache

import pytest
from reproduction.published import MODELS

from penstock.plan.cost import rows_by_speed
from penstock.plan.fitted_plan import Assignment, fitted_plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.search.search import PLANNERS
from penstock.simulate.score import make_score

RELEASED = [
    ("bert-48", "a", "29:8 54:8"),
    ("xlnet-36", "a", "21:8 40:8"),
    ("xlnet-36", "b", "21:8 40:8"),
    ("xlnet-36", "c", "21:8 40:8"),
    ("amoeba-36", "a", "29:8 42:8"),
    ("amoeba-36", "b", "31:11 42:5"),
    ("amoeba-36", "c", "31:11 42:5"),
    ("vgg-19", "a", "17:15 24:1"),
    ("vgg-19", "b", "15:14 24:2"),
    ("vgg-19", "c", "18:14 24:2"),
    ("vgg-16", "a", "24:15 39:1"),
    ("vgg-16", "a", "39:16"),
    ("vgg-16", "b", "30:15 39:1"),
    ("vgg-16", "b", "39:16"),
    ("vgg-16", "c", "30:15 39:1"),
]


@cache
def searched(model: str, config: str) -> tuple[PlanningProblem, Score, float]:
    """A problem, its score, and the seconds of our own plan."""
    problem = MODELS[model].problem(f"dapple-{config}")
    score = make_score(problem)
    return problem, score, score(PLANNERS["search"](problem, score))


def assignments(problem: PlanningProblem, written: str, size: int) -> list[Assignment]:
    """Stages with their layers counted from the end, where states and layers are the same."""
    lasts, counts = zip(*(map(int, stage.split(":")) for stage in written.split()), strict=True)
    stages: list[Assignment] = []
    lo = device = 0
    for last, count in zip(lasts, counts, strict=True):
        hi = len(problem.profile.layers) - (lasts[-1] - last)
        devices = tuple(range(device, device + count))
        stages.append((range(lo, hi), devices, rows_by_speed(problem.cluster, devices, size)))
        lo, device = hi, device + count
    return stages


@pytest.mark.slow
@pytest.mark.parametrize(("model", "config", "written"), RELEASED)
def test_no_plan_of_the_released_planner_is_better_than_ours(
    model: str, config: str, written: str
) -> None:
    problem, score, ours_s = searched(model, config)
    most = max(int(stage.split(":")[1]) for stage in written.split())
    for size in (size for size in problem.micro_batch_sizes if size >= most):
        for schedule in ("1f1b", "early-backward"):
            plan = fitted_plan(problem, assignments(problem, written, size), schedule)
            if plan is not None:
                assert ours_s <= score(plan) * (1 + 1e-9)
