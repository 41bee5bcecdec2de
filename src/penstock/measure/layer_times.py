"""A model's profile, measured layer by layer on this device."""

import gc
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn

from penstock.capture.layer_graph import Batch, LayerGraph, StageProgram
from penstock.errors import BadInput
from penstock.measure.affine_fit import fit_affine, whole_bytes
from penstock.measure.backward_halves import Times
from penstock.measure.clock import work_s
from penstock.measure.layer_runs import (
    LayerRun,
    RunSettings,
    programs_of,
    resized,
    undisturbed,
    walk,
)
from penstock.measure.layer_sizes import Sizes, layer_sizes
from penstock.measure.model_structure import edges_of, parameters_of
from penstock.profile.model_profile import (
    LayerCost,
    ModelProfile,
)

__all__ = ["measure_profile", "measure_step_s_per_byte"]


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

    Forward, full backward and the two halves of a split backward are timed at each of
    ``batch_sizes`` (default: a quarter of the batch, half of it, and all), the median of
    ``repeats`` after one run that warms up, and fitted as ``fixed + per_sample * b``. A layer alone
    costs more than within a stage (a call, the start of a backward), so the times are then made to
    add up to those of the whole model run as one stage. Parameters, buffers, gradients and random
    state are left as they were.

    Raises:
        BadInput: fewer than one repeat, or a batch size below 1.
    """
    leaves = [leaf.to(device) for leaf in graph.batch_leaves(batch)]
    sizes = tuple(batch_sizes) or default_sizes(leaves[0].shape[0])
    if min(sizes) < 1 or repeats < 1:
        raise BadInput(
            f"batch sizes {list(sizes)} with {repeats} repeats cannot be measured; all must be >= 1"
        )
    settings = RunSettings(torch.device(device), autocast)
    programs = programs_of(graph, settings.device)
    with undisturbed(programs, settings.device):
        times = [layer_times(graph, programs, leaves, n, repeats, settings) for n in sizes]
        bytes_at = [layer_sizes(programs, resized(leaves, n), settings) for n in sizes]
    own, shared = parameters_of(graph)
    layers = tuple(
        layer_cost(name, sizes, [t[index] for t in times], [b[index] for b in bytes_at], own[index])
        for index, name in enumerate(graph.layer_names)
    )
    return ModelProfile(
        name=graph.name,
        layers=layers,
        edges=edges_of(graph),
        shared=shared,
        batch_size=max(sizes),
        step_s_per_byte=step_s_per_byte,
        source=f"measured on {settings.device.type}, {torch.get_num_threads()} threads",
    )


def default_sizes(batch_size: int) -> tuple[int, ...]:
    """A quarter, a half and the whole of a batch, without repetition."""
    return tuple(sorted({max(1, batch_size // 4), max(1, batch_size // 2), batch_size}))


def layer_cost(
    name: str,
    sizes: Sequence[int],
    times: Sequence[Times],
    bytes_at: Sequence[Sizes],
    own: tuple[int, int],
) -> LayerCost:
    """One layer's affine costs from its measurements at all batch sizes."""
    parameter_bytes, buffer_bytes = own
    return LayerCost(
        name=name,
        forward_s=fit_affine(sizes, [t.forward_s for t in times]),
        backward_input_s=fit_affine(sizes, [t.halves()[0] for t in times]),
        backward_weight_s=fit_affine(sizes, [t.halves()[1] for t in times]),
        parameter_bytes=parameter_bytes,
        buffer_bytes=buffer_bytes,
        saved_bytes=whole_bytes(fit_affine(sizes, [b.saved_bytes for b in bytes_at])),
        workspace_bytes=whole_bytes(fit_affine(sizes, [b.workspace_bytes for b in bytes_at])),
    )


