"""Measure a model's profile on this device, layer by layer."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median, stdev
from typing import TypeAlias

import torch
from torch import nn

from penstock.capture.contract import Batch
from penstock.capture.forward.deferred_weights import DeferredGradients
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.stand_ins import is_on_meta
from penstock.capture.record.torch_calls import CountedNorms
from penstock.device import (
    allocated_bytes,
    begin_peak,
    device_kind,
    is_gpu,
    keep_freed_memory,
    peak_bytes,
)
from penstock.errors import BadInput
from penstock.machine import without_collecting
from penstock.measure.affine_fit import fit_affine, fit_layers, whole_bytes
from penstock.measure.clock import warm_up, work_s
from penstock.measure.layer_runs import (
    LayerRun,
    RunSettings,
    SavedStorages,
    programs_of,
    resized,
    storage_bytes,
    undisturbed,
    walk,
)
from penstock.measure.machine_load import Spread
from penstock.measure.same_work import edges_of, parameter_bytes_of, work_of
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.runtime.stage.batch_norm import SynchronisedBatchNorm
from penstock.text import counted

Differentiated: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Outputs of a layer that gradients start from, and these gradients."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one layer, or of a whole model, at one batch size."""

    forward_s: float
    backward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0

    @property
    def work_s(self) -> float:
        """The seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def halves(self) -> tuple[float, float]:
        """The seconds of a whole backward, divided in the ratio of the separately timed halves.

        The separate halves repeat some work, so their own sum is too large.
        """
        both = self.backward_input_s + self.backward_weight_s
        share = self.backward_input_s / both if both else 0.0
        return self.backward_s * share, self.backward_s * (1 - share)


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of each layer alone, and of the model in one and in several stages, one by one."""

    layers: Sequence[PassSeconds]
    models: Sequence[PassSeconds]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer at one batch size, and the channels of its batch normalisations.

    ``flops`` are the operations of its matrix products, forward and backward, where counted.
    ``cast_bytes`` are those of its weights in the autocast type, as far as it saves them.
    """

    saved_bytes: int
    workspace_bytes: int
    norm_channels: tuple[int, ...] = ()
    flops: float = 0.0
    cast_bytes: int = 0


def layer_sizes(
    graph: LayerGraph,
    programs: Sequence[StageProgram],
    leaves: Sequence[torch.Tensor],
    settings: RunSettings,
    lends: bool,
) -> list[LayerBytes]:
    """Saved and workspace bytes of each layer for the given batch."""
    whole = graph.own_module()
    storages = SavedStorages([*whole.parameters(), *whole.buffers(), *leaves])
    sizes: list[LayerBytes] = []

    def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
        if lends:  # it has these only while it is visited
            storages.ignore([*run.program.module.parameters(), *run.program.module.buffers()])
        before, norms = 0, CountedNorms()
        cast_bytes = sum(map(storage_bytes, storages.casts_of(run)))

        def begin() -> None:
            nonlocal before
            begin_peak(settings.device)
            before = allocated_bytes(settings.device)
            norms.channels.clear()

        begin()
        with norms:
            outputs, saved = storages.saved_by(run, begin)
        storages.forget([*outputs, *run.received])
        saved_bytes = sum(map(storage_bytes, saved))
        workspace = max(0, peak_bytes(settings.device) - before - saved_bytes)
        if run.has_checkpoints:
            workspace = max(workspace, run.peak_of_backward(outputs))
        channels = tuple(norms.channels)
        sizes.append(LayerBytes(saved_bytes, workspace, channels, cast_bytes=cast_bytes))
        return outputs

    walk(programs, leaves, settings, visit, lends=lends)
    return sizes


MICRO_BATCHES, IN_FLIGHT = 3, 2
"""Micro-batches of a step while the whole model is timed, and how many are in flight at once."""

STAGES = 8
"""The most stages in which the whole model is timed, to find what each of them adds."""

STEADY = 0.02
"""Standard error of the whole model's time, relative to it, below which it is not timed again."""

MOST_REPEATS = 2
"""Limit of the repeats of a model that is not steady, as a multiple of those wanted."""


