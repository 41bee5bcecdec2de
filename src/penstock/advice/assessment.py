"""Prediction of a plan, next to a proven bound and the times without a pipeline."""

from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from penstock.advice.baselines import PLAIN, Rival, best_rival, rivals_of
from penstock.costs.lower_bound import LowerBound, gap, lower_bound
from penstock.errors import Infeasible
from penstock.files import Json
from penstock.plan.json_file import plan_to_json
from penstock.plan.plan import Plan, Stage, plan_html, plan_words, with_state_on
from penstock.plan.problem import AS_FAST, PlanningProblem, Score
from penstock.plan.throughput import NOT_KNOWN, Throughput, throughput_of
from penstock.planners.find_plan import find_plan
from penstock.planners.spp.bound import is_spp_order, spp_bound_s
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.by_length import LengthPrediction, expected_s, predict_lengths
from penstock.simulate.score import make_score, predict_plan
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.text import seconds_text, size_text

PARTS = ("stages", "tensor_groups", "state_on")
"""Keys of a plan's file that the command line prints, too, where they are."""


@dataclass(frozen=True)
class Baselines:
    """Seconds of an iteration without a pipeline; infinite where memory does not allow it.

    One device counts as if its memory were enough, because all plans are compared with it. The
    ``rivals`` are data parallelism in several kinds, the plain one first.
    """

    one_device_s: float
    rivals: tuple[Rival, ...] = ()

    @property
    def data_parallel_s(self) -> float:
        """Data parallelism that keeps all activations."""
        return self.rivals[0].iteration_s if self.rivals else inf


@dataclass(frozen=True, slots=True)
class HostStatePrice:
    """Bytes that optimizer state in host memory saves each device, and its cost in an iteration."""

    less_bytes: tuple[float, ...]
    seconds: float

    def __str__(self) -> str:
        saved, seconds = size_text(max(self.less_bytes)), seconds_text(self.seconds)
        return f"optimizer state in host memory: up to {saved} less on a device, {seconds} more"


