"""Whether the pipeline computes what one device computes: loss, every gradient, every buffer."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.recompute import random_state, restore_random_state
from penstock.runtime.without_dropout import WithoutDropout
from penstock.runtime.worker import Worker

__all__ = ["Difference", "VerifyResult", "verify"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest value of the tensor, by the type of computation.

Sums in another order differ by some units in the last place of every addition: some 1e-13 in
float64, where wrong results differ by far more than 1e-9.
"""

NOISE_SHARE = 1e-3
"""Tensors far smaller than the largest (a gradient that is zero but for rounding) are compared on
the scale of this share of the largest."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor that is not the same.

    ``value`` is the pipeline's and ``reference`` one device's, where they differ most.
    """

    name: str
    kind: Literal["loss", "gradient", "buffer"]
    stage: int
    value: float
    reference: float
    relative: float


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What `verify` found; prints as one line.

    ``largest`` is the largest relative difference among the ``compared`` tensors.
    """

    loss: float
    reference_loss: float
    compared: int
    largest: float
    tolerance: float
    difference: Difference | None

    @property
    def equal(self) -> bool:
        """Whether everything agrees within the tolerance."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return (
                f"equal to one device: loss {self.loss:.6g}, {self.compared} gradients and buffers "
                f"differ by at most {self.largest:.1e} (limit {self.tolerance:.0e})"
            )
        d = self.difference
        where = f" of '{d.name}' on stage {d.stage}" if d.kind != "loss" else ""
        return (
            f"{d.kind}{where} is {d.value:.9g}, on one device {d.reference:.9g}: relative "
            f"difference {d.relative:.1e}, limit {self.tolerance:.0e}"
        )


@dataclass(frozen=True)
class Values:
    """Loss, gradients and buffers after one batch, by name, on the CPU."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    loss_dtype: torch.dtype = torch.float64


def verify(worker: Worker, leaves: Sequence[torch.Tensor]) -> VerifyResult:
    """Run a batch through the pipeline and on one device, without dropout, and compare.

    The one device is rank 0, which gathers the whole model: it must fit there. It runs the plain
    model micro-batch by micro-batch. Weights, buffers, optimizer and random state are as before
    afterwards. Every rank calls, and gets the same result.

    Raises:
        BadInput: the batch is not the same on all ranks.
        RunFailed: a rank failed.
    """
    world = worker.world
    own = worker.named_tensors()
    before = {name: tensor.detach().clone() for name, tensor in worker.named_buffers()}
    states = random_state(world.device)
    gathered = world.gather_to_first(on_cpu(worker.owned_tensors()))
    try:
        totals = worker.run(leaves, training=True, within=WithoutDropout())
        if worker.buckets is not None:
            worker.buckets.scale(1.0 / totals.weight)
        gradients = {
            name: p.grad
            for name, p in worker.named_parameters()
            if p.grad is not None and worker.owns(name)
        }
        buffers = {n: t for n, t in own.items() if n in before and worker.owns(n)}
        parts = world.gather_to_first((on_cpu(gradients), on_cpu(buffers)))
    finally:
        for name, tensor in worker.named_buffers():
            # As torch's kernels do, unseen by autograd's check: nothing is saved across steps.
            tensor.data.copy_(before[name])
        restore_random_state(world.device, *states)
    result = None
    if world.rank == 0:
        our_gradients, our_buffers = zip(*parts, strict=True)
        found = Values(totals.loss, merged(our_gradients), merged(our_buffers))
        reference = one_device(worker, merged(gathered), leaves)
        restore_random_state(world.device, *states)
        result = compare(worker, found, reference)
    return world.from_first(result)


def one_device(
    worker: Worker, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Values:
    """The same batch on this rank alone, with copies of all tensors."""
    graph, device = worker.graph, worker.world.device
    program = graph.stage(range(len(graph.layer_names)))
    module = own_copy(program.module, graph.tied_names, tensors, device)
    cut = cut_batch(worker.plan, leaves[0].shape[0])
    inputs = [leaves[index].to(device) for index in program.batch_inputs]
    loss_sum, weight_sum, loss_dtype = 0.0, 0.0, torch.float64
    with WithoutDropout():
        for rows in cut.micro_batches:
            with worker.autocast():
                loss, weight = module(*(leaf[rows.start : rows.stop] for leaf in inputs))[:2]
            loss_dtype = loss.dtype
            if loss.requires_grad:
                loss.backward(weight.to(loss.dtype))
            if float(weight) > 0:
                loss_sum += float(loss.detach().double() * weight)
                weight_sum += float(weight)
    gradients = {
        graph.tied_names.get(name, name): p.grad / weight_sum
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    buffers = {graph.tied_names.get(name, name): b for name, b in module.named_buffers()}
    return Values(loss_sum / weight_sum, on_cpu(gradients), on_cpu(buffers), loss_dtype)


def own_copy(
    module: nn.Module,
    tied: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> nn.Module:
    """A copy of ``module`` with the given values, that shares nothing with it."""
    copied = copy.deepcopy(module)
    copied = copied.to_empty(device=device) if has_meta(copied) else copied.to(device)
    with torch.no_grad():
        for name, tensor in (*copied.named_parameters(), *copied.named_buffers()):
            value = tensors.get(tied.get(name, name))
            if value is not None:
                tensor.copy_(value)
            if isinstance(tensor, nn.Parameter):
                tensor.grad = None
    return copied


def has_meta(module: nn.Module) -> bool:
    """Whether some tensor of the module has no values."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def compare(worker: Worker, found: Values, reference: Values) -> VerifyResult:
    """Loss first, then gradients in the model's order, then buffers."""
    tolerance = tolerance_of(worker, reference)
    first: Difference | None = None
    largest = 0.0
    pairs: list[tuple[str, Literal["loss", "gradient", "buffer"], torch.Tensor, torch.Tensor]] = [
        ("loss", "loss", torch.tensor(found.loss), torch.tensor(reference.loss))
    ]
    for use in worker.graph.parameter_uses:
        kind = "buffer" if use.is_buffer else "gradient"
        ours = (found.buffers if use.is_buffer else found.gradients).get(use.name)
        theirs = (reference.buffers if use.is_buffer else reference.gradients).get(use.name)
        if ours is None and theirs is None:
            continue
        shape = ours if ours is not None else theirs
        assert shape is not None
        zeros = torch.zeros_like(shape)
        pairs.append(
            (use.name, kind, zeros if ours is None else ours, zeros if theirs is None else theirs)
        )
    scale = max(
        (float(r.abs().max()) for _, kind, _, r in pairs if kind == "gradient" and r.numel()),
        default=0.0,
    )
    for name, kind, ours, theirs in pairs:
        floor = scale * NOISE_SHARE if kind == "gradient" else 0.0
        difference = difference_of(name, kind, stage_of(worker, name), ours, theirs, floor)
        largest = max(largest, difference.relative)
        if first is None and not difference.relative <= tolerance:
            first = difference
    return VerifyResult(found.loss, reference.loss, len(pairs) - 1, largest, tolerance, first)


