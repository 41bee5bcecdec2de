"""Joins the layers of long chains, for planners whose time grows with the square of the layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.plan.candidate import Candidate
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import at, crossing_table
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
)

__all__ = ["coarse_problem", "expanded", "likely_cuts"]


def likely_cuts(problem: PlanningProblem, most: int) -> tuple[int, ...]:
    """The cuts to try: all of a short chain; of a long one those that the fewest bytes cross.

    A chain with more than ``most`` layers has one cut in each of ``most`` equal parts of the work.
    """
    profile = problem.profile
    layers = len(profile.layers)
    if layers <= most:
        return tuple(range(layers + 1))
    size = max(problem.micro_batch_sizes)
    costs = ((layer.forward_s + layer.backward_s).at(size) for layer in profile.layers)
    work = list(accumulate(costs, initial=0.0))
    crossing = at(crossing_table(profile, lambda edge: edge.bytes + edge.gradient_bytes), size)
    best: dict[int, int] = {}
    for cut in range(1, layers):
        part = min(most - 1, int(work[cut] / max(work[-1], 1e-300) * most))
        known = best.setdefault(part, cut)
        if crossing[cut] < crossing[known]:
            best[part] = cut
    return (0, *sorted(best.values()), layers)


def coarse_problem(problem: PlanningProblem, most: int) -> tuple[PlanningProblem, tuple[int, ...]]:
    """The problem with the layers between `likely_cuts` joined, and those cuts."""
    cuts = likely_cuts(problem, most)
    if len(cuts) == len(problem.profile.layers) + 1:
        return problem, cuts
    stages = min(problem.max_stages, len(cuts) - 1)
    profile = joined(problem.profile, cuts, max(problem.micro_batch_sizes))
    return replace(problem, profile=profile, max_stages=stages), cuts


def joined(profile: ModelProfile, cuts: Sequence[int], most_rows: int) -> ModelProfile:
    """The profile with one layer for each run between cuts, which no tensor group divides."""
    place = [i for i, (lo, hi) in enumerate(pairwise(cuts)) for _ in range(lo, hi)]
    edges: dict[tuple[str, int], Edge] = {}
    for edge in profile.edges:
        producer, consumer = place[edge.producer], place[edge.consumer]
        if producer != consumer:
            moved = replace(edge, producer=producer, consumer=consumer)
            edges.setdefault((edge.tensor, consumer), moved)
    shared = tuple(
        SharedParameter(tied.name, tied.bytes, tuple(sorted({place[i] for i in tied.layers})))
        for tied in profile.shared
    )
    runs = (profile.layers[lo:hi] for lo, hi in pairwise(cuts))
    return replace(
        profile,
        layers=tuple(joined_layer(run, most_rows) for run in runs),
        edges=tuple(edges.values()),
        shared=shared,
        by_length=(),
        tensor_parallel=None,
    )


def joined_layer(run: Sequence[LayerCost], most_rows: int) -> LayerCost:
    """Consecutive layers as one, in micro-batches of up to ``most_rows``."""
    return LayerCost(
        name=f"{run[0].name} ... {run[-1].name}",
        forward_s=sum((layer.forward_s for layer in run), Affine()),
        backward_input_s=sum((layer.backward_input_s for layer in run), Affine()),
        backward_weight_s=sum((layer.backward_weight_s for layer in run), Affine()),
        parameter_bytes=sum(layer.parameter_bytes for layer in run),
        buffer_bytes=sum(layer.buffer_bytes for layer in run),
        saved_bytes=sum((layer.saved_bytes for layer in run), Affine()),
        workspace_bytes=largest([layer.workspace_bytes for layer in run], most_rows),
        norms=sum(layer.norms for layer in run),
        norm_channels=sum(layer.norm_channels for layer in run),
    )


def largest(sizes: Sequence[Affine], most_rows: int) -> Affine:
    """The least affine size that for 1 to ``most_rows`` rows is at least each of ``sizes``.

    Their maximum is convex. So the line between its values at both ends is nowhere below it.

    >>> largest([Affine(10.0, 0.0), Affine(0.0, 5.0)], 11)
    Affine(fixed=5.5, per_sample=4.5)
    """
    first, last = (max(size.at(rows) for size in sizes) for rows in (1, most_rows))
    each = (last - first) / (most_rows - 1) if most_rows > 1 else 0.0
    return Affine(first - each, each)


def expanded(candidates: Iterator[Candidate], cuts: Sequence[int]) -> Iterator[Candidate]:
    """Candidates of a coarse problem as those of the problem itself."""
    for candidate in candidates:
        stages = tuple(
            replace(stage, layers=range(cuts[stage.layers.start], cuts[stage.layers.stop]))
            for stage in candidate.plan.stages
        )
        yield replace(candidate, plan=replace(candidate.plan, stages=stages))