def measure_profile(
    graph: LayerGraph,
    batch: Batch,
    *,
    batch_sizes: Sequence[int] = (),
    repeats: int = 5,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    step_s_per_byte: float = 0.0,
) -> ModelProfile:
    """Time every layer of ``graph`` and count its bytes, on the rows of ``batch``.

    Forward, whole backward and the two halves of a split backward are timed at each of
    ``batch_sizes`` (default: a quarter, half and all of the batch). Each time is the median of
    ``repeats`` runs after a warm-up run, and is fitted as ``fixed + per_sample * b``.

    A layer alone costs more than within a stage, because of a call and the start of a backward. So
    the times are scaled to add up to the mean of the whole model, run as one stage, less what each
    stage takes beyond its layers. That is found by running it in several stages, too, at the middle
    batch size. Layers and models run in turns, so that a slow while falls on all, and more often
    where the model in one stage is not steady (`until_steady`). A model that the device's memory
    does not hold is not run as a whole, nor one on the meta device: its layers are on the device
    one at a time, those on meta with made-up values.

    Parameters, buffers, gradients and random state are restored. Times are those of an idle
    machine: those in which this thread waits for a core do not count.

    Raises:
        BadInput: fewer than one repeat, or a batch size below 1.
    """
    settings = RunSettings(torch.device(device), autocast)
    measured = partial(measure, graph, batch, batch_sizes, repeats, step_s_per_byte, settings)
    if not is_on_meta(graph.own_module()):
        with suppress(torch.OutOfMemoryError):
            return measured()
        graph.own_module().to("cpu")
    return measured(lends=True)


