"""What people would do without a pipeline: data parallelism, with less and less on each device.

A plan is compared with all of them, so that it is not praised for beating only the weakest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from penstock.document import Json
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import AS_FAST, PlanningProblem, Score
from penstock.planners.data_parallel import one_stage_candidates
from penstock.planning.answers import find_plan
from penstock.planning.fsdp import fsdp_price
from penstock.simulate.score import make_score, predict_plan
from penstock.words import seconds_text, size_text

__all__ = ["PLAIN", "Rival", "best_rival", "rivals_line", "rivals_of"]

PLAIN = "1f1b"
"""The schedule of plans of one stage, for which all synchronous schedules are the same."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A way to train without a pipeline: seconds of an iteration, and bytes on the fullest device.

    Both are infinite where it does not fit.
    """

    name: str
    iteration_s: float = inf
    peak_memory_bytes: float = inf

    def __str__(self) -> str:
        return f"{self.name} ({size_text(self.peak_memory_bytes)})"

    def to_json(self) -> dict[str, Json]:
        """Its numbers; null where it does not fit."""
        fits = self.iteration_s < inf
        return {
            "name": self.name,
            "iteration_s": self.iteration_s if fits else None,
            "peak_memory_bytes": self.peak_memory_bytes if fits else None,
        }


def best_rival(rivals: tuple[Rival, ...]) -> Rival | None:
    """The plainest that is about as fast as the fastest; None where none fits."""
    limit_s = min((rival.iteration_s for rival in rivals), default=inf) * (1 + AS_FAST)
    return next((rival for rival in rivals if rival.iteration_s <= limit_s < inf), None)


def rivals_line(rivals: Iterable[Rival]) -> str:
    """The times and the memory of all of them, in a line."""
    words = [
        f"{seconds_text(rival.iteration_s)} by {rival}"
        if rival.iteration_s < inf
        else f"{rival.name} does not fit"
        for rival in rivals
    ]
    return f"without a pipeline: {'; '.join(words)}"


def rivals_of(problem: PlanningProblem, score: Score) -> tuple[Rival, ...]:
    """Data parallelism in four kinds, each at its best, whatever recompute the problem allows.

    The first two are the plans of `penstock.planners.data_parallel` that keep all activations, and
    that recompute by block. With ZeRO-1 all devices also divide the optimizer's state, and may do
    either; as many bytes are sent as without (`penstock.runtime.gradients.sharding`). FSDP, which
    may do either too, has the price of `penstock.planning.fsdp`.
    """
    plain = replace(problem, schedules=(PLAIN,), recompute="off", blocks="no")
    by_block = replace(plain, blocks="always")
    devices = len(problem.cluster.devices)
    share = problem.optimizer_bytes_per_parameter_byte / devices
    divided = replace(problem, optimizer_bytes_per_parameter_byte=share)
    return (
        planned(plain, score, "data parallelism"),
        planned(by_block, score, "data parallelism by block"),
        fastest(divided, on_all_devices(divided), "ZeRO-1"),
        fsdp(problem),
    )


def fsdp(problem: PlanningProblem) -> Rival:
    """FSDP on all devices, if there are several, with the best micro-batches."""
    devices = len(problem.cluster.devices)
    prices = [
        fsdp_price(problem, size, by_block=by_block)
        for size in problem.micro_batch_sizes
        for by_block in (False, True)
        if size >= devices > 1
    ]
    fitting = [price for price in prices if price.fits]
    if not fitting:
        return Rival("FSDP")
    best = min(fitting, key=lambda price: price.iteration_s)
    return Rival("FSDP", best.iteration_s, best.peak_memory_bytes)


def planned(problem: PlanningProblem, score: Score, name: str) -> Rival:
    """The plan of data parallelism for a problem."""
    try:
        return fastest(problem, [find_plan(problem, "data-parallel", score)], name)
    except Infeasible:
        return Rival(name)


def on_all_devices(problem: PlanningProblem) -> Iterator[Plan]:
    """One stage on all devices for each size of micro-batches, keeping everything and by block."""
    for candidate in one_stage_candidates(
        replace(problem, schedules=(PLAIN,), recompute="off"), len(problem.cluster.devices)
    ):
        (stage,) = candidate.plan.stages
        yield candidate.plan
        yield replace(candidate.plan, stages=(replace(stage, by_block=True),))


def fastest(problem: PlanningProblem, plans: Iterable[Plan], name: str) -> Rival:
    """The fastest of some plans that fits, with its memory."""
    score = make_score(problem)
    scored = [(score(plan), plan) for plan in plans]
    seconds, plan = min(scored, key=lambda one: one[0], default=(inf, None))
    if plan is None or seconds == inf:
        return Rival(name)
    prediction = predict_plan(problem, plan, with_timeline=False)
    return Rival(name, seconds, max(prediction.peak_memory_bytes))