def layer_times(
    graph: LayerGraph,
    programs: Sequence[StageProgram],
    leaves: Sequence[torch.Tensor],
    samples: int,
    repeats: int,
    settings: RunSettings,
) -> list[Times]:
    """The layers' seconds at one batch size, adding up to those of the model in one stage."""
    rows = resized(leaves, samples)
    alone: list[Times] = []

    def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
        alone.append(time_layer(run, repeats, halves=True))
        return run.forward()

    walk(programs, rows, settings, visit)
    program = graph.stage(range(len(programs)))
    program.module.train()
    whole_run = LayerRun(program, tuple(rows[i] for i in program.batch_inputs), (), settings)
    whole = time_layer(whole_run, repeats, halves=False)
    forward = adding_up([t.forward_s for t in alone], whole.forward_s)
    backward = adding_up([t.backward_s for t in alone], whole.backward_s)
    return [
        Times(forward_s, backward_s, t.backward_input_s, t.backward_weight_s)
        for t, forward_s, backward_s in zip(alone, forward, backward, strict=True)
    ]


def time_layer(run: LayerRun, repeats: int, *, halves: bool) -> Times:
    """Median seconds of a layer's forward and backward; the first of the runs warms up.

    Gradients accumulate into parameters that have one already, as in every micro-batch but the
    first of a step.
    """
    seconds_of = work_s(run.settings.device)
    rounds: list[Times] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats + 1):
            rounds.append(time_once(run, seconds_of, halves=halves))
    finally:
        if collecting:
            gc.enable()
    kept = rounds[1:]
    return Times(
        median(t.forward_s for t in kept),
        median(t.backward_s for t in kept),
        median(t.backward_input_s for t in kept),
        median(t.backward_weight_s for t in kept),
    )


def time_once(
    run: LayerRun, seconds_of: Callable[[Callable[[], object]], float], *, halves: bool
) -> Times:
    """One forward and one backward of a layer, its halves before it where asked."""
    made: list[tuple[torch.Tensor, ...]] = []
    forward_s = seconds_of(lambda: made.append(run.forward()))
    outputs = run.differentiable(made.pop())
    if not outputs:
        return Times(forward_s, 0.0)
    ones = [torch.ones_like(output) for output in outputs]

    def half_s(wanted: Sequence[torch.Tensor]) -> float:
        if not (halves and wanted):
            return 0.0
        return seconds_of(
            lambda: torch.autograd.grad(outputs, wanted, ones, retain_graph=True, allow_unused=True)
        )

    input_s, weight_s = half_s(run.inputs), half_s(run.parameters)
    for tensor in run.inputs:
        tensor.grad = None
    backward_s = seconds_of(lambda: torch.autograd.backward(outputs, ones))
    return Times(forward_s, backward_s, input_s, weight_s)


def adding_up(parts: Sequence[float], whole: float) -> list[float]:
    """``parts`` less an equal overhead for each, as far as it goes, and adding up to ``whole``.

    A part keeps at least a tenth of itself; what is left to correct is corrected in proportion.

    >>> adding_up([3.0, 5.0], 6.0)
    [2.0, 4.0]
    >>> adding_up([1.0, 2.0], 6.0)
    [2.0, 4.0]
    """
    overhead = max(0.0, sum(parts) - whole) / len(parts)
    kept = [max(part - overhead, part / 10) for part in parts]
    total = sum(kept)
    return [part * whole / total if total else 0.0 for part in kept]


def measure_step_s_per_byte(
    module: nn.Module,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    repeats: int = 5,
) -> float:
    """Seconds of all that a training step does once, per byte of parameters.

    That is: clear the gradients (which lie one behind another in memory), and after the backwards
    take their norm, scale them (mean and clipping), and step the optimizer. The parameters are left
    as they were.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return 0.0
    values, kept = [p.detach().clone() for p in parameters], [p.grad for p in parameters]
    flats = [flat_gradients(group) for group in by_dtype(parameters)]
    stepper = optimizer(parameters)

    def step() -> None:
        for flat in flats:
            flat.zero_()
            torch.linalg.vector_norm(flat)
            flat.mul_(1.0)
        stepper.step()

    seconds_of = work_s(parameters[0].device)
    seconds = [seconds_of(step) for _ in range(repeats + 1)]
    with torch.no_grad():
        for parameter, value, gradient in zip(parameters, values, kept, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
    return median(seconds[1:]) / sum(p.numel() * p.element_size() for p in parameters)


def by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups of one type each."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Give the parameters gradients of zero that are parts of one tensor; that tensor."""
    flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
