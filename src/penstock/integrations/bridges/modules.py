"""The modules of a model as other frameworks cut it, and the stages of a plan as lists of them.

Penstock may cut a transformer block between attention and MLP. Other frameworks hold a block, which
is an entry of a ModuleList or Sequential, on one stage. A name such as ``transformer.h.3.mlp`` says
which block a layer is in: the path up to its first number.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from penstock.errors import BadInput
from penstock.integrations.bridges.layout import PipelineLayout
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile

LOSS = "loss"
OWN_FORWARD = "forward"
"""The name of layers that the model's own forward computes outside its modules."""

MODULE_PATH = re.compile(r"(?:[^\W\d]\w*|\d+)(?:\.(?:[^\W\d]\w*|\d+))*")
ENTRY_NUMBER = re.compile("[0-9]{1,9}")
MOST_LIGHT_ENTRIES = 1000
"""A larger gap in the numbers of a container's entries is no gap of light modules."""


@dataclass(frozen=True, slots=True)
class ModuleLayers:
    """A module by its dotted name, and the consecutive layers of the profile that it computes."""

    name: str
    layers: range

    @property
    def container(self) -> str | None:
        """The list that the module is a numbered entry of; None if it is in no named list.

        >>> ModuleLayers("transformer.h.3", range(2)).container
        'transformer.h'
        """
        before, _, last = self.name.rpartition(".")
        return before if before and entry_number(last) is not None else None


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan with all that a framework's layout of it may say; the layout will be at ``path``.

    ``modules`` are those of each stage, and ``names`` also have the light modules beside them.
    """

    plan: Plan
    profile: ModelProfile
    path: Path
    layout: PipelineLayout
    chain: tuple[ModuleLayers, ...]
    modules: tuple[tuple[ModuleLayers, ...], ...]
    names: tuple[tuple[str, ...], ...]

    @property
    def expert_size(self) -> int:
        """The ranks among which experts are divided."""
        costs = self.profile.tensor_parallel
        return self.layout.group_size if costs is not None and costs.experts else 1


def module_of_layer(layer: str) -> str:
    """The module that holds a layer: its block, if it is in one.

    >>> module_of_layer("transformer.h.3.mlp"), module_of_layer("lm_head#2")
    ('transformer.h.3', 'lm_head')
    """
    parts = re.sub(r"#\d+$", "", layer).split(".")
    number = next((i for i, p in enumerate(parts) if entry_number(p) is not None), len(parts))
    return ".".join(parts[: number + 1])


def entry_number(part: str) -> int | None:
    """The number of a container's entry; None for another part of a path."""
    return int(part) if ENTRY_NUMBER.fullmatch(part) else None


def module_chain(profile: ModelProfile) -> tuple[ModuleLayers, ...]:
    """The modules that compute a profile's layers, in order, without the loss."""
    modules: list[ModuleLayers] = []
    for index, layer in enumerate(profile.layers):
        name = module_of_layer(layer.name)
        if name == LOSS and index == len(profile.layers) - 1:
            continue
        start = modules.pop().layers.start if modules and modules[-1].name == name else index
        modules.append(ModuleLayers(name, range(start, index + 1)))
    if not modules:
        raise BadInput(f"profile '{profile.name}' has no layer but the loss; there is no stage")
    return tuple(modules)


def with_light_modules(names: Sequence[str], joined: Mapping[str, str]) -> dict[str, list[str]]:
    """The names to list for each module: itself, and light modules beside it.

    A profile has no layers for modules without heavy work, such as a norm. Entries of a container
    that are missing between two others follow the first of them. ``joined`` names others, each with
    the module that it follows.

    >>> with_light_modules(["0", "3"], {"norm": "3"})
    {'0': ['0', '1', '2'], '3': ['3', 'norm']}
    """
    listed: dict[str, list[str]] = {name: [name] for name in names}
    latest: dict[str, str] = {}
    for name in listed:
        container, dot, last = name.rpartition(".")
        number = entry_number(last)
        if number is None:
            continue
        before = latest.get(container)
        start = int(before.rpartition(".")[2]) + 1 if before is not None else 0
        gap = range(start, number) if number - start <= MOST_LIGHT_ENTRIES else range(0)
        missing = [f"{container}{dot}{i}" for i in gap]
        if before is None:
            listed[name][:0] = missing
        else:
            listed[before] += missing
        latest[container] = name
    for light, layer in joined.items():
        name = module_of_layer(layer)
        if name not in listed:
            raise BadInput(
                f"module '{light}' is to join '{name}', which is no module of the profile; it has "
                f"{', '.join(list(listed)[:3])} ... {list(listed)[-1]}"
            )
        listed[name].append(light)
    return listed