@dataclass(frozen=True, repr=False)
class PlannedPipeline:
    """A plan with what the simulator predicts of it.

    ``spp_bound_s`` is SPP's bound for a plan in SPP's order of work, infinite for other orders.
    Where batches have different lengths, ``prediction`` and the bound are for the mean costs, and
    ``by_length`` has the prediction of each length. ``memory_reserve`` is the share of each
    device's memory that the plan had to leave free. ``throughput`` is what it trains each second,
    by the mean over lengths. ``optimizer_state`` are the bytes that the optimizer keeps for each
    byte of parameters, and ``on_host`` is the price of keeping them in host memory, if that is so.
    """

    plan: Plan
    prediction: Prediction
    bound: LowerBound
    baselines: Baselines
    spp_bound_s: float
    by_length: tuple[LengthPrediction, ...] = ()
    memory_reserve: float = 0.0
    throughput: Throughput = NOT_KNOWN
    optimizer_state: float = 2.0
    on_host: HostStatePrice | None = None

    def __repr__(self) -> str:
        return f"PlannedPipeline({plan_words(self.plan)}: {self.prediction!r}, {self.throughput})"

    def _repr_html_(self) -> str:
        return plan_html(self.plan, f"{plan_words(self.plan)}: {self.prediction!r}")

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no plan of the problem can beat."""
        return self.bound.seconds

    @property
    def gap(self) -> float:
        """By how much the plan is slower than the proven bound, as a part of the bound.

        Infinite where no plan of the problem fits, so that there is nothing to compare with.
        """
        if self.lower_bound_s == inf:
            return inf
        return gap(self.prediction.iteration_s, self.lower_bound_s)

    @property
    def speedup_over_one_device(self) -> float:
        """Speedup over one device of enough memory."""
        return self.baselines.one_device_s / self.prediction.iteration_s

    @property
    def speedup_over_data_parallel(self) -> float:
        """Speedup over plain data parallelism; infinite where that cannot run."""
        return self.baselines.data_parallel_s / self.prediction.iteration_s

    def rival_words(self) -> str:
        """Comparison with plain data parallelism, and with the best of its kinds, in words."""
        plain, best = self.speedup_over_data_parallel, best_rival(self.baselines.rivals)
        words = f"{plain:.2f}x DDP" if plain < inf else "DDP does not fit"
        if best and best != self.baselines.rivals[0]:
            factor = best.iteration_s / self.prediction.iteration_s
            words += f", {factor:.2f}x {best}"
            words += ", which is faster" if factor < 1 - AS_FAST else ""
        return words

    def to_json(self, planning_s: float) -> dict[str, Json]:
        """The keys that the command line documents; an infinite value becomes null."""
        whole = plan_to_json(self.plan)
        groups = {name: whole[name] for name in PARTS if name in whole}
        price = {}
        if self.on_host is not None:
            saved: list[Json] = [*self.on_host.less_bytes]
            price = {"host_state_saves_bytes": saved, "host_state_costs_s": self.on_host.seconds}
        by_length: list[Json] = [found.to_json() for found in self.by_length]
        lengths = {"expected_s": expected_s(self.by_length), "by_length": by_length}
        return {
            "planner": self.plan.planner,
            "schedule": self.plan.schedule,
            "micro_batches": self.plan.micro_batches,
            "micro_batch_size": self.plan.micro_batch_size,
            **groups,
            "iteration_s": self.prediction.iteration_s,
            "lower_bound_s": finite(self.lower_bound_s),
            "bound_argument": self.bound.argument,
            "bound_covers": self.bound.covers,
            "gap": finite(self.gap),
            "spp_bound_s": finite(self.spp_bound_s),
            "bubble": self.prediction.bubble,
            "peak_memory_bytes": list(self.prediction.peak_memory_bytes),
            "fits": self.prediction.fits,
            "memory_reserve": self.memory_reserve,
            "optimizer_bytes_per_parameter_byte": self.optimizer_state,
            **price,
            "planning_s": planning_s,
            **self.throughput.to_json(),
            "speedup_over_one_device": finite(self.speedup_over_one_device),
            "speedup_over_data_parallel": finite(self.speedup_over_data_parallel),
            "rivals": [rival.to_json() for rival in self.baselines.rivals],
            **(lengths if by_length else {}),
        }


def finite(value: float) -> float | None:
    """``value``, or None where it is infinite, for which JSON has no number."""
    return value if value < inf else None


def baselines_of(problem: PlanningProblem, score: Score) -> Baselines:
    """Times of the same problem on one device and with data parallelism alone, without pins."""
    if problem.pins:
        problem = replace(problem, pins=())
        score = make_score(problem)
    return Baselines(
        one_device_s=one_device_s(problem, score),
        rivals=rivals_of(problem, score),
    )


def one_device_s(problem: PlanningProblem, score: Score) -> float:
    """Seconds on the fastest device; where its memory is too small, as if it were not."""
    plain = replace(problem, schedules=(PLAIN,), recompute="off")
    with suppress(Infeasible):
        return score(find_plan(plain, "single-device", score))
    speeds = [device.speed for device in problem.cluster.devices]
    size = max(problem.micro_batch_sizes)
    layers = range(len(problem.profile.layers))
    whole = Plan(
        stages=(Stage(layers, (speeds.index(max(speeds)),), (size,)),),
        micro_batches=problem.global_batch // size,
        micro_batch_size=size,
        schedule=PLAIN,
        planner="single-device",
    )
    prediction = simulate_plan(whole, problem.profile, problem.cluster, with_timeline=False)
    return prediction.iteration_s


def assess_plan(
    plan: Plan,
    problem: PlanningProblem,
    baselines: Baselines,
    bound: LowerBound | None = None,
    *,
    with_timeline: bool = True,
) -> PlannedPipeline:
    """``plan`` with the simulator's prediction, the bound of its problem, and its baselines."""

    def of_length(profile: ModelProfile) -> float:
        own = replace(problem, profile=profile)
        return predict_plan(own, plan, with_timeline=False).iteration_s

    if any(stage.in_turn for stage in plan.stages):
        # Bounds are about micro-batches that are split, whose rows limit the devices of a stage.
        bound = LowerBound(0.0, "no bound where devices take whole micro-batches in turn")
    elif any(stage.sharding == "parameters" for stage in plan.stages):
        bound = lower_bound(replace(problem, sharding="parameters"))
    prediction = predict_plan(problem, plan, with_timeline=with_timeline)
    by_length = predict_lengths(problem.profile, of_length)
    mean_s = expected_s(by_length) if by_length else prediction.iteration_s
    on_host = None
    if plan.state_on == "host":
        other = predict_plan(problem, with_state_on(plan, "device"), with_timeline=False)
        peaks = zip(other.peak_memory_bytes, prediction.peak_memory_bytes, strict=True)
        saved = tuple(more - own for more, own in peaks)
        on_host = HostStatePrice(saved, prediction.iteration_s - other.iteration_s)
    return PlannedPipeline(
        plan,
        prediction,
        bound or lower_bound(problem),
        baselines,
        spp_bound_s(problem.with_state_on(plan.state_on), plan) if is_spp_order(plan) else inf,
        by_length,
        problem.memory_reserve,
        throughput_of(problem.profile, problem.cluster, plan.devices, plan.global_batch, mean_s),
        problem.optimizer_bytes_per_parameter_byte,
        on_host,
    )
