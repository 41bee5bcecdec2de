"""How much faster the stages of a plan would train without a flush.

The gain is simulated. What it costs, in samples for the same loss, depends on the optimizer and was
measured elsewhere (docs/benchmarks/convergence.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.document import Json
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planning.assessment import PlannedPipeline
from penstock.schedule.registry import FAMILIES
from penstock.search.recut import recut
from penstock.simulate.simulation import simulate_plan

__all__ = ["SCHEDULES", "WithoutFlush", "advice_words", "without_flush"]

SCHEDULES = {"SGD with momentum": "spectrain", "AdamW": "xpipe", "Muon": "2bw"}
"""For each optimizer, the schedule that needs the fewest samples in its worst case."""


@dataclass(frozen=True, slots=True)
class WithoutFlush:
    """The same stages under ``schedule``, with an optimizer: ``gain`` is how many times as fast.

    ``fits`` says whether the stages then fit in memory.
    """

    optimizer: str
    schedule: str
    gain: float
    fits: bool

    def to_json(self) -> dict[str, Json]:
        """All of it."""
        return {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "gain": self.gain,
            "fits": self.fits,
        }


def without_flush(planned: PlannedPipeline, problem: PlanningProblem) -> tuple[WithoutFlush, ...]:
    """The plan's stages in steady state without a flush, for every optimizer.

    Empty for a plan of one stage, or one that does not flush anyway. Where a device holds several
    stages, the layers are cut anew, one stage on each set of devices. Updates are as frequent as in
    the schedule's source.
    """
    plan = planned.plan
    if len(plan.device_groups) < 2 or not FAMILIES[plan.schedule].flushes:
        return ()
    if plan.placement or plan.mirrored:
        plan = recut(problem, bare(plan), "straight", 1)
    found: list[WithoutFlush] = []
    for optimizer, schedule in SCHEDULES.items():
        try:
            prediction = simulate_plan(
                replace(bare(plan), schedule=schedule),
                problem.profile,
                problem.cluster,
                optimizer_bytes_per_parameter_byte=problem.optimizer_bytes_per_parameter_byte,
                iterations=3,
                with_timeline=False,
            )
        except BadInput:
            continue
        gain = planned.prediction.iteration_s / prediction.steady_s
        found.append(WithoutFlush(optimizer, schedule, gain, prediction.fits))
    return tuple(found)


def bare(plan: Plan) -> Plan:
    """The plan under a schedule that needs no costs."""
    return replace(plan, schedule="1f1b", costs=(), memory_bytes=())


def advice_words(options: Sequence[WithoutFlush]) -> str:
    """What leaving out the flush would gain, in a sentence."""
    return (
        f"Without a flush: {'; '.join(map(option_words, options))}. The same loss may take more "
        f"samples then (docs/benchmarks/convergence.md)."
    )


def option_words(option: WithoutFlush) -> str:
    """The gain with one optimizer."""
    start = f"with {option.optimizer} `{option.schedule}`"
    if not option.fits:
        return f"{start} would not fit in memory"
    if option.gain <= 1.0:
        return f"{start} would not be faster"
    return f"{start} would be {option.gain:.2f} times as fast"
