"""The predicted seconds of a plan, fast enough to compare tens of thousands of plans."""

from functools import cache
from math import inf

from penstock.core import native
from penstock.plan.pins import broken_pin
from penstock.plan.plan import Plan, with_state_on
from penstock.plan.problem import PlanningProblem, Score
from penstock.simulate.catalogue import Catalogue, Recent
from penstock.simulate.compiled import played_s
from penstock.simulate.orders import FlatOrders, orders_of_plan
from penstock.simulate.simulation import Prediction, check_plan_fits_inputs, simulate_plan

MOST_ACTIONS = 1_000_000
"""Actions kept in the orders of one cache generation; an action takes 8 bytes."""

MOST_PLANS = 20_000
"""Plans kept in one cache generation; a plan of 16 stages takes some 5 kB."""


def predict_plan(
    problem: PlanningProblem,
    plan: Plan,
    *,
    iterations: int = 1,
    with_timeline: bool = True,
) -> Prediction:
    """`simulate_plan` with the costs, the devices and the optimizer of a problem."""
    problem = problem.with_state_on(plan.state_on)
    return simulate_plan(
        plan,
        problem.profile,
        problem.cluster,
        optimizer_bytes_per_parameter_byte=problem.optimizer_bytes_per_parameter_byte,
        iterations=iterations,
        with_timeline=with_timeline,
    )


def host_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """The bytes on each host where a plan's optimizers have weights, gradients and state there."""
    each = 2 + problem.optimizer_bytes_per_parameter_byte
    held = [0.0] * len(problem.cluster.hosts)
    for stage in plan.stages:
        share = len(stage.devices) if stage.sharding else 1
        own = problem.profile.parameter_bytes(stage.layers) * each / share
        for device in stage.devices:
            held[problem.cluster.host_index[device]] += own
    return held


def fits_hosts(problem: PlanningProblem, plan: Plan) -> bool:
    """Return whether a plan with optimizers in host memory fits there, as far as is known."""
    if problem.profile.device == "cpu":
        return True
    pairs = zip(host_bytes(problem, plan), problem.cluster.hosts, strict=True)
    return all(held <= host.memory_bytes for held, host in pairs if host.memory_bytes)


def make_score(problem: PlanningProblem) -> Score:
    """A function that predicts the iteration time of a plan; infinite if the plan does not fit.

    It is infinite for a plan that does not keep the problem's pins, too. Scores are cached,
    whichever planner a plan is of.

    The result equals `simulate_plan`. It is faster because plans share cached parts: the work of a
    stage, the messages of a pair of stages and the orders of a shape. If forwards run beside
    backwards, memory depends on times, and the plan is simulated in full.
    """
    profile, cluster = problem.profile, problem.cluster
    catalogue = Catalogue(profile, cluster, problem.optimizer_bytes_per_parameter_byte)
    orders_of_shapes = Recent[object, FlatOrders](MOST_ACTIONS, lambda orders: len(orders.words))
    plans = Recent[Plan, float](MOST_PLANS, lambda _: 1)

    @cache
    def score_on_host() -> Score:
        return make_score(problem.with_state_on("host"))

    def score(plan: Plan) -> float:
        find = on_host_s if plan.state_on == "host" else simulated_s
        return plans.find(plan, lambda: find(plan))

    def on_host_s(plan: Plan) -> float:
        fits = fits_hosts(problem, plan)
        return score_on_host()(with_state_on(plan, "device")) if fits else inf

    def simulated_s(plan: Plan) -> float:
        check_plan_fits_inputs(plan, profile, cluster)
        if problem.pins and broken_pin(problem.pins, plan):
            return inf
        key = (plan.schedule, plan.shape())
        orders = orders_of_shapes.find(key, lambda: orders_of_plan(plan))
        if orders.concurrent:
            prediction = predict_plan(problem, plan)
            return prediction.iteration_s if prediction.fits else inf
        parts = catalogue.parts_of(plan, orders.instances)
        fits = native.fits(parts.in_core, orders.in_core)
        return played_s(parts, orders) if fits else inf

    return score
