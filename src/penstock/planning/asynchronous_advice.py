"""Whether training without a flush would pay: what it gains in time, against what it costs.

The gain is simulated, the cost was measured: how many more samples than synchronous training it
took to the same loss (docs/benchmarks/convergence.md). Recommended only where the first is larger.
"""

from dataclasses import dataclass, replace
from math import inf, isfinite

from penstock.document import Json
from penstock.errors import BadInput
from penstock.plan.problem import PlanningProblem
from penstock.planning.assessment import PlannedPipeline
from penstock.schedule.registry import ASYNCHRONOUS
from penstock.simulate.simulation import simulate_plan
from penstock.words import percent_text

__all__ = ["MEASURED_SAMPLES", "WithoutFlush", "advice_words", "without_flush"]

SCHEDULE = "spectrain"
"""The rule that came nearest to synchronous training on the sequence model."""

MEASURED_SAMPLES: dict[str, float] = {"SGD with momentum": inf, "AdamW": 1.39}
"""The most samples that it needed, over those of synchronous training, by optimizer.

Infinite where it never had the loss in some case.
"""


@dataclass(frozen=True, slots=True)
class WithoutFlush:
    """The same stages without a flush: ``gain`` is how many times as fast, ``fits`` in memory."""

    gain: float
    fits: bool

    @property
    def pays_with(self) -> tuple[str, ...]:
        """The optimizers with which the gain is more than the samples that it costs."""
        if not self.fits:
            return ()
        return tuple(name for name, ratio in MEASURED_SAMPLES.items() if self.gain > ratio)

    def to_json(self) -> dict[str, Json]:
        """The gain, and with which optimizers it is worth the samples."""
        return {
            "schedule": SCHEDULE,
            "gain": self.gain,
            "fits": self.fits,
            "pays_with": list[Json](self.pays_with),
        }


def without_flush(planned: PlannedPipeline, problem: PlanningProblem) -> WithoutFlush | None:
    """The plan's stages in steady state without a flush; ``None`` where that cannot be.

    Several stages on a device, one stage, and plans that do not flush already are left out. A
    micro-batch then is an update, as the sources have it.
    """
    plan = planned.plan
    if len(plan.stages) < 2 or plan.schedule in ASYNCHRONOUS:
        return None
    if len(plan.device_groups) != len(plan.stages) or plan.mirrored:
        return None
    try:
        other = replace(plan, schedule=SCHEDULE)
        prediction = simulate_plan(
            other,
            problem.profile,
            problem.cluster,
            optimizer_bytes_per_parameter_byte=problem.optimizer_bytes_per_parameter_byte,
            iterations=3,
            with_timeline=False,
        )
    except BadInput:
        return None
    return WithoutFlush(planned.prediction.iteration_s / prediction.steady_s, prediction.fits)


def advice_words(found: WithoutFlush) -> str:
    """Whether to flush, in a sentence."""
    if not found.fits:
        return f"Without a flush (`{SCHEDULE}`) these stages would not fit in memory."
    needed = ", ".join(cost_words(name, ratio) for name, ratio in MEASURED_SAMPLES.items())
    if found.gain <= 1.0:
        return f"Without a flush (`{SCHEDULE}`) these stages would not be faster."
    faster = f"Without a flush (`{SCHEDULE}`) these stages would be {found.gain:.2f} times as fast"
    if not found.pays_with:
        return f"{faster}; that does not pay for the samples it may cost ({needed})."
    return (
        f"{faster}; with {' or '.join(found.pays_with)} that pays for the samples it may cost "
        f"({needed}): try `--schedule {SCHEDULE}`."
    )


def cost_words(name: str, ratio: float) -> str:
    """What an equal loss took in samples."""
    if not isfinite(ratio):
        return f"with {name} not every case came to an equal loss"
    return f"{percent_text(ratio - 1)} more with {name}"
