"""The frameworks that plans go to and layouts come from, by the names of the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.errors import BadInput
from penstock.integrations.bridges import (
    deepspeed,
    device_map,
    megatron,
    torch_pipelining,
    torchtitan,
)
from penstock.integrations.bridges.layout import LayoutOptions, PipelineLayout, layout_of_plan
from penstock.integrations.bridges.modules import (
    NamedPlan,
    check_neighbours,
    module_chain,
    names_of_stages,
    stage_modules,
)
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile

Writer: TypeAlias = Callable[[NamedPlan], tuple[str, list[str]]]
"""The text of a layout, and what its reader must know besides.

It raises BadInput for what the framework cannot express.
"""

Reader: TypeAlias = Callable[[Path, ModelProfile, LayoutOptions], PipelineLayout]
"""A function that reads a layout of the profile's model; raises BadInput if it does not fit."""


@dataclass(frozen=True, slots=True)
class Format:
    """Writer and reader of a framework's layouts; None for what is not supported.

    Frameworks on ``torch_pipelines`` send between neighbours only, and read the order of work.
    """

    title: str
    write: Writer | None = None
    read: Reader | None = None
    torch_pipelines: bool = False


FORMATS: dict[str, Format] = {
    "torch": Format(
        torch_pipelining.TARGET,
        torch_pipelining.torch_layout,
        torch_pipelining.read_torch_layout,
        torch_pipelines=True,
    ),
    "torchtitan": Format(torchtitan.TARGET, torchtitan.torchtitan_config, torch_pipelines=True),
    "megatron": Format(
        megatron.TARGET, megatron.megatron_arguments, megatron.read_megatron_arguments
    ),
    "deepspeed": Format(deepspeed.TARGET, deepspeed.deepspeed_parts),
    "device-map": Format(device_map.TARGET, read=device_map.read_device_map),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of a layout, and what the reader must know that it does not say.

    ``stages`` are the module names of each stage. ``actions`` is the order of work as CSV, to stand
    beside the layout as .csv; empty where the framework reads none.
    """

    layout: PipelineLayout
    stages: tuple[tuple[str, ...], ...]
    text: str
    actions: str
    notes: tuple[str, ...]


def export_layout(
    to: str, plan: Plan, profile: ModelProfile, path: Path, joined: Mapping[str, str]
) -> Exported:
    """A plan as a layout that is to stand at ``path``, with names of the profile's modules.

    ``joined`` names modules without a layer in the profile, each with the module that it follows.
    """
    form = format_named(to)
    assert form.write is not None
    layout, chain = layout_of_plan(plan, form.title), module_chain(profile)
    if form.torch_pipelines:
        check_neighbours(layout, chain, profile, form.title)
    modules = stage_modules(chain, layout.stages, form.title)
    names = names_of_stages(modules, joined)
    text, notes = form.write(NamedPlan(plan, profile, path, layout, chain, modules, names))
    actions = torch_pipelining.csv_of_plan(plan) if form.torch_pipelines else ""
    recomputed = [i for i, stage in enumerate(plan.stages) if stage.recompute or stage.by_block]
    if recomputed:
        notes.append(
            f"the plan recomputes activations on stages {', '.join(map(str, recomputed))}, and the "
            f"layout does not say so: turn on activation checkpointing there"
        )
    if layout.group_size > 1:
        notes.append(
            f"each pipeline rank is a tensor group of {layout.group_size} ranks; which tensors it "
            f"divides is {form.title}'s to say"
        )
    return Exported(layout, names, text, actions, tuple(notes))


def read_layout(
    of: str, path: Path, profile: ModelProfile, options: LayoutOptions
) -> PipelineLayout:
    """The layout in a file of the framework ``of``, for the model of ``profile``."""
    form = format_named(of, reads=True)
    assert form.read is not None
    return form.read(path, profile, options)


def format_named(name: str, reads: bool = False) -> Format:
    """The format of a framework whose layouts are written, or also read."""
    known = [name for name, form in FORMATS.items() if (form.read if reads else form.write)]
    if name not in known:
        raise BadInput(
            f"layouts of '{name}' are not {'read' if reads else 'written'}; "
            f"name one of {', '.join(known)}"
        )
    return FORMATS[name]
