"""Estimate profiles for hardware that is not present.

Nothing is computed. Tensors without values run through the model, and every operator takes an
estimated time. Of layers that do the same work only one is run.

    seconds of an operator = max(operations / (share * peak rate),
                                 bytes read and written / (share * memory rate),
                                 launch seconds)

(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009; the shares are those of
`penstock.measure.hardware`.) With ``fuses``, consecutive elementwise operators, sums and norms form
one kernel. What one of them makes for another is neither written nor read, and an input of several
is read once.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import prod
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

from penstock.capture.contract import Batch
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.stand_ins import standing_in
from penstock.capture.record.torch_calls import CountedNorms
from penstock.errors import BadInput
from penstock.measure.fused_attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    FusedAttention,
    attention_operations,
)
from penstock.measure.gpu_autocast import gpu_autocast
from penstock.measure.hardware import Hardware, hardware_named
from penstock.measure.layer_runs import (
    LayerRun,
    RunSettings,
    SavedStorages,
    resized,
    storage_bytes,
    undisturbed,
    walk,
)
from penstock.measure.layer_times import LayerBytes, PassSeconds, profile_from
from penstock.measure.same_work import work_of
from penstock.profile.model_profile import ModelProfile
from penstock.torch_internals import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    GROUPED_PRODUCT,
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
    storage_id,
)


def _experts(rows: Any, weights: Any, *_: Any, **__: Any) -> float:
    """Product of each row with one of several matrices, or (backward) of each part with its own."""
    return 2 * rows.numel() * weights.shape[-1]


def _four_bits(x: Any, _: Any, shape: Any, *__: Any, **___: Any) -> float:
    """A linear layer of bitsandbytes, whose weights are dequantised within the product."""
    return 2 * x.numel() * shape[0]


def _attention_backward(
    _: Any, query: Any, key: Any, value: Any, result: Any, sums: Any, is_causal: bool, **__: Any
) -> float:
    """Five matrix products where the forward has two, because the scores are computed again."""
    return 2.5 * attention_operations(query, key, value, is_causal)


OPERATIONS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    CPU_ATTENTION: flop_registry[FLASH_ATTENTION],
    CPU_ATTENTION_BACKWARD: flop_registry[FLASH_ATTENTION_BACKWARD],
    GROUPED_PRODUCT: _experts,
    ATTENTION: attention_operations,
    ATTENTION_BACKWARD: _attention_backward,
}
"""The number of operations of operators that multiply matrices, from their arguments."""

OF_LIBRARIES: dict[str, Callable[..., float]] = {"bitsandbytes.gemm_4bit": _four_bits}
"""The same for operators of libraries that may not be there, by name."""

PRODUCTS = frozenset(getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm"))
"""Products of matrices: results of rows and columns, perhaps several."""

FREE = frozenset(
    [
        *("_unsafe_view", "device", "empty", "empty_like", "empty_strided"),
        *("new_empty", "new_empty_strided"),
    ]
)
"""Operators that neither compute nor move data, though their schemas do not say so."""

FUSED_BESIDES = frozenset(
    [
        *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"),
        *("_to_copy", "amax", "cat", "clone", "mean", "native_dropout", "native_dropout_backward"),
        *("native_layer_norm", "native_layer_norm_backward", "sum", "var_mean"),
    ]
)
"""Operators that a compiler fuses in addition to elementwise ones."""


class OperatorSeconds(TorchDispatchMode):
    """A mode that sums up the seconds of the operators that run while it is active."""

    def __init__(self, hardware: Hardware, *, fuses: bool = False) -> None:
        super().__init__()
        self._hardware = hardware
        self._chain = FusedKernel() if fuses else None
        self._seconds = 0.0
        self.flops = 0.0

    def restart(self) -> None:
        """Drop the operators so far."""
        self._seconds, self.flops, self._chain = 0.0, 0.0, FusedKernel() if self._chain else None

    @property
    def seconds(self) -> float:
        """Seconds of all operators so far."""
        return self._seconds + (self._kernel_s(self._chain.bytes) if self._chain else 0.0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in pytree.tree_leaves(result) if torch.is_tensor(leaf)]
        if made and not func.is_view and func.overloadpacket.__name__ not in FREE:
            read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
            is_pointwise = torch.Tag.pointwise in func.tags
            if self._chain is not None and (
                is_pointwise or func.overloadpacket.__name__ in FUSED_BESIDES
            ):
                self._chain.add(read, made)
            else:
                if self._chain is not None:
                    self._seconds += self._kernel_s(self._chain.end(read))
                self._seconds += self._operator_s(func, [*read, *made], args, kwargs or {}, result)
        return result

    def write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the writes of tensors that outlive the operators: results and saved tensors."""
        if self._chain is not None:
            self._seconds += self._kernel_s(self._chain.end(tensors))

    def _kernel_s(self, moved_bytes: float) -> float:
        """Seconds of one kernel that only moves bytes; zero bytes take no time."""
        hardware = self._hardware
        rate = hardware.sustained_share * hardware.memory_share * hardware.bytes_per_s
        return max(moved_bytes / rate, hardware.launch_s) if moved_bytes else 0.0

    def _operator_s(
        self,
        func: Any,
        tensors: Sequence[torch.Tensor],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
    ) -> float:
        packet = func.overloadpacket
        formula = OPERATIONS.get(packet) or OF_LIBRARIES.get(str(packet))
        operations = formula(*args, **kwargs, out_val=result) if formula else 0
        self.flops += operations
        half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        hardware = self._hardware
        peak = hardware.half_flops_per_s if half else hardware.flops_per_s
        share = self._share(func)
        if packet in PRODUCTS:
            *counts, rows, columns = result.shape
            share *= hardware.filled(rows, columns, prod(counts))
        computing_s = operations / (peak * hardware.sustained_share * share)
        return max(computing_s, self._kernel_s(sum(tensor.nbytes for tensor in tensors)))

    def _share(self, func: Any) -> float:
        """The share of the peak rate that the best kernel of an operator reaches."""
        if func.overloadpacket is ATTENTION:
            return self._hardware.attention_share
        if func.overloadpacket is ATTENTION_BACKWARD:
            return self._hardware.attention_backward_share
        return self._hardware.product_share