def difference_of(
    name: str,
    kind: Literal["loss", "gradient", "buffer"],
    stage: int,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    floor: float,
) -> Difference:
    """Where two tensors differ most, relative to the largest value or ``floor``."""
    a, b = ours.double().reshape(-1), theirs.double().reshape(-1)
    if not a.numel():
        return Difference(name, kind, stage, 0.0, 0.0, 0.0)
    # Equal infinities (masks held as buffers) do not differ.
    gap = torch.where(a == b, 0.0, (a - b).abs())
    at = int(gap.argmax())
    finite = b[b.isfinite()]
    size = max(float(finite.abs().max()) if finite.numel() else 0.0, floor)
    relative = float(gap[at]) / size if size else float(gap[at])
    return Difference(name, kind, stage, float(a[at]), float(b[at]), relative)


def tolerance_of(worker: Worker, reference: Values) -> float:
    """By the coarsest type that takes part: weights, boundary tensors, loss, autocast."""
    dtypes = {gradient.dtype for gradient in reference.gradients.values()}
    dtypes |= {spec.dtype for spec, _, _ in worker.graph.crossings} | {reference.loss_dtype}
    if worker.autocast_dtype is not None:
        dtypes.add(worker.autocast_dtype)
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=1e-9)


def stage_of(worker: Worker, name: str) -> int:
    """The first stage that holds a tensor; the last one for the loss."""
    layers = {use.name: use.layers for use in worker.graph.parameter_uses}
    if name in layers:
        return worker.plan.stage_of_layer(layers[name][0])
    return len(worker.plan.stages) - 1


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that outlive what is done to the originals."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def merged(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All parts as one; no two have a name in common."""
    return {name: tensor for part in parts for name, tensor in part.items()}