def measure(
    graph: LayerGraph,
    batch: Batch,
    batch_sizes: Sequence[int],
    repeats: int,
    step_s_per_byte: float,
    settings: RunSettings,
    *,
    lends: bool = False,
) -> ModelProfile:
    """The profile, of a model that is on the device as a whole unless ``lends`` (see `walk`)."""
    device = settings.device
    keep_freed_memory(device)  # as the engine does that will run the layers
    with undisturbed(graph, device) as graph:
        leaves = [leaf.to(device) for leaf in graph.batch_leaves(batch)]
        batch_size = leaves[0].shape[0]
        quarters = {max(1, batch_size // 4), max(1, batch_size // 2), batch_size}
        sizes = tuple(batch_sizes) or tuple(sorted(quarters))
        if min(sizes) < 1 or repeats < 1:
            raise BadInput(
                f"batch sizes {list(sizes)} with {repeats} repeats cannot be measured; all must be "
                f">= 1"
            )
        programs = programs_of(graph)
        models: list[Sequence[StageProgram]] = []
        middle, further, spread = sorted(sizes)[len(sizes) // 2], PassSeconds(0.0, 0.0), Spread()
        notes = [LAYERS_ALONE] if lends and not is_on_meta(graph.own_module()) else []
        warm_up(device)
        if not lends:
            graph.own_module().to(device)
            models = [whole_model(graph, 1), whole_model(graph, min(STAGES, len(programs)))]
        measured = {
            n: take_turns(
                programs,
                models if n == middle else models[:1],
                resized(leaves, n),
                repeats,
                settings,
            )
            for n in sizes
        }
        if models:
            further = seconds_of_stage(measured[middle][1], len(models[1]))
        found = [layer_times(*measured[n], further, spread) for n in sizes]
        variation = 0.0 if is_gpu(device) else variation_of([measured[n][1] for n in sizes])
        notes += spread.warnings()
        sizes_of = partial(layer_sizes, graph, programs, settings=settings, lends=lends)
        costs = [
            list(zip(at, sizes_of(resized(leaves, n)), strict=True))
            for n, at in zip(sizes, found, strict=True)
        ]
        profile = profile_from(graph, leaves, sizes, costs)
        if models and profile.has_norms:
            norms, rows = sum(layer.norms for layer in profile.layers), resized(leaves, middle)
            statistics_s = time_statistics(models[0], rows, norms, repeats, settings)
            profile = replace(profile, statistics_s=statistics_s)
    return replace(
        profile,
        step_s_per_byte=step_s_per_byte,
        stage_forward_s=further.forward_s,
        stage_backward_s=further.backward_s,
        variation=variation,
        source=f"measured on {device.type}, {counted(torch.get_num_threads(), 'thread')}",
        device=device_kind(device),
        notes=tuple(notes),
    )


LAYERS_ALONE = (
    "layers were measured one by one, and not in the model, for which memory was too small"
)


def profile_from(
    graph: LayerGraph,
    leaves: Sequence[torch.Tensor],
    sizes: Sequence[int],
    costs: Sequence[Sequence[tuple[PassSeconds, LayerBytes]]],
) -> ModelProfile:
    """The profile by the layers' affine costs, from ``costs[k][layer]`` at each batch size."""
    own, shared = parameter_bytes_of(graph)

    def fit_seconds(of: Callable[[PassSeconds], float]) -> list[Affine]:
        return fit_layers(sizes, [[of(times) for times, _ in layers] for layers in costs])

    def fit_bytes(index: int, of: Callable[[LayerBytes], float]) -> Affine:
        return whole_bytes(fit_affine(sizes, [of(layers[index][1]) for layers in costs]))

    forward_s = fit_seconds(lambda times: times.forward_s)
    backward_input_s = fit_seconds(lambda times: times.halves()[0])
    backward_weight_s = fit_seconds(lambda times: times.halves()[1])

    def cost(index: int, name: str) -> LayerCost:
        found = costs[0][index][1]
        return LayerCost(
            name=name,
            forward_s=forward_s[index],
            backward_input_s=backward_input_s[index],
            backward_weight_s=backward_weight_s[index],
            parameter_bytes=own[index][0],
            buffer_bytes=own[index][1],
            cast_bytes=found.cast_bytes,
            saved_bytes=fit_bytes(index, lambda found: found.saved_bytes),
            workspace_bytes=fit_bytes(index, lambda found: found.workspace_bytes),
            norms=len(found.norm_channels),
            norm_channels=sum(found.norm_channels),
        )

    return ModelProfile(
        name=graph.name,
        layers=tuple(cost(index, name) for index, name in enumerate(graph.layer_names)),
        edges=edges_of(graph, graph.lengths_of(dict(enumerate(leaves)))),
        shared=shared,
        batch_size=max(sizes),
        whole_loss=bool(graph.whole_loss),
    )


def whole_model(graph: LayerGraph, stages: int) -> list[StageProgram]:
    """The model in ``stages`` stages, of about equally many layers."""
    layers = len(graph.layer_names)
    return [
        graph.stage(range(i * layers // stages, (i + 1) * layers // stages)) for i in range(stages)
    ]


def take_turns(
    programs: Sequence[StageProgram],
    models: Sequence[Sequence[StageProgram]],
    leaves: Sequence[torch.Tensor],
    repeats: int,
    settings: RunSettings,
) -> tuple[list[Hashable], list[Turn]]:
    """The work of each layer, and turns of all layers and of all ``models``.

    Without models, as for one that does not fit in memory, a layer has all its turns at once, while
    it is on the device.
    """
    works: list[Hashable] = []
    runs: list[LayerRun] = []
    alone: list[list[PassSeconds]] = []

    def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
        works.append(work_of(run))
        if models:
            runs.append(run)
        else:
            with without_collecting():
                alone.append([time_once(run) for _ in range(repeats + 1)][1:])
        return run.forward()

    def turn() -> Turn:
        layers = [time_once(run) for run in runs]
        return Turn(layers, [time_stages(stages, leaves, settings) for stages in models])

    walk(programs, leaves, settings, visit, lends=not models)
    if not models:
        return works, [Turn(layers, ()) for layers in zip(*alone, strict=True)]
    # Gradients accumulate into parameters that already have one after the first turn, a warm-up, as
    # in every micro-batch of a step except the first.
    with without_collecting(), settings.casting_once():
        return works, until_steady(turn, repeats)


def layer_times(
    works: Sequence[Hashable], turns: Sequence[Turn], further: PassSeconds, spread: Spread
) -> list[PassSeconds]:
    """The seconds of each layer, adding up to those of the model in one stage, less ``further``.

    Layers that do the same work share their measurements: each gets the median over all of them, so
    that no outlier decides a plan. Where the model was not timed, they are not scaled.
    """
    measured: dict[Hashable, list[PassSeconds]] = {}
    for index, work in enumerate(works):
        times = [turn.layers[index] for turn in turns]
        spread.add([t.work_s for t in times])
        measured.setdefault(work, []).extend(times)
    alone = [median_times(measured[work]) for work in works]
    if not turns[0].models:
        return alone

    def within_model(seconds_of: Callable[[PassSeconds], float]) -> list[float]:
        model_s = mean(seconds_of(turn.models[0]) for turn in turns)
        added_s = median(
            sum(map(seconds_of, turn.layers)) - seconds_of(turn.models[0]) for turn in turns
        )
        return adding_up(
            list(map(seconds_of, alone)),
            max(model_s - seconds_of(further), model_s / 2),
            max(0.0, added_s / len(alone)),
        )

    forward, backward = within_model(lambda t: t.forward_s), within_model(lambda t: t.backward_s)
    return [
        PassSeconds(forward_s, backward_s, t.backward_input_s, t.backward_weight_s)
        for t, forward_s, backward_s in zip(alone, forward, backward, strict=True)
    ]


def seconds_of_stage(turns: Sequence[Turn], stages: int) -> PassSeconds:
    """Median seconds that each stage adds to its layers, by turns in one and in ``stages`` stages.

    The difference of each turn is divided among the stages that the second has more.
    """

    def more(seconds_of: Callable[[PassSeconds], float]) -> float:
        if stages == 1:  # a model of one layer
            return 0.0
        added_s = median(seconds_of(t.models[1]) - seconds_of(t.models[0]) for t in turns)
        return max(0.0, added_s / (stages - 1))

    return PassSeconds(more(lambda t: t.forward_s), more(lambda t: t.backward_s))


def variation_of(series: Sequence[Sequence[Turn]]) -> float:
    """The standard deviation of the seconds of the model in one stage, relative to their mean.

    Each series is at one batch size. Without a model there is none.
    """
    found: list[float] = []
    for turns in series:
        if len(turns) > 1 and turns[0].models:
            seconds = [turn.models[0].work_s for turn in turns]
            found.append((stdev(seconds) / mean(seconds)) ** 2)
    return mean(found) ** 0.5 if found else 0.0


def until_steady(once: Callable[[], Turn], repeats: int) -> list[Turn]:
    """Take ``repeats`` turns after a warm-up; more where the first of its models is not steady.

    On a machine whose speed varies, that is timed until its mean is known to within `STEADY`, at
    most `MOST_REPEATS` times as often.

    >>> len(until_steady(lambda: Turn([], [PassSeconds(1.0, 2.0)]), 5))
    5
    >>> seconds = iter([1.0, 2.0] * 20)
    >>> len(until_steady(lambda: Turn([], [PassSeconds(next(seconds), 2.0)]), 5))
    10
    """
    once()
    turns = [once() for _ in range(repeats)]
    while 1 < len(turns) < MOST_REPEATS * repeats:
        seconds = [turn.models[0].work_s for turn in turns]
        if stdev(seconds) <= STEADY * mean(seconds) * len(turns) ** 0.5:
            break
        turns.append(once())
    return turns


class NormWithoutMessages(SynchronisedBatchNorm):
    """Batch normalisation as the first of two replicas computes it, without the other."""

    def __init__(self) -> None:
        super().__init__({}, (0, 1), 0)

    def sum_over_replicas(self, table: torch.Tensor) -> None:
        """Leave the table as it is: the other replica has no rows."""


def time_statistics(
    model: Sequence[StageProgram],
    leaves: Sequence[torch.Tensor],
    norms: int,
    repeats: int,
    settings: RunSettings,
) -> float:
    """Median seconds that each sum of statistics takes replicas beyond its message.

    The model runs with its own ``norms`` and with those of a replica in turns. Each has a sum in
    the forward and one in the backward.
    """
    more_s: list[float] = []
    with without_collecting(), settings.casting_once():
        for _ in range(repeats + 1):
            own = time_stages(model, leaves, settings)
            with NormWithoutMessages():
                shared = time_stages(model, leaves, settings)
            more_s.append(shared.work_s - own.work_s)
    return max(0.0, median(more_s[1:])) / (2 * norms)


def time_stages(
    programs: Sequence[StageProgram], leaves: Sequence[torch.Tensor], settings: RunSettings
) -> PassSeconds:
    """Mean seconds of a micro-batch's passes through all stages, with others in flight.

    Forwards and backwards take turns as in a pipeline, where each finds in the caches what the
    other has left there: F F B F B B.
    """
    seconds_of = work_s(settings.device)
    made: deque[list[Differentiated]] = deque()
    forward_s = backward_s = 0.0

    def visit(_: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
        nonlocal forward_s
        found: list[tuple[torch.Tensor, ...]] = []
        forward_s += seconds_of(lambda: found.append(run.forward()))
        if outputs := run.differentiable(found[0]):
            made[-1].append((outputs, [torch.ones_like(one) for one in outputs]))
        return found[0]

    for begun in range(MICRO_BATCHES + IN_FLIGHT - 1):
        if begun < MICRO_BATCHES:
            made.append([])
            walk(programs, leaves, settings, visit)
        ends = made.popleft() if begun >= IN_FLIGHT - 1 else []
        while ends:
            backward_s += seconds_of(partial(torch.autograd.backward, *ends.pop()))
    return PassSeconds(forward_s / MICRO_BATCHES, backward_s / MICRO_BATCHES)


def median_times(runs: Sequence[PassSeconds]) -> PassSeconds:
    """The median of each number over runs of the same work."""
    return PassSeconds(
        median(t.forward_s for t in runs),
        median(t.backward_s for t in runs),
        median(t.backward_input_s for t in runs),
        median(t.backward_weight_s for t in runs),
    )


def time_passes(run: LayerRun) -> PassSeconds:
    """A forward of a layer, from its own first call on, and the whole backward."""
    seconds_of = run.stopwatch
    made: list[tuple[torch.Tensor, ...]] = []
    forward_s = seconds_of(lambda: made.append(run.forward(seconds_of.restart)))
    outputs = run.differentiable(made.pop())
    ones = [torch.ones_like(output) for output in outputs]
    backward_s = seconds_of(partial(torch.autograd.backward, outputs, ones)) if outputs else 0.0
    return PassSeconds(forward_s, backward_s)


def time_once(run: LayerRun) -> PassSeconds:
    """One forward of a layer, its whole backward, and its backward in halves."""
    whole = time_passes(run)
    deferred = DeferredGradients()
    outputs: list[torch.Tensor] = []
    # A reentrant checkpoint gives no gradients of chosen tensors, which the first half takes.
    if not run.program.module.has_checkpoints(reentrant=True):
        outputs = run.differentiable(run.forward(deferred=deferred))
    if not deferred.products:
        return replace(whole, backward_input_s=whole.backward_s)
    seconds_of = run.stopwatch
    ones = [torch.ones_like(output) for output in outputs]
    held = [p for p in run.program.module.parameters() if p.requires_grad]
    inputs = [tensor for tensor in run.received if tensor.requires_grad]
    input_s = seconds_of(lambda: deferred.first_half(outputs, ones, inputs, held))
    weight_s = seconds_of(deferred.accumulate)
    return replace(whole, backward_input_s=input_s, backward_weight_s=weight_s)


def adding_up(parts: Sequence[float], whole: float, overhead: float) -> list[float]:
    """``parts`` minus an ``overhead`` each, scaled to add up to ``whole``.

    Each part keeps at least a tenth.

    >>> adding_up([3.0, 5.0], 6.0, 1.0)
    [2.0, 4.0]
    >>> adding_up([1.0, 2.0], 6.0, 0.0)
    [2.0, 4.0]
    """
    kept = [max(part - overhead, part / 10) for part in parts]
    total = sum(kept)
    return [part * whole / total if total else 0.0 for part in kept]


def measure_step_s_per_byte(
    module: nn.Module,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    repeats: int = 5,
    in_place: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float:
    """Seconds of all that a training step does once, per byte of parameters.

    That is: clear the gradients (which are contiguous in memory), compute their norm, scale them
    (mean and clipping), and step the optimizer, within ``in_place``. The parameters are restored.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return 0.0
    values, kept = [p.detach().clone() for p in parameters], [p.grad for p in parameters]
    types = dict.fromkeys(p.dtype for p in parameters)
    flats = [flat_gradients([p for p in parameters if p.dtype == dtype]) for dtype in types]
    with in_place():
        stepper = optimizer(parameters)

    def step() -> None:
        for flat in flats:
            flat.zero_()
            torch.linalg.vector_norm(flat)
            flat.mul_(1.0)
        with in_place():
            stepper.step()

    seconds_of = work_s(parameters[0].device)
    seconds = [seconds_of(step) for _ in range(repeats + 1)]
    with torch.no_grad():
        for parameter, value, gradient in zip(parameters, values, kept, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
    return median(seconds[1:]) / sum(p.numel() * p.element_size() for p in parameters)


def flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Give the parameters zero gradients that are views of one flat tensor, and return that."""
    flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
