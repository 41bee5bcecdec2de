"""Build the stages that this rank holds from a model and a plan."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.contract import Batch, Loss
from penstock.capture.forward.materialise import check_values, materialise, named_tensors
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.user_lines import line_with_source
from penstock.capture.tensor_parts import is_quantised
from penstock.errors import BadInput, shortened
from penstock.plan.choices import choices_of
from penstock.plan.plan import Plan, Stage
from penstock.runtime.micro_batches import check_runnable
from penstock.runtime.processes.world import World
from penstock.runtime.program import places_of_rank
from penstock.runtime.stage.partial_recompute import CallOf, PartlyRecomputed
from penstock.runtime.stage.runner import ModuleRunner
from penstock.runtime.tables import Quantise, Weights
from penstock.runtime.transport.messages import boundaries_of
from penstock.runtime.weights.pretrained import read_stage, sources_of
from penstock.runtime.weights.safetensors_file import StoredTensor
from penstock.text import numbered


def graph_of(
    model: nn.Module | LayerGraph,
    batch: Batch,
    loss: Loss | None,
) -> LayerGraph:
    """Capture ``model``; a model that is already captured is returned as it is."""
    if isinstance(model, nn.Module):
        return capture_model(model, batch, loss=loss)
    if loss is not None:
        raise BadInput(
            "a captured model has its loss already, but loss=... was given too; give it to "
            "capture_model only"
        )
    return model


def check_alike(plan: Plan, graph: LayerGraph, world: World) -> None:
    """Raise `BadInput` unless all ranks have the same plan, calls and trained parameters.

    All ranks must call this. Otherwise one would wait for a message that another does not send.
    """
    trained = [use.name for use in graph.parameter_uses if use.requires_grad]
    cut = [
        " with ".join((f"{s.layers} on {s.devices} in {s.slices}", *choices_of(s)))
        for s in plan.stages
    ]
    planned = [*cut, plan.schedule, f"{plan.micro_batches} micro-batches"]
    own = {"was given the plan": planned, "calls": graph.calls, "trains": trained}
    digests = world.all_gather(
        {what: zlib.crc32(repr(facts).encode()) for what, facts in own.items()}
    )
    for what, facts in own.items():
        if all(digest[what] == digests[0][what] for digest in digests):
            continue
        every = world.all_gather(facts)
        rank = next(rank for rank, other in enumerate(every) if other != every[0])
        pairs = zip_longest(every[0], every[rank], fillvalue="nothing more")
        first, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise BadInput(
            f"rank {rank} {what} {other}, where rank 0 {what} {first}; give all ranks the same "
            f"plan, model and example batch"
        )


def check_plan_fits(plan: Plan, graph: LayerGraph, world: World, *, may_idle: bool) -> None:
    """Raise `BadInput` if plan, model and number of processes do not fit together.

    The plan must use all ranks, unless some ``may_idle``.
    """
    check_runnable(plan)
    layers = plan.stages[-1].layers.stop
    if layers != len(graph.layer_names):
        raise BadInput(
            f"the plan covers {layers} layers, the model {graph.name} has "
            f"{len(graph.layer_names)} ({shortened(', '.join(graph.layer_names), 200)}); plan "
            f"again for this model and granularity"
        )
    needed, used = max(plan.ranks) + 1, len(plan.ranks)
    if used < world.size and needed <= world.size and not may_idle:
        start = f"start {needed} with torchrun --nproc-per-node {needed}, "
        raise BadInput(
            f"the plan uses {used} of {world.size} ranks, and the others would idle; "
            f"{start * (needed < world.size)}plan for {world.size}, or let them idle with "
            f"Safety(idle_ranks=True)"
        )
    if needed > world.size:
        what = "ranks" if plan.tensor_groups else "devices"
        counted = f"{used} {what}" if used == needed else f"{what} up to number {needed - 1}"
        run = "one worker runs" if world.size == 1 else f"{world.size} workers run"
        raise BadInput(
            f"the plan uses {counted} but {run}; start with torchrun --nproc-per-node {needed} or "
            f"plan again"
        )
    check_counts(plan, graph)
    for kind in graph.kinds:
        check_carried(plan, kind)


def check_carried(plan: Plan, graph: LayerGraph) -> None:
    """Raise `BadInput` if rows of a batch would continue others than those of the last batch."""
    replicas = max(stage.replicas for stage in plan.stages)
    if plan.micro_batches == replicas == 1:
        return
    slices = f"{plan.micro_batches * replicas} slices of a batch"
    for place, state in graph.recorded.carried.items():
        moves = replicas > 1 and state.of_batch and place.kind == "attribute"
        if state.has_rows or moves:
            line = line_with_source(next(iter(state.reads.values())))
            raise BadInput(
                f"forward keeps '{place.name}' of one batch for the next, and reads it at {line}; "
                f"with {slices}, it would be that of other samples: plan one micro-batch and one "
                f"worker for each stage, or let forward begin without it"
            )
    for name, line in graph.recorded.moved.items():
        raise BadInput(
            f"forward moves '{name}' with every call, and the loss reads it at {line} together "
            f"with numbers of the whole step; with {slices}, it has moved in between: plan one "
            f"micro-batch and one worker for each stage, or move it between the steps"
        )


def check_counts(plan: Plan, graph: LayerGraph) -> None:
    """Raise `BadInput` if replicas would each count only their own samples in a buffer."""
    users = {use.name: use.layers for use in graph.parameter_uses}
    for name, place in graph.recorded.counts.items():
        layers = users.get(graph.tied_names.get(name, name), range(len(graph.layer_names)))
        for number, stage in enumerate(plan.stages):
            if stage.replicas > 1 and set(stage.layers) & set(layers):
                raise BadInput(
                    f"forward writes to buffer '{name}' what it finds in the samples ({place}), "
                    f"and each of the {stage.replicas} workers of stage {number} would write that "
                    f"of its own samples; give this stage one worker"
                )


def stages_of(graph: LayerGraph, plan: Plan, rank: int) -> dict[int, StageProgram]:
    """The stages of a rank, on the tensors that the model has."""
    boundaries, found = boundaries_of(graph, plan), dict[int, StageProgram]()
    for stage in (place.stage for place in places_of_rank(plan, rank)):
        program = graph.stage(plan.stages[stage].layers)
        # Of what it sends, it passes on what it has received.
        received = {spec.name: place for place, spec in enumerate(program.received)}
        sent = (spec for b in boundaries if b.producer == stage for spec in b.tensors)
        relayed = {received[spec.name]: spec for spec in sent if spec.name in received}
        every = *program.sent, *relayed.values()
        found[stage] = replace(program, sent=every, relayed=tuple(relayed))
    return found


def build_stages(
    graph: LayerGraph,
    plan: Plan,
    world: World,
    seed: int,
    weights: Weights | Path | str | None = None,
) -> dict[int, StageProgram]:
    """Build this rank's stages with their tensors on this rank's device; all ranks must call this.

    Values are read from ``weights``, or initialised if the model is on meta, or else kept.
    """

    def own_stages() -> dict[int, StageProgram]:
        sources = sources_of(weights, graph) if weights is not None else {}
        quantise = weights.quantise if isinstance(weights, Weights) else None
        programs = stages_of(graph, plan, world.rank)
        for program in programs.values():
            give_values(program, graph, sources, world.device, seed, quantise)
        share_tied(programs.values(), graph.tied_names)
        return programs

    return world.all_succeed(own_stages)


def give_values(
    program: StageProgram,
    graph: LayerGraph,
    sources: Mapping[str, StoredTensor],
    device: torch.device,
    seed: int,
    quantise: Quantise | None = None,
) -> None:
    """Read a stage's tensors from ``sources``, initialise those without values, move the others."""
    module = program.module
    for name, parameter in module.named_parameters():
        own = quantise is not None and graph.tied_names.get(name, name) in sources
        if is_quantised(parameter) and (parameter.is_meta or sources) and not own:
            raise BadInput(
                f"'{name}' is quantised and has no values yet, which it gets only from its own "
                f"library; give Weights(DIRECTORY, quantise=...) a function that quantises a "
                f"weight, or give the model its weights before it is quantised, without weights=..."
            )
    read_stage(module, sources, graph.tied_names, device, quantise)
    check_values(program)
    if any(tensor.is_meta for _, tensor in named_tensors(module)):
        materialise(program, device=device, seed=seed)
    else:
        module.to(device)


