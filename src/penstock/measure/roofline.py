"""Estimated profiles for hardware that is not here: every operator under its roofline.

    seconds of an operator = max(operations / peak rate, bytes read and written / memory rate,
                                 launch seconds)

(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009), summed over the operators of a layer.
Nothing is computed: shapes alone run through the model. No real kernel beats its roofline, so the
times are lower bounds, closest for large matrix products; the *shares* of the layers are what a
plan needs, and those suffer less. Operators that a compiler would fuse are counted apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.capture.layer_graph import Batch, LayerGraph
from penstock.errors import BadInput
from penstock.measure.affine_fit import fit_affine, whole_bytes
from penstock.measure.backward_halves import Times
from penstock.measure.layer_runs import LayerRun, RunSettings, resized, walk
from penstock.measure.model_structure import edges_of, parameters_of
from penstock.measure.saved_tensors import SavedStorages
from penstock.measure.stand_ins import standing_in
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile

__all__ = ["HARDWARE", "Hardware", "estimate_profile"]

ADAM_STEP_PASSES = 7
"""Adam reads parameter, gradient and two moments, and writes all but the gradient."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one device, from its data sheet.

    ``half_flops_per_s`` holds for bfloat16 (float16 on V100), ``flops_per_s`` for float32.
    """

    flops_per_s: float
    half_flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    launch_s: float
    source: str


HARDWARE: dict[str, Hardware] = {
    "V100-16GB": Hardware(15.7e12, 125e12, 0.9e12, 16e9, 5e-6, "NVIDIA V100 data sheet, SXM2"),
    "A100-80GB": Hardware(19.5e12, 312e12, 2.039e12, 80e9, 5e-6, "NVIDIA A100 data sheet, SXM"),
    "H100-80GB": Hardware(67e12, 989e12, 3.35e12, 80e9, 5e-6, "NVIDIA H100 data sheet, SXM"),
    "H200-141GB": Hardware(67e12, 989e12, 4.8e12, 141e9, 5e-6, "NVIDIA H200 data sheet, SXM"),
    "cpu": Hardware(
        83e9, 83e9, 12e9, 8e9, 2e-6, "one 2.6 GHz core with two 256-bit multiply-add units"
    ),
}


def attention_operations(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of attention on the CPU, which torch's own table leaves out."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_operations(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    """Operations of its backward."""
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


OPERATIONS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        attention_backward_operations
    ),
}
"""For each operator that multiplies matrices the number of its operations, from its arguments."""


class OperatorSeconds(TorchDispatchMode):
    """Adds up the roofline seconds of the operators that run while it is active."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self.hardware = hardware
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        computes = any(torch.is_tensor(leaf) for leaf in tree_leaves(result))
        if computes and not is_view(func):
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs, result)) if torch.is_tensor(leaf)
            ]
            self.seconds += self.operator_s(func, tensors, args, kwargs or {}, result)
        return result

    def operator_s(
        self,
        func: Any,
        tensors: Sequence[torch.Tensor],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
    ) -> float:
        """Seconds of one operator on the hardware."""
        hardware = self.hardware
        moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        formula = OPERATIONS.get(func.overloadpacket)
        operations = formula(*args, **kwargs, out_val=result) if formula else 0
        half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        rate = hardware.half_flops_per_s if half else hardware.flops_per_s
        return max(operations / rate, moved_bytes / hardware.bytes_per_s, hardware.launch_s)


def is_view(func: Any) -> bool:
    """Whether an operator only looks at its input in another way."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def estimate_profile(
    graph: LayerGraph,
    batch: Batch,
    hardware_name: str,
    *,
    batch_sizes: Sequence[int] = (),
    autocast: torch.dtype | None = None,
) -> ModelProfile:
    """The profile of ``graph`` on a device of the table `HARDWARE`, from shapes alone.

    The model may be on the meta device.

    Raises:
        BadInput: no such hardware, or a batch size below 1.
    """
    if hardware_name not in HARDWARE:
        raise BadInput(
            f"hardware '{hardware_name}' is not in the table; use one of {', '.join(HARDWARE)}"
        )
    hardware = HARDWARE[hardware_name]
    leaves = graph.batch_leaves(batch)
    sizes = tuple(batch_sizes) or tuple(sorted({max(1, len(leaves[0]) // 2), len(leaves[0])}))
    if min(sizes) < 1:
        raise BadInput(f"batch sizes {list(sizes)} cannot be estimated; all must be >= 1")
    estimates = [estimate(graph, resized(leaves, size), hardware, autocast) for size in sizes]
    own, shared = parameters_of(graph)

    def cost(index: int, name: str) -> LayerCost:
        def fit(of: Callable[[Estimate], float]) -> Affine:
            return fit_affine(sizes, [of(estimates[k][index]) for k in range(len(sizes))])

        return LayerCost(
            name=name,
            forward_s=fit(lambda e: e.times.forward_s),
            backward_input_s=fit(lambda e: e.times.halves()[0]),
            backward_weight_s=fit(lambda e: e.times.halves()[1]),
            parameter_bytes=own[index][0],
            buffer_bytes=own[index][1],
            saved_bytes=whole_bytes(fit(lambda e: e.saved_bytes)),
        )

    return ModelProfile(
        name=graph.name,
        layers=tuple(cost(index, name) for index, name in enumerate(graph.layer_names)),
        edges=edges_of(graph),
        shared=shared,
        batch_size=max(sizes),
        step_s_per_byte=ADAM_STEP_PASSES / hardware.bytes_per_s,
        source=f"estimated for {hardware_name} ({hardware.source})",
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one layer costs at one batch size."""

    times: Times
    saved_bytes: float


def estimate(
    graph: LayerGraph,
    leaves: Sequence[torch.Tensor],
    hardware: Hardware,
    autocast: torch.dtype | None,
) -> list[Estimate]:
    """Every layer's costs for one batch; the tensors are shapes without values."""
    programs = [graph.stage(range(i, i + 1)) for i in range(len(graph.layer_names))]
    modules = [program.module for program in programs]
    estimates: list[Estimate] = []
    # All shapes are on a CPU, wherever the tensors are: on meta there is no autocast.
    home = torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), standing_in(modules, shape_on(home)):
        held = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        shapes = [shape_on(home)(leaf) for leaf in leaves]
        storages = SavedStorages([*held, *shapes])

        def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
            with OperatorSeconds(hardware) as forward:
                outputs, saved = storages.bytes_saved_by(run.forward)
            times = Times(
                forward.seconds,
                towards_s(run, outputs, [*run.inputs, *run.parameters], hardware),
                towards_s(run, outputs, run.inputs, hardware),
                towards_s(run, outputs, run.parameters, hardware),
            )
            estimates.append(Estimate(times, saved))
            return outputs

        walk(programs, shapes, RunSettings(home, autocast), visit)
    return estimates


def shape_on(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes, among fake tensors, one like another but on ``device``."""
    return partial(torch.empty_like, device=device, requires_grad=False)


def towards_s(
    run: LayerRun,
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    hardware: Hardware,
) -> float:
    """Seconds of the backward towards ``wanted``."""
    roots = run.differentiable(outputs)
    if not (roots and wanted):
        return 0.0
    ones = [torch.ones_like(root) for root in roots]
    with OperatorSeconds(hardware) as backward:
        torch.autograd.grad(roots, wanted, ones, retain_graph=True, allow_unused=True)
    return backward.seconds
