"""The frameworks that plans go to and layouts come from, by the names of the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

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
    stage_modules,
    with_light_modules,
)
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile

Writer: TypeAlias = Callable[[NamedPlan], tuple[str, list[str]]]
"""The text of a layout, and what its reader must know besides.

It raises BadInput for what the framework cannot express.
"""

Reader: TypeAlias = Callable[[Path, ModelProfile, LayoutOptions], PipelineLayout]
"""A function that reads a layout of the profile's model; raises BadInput if it does not fit."""


T = TypeVar("T")

WRITERS: dict[str, tuple[str, Writer]] = {
    "torch": (torch_pipelining.TARGET, torch_pipelining.torch_layout),
    "torchtitan": (torchtitan.TARGET, torchtitan.torchtitan_config),
    "megatron": (megatron.TARGET, megatron.megatron_arguments),
    "deepspeed": (deepspeed.TARGET, deepspeed.deepspeed_parts),
}
"""The title of each framework that plans go to, and what writes its layouts."""

READERS: dict[str, Reader] = {
    "torch": torch_pipelining.read_torch_layout,
    "megatron": megatron.read_megatron_arguments,
    "device-map": device_map.read_device_map,
}

ON_TORCH = ("torch", "torchtitan")
"""Those on torch's pipelines send between neighbours only, and read the order of work."""


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
    title, write = framework_named(to, WRITERS, "written")
    layout, chain = layout_of_plan(plan, title), module_chain(profile)
    if to in ON_TORCH:
        check_neighbours(layout, chain, profile, title)
    modules = stage_modules(chain, layout.stages, title)
    listed = with_light_modules([module.name for own in modules for module in own], joined)
    called = (dict.fromkeys(module.name for module in own) for own in modules)
    names = tuple(tuple(name for each in own for name in listed[each]) for own in called)
    text, notes = write(NamedPlan(plan, profile, path, layout, chain, modules, names))
    actions = torch_pipelining.csv_of_plan(plan) if to in ON_TORCH else ""
    recomputed = [i for i, stage in enumerate(plan.stages) if stage.recompute or stage.by_block]
    if recomputed:
        notes.append(
            f"the plan recomputes activations on stages {', '.join(map(str, recomputed))}, and the "
            f"layout does not say so: turn on activation checkpointing there"
        )
    if layout.group_size > 1:
        notes.append(
            f"each pipeline rank is a tensor group of {layout.group_size} ranks; which tensors it "
            f"divides is {title}'s to say"
        )
    return Exported(layout, names, text, actions, tuple(notes))


def read_layout(
    of: str, path: Path, profile: ModelProfile, options: LayoutOptions
) -> PipelineLayout:
    """The layout in a file of the framework ``of``, for the model of ``profile``."""
    return framework_named(of, READERS, "read")(path, profile, options)


def framework_named(name: str, known: Mapping[str, T], done: str) -> T:
    """The entry of a framework in ``known``, whose layouts are ``done``: written, or read."""
    if name not in known:
        raise BadInput(f"layouts of '{name}' are not {done}; name one of {', '.join(known)}")
    return known[name]