class FusedKernel:
    """Operators that are fused into one kernel, and the bytes that the kernel moves.

    The result of an operator is written only if something outside the kernel reads it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._read: dict[int, torch.Tensor] = {}
        self._unwritten: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def add(self, read: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Add an operator to the kernel."""
        for tensor in read:
            address = storage_id(tensor)
            if address in self._made or address in self._read:
                continue
            self.bytes += self._written(address) + tensor.nbytes
            self._read[address] = tensor
        for tensor in made:
            # Keeping the tensors prevents a storage's address from being reused while known.
            self._unwritten[storage_id(tensor)] = tensor
            self._made.add(storage_id(tensor))

    def end(self, read: Iterable[torch.Tensor]) -> int:
        """End the kernel because an operator outside reads ``read``; returns the bytes moved."""
        self.bytes += sum(self._written(storage_id(tensor)) for tensor in read)
        moved, self.bytes = self.bytes, 0
        self._read.clear()
        self._made.clear()
        return moved

    def _written(self, address: int) -> int:
        """The bytes of a result that must be written now, because another kernel reads it."""
        tensor = self._unwritten.pop(address, None)
        return 0 if tensor is None else tensor.nbytes


Cost: TypeAlias = tuple[PassSeconds, LayerBytes]
"""The costs of one layer at one batch size."""

Saved: TypeAlias = tuple[bool, ...]

HOME = torch.device("cpu")
"""The device of all tensors without values: the meta device has no autocast."""

ADAM_STEP_PASSES = 7
"""Adam reads a parameter, its gradient and two moments, and writes all but the gradient."""

HOST_COPIES = 3
"""Gradients and parameters come to host memory, and parameters go back."""

HOST_BYTES_PER_S, HOST_LINK_BYTES_PER_S = 50e9, 25e9
"""Assumed of a GPU's share of its host: of the memory's rate, and a PCIe 4.0 link of 16 lanes with
pinned memory. No data sheet of a GPU says them; a measured profile has its own."""

