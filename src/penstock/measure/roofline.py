"""Estimates profiles for hardware that is not present.

Nothing is computed. Tensors without values run through the model, and every operator takes the time
that `penstock.measure.operator_seconds` estimates. Of layers that do the same work only one is run.
The table of devices is `penstock.measure.hardware`.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.capture.batch_norms import CountedNorms
from penstock.capture.layer_graph import Batch, LayerGraph
from penstock.errors import BadInput
from penstock.measure.affine_fit import fit_affine, whole_bytes
from penstock.measure.backward_halves import PassSeconds
from penstock.measure.fused_attention import FusedAttention
from penstock.measure.hardware import Hardware, hardware_named
from penstock.measure.layer_runs import LayerRun, RunSettings, resized, walk
from penstock.measure.model_structure import edges_of, parameters_of
from penstock.measure.operator_seconds import OperatorSeconds
from penstock.measure.same_work import work_of
from penstock.measure.saved_tensors import SavedStorages, storage_address, storage_bytes
from penstock.measure.stand_ins import standing_in
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile

__all__ = ["EqualLayers", "estimate_profile"]

ADAM_STEP_PASSES = 7
"""Adam reads a parameter, its gradient and two moments, and writes all but the gradient."""


def estimate_profile(
    graph: LayerGraph,
    batch: Batch,
    hardware_name: str,
    *,
    batch_sizes: Sequence[int] = (),
    autocast: torch.dtype | None = None,
    compiled: bool = False,
) -> ModelProfile:
    """The profile of ``graph`` on a device of the table `HARDWARE`, from shapes alone.

    The model may be on the meta device. ``compiled``: operators are fused, as by ``torch.compile``.

    Raises:
        BadInput: unknown hardware, or a batch size below 1.
    """
    hardware = hardware_named(hardware_name)
    leaves = graph.batch_leaves(batch)
    sizes = tuple(batch_sizes) or tuple(sorted({max(1, len(leaves[0]) // 2), len(leaves[0])}))
    if min(sizes) < 1:
        raise BadInput(f"batch sizes {list(sizes)} cannot be estimated; all must be >= 1")
    target = RooflineTarget(hardware, autocast, compiled)
    estimates = [estimate(graph, resized(leaves, size), target) for size in sizes]
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
            norms=len(estimates[0][index].norm_channels),
            norm_channels=sum(estimates[0][index].norm_channels),
        )

    return ModelProfile(
        name=graph.name,
        layers=tuple(cost(index, name) for index, name in enumerate(graph.layer_names)),
        edges=edges_of(graph, graph.lengths_of(dict(enumerate(leaves)))),
        shared=shared,
        batch_size=max(sizes),
        step_s_per_byte=ADAM_STEP_PASSES / (hardware.memory_share * hardware.bytes_per_s),
        source=f"estimated for {hardware_name} ({hardware.source})"
        + (", compiled" if compiled else ""),
        device=hardware_name,
    )


@dataclass(frozen=True, slots=True)
class RooflineTarget:
    """What to estimate for: hardware, type of matrix products, and whether stages are compiled."""

    hardware: Hardware
    autocast: torch.dtype | None = None
    compiled: bool = False

    def counting(self) -> OperatorSeconds:
        """A context that sums up the seconds of the operators in it."""
        return OperatorSeconds(self.hardware, fuses=self.compiled)

    def attention(self) -> AbstractContextManager[object]:
        """A context in which attention is one operator, if the hardware has a kernel for it."""
        return FusedAttention() if self.hardware.fused_attention else nullcontext()


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one layer at one batch size."""

    times: PassSeconds
    saved_bytes: float
    norm_channels: tuple[int, ...]


