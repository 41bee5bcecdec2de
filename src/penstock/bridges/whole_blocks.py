"""Moves the cuts of a plan that are inside a block to the block's nearer end."""

from dataclasses import replace
from itertools import pairwise

from penstock.bridges.module_chain import module_chain
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile

__all__ = ["with_whole_blocks"]


def with_whole_blocks(plan: Plan, profile: ModelProfile) -> Plan:
    """The plan with every cut at the end of a module; the same object if none had to move.

    A cut moves to the end with fewer seconds of forwards between; the micro-batches, the devices
    and the order of work stay.

    Raises:
        BadInput: a stage would be left without a layer.
    """
    ends = [module.layers.stop for module in module_chain(profile).modules]
    times = [0.0, *profile.prefix_sums(plan.micro_batch_size)[0][1:]]
    cuts = [stage.layers.stop for stage in plan.stages[:-1]]
    moved = [min((0, *ends), key=lambda end: abs(times[end] - times[cut])) for cut in cuts]
    bounds = [0, *moved, len(profile.layers)]
    if moved == cuts:
        return plan
    for index, (lo, hi) in enumerate(pairwise(bounds)):
        if hi <= lo:
            raise BadInput(
                f"stage {index} (layers {plan.stages[index].layers.start} to "
                f"{plan.stages[index].layers.stop - 1}) has no whole block; plan for fewer stages "
                f'with --max-stages, or profile with granularity = "block" in the job'
            )
    singled = {layer for stage in plan.stages for layer in stage.recompute_layers}
    stages: list[Stage] = []
    for stage, lo, hi in zip(plan.stages, bounds[:-1], bounds[1:], strict=True):
        named = tuple(layer for layer in range(lo, hi) if layer in singled)
        recompute = stage.recompute and (bool(named) or not stage.recompute_layers)
        kept = named if stage.recompute_layers else ()
        stages.append(
            replace(stage, layers=range(lo, hi), recompute=recompute, recompute_layers=kept)
        )
    return replace(plan, stages=tuple(stages))
