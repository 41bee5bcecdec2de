"""The winners of DAPPLE's table of planning results (PPoPP 2021, table V), and plans of a form.

A form is "data-parallel", "straight" (one device a stage), or the devices of two stages: "8:8".
"""

from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from reference.plain_dapple import plan_latency_s
from reference.stage_formula import crossing_bytes
from reproduction.published import TABLE

from penstock.costs.fit import Assignment, fitted_plan
from penstock.costs.stage_costs import rows_by_speed
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.data_parallel import data_parallel

DEVICES = 16
TIE = 1.03
SCHEDULES = ("1f1b", "early-backward")
CASES = [
    (model, f"dapple-{config}", form)
    for model, forms in TABLE.items()
    for config, form in zip("abc", forms, strict=True)
]


def assigned(
    problem: PlanningProblem, cuts: tuple[int, ...], counts: tuple[int, ...], size: int
) -> list[Assignment]:
    """Stages that end at ``cuts``, on so many devices each, in order."""
    ends = list(accumulate(counts, initial=0))
    starts = (0, *cuts[:-1])
    devices = [tuple(range(a, b)) for a, b in pairwise(ends)]
    return [
        (range(lo, hi), group, rows_by_speed(problem.cluster, group, size))
        for lo, hi, group in zip(starts, cuts, devices, strict=True)
    ]


def straight_cuts(problem: PlanningProblem, size: int, slack: float) -> tuple[int, ...] | None:
    """One device a stage, none above ``slack`` of the least there can be; fewest bytes cross."""
    profile = problem.profile
    layers = len(profile.layers)
    times = [layer.forward_s.at(size) + layer.backward_s.at(size) for layer in profile.layers]
    done = list(accumulate(times, initial=0.0))
    limit_s = slack * max(done[-1] / DEVICES, max(times))
    moved = [crossing_bytes(profile, c).at(size) for c in range(layers + 1)]

    @cache
    def best(lo: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return (0.0, (layers,)) if done[layers] - done[lo] <= limit_s else (inf, ())
        found = (inf, ())
        for hi in range(lo + 1, layers - stages + 2):
            if done[hi] - done[lo] <= limit_s:
                rest, cuts = best(hi, stages - 1)
                found = min(found, (moved[hi] + rest, (hi, *cuts)))
        return found

    size_bytes, cuts = best(0, DEVICES)
    return cuts if size_bytes < inf else None


def of_form(problem: PlanningProblem, form: str) -> Iterator[list[Assignment]]:
    """Plans of a form of the table: all cuts, or for straight ones balanced ones."""
    layers = len(problem.profile.layers)
    for size in problem.micro_batch_sizes:
        if form == "straight":
            for slack in (1.05, 1.1, 1.2, 1.4, 2.0):
                if cuts := straight_cuts(problem, size, slack):
                    yield assigned(problem, cuts, (1,) * DEVICES, size)
            continue
        first, second = (int(count) for count in form.split(":"))
        if size >= first:
            for cut in range(1, layers):
                yield assigned(problem, (cut, layers), (first, second), size)


def estimated(problem: PlanningProblem, form: str) -> list[tuple[float, int, list[Assignment]]]:
    """The plans of a form that fit, each behind its closed form; the least first."""
    found: list[tuple[float, int, list[Assignment]]] = []
    for number, assignments in enumerate(of_form(problem, form)):
        plan = fitted_plan(problem, assignments, "1f1b")
        if plan is not None:
            found.append((plan_latency_s(problem, plan), number, assignments))
    return sorted(found)


def least_latency_s(problem: PlanningProblem, form: str, score: Score) -> float:
    """The least closed form of the plans of a form."""
    if form == "data-parallel":
        return plan_latency_s(problem, data_parallel(problem, score))
    return estimated(problem, form)[0][0]


def best_of_form(problem: PlanningProblem, form: str, score: Score) -> float:
    """The least simulated seconds of a form, of the 20 plans with the least closed form."""
    if form == "data-parallel":
        return score(data_parallel(problem, score))
    plans: list[Plan | None] = []
    for _, _, assignments in estimated(problem, form)[:20]:
        plans += [fitted_plan(problem, assignments, schedule) for schedule in SCHEDULES]
    return min(score(plan) for plan in plans if plan is not None)


def form_of(plan: Plan) -> str:
    """How the table would write a plan."""
    replicas = [stage.replicas for stage in plan.stages]
    if replicas == [1] * DEVICES:
        return "straight"
    return "data-parallel" if replicas == [DEVICES] else ":".join(map(str, replicas))
