"""The plans that a search enumerates on small problems."""

from dataclasses import replace
from math import inf

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.every_plan import every_variant
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile


def problem(*schedules: str) -> PlanningProblem:
    one = Affine(0.0, 1.0)
    profile = ModelProfile("three", (LayerCost("layer", one, one, one),) * 3)
    cluster = Cluster("three", (Host("host", (Device("device", inf, 1.0),) * 3, 1e6),))
    asked = PlanningProblem(profile, cluster, 4, (1,))
    return replace(asked, schedules=schedules, recompute="off")


PLAN = Plan(tuple(Stage(range(k, k + 1), (k,), (1,)) for k in range(3)), 4, 1, "1f1b")


def test_one_forward_one_backward_has_as_many_in_flight_as_stages_from_there() -> None:
    """Three, two and one, or fewer: what a depth beyond these keeps waits for nothing."""
    found = [(p.schedule, p.in_flight_limit) for p in every_variant(problem("1f1b"), PLAN)]
    falling = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1)]
    assert found == [("1f1b", limit) for limit in falling]


def test_early_backward_has_every_depth_that_falls_and_stands_for_the_others() -> None:
    asked = problem("gpipe", "1f1b", "early-backward")
    found = [(p.schedule, p.in_flight_limit) for p in every_variant(asked, PLAN)]
    assert {schedule for schedule, _ in found} == {"early-backward"}
    # Falling triples of 1 to 4: as many as ways to choose three of four, with repetition.
    assert len(set(found)) == len(found) == 20
