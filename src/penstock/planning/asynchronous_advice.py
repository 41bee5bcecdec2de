"""Whether training without a flush would pay: its gain in time against its cost in samples.

The gain is simulated. The cost was measured: how many more samples than synchronous training are
needed for the same loss (docs/benchmarks/convergence.md). It is recommended only where the gain is
larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from penstock.document import Json
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planning.assessment import PlannedPipeline
from penstock.schedule.registry import FAMILIES
from penstock.search.recut import recut
from penstock.simulate.simulation import simulate_plan
from penstock.words import percent_text

__all__ = ["MEASURED", "WithoutFlush", "advice_words", "without_flush"]

MEASURED: dict[str, tuple[str, float]] = {
    "SGD with momentum": ("spectrain", inf),
    "AdamW": ("xpipe", 1.07),
    "Muon": ("2bw", 1.46),
}
"""For each optimizer, the schedule that needed the fewest samples in its worst case, and how many.

The number is relative to synchronous training. It is infinite where the loss was not reached in
some case.
"""


@dataclass(frozen=True, slots=True)
class WithoutFlush:
    """The same stages under ``schedule``, with an optimizer: ``gain`` is how many times as fast.

    ``samples`` are those needed for an equal loss, relative to synchronous training. ``fits`` says
    whether the stages then fit in memory.
    """

    optimizer: str
    schedule: str
    gain: float
    fits: bool
    samples: float

    @property
    def pays(self) -> bool:
        """Whether the gain is more than the samples that it costs."""
        return self.fits and self.gain > self.samples

    def to_json(self) -> dict[str, Json]:
        """All of it; ``samples`` is null where the loss was not always reached."""
        return {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "gain": self.gain,
            "fits": self.fits,
            "samples": self.samples if isfinite(self.samples) else None,
            "pays": self.pays,
        }


def without_flush(
    planned: PlannedPipeline, problem: PlanningProblem, *, only_paying: bool = False
) -> tuple[WithoutFlush, ...]:
    """The plan's stages in steady state without a flush, for every optimizer that was measured.

    Empty for a plan of one stage, or one that does not flush anyway. Where a device holds several
    stages, the layers are cut anew, one stage on each set of devices. Updates are as frequent as in
    the schedule's source.

    With ``only_paying``, options that do not pay are left out. Those that cannot pay, because the
    plan idles too little, are not simulated: that takes many times as long as one iteration.
    """
    plan = planned.plan
    if len(plan.stages) < 2 or not FAMILIES[plan.schedule].flushes:
        return ()
    if len(plan.device_groups) == 1:
        return ()
    if plan.placement or plan.mirrored:
        plan = recut(problem, bare(plan), "straight", 1)
    # Devices are busy for this part of an iteration, and have as much to compute without a flush.
    busy = 1.0 - planned.prediction.bubble
    found: list[WithoutFlush] = []
    for optimizer, (schedule, samples) in MEASURED.items():
        if only_paying and samples * busy >= 1.0:
            continue
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
        found.append(WithoutFlush(optimizer, schedule, gain, prediction.fits, samples))
    return tuple(option for option in found if option.pays or not only_paying)


def bare(plan: Plan) -> Plan:
    """The plan under a schedule that needs no costs."""
    return replace(plan, schedule="1f1b", costs=(), memory_bytes=())


def advice_words(options: Sequence[WithoutFlush]) -> str:
    """Whether to flush, in a sentence for each optimizer."""
    return "Without a flush: " + "; ".join(map(option_words, options)) + "."


def option_words(option: WithoutFlush) -> str:
    """Whether to flush with one optimizer."""
    start = f"with {option.optimizer} `{option.schedule}`"
    if not option.fits:
        return f"{start} would not fit in memory"
    if option.gain <= 1.0:
        return f"{start} would not be faster"
    faster = f"{start} would be {option.gain:.2f} times as fast"
    if not isfinite(option.samples):
        return f"{faster}, but did not always come to the same loss"
    cost = f"{percent_text(option.samples - 1)} more samples"
    if not option.pays:
        return f"{faster}, less than the {cost} it may take"
    return f"{faster} and may take {cost}: try `--schedule {option.schedule}`"
