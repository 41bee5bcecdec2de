"""One profile from those of several workers that measured at the same time.

Workers on one machine contend for its memory and caches while they train. So they are measured
under the same contention: each times the same model at the same time as the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from penstock.errors import BadInput
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile, TensorParallelCosts

__all__ = ["median_profile"]


def median_profile(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """The median over workers of every layer's times; bytes are the same for all.

    Raises:
        BadInput: no profiles, or profiles of different models.
    """
    names = {tuple(layer.name for layer in profile.layers) for profile in profiles}
    if len(names) != 1:
        raise BadInput(
            f"{len(profiles)} profiles of {len(names)} different models have no median; measure "
            f"the same model in every worker"
        )
    first = profiles[0]
    lengths = zip(*(profile.by_length for profile in profiles), strict=True)
    return replace(
        first,
        layers=median_costs([profile.layers for profile in profiles]),
        by_length=tuple(
            replace(every[0], layers=median_costs([costs.layers for costs in every]))
            for every in lengths
        ),
        step_s_per_byte=median(profile.step_s_per_byte for profile in profiles),
        stage_forward_s=median(profile.stage_forward_s for profile in profiles),
        stage_backward_s=median(profile.stage_backward_s for profile in profiles),
        notes=max((profile.notes for profile in profiles), key=len),
        source=f"{first.source}, {len(profiles)} workers at once",
        tensor_parallel=with_median_factors([profile.tensor_parallel for profile in profiles]),
    )


def with_median_factors(
    workers: Sequence[TensorParallelCosts | None],
) -> TensorParallelCosts | None:
    """What tensor groups divide, with the median over workers of each measured factor."""
    known = [costs for costs in workers if costs is not None]
    if not known:
        return None
    factors = tuple(
        (ranks, median(costs.factor(ranks) for costs in known)) for ranks, _ in known[0].factors
    )
    return replace(known[0], factors=factors)


def median_costs(workers: Sequence[Sequence[LayerCost]]) -> tuple[LayerCost, ...]:
    """The median times of every layer over workers."""
    return tuple(median_cost(layers) for layers in zip(*workers, strict=True))


def median_cost(layers: Sequence[LayerCost]) -> LayerCost:
    """The median times of one layer."""
    return replace(
        layers[0],
        forward_s=median_affine([layer.forward_s for layer in layers]),
        backward_input_s=median_affine([layer.backward_input_s for layer in layers]),
        backward_weight_s=median_affine([layer.backward_weight_s for layer in layers]),
    )


def median_affine(costs: Sequence[Affine]) -> Affine:
    """The median of each term."""
    return Affine(median(c.fixed for c in costs), median(c.per_sample for c in costs))