def stage_modules(
    chain: Sequence[ModuleLayers], stages: Sequence[range], target: str
) -> tuple[tuple[ModuleLayers, ...], ...]:
    """The modules of each stage."""
    for cut in (stage.stop for stage in stages[:-1]):
        whole = next((m for m in chain if m.layers.start < cut < m.layers.stop), None)
        if whole is not None:
            raise BadInput(
                f"the cut before layer {cut} is inside module '{whole.name}' (layers "
                f"{whole.layers.start} to {whole.layers.stop - 1}), which {target} keeps whole; "
                f'move it with --whole-blocks, or profile with granularity = "block" in the '
                f"job and plan again"
            )
    found = tuple(tuple(m for m in chain if m.layers.start in layers) for layers in stages)
    owner: dict[str, int] = {}
    for index, modules in enumerate(found):
        if not modules:
            raise BadInput(
                f"stage {index} holds only the loss, which {target} computes with the last "
                f"module; put it on one stage with '{chain[-1].name}'"
            )
        for module in modules:
            if owner.setdefault(module.name, index) != index:
                raise BadInput(
                    f"module '{module.name}' is called on stages {owner[module.name]} and "
                    f"{index}; {target} puts a module on one stage; move the cuts so that "
                    f"both calls are on one"
                )
    return found


def check_neighbours(
    layout: PipelineLayout, chain: Sequence[ModuleLayers], profile: ModelProfile, target: str
) -> None:
    """Raise unless stages only need what torch's pipelines give them.

    They send from a stage to the next one only, and leave gradients of tied parameters unsummed.
    Tensors without a gradient, such as masks, are not counted: models make them on each stage.
    """
    if len(layout.stages) == 1:
        return
    for module in chain:
        if module.name == OWN_FORWARD:
            raise BadInput(
                f"layer {module.layers.start} of profile '{profile.name}' is computed by the "
                f"model's own forward, outside its modules, and {target} places modules only; "
                f"move that work into a module"
            )
        if not MODULE_PATH.fullmatch(module.name):
            raise BadInput(
                f"layer {module.layers.start} of profile '{profile.name}' is called "
                f"'{module.name}', which is no path of a module, and {target} needs these; use "
                f"the profile that 'penstock profile' measures of your model"
            )
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
    """The stages that begin at these modules; the first begins at the first layer."""
    names = [layer.name for layer in profile.layers]
    bounds = [0]
    for start in starts:
        first = next((i for i, name in enumerate(names) if is_within(name, start)), None)
        if first is None:
            near = get_close_matches(start, [module_of_layer(name) for name in names], n=1)
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
    """Return whether a layer is a module or a part of it.

    >>> is_within("h.1.mlp", "h.1"), is_within("h.10", "h.1"), is_within("lm_head#2", "lm_head")
    (True, False, True)
    """
    return layer == module or layer.startswith((f"{module}.", f"{module}#"))


def with_whole_blocks(plan: Plan, profile: ModelProfile) -> Plan:
    """The plan with every cut at the end of a module; the same object if none had to move.

    A cut moves to the end with fewer seconds of forwards between; the micro-batches, the devices
    and the order of work stay.
    """
    ends = [module.layers.stop for module in module_chain(profile)]
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
    runs = (range(lo, hi) for lo, hi in pairwise(bounds))
    stages = tuple(replace(stage, layers=run) for stage, run in zip(plan.stages, runs, strict=True))
    return replace(plan, stages=stages)