def estimate(
    graph: LayerGraph,
    leaves: Sequence[torch.Tensor],
    target: RooflineTarget,
) -> list[Estimate]:
    """The cost of every layer for one batch, from tensors without values."""
    programs = [graph.stage(range(i, i + 1)) for i in range(len(graph.layer_names))]
    modules = [program.module for program in programs]
    estimates: list[Estimate] = []
    # All tensors without values are on the CPU, because the meta device has no autocast.
    home = torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), standing_in(modules, shape_on(home)):
        held = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        shapes = [shape_on(home)(leaf) for leaf in leaves]
        storages = SavedStorages([*held, *shapes])

        equal = EqualLayers[Estimate](storages)

        def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
            outputs, found = equal.run(run, partial(estimated, run))
            estimates.append(found)
            return outputs

        def estimated(run: LayerRun) -> tuple[tuple[torch.Tensor, ...], Estimate]:
            with target.attention(), target.counting() as forward, CountedNorms() as norms:
                outputs, saved = storages.saved_by(run.forward)
            forward.write([*outputs, *saved])
            times = PassSeconds(
                forward.seconds,
                towards_s(run, outputs, [*run.inputs, *run.parameters], target),
                towards_s(run, outputs, run.inputs, target),
                towards_s(run, outputs, run.parameters, target),
            )
            return outputs, Estimate(times, sum(map(storage_bytes, saved)), tuple(norms.channels))

        walk(programs, shapes, RunSettings(home, target.autocast), visit)
    return estimates


def shape_on(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes, among fake tensors, one like a given tensor but on ``device``."""
    return partial(torch.empty_like, device=device, requires_grad=False)


def towards_s(
    run: LayerRun,
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    target: RooflineTarget,
) -> float:
    """Seconds of the backward that computes the gradients of ``wanted``."""
    roots = run.differentiable(outputs)
    if not (roots and wanted):
        return 0.0
    ones = [torch.ones_like(root) for root in roots]
    with target.counting() as backward:
        found = torch.autograd.grad(roots, wanted, ones, retain_graph=True, allow_unused=True)
    backward.write(gradient for gradient in found if gradient is not None)
    return backward.seconds


Cost = TypeVar("Cost")


@dataclass(frozen=True)
class _Known(Generic[Cost]):
    """The cost of a layer, and what it did to its inputs (by index) and outputs.

    ``source`` is the index of the input that an output shares its storage with, or -1.
    """

    cost: Cost
    outputs: Sequence[torch.Tensor]
    source: Sequence[int]
    saved_inputs: Sequence[int]
    saved_outputs: Sequence[int]


class EqualLayers(Generic[Cost]):
    """Caches the costs of layers on tensors without values, by the work that the layers do.

    ``storages`` are those that the layers have saved so far.
    """

    def __init__(self, storages: SavedStorages) -> None:
        self._storages = storages
        self._known: dict[Hashable, _Known[Cost]] = {}

    def run(
        self, run: LayerRun, visit: Callable[[], tuple[tuple[torch.Tensor, ...], Cost]]
    ) -> tuple[tuple[torch.Tensor, ...], Cost]:
        """Outputs and cost of a layer: from ``visit``, or derived from an equal layer."""
        key = self._key(run)
        inputs = (*run.leaves, *run.received)
        if key is None:
            return visit()
        if key not in self._known:
            outputs, cost = visit()
            addresses = [storage_address(tensor) for tensor in inputs]
            self._known[key] = _Known(
                cost,
                outputs,
                [_position(storage_address(tensor), addresses) for tensor in outputs],
                self._saved(inputs),
                self._saved(outputs),
            )
            return outputs, cost
        known = self._known[key]
        outputs = tuple(
            inputs[source] if source >= 0 else _like(tensor)
            for tensor, source in zip(known.outputs, known.source, strict=True)
        )
        self._storages.ignore(inputs[k] for k in known.saved_inputs)
        self._storages.ignore(outputs[k] for k in known.saved_outputs)
        return outputs, known.cost

    def _saved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [k for k, tensor in enumerate(tensors) if self._storages.knows(tensor)]

    def _key(self, run: LayerRun) -> Hashable | None:
        """All that the cost of a layer depends on; None for layers that are not captured graphs."""
        work = work_of(run)
        return work and (work, tuple(map(self._storages.knows, (*run.leaves, *run.received))))


def _position(address: int, addresses: Sequence[int]) -> int:
    return addresses.index(address) if address in addresses else -1


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).requires_grad_(tensor.requires_grad)
