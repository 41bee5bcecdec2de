"""In words what the bound of a relaxed plan is spent on."""

from dataclasses import dataclass

from penstock.plan.bound_headroom import TERMS
from penstock.plan.bound_program import Relaxation, RelaxedPlan, RelaxedStage, SizedRelaxation
from penstock.plan.run_tables import Floats

__all__ = ["binding_argument"]

CLOSE = 1e-6
"""Figures that differ by less of themselves are the same."""


@dataclass(frozen=True)
class StageTimes:
    """A stage's forward and backward, and its entries of the headroom table by name."""

    forward_s: float
    backward_s: float
    terms: dict[str, float]

    @property
    def whole_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Found:
    """A term of a stage; ``reducing``: the earlier stage whose all-reduce follows, if any does."""

    seconds: float
    stage: RelaxedStage
    times: StageTimes
    name: str
    reducing: RelaxedStage | None


def binding_argument(relaxed: Relaxation, plan: RelaxedPlan) -> str:
    """Which stage of the relaxed plan binds, and by what."""
    sized = relaxed.of_size(plan.micro_batch_size)
    table = sized.filled(plan.seconds)
    first_s = after_s = reduced_s = 0.0
    reducing: RelaxedStage | None = None
    found: list[Found] = []
    for stage in plan.stages:
        entry = table[sized.options.index(stage.option), stage.layers.start, stage.layers.stop]
        times = times_of(sized, stage, entry)
        reached_s = {
            "after_forward": first_s,
            "round_trip": first_s + after_s,
            "after_drain": after_s,
            "thin_drain": first_s + after_s,
            "thin": first_s,
            "thin_both": first_s + reduced_s,
            "before_thin_drain": reduced_s,
            "sent": first_s + reduced_s,
            "alone": 0.0,
        }
        found += [
            Found(reached_s[name] + times.terms[name], stage, times, name, reducing)
            for name in reached_s
        ]
        first_s += times.forward_s
        after_s += times.backward_s
        if times.terms["tail"] > after_s * (1 + CLOSE):
            after_s, reducing = times.terms["tail"], stage
        reduced_s = max(times.terms["reduced"], reduced_s)
    binding = max(found, key=lambda one: one.seconds)
    words = f"{stage_text(binding.stage, len(plan.stages))}: {cause(sized, binding)}"
    if binding.reducing and binding.name not in ("alone", "after_forward", "thin"):
        layers = binding.reducing.layers
        words += f"; then the all-reduce of layers {layers.start}-{layers.stop - 1}"
    return words


def times_of(sized: SizedRelaxation, stage: RelaxedStage, entry: Floats) -> StageTimes:
    """The times of a relaxed stage."""
    own = sized.times[:, stage.layers.stop] - sized.times[:, stage.layers.start]
    option = stage.option
    return StageTimes(
        forward_s=float(own[0] / option.fastest + own[1] * option.row_s),
        backward_s=float(own[2] / option.fastest + own[3] * option.row_s),
        terms=dict(zip(TERMS, map(float, entry), strict=True)),
    )


def stage_text(stage: RelaxedStage, stages: int) -> str:
    """The stage for people."""
    replicas = stage.option.replicas
    devices = "1 device" if replicas == 1 else f"{replicas} devices"
    if stages == 1:
        return f"all layers on {devices}"
    return f"stage of layers {stage.layers.start}-{stage.layers.stop - 1} on {devices}"


def cause(sized: SizedRelaxation, found: Found) -> str:
    """What a term consists of."""
    stage, times, name = found.stage, found.times, found.name
    batches, rows = sized.batches, sized.rows
    of_all = f"{batches} micro-batches of {rows}" if batches > 1 else f"one micro-batch of {rows}"
    value, busy_s = times.terms[name], batches * times.whole_s
    tail_s = times.terms["tail"]
    if name == "round_trip":
        if value > busy_s * (1 + CLOSE):
            return f"memory: too few of {of_all} in flight, or recompute, between fill and drain"
        return f"its compute for {of_all} between fill and drain"
    if name == "after_forward" and value <= (busy_s - times.backward_s + tail_s) * (1 + CLOSE):
        if tail_s <= times.backward_s * (1 + CLOSE):
            return f"its compute for {of_all} after the fill"
        return f"the all-reduce and step after its compute for {of_all}{rate_text(stage)}"
    slow_s = slowest_s(sized, stage)
    if name == "thin_both" and value <= slow_s * (1 + CLOSE):
        return f"its compute for {of_all} on the fullest replica"
    if name == "thin" and value <= (slow_s + times.terms["reduced"]) * (1 + CLOSE):
        return f"its compute for {of_all} on the fullest replica, and the all-reduce and step"
    return f"the links of its devices, which carry the messages of {of_all}"


def slowest_s(sized: SizedRelaxation, stage: RelaxedStage) -> float:
    """Compute of all micro-batches on the slowest replica."""
    own = sized.times[:, stage.layers.stop] - sized.times[:, stage.layers.start]
    option = stage.option
    fixed_s, rows_s = (own[0] + own[2]) / option.fastest, (own[1] + own[3]) * option.slowest_row_s
    return float(sized.batches * (fixed_s + rows_s))


def rate_text(stage: RelaxedStage) -> str:
    """The rate at which a ring over the stage's devices runs at best."""
    if not stage.option.placement.ways:
        return ""
    ring = stage.option.placement.ways[0]
    replicas = stage.option.replicas
    rate = 2 * (replicas - 1) / replicas / ring.s_per_byte if ring.s_per_byte else 0.0
    return f", at {rate / 1e9:.3g} GB/s at best"