def share_tied(programs: Iterable[StageProgram], tied_names: Mapping[str, str]) -> None:
    """Make stages of one rank share tied tensors as the model does, so that gradients are summed.

    The tensor of the first stage is used in all.
    """
    first: dict[str, torch.Tensor] = {}
    for program in programs:
        module = program.module
        for name, tensor in named_tensors(module):
            kept = first.setdefault(tied_names.get(name, name), tensor)
            if kept is not tensor:
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path), last, kept)


def runner_of(
    graph: LayerGraph,
    stage: Stage,
    program: StageProgram,
    device: torch.device,
    *,
    call_of: CallOf,
    **options: Any,
) -> ModuleRunner:
    """The runner of ``program``; it runs layer by layer if ``stage`` recomputes by block.

    ``call_of`` makes its call (compiled, or on shards). ``options`` are those of `ModuleRunner`.
    """
    if stage.by_block:
        return PartlyRecomputed(graph, program, device, call_of=call_of, by_block=True, **options)
    return ModuleRunner(program, device, call=call_of(program), **options)


def module_for(
    name: str,
    graph: LayerGraph,
    programs: Mapping[int, StageProgram],
    holders: Mapping[str, tuple[int, ...]],
    rank: int,
) -> nn.Module:
    """The module in ``programs`` that holds ``name``, a part of the model.

    ``name`` is a submodule, parameter or buffer of the model. ``holders[tensor]`` are the ranks
    that hold a parameter or buffer, by its first name.
    """
    first = graph.tied_names.get(name, name)
    below = f"{first}."
    wanted = [held for held in holders if held == first or held.startswith(below)]
    if not wanted:
        parts = [held.split(".") for held in {*holders, *graph.tied_names}]
        known = {".".join(path[:k]) for path in parts for k in range(1, len(path) + 1)}
        near = get_close_matches(name, sorted(known), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "see model.named_parameters()"
        raise BadInput(
            f"the model has no parameter or buffer '{name}', and no module of that name with any; "
            f"{hint}"
        )
    path = first.rpartition(".")[0] if wanted == [first] else first
    for program in programs.values():
        own = {n for n, _ in (*program.module.named_parameters(), *program.module.named_buffers())}
        if own & {*wanted, *(other for other, n in graph.tied_names.items() if n in wanted)}:
            return program.module.get_submodule(path)
    ranks = sorted({holder for held in wanted for holder in holders[held]})
    raise BadInput(
        f"'{name}' is held by {numbered('rank', ranks)}, not by rank {rank}; read it there"
    )
