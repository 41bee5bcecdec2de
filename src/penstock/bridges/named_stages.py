"""Stages as lists of module names: what torch's own frameworks need, and how lists are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from penstock.bridges.layout import PipelineLayout
from penstock.bridges.module_chain import (
    ModuleChain,
    check_module_names,
    module_chain,
    module_of,
    with_light_modules,
)
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile

__all__ = ["check_neighbours", "names_of_stages", "stages_of_starts", "with_whole_blocks"]


def names_of_stages(
    layout: PipelineLayout, chain: ModuleChain, joined: Mapping[str, str], target: str
) -> tuple[tuple[str, ...], ...]:
    """The modules of each stage, with the light ones beside them.

    Raises:
        BadInput: ``target`` cannot express the cuts, or ``joined`` names no module.
    """
    found = chain.stage_modules(layout.stages, target)
    names = [module.name for module in chain.modules]
    listed = with_light_modules(names, joined)
    return tuple(
        tuple(name for module in dict.fromkeys(m.name for m in modules) for name in listed[module])
        for modules in found
    )


def check_neighbours(
    layout: PipelineLayout, chain: ModuleChain, profile: ModelProfile, target: str
) -> None:
    """Raise unless stages only need what torch's pipelines give them.

    They send from a stage to the next one only, and leave gradients of tied parameters unsummed.
    Tensors without a gradient, such as masks, are not counted: models make them on each stage.

    Raises:
        BadInput: a name that is no module's, a skip connection, or a tied parameter on two stages.
    """
    if len(layout.stages) == 1:
        return
    check_module_names(chain, profile, target)
    stage_of = [index for index, layers in enumerate(layout.stages) for _ in layers]
    for edge in profile.edges:
        source, reader = stage_of[edge.producer], stage_of[edge.consumer]
        if reader > source + 1 and edge.gradient_bytes.at(1) > 0:
            raise BadInput(
                f"stage {reader} reads tensor '{edge.tensor}' of stage {source}, and {target} "
                f"sends to the next stage only; cut so that the two are neighbours, or train this "
                f"plan with 'penstock train'"
            )
    for shared in profile.shared:
        users = sorted({stage_of[layer] for layer in shared.layers})
        if len(users) > 1:
            raise BadInput(
                f"parameter '{shared.name}' is tied across stages {users[0]} and {users[-1]}, and "
                f"{target} does not sum its gradients; untie it, put its layers on one stage, or "
                f"train this plan with 'penstock train'"
            )


def stages_of_starts(starts: Sequence[str], profile: ModelProfile, path: Path) -> tuple[range, ...]:
    """The stages that begin at these modules; the first begins at the first layer.

    Raises:
        BadInput: a name is no module's, or they are not in the model's order.
    """
    names = [layer.name for layer in profile.layers]
    bounds = [0]
    for start in starts:
        first = next((i for i, name in enumerate(names) if is_within(name, start)), None)
        if first is None:
            near = get_close_matches(start, [module_of(name) for name in names], n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it begins with '{names[0]}'"
            raise BadInput(f"{path}: profile '{profile.name}' has no module '{start}'; {hint}")
        if first <= bounds[-1]:
            raise BadInput(
                f"{path}: a stage begins at '{start}', which is not after the beginning of the "
                f"one before; name modules in the model's order, without the first"
            )
        bounds.append(first)
    bounds.append(len(names))
    return tuple(range(lo, hi) for lo, hi in pairwise(bounds))


def is_within(layer: str, module: str) -> bool:
    """Whether a layer is a module or a part of it.

    >>> is_within("h.1.mlp", "h.1"), is_within("h.10", "h.1"), is_within("lm_head#2", "lm_head")
    (True, False, True)
    """
    return layer == module or layer.startswith((f"{module}.", f"{module}#"))


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
