"""The result of a verification: tensors compared, tolerances, the first difference."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

import torch

from penstock.runtime.engine import Engine
from penstock.runtime.verify.own_module import Values

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference relative to the tensor's largest value, by the type of the computation.

Sums in another order differ by a few units in the last place of every addition. In float64 that is
about 1e-13, while wrong results differ by far more than 1e-9.
"""

NOISE_SHARE = 1e-3
"""Tensors much smaller than the largest are compared relative to this share of the largest.

An example is a gradient that is zero except for rounding.
"""


Kind: TypeAlias = Literal["loss", "gradient norm", "gradient", "buffer"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor that differs.

    ``value`` is the pipeline's and ``reference`` the module's, where they differ most. None: there
    is no gradient, so that an optimizer leaves the parameter as it is.
    """

    name: str
    kind: Kind
    stage: int
    value: float | None
    reference: float | None
    relative: float


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of `verify`; prints as one line.

    ``reference`` names what the pipeline was compared with. ``skipped`` is the reason if nothing
    was compared. ``largest`` is the largest relative difference of the ``compared`` tensors.
    ``cause`` says why they differ, if that was found, and what to do.
    """

    loss: float
    reference_loss: float
    compared: int
    largest: float
    tolerance: float
    difference: Difference | None
    reference: str = ""
    skipped: str = ""
    cause: str = ""

    @property
    def equal(self) -> bool:
        return self.difference is None and not self.skipped

    def __str__(self) -> str:
        if self.skipped:
            return f"not compared: {self.skipped}"
        if self.difference is None:
            return (
                f"equal to {self.reference}: loss {self.loss:.6g}, {self.compared} gradients and "
                f"buffers differ by at most {self.largest:.1e} (limit {self.tolerance:.0e})"
            )
        d = self.difference
        where = f" of '{d.name}' on stage {d.stage}" if d.kind in ("gradient", "buffer") else ""
        ours, theirs = ("None" if v is None else f"{v:.9g}" for v in (d.value, d.reference))
        return (
            f"{d.kind}{where} is {ours}, of {self.reference} {theirs}: relative "
            f"difference {d.relative:.1e}, limit {self.tolerance:.0e}"
            f"{'; ' * bool(self.cause)}{self.cause}"
        )


def not_compared(why: str) -> VerifyResult:
    """The result of a verification that was not possible."""
    return VerifyResult(float("nan"), float("nan"), 0, 0.0, 0.0, None, skipped=why)


@dataclass(frozen=True)
class Compared:
    """The pipeline's tensor and the reference's; small ones are judged as if of size ``floor``.

    A gradient that is ``missing`` on one side is other than one of zeros.
    """

    name: str
    kind: Kind
    ours: torch.Tensor
    theirs: torch.Tensor
    floor: float = 0.0
    missing: Literal["ours", "theirs", ""] = ""

    @property
    def is_negligible(self) -> bool:
        """True if the reference's tensor is nothing next to the others."""
        return largest_of(self.theirs) < self.floor

    @property
    def gap(self) -> float:
        """The largest difference relative to the reference's largest value."""
        if self.missing:
            return inf
        gap = relative_gap(self.ours, self.theirs, max(largest_of(self.theirs), self.floor))
        return gap if gap == gap else difference_of(self, 0).relative


def pairs_of(engine: Engine, found: Values, reference: Values) -> list[Compared]:
    """The loss, gradients and buffers in the model's order, and the norm.

    A norm that is NaN was not computed, as where weights change without a flush.
    """
    largest = max(map(largest_of, reference.gradients.values()), default=0.0)
    pairs = [Compared("loss", "loss", torch.tensor(found.loss), torch.tensor(reference.loss))]
    for use in engine.graph.parameter_uses:
        ours = (found.buffers if use.is_buffer else found.gradients).get(use.name)
        theirs = (reference.buffers if use.is_buffer else reference.gradients).get(use.name)
        some = theirs if ours is None else ours
        if some is None:
            continue
        missing = "ours" if ours is None else "theirs" if theirs is None else ""
        if use.is_buffer or engine.graph.compiles:  # compiled code may give zeros
            missing = ""
        ours, theirs = (torch.zeros_like(some) if t is None else t for t in (ours, theirs))
        kind, floor = ("buffer", 0.0) if use.is_buffer else ("gradient", largest * NOISE_SHARE)
        pairs.append(Compared(use.name, kind, ours, theirs, floor, missing))
    if found.norm == found.norm:
        ours, theirs = torch.tensor(found.norm), torch.tensor(reference.norm)
        pairs.append(Compared("norm", "gradient norm", ours, theirs))
    return pairs


def compare_values(
    engine: Engine,
    found: Values,
    reference: Values,
    tolerance: float,
    reference_name: str,
) -> VerifyResult:
    """Compare all values; ``reference_name`` is used in messages."""
    first: Difference | None = None
    largest = 0.0
    pairs = pairs_of(engine, found, reference)
    tensors = sum(pair.kind in ("gradient", "buffer") for pair in pairs)
    for pair in pairs:
        relative = pair.gap
        if first is None and not relative <= tolerance:
            first = difference_of(pair, stage_of(engine, pair.name))
        largest = max(largest, relative)
    return VerifyResult(
        found.loss, reference.loss, tensors, largest, tolerance, first, reference_name
    )


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor, size: float) -> float:
    """The largest difference of two tensors relative to ``size``, in few passes over memory.

    NaN if they contain infinities, which `difference_of` handles.
    """
    a, b = ours.detach().cpu(), theirs.detach().cpu()
    if not (a.dtype == b.dtype and a.is_floating_point() and a.element_size() >= 4):
        a, b = a.double(), b.double()
    gap = largest_of(a - b)
    return gap / size if size else gap


def largest_of(values: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    numbers = values.detach() if values.is_floating_point() else values.detach().double()
    return float(torch.linalg.vector_norm(numbers, inf))


def difference_of(pair: Compared, stage: int) -> Difference:
    """Find where two tensors differ most, relative to their largest value or the floor."""
    name, kind = pair.name, pair.kind
    a, b = (tensor.detach().cpu().double().reshape(-1) for tensor in (pair.ours, pair.theirs))
    if not a.numel():
        return Difference(name, kind, stage, 0.0, 0.0, 0.0)
    # Equal infinities (in masks that are buffers) are no difference.
    gap = torch.where(a == b, 0.0, (a - b).abs())
    at = int(gap.argmax())
    finite = b[b.isfinite()]
    size = max(float(finite.abs().max()) if finite.numel() else 0.0, pair.floor)
    relative = float(gap[at]) / size if size else float(gap[at])
    value, reference = float(a[at]), float(b[at])
    if pair.missing == "ours":
        return Difference(name, kind, stage, None, reference, inf)
    if pair.missing == "theirs":
        return Difference(name, kind, stage, value, None, inf)
    return Difference(name, kind, stage, value, reference, relative)


def tolerance_of(engine: Engine, types: Collection[torch.dtype]) -> float:
    """The tolerance of the coarsest type used: in the module, in boundary tensors, in autocast."""
    dtypes = {*types, *(spec.dtype for spec, _, _ in engine.graph.crossings)}
    if engine.autocast_dtype is not None:
        dtypes.add(engine.autocast_dtype)
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=1e-9)


def stage_of(engine: Engine, name: str) -> int:
    """The first stage that uses a tensor; the last stage for loss and norm."""
    layers = {use.name: use.layers for use in engine.graph.parameter_uses}
    if name in layers:
        return engine.plan.stage_of_layer(layers[name][0])
    return len(engine.plan.stages) - 1