HOST_STEP_S_PER_BYTE = ADAM_STEP_PASSES / HOST_BYTES_PER_S + HOST_COPIES / HOST_LINK_BYTES_PER_S


def estimate_profile(
    graph: LayerGraph,
    batch: Batch,
    hardware_name: str,
    *,
    batch_sizes: Sequence[int] = (),
    autocast: torch.dtype | None = None,
    compiled: bool = False,
) -> ModelProfile:
    """The profile of ``graph`` on a device of `HARDWARE`, or of a file, from shapes alone.

    The model may be on the meta device. ``compiled``: operators are fused, as by ``torch.compile``.

    Raises:
        BadInput: unknown hardware, or a batch size below 1.
    """
    hardware = hardware_named(hardware_name)
    with undisturbed(graph, HOME, "estimated") as graph:
        leaves = graph.batch_leaves(batch)
        sizes = tuple(batch_sizes) or tuple(sorted({max(1, len(leaves[0]) // 2), len(leaves[0])}))
        if min(sizes) < 1:
            raise BadInput(f"batch sizes {list(sizes)} cannot be estimated; all must be >= 1")
        target = RooflineTarget(hardware, autocast, compiled)
        estimates = estimate(graph, [resized(leaves, size) for size in sizes], target)
    return replace(
        profile_from(graph, leaves, sizes, estimates),
        step_s_per_byte=ADAM_STEP_PASSES / (hardware.memory_share * hardware.bytes_per_s),
        host_step_s_per_byte=HOST_STEP_S_PER_BYTE,
        source=f"estimated for {hardware.name} ({hardware.source})"
        + (", compiled" if compiled else ""),
        device=hardware.name,
        flops_per_sample=sum(own.flops for _, own in estimates[-1]) / sizes[-1],
    )


@dataclass(frozen=True, slots=True)
class RooflineTarget:
    """The target of an estimate: hardware, type of matrix products, and if stages are compiled."""

    hardware: Hardware
    autocast: torch.dtype | None = None
    compiled: bool = False

    def counting(self) -> OperatorSeconds:
        """A context that sums up the seconds of the operators in it."""
        return OperatorSeconds(self.hardware, fuses=self.compiled)

    def attention(self) -> AbstractContextManager[object]:
        """A context in which attention is one operator, if the hardware has a kernel for it."""
        return FusedAttention() if self.hardware.fused_attention else nullcontext()


def estimate(
    graph: LayerGraph,
    batches: Sequence[Sequence[torch.Tensor]],
    target: RooflineTarget,
) -> list[list[Cost]]:
    """The costs of every layer for each batch (its leaves), from tensors without values."""
    programs = [graph.stage(range(i, i + 1)) for i in range(len(graph.layer_names))]
    whole = graph.own_module()
    # The mode is off in forwards: what is made of the batch alone has values, by which code between
    # layers decides (to leave out a mask that masks nothing).
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.shape, tensor.stride()  # of a wrapper as if it were not quantised
        with mode:
            return torch.empty_strided(*shape, dtype=tensor.dtype, device=HOME)

    policy = gpu_autocast() if target.autocast is not None else nullcontext()
    with standing_in([whole], without_values), policy:
        held = [*whole.parameters(), *whole.buffers()]
        return [estimate_batch(programs, held, leaves, target) for leaves in batches]


def estimate_batch(
    programs: Sequence[StageProgram],
    held: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    target: RooflineTarget,
) -> list[Cost]:
    """The cost of every layer for one batch; ``held`` are parameters and buffers."""
    estimates: list[Cost] = []
    leaves = [leaf.to(HOME) for leaf in leaves]
    storages = SavedStorages([*held, *leaves])
    equal = EqualLayers(storages)

    def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
        try:
            outputs, found = equal.run(run, partial(estimated, run))
        except RuntimeError as failure:
            reason = str(failure).partition("\n")[0]
            raise BadInput(
                f"layer {index} of the model does not run on tensors without values ({reason}), so "
                f"it cannot be estimated; measure it on a device"
            ) from failure
        estimates.append(found)
        return outputs

    def estimated(run: LayerRun) -> tuple[tuple[torch.Tensor, ...], Cost]:
        # What is within checkpoints is not compiled.
        own = replace(target, compiled=False) if run.has_checkpoints else target
        with own.attention():
            casts = storages.casts_of(run)
        forward, norms = own.counting(), CountedNorms()

        def begin() -> None:
            forward.restart()
            norms.channels.clear()

        with own.attention(), forward, norms:
            outputs, saved = storages.saved_by(run, begin)
        forward.write([*outputs, *saved])
        inputs = [tensor for tensor in run.received if tensor.requires_grad]
        parameters = [p for p in run.program.module.parameters() if p.requires_grad]
        if run.has_checkpoints:
            # As a whole: reentrant checkpoints give no gradients of chosen tensors, and no part of
            # what is within checkpoints can be deferred.
            roots, backward, workspace = run.differentiable(outputs), own.counting(), 0
            if roots:
                with mode_of(roots), own.attention(), backward:
                    workspace = run.peak_of_backward(outputs)
            found = backward.seconds, backward.seconds, 0.0
            flops = 3 * forward.flops  # a backward has two products for each; recompute is no use
        else:
            wanted = ([*inputs, *parameters], inputs, parameters)
            counted = [towards(run, outputs, tensors, own) for tensors in wanted]
            found, workspace = [one.seconds for one in counted], 0
            flops = forward.flops + counted[0].flops
        return outputs, (
            PassSeconds(forward.seconds, *found),
            LayerBytes(
                sum(map(storage_bytes, saved)),
                workspace,
                tuple(norms.channels),
                flops,
                sum(map(storage_bytes, casts)),
            ),
        )

    walk(programs, leaves, RunSettings(HOME, target.autocast), visit)
    return estimates


def towards(
    run: LayerRun,
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    target: RooflineTarget,
) -> OperatorSeconds:
    """The counter of the backward that computes the gradients of ``wanted``."""
    roots, backward = run.differentiable(outputs), target.counting()
    if not (roots and wanted):
        return backward
    ones = [torch.ones_like(root) for root in roots]
    with mode_of(roots), backward:
        found = torch.autograd.grad(roots, wanted, ones, retain_graph=True, allow_unused=True)
    backward.write(gradient for gradient in found if gradient is not None)
    return backward


def mode_of(tensors: Sequence[torch.Tensor]) -> FakeTensorMode:
    """The mode of tensors without values."""
    return tensors[0].fake_mode  # type: ignore[attr-defined, no-any-return]


class EqualLayers:
    """Cache of the costs of layers on tensors without values, by the work that the layers do.

    ``storages`` are those that the layers have saved so far.
    """

    def __init__(self, storages: SavedStorages) -> None:
        self._storages = storages
        # With the costs a layer's outputs, each with the input that shares its storage (or None),
        # and which inputs and outputs are saved.
        self._known: dict[Hashable, tuple[Cost, list[tuple[torch.Tensor, int | None]], Saved]] = {}

    def run(
        self, run: LayerRun, visit: Callable[[], tuple[tuple[torch.Tensor, ...], Cost]]
    ) -> tuple[tuple[torch.Tensor, ...], Cost]:
        """Outputs and costs of a layer: from ``visit``, or derived from an equal layer."""
        inputs = (*run.leaves, *run.received)
        key = work_of(run), self._saved(*run.leaves, *run.received)
        if key not in self._known:
            outputs, cost = visit()
            places = {storage_id(tensor): index for index, tensor in enumerate(inputs)}
            made = [(tensor, places.get(storage_id(tensor))) for tensor in outputs]
            self._known[key] = cost, made, self._saved(*inputs, *outputs)
            return outputs, cost
        cost, made, saved = self._known[key]
        outputs = tuple(_like(own) if index is None else inputs[index] for own, index in made)
        self._storages.ignore(compress((*inputs, *outputs), saved))
        return outputs, cost

    def _saved(self, *tensors: torch.Tensor) -> Saved:
        return tuple(map(self._storages.knows, tensors))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.new_empty_strided(tensor.shape, tensor.stride())
    return made.requires_grad_(tensor.requires_grad)
