"""Compares a pipeline with the user's own module: loss, gradients, buffers.

    rank 0    gathers the values, runs the user's module ----+
    all ranks run the batch through the pipeline            compare
    rank 0    gathers its gradients and buffers -------------+

Dropout is off in both. But a training step itself can be compared, before its optimizer changes the
weights, if there is no dropout or if the module can draw the masks of the step (`same_dropout`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import torch

from penstock.capture.kept_buffers import kept_buffers
from penstock.runtime.metrics import Totals
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.processes.gathering import gathered
from penstock.runtime.rank import Worker
from penstock.runtime.stages.replay import random_state, restore_random_state
from penstock.runtime.verify.own_module import OwnRun, run_own_module
from penstock.runtime.verify.reference_memory import memory_for_reference
from penstock.runtime.verify.result import (
    Difference,
    Values,
    VerifyResult,
    compare,
    not_compared,
)
from penstock.runtime.verify.same_dropout import DropoutCall, OtherMasks, Slices, masks_of
from penstock.runtime.verify.without_dropout import WithoutDropout

__all__ = [
    "Difference",
    "Reference",
    "VerifyResult",
    "compared",
    "compared_without_dropout",
    "not_compared",
    "obstacle",
    "reference_of",
    "verify",
    "verify_with",
]

WHOLE = "your module on the whole batch"
IN_PARTS = "your module, micro-batch by micro-batch"


@dataclass(frozen=True)
class Reference:
    """The results of the user's module; ``run`` is set on rank 0 only, the rest on all ranks.

    ``dropped``: its dropout was off. ``masked``: it used the masks of a step. ``skipped`` is the
    reason if there are no results to compare with.
    """

    name: str
    dropped: bool
    skipped: str
    run: OwnRun | None
    masked: bool = False


def verify(worker: Worker, leaves: Sequence[torch.Tensor]) -> VerifyResult:
    """Run a batch through the user's module and the pipeline, without dropout, and compare.

    Weights, gradients, buffers, optimizer and random states are restored afterwards. All ranks must
    call this, and all get the same result.

    Raises:
        BadInput: the batch is not the same on all ranks.
        RunFailed: a rank failed.
    """
    return compared_without_dropout(worker, [leaves])


def compared_without_dropout(
    worker: Worker, batches: Sequence[Sequence[torch.Tensor]]
) -> VerifyResult:
    """Like `verify`, with several batches that make one step."""
    why = obstacle(worker, batches)
    if why:
        return not_compared(why)
    return verify_with(worker, reference_of(worker, batches), batches)


def verify_with(
    worker: Worker, reference: Reference, batches: Sequence[Sequence[torch.Tensor]]
) -> VerifyResult:
    """Run batches through the pipeline, without dropout, and compare with the reference."""
    if reference.skipped:
        return not_compared(reference.skipped)
    with untouched(worker):
        totals = worker.run(*batches, within=WithoutDropout())
        return compared(worker, reference, totals)


@contextmanager
def untouched(worker: Worker) -> Iterator[None]:
    """Within, the pipeline may run; its buffers, gradients and random states are restored."""
    device, random = worker.world.device, worker.random.state
    gradients = worker.buckets.buckets
    tensors = [*(tensor for _, tensor in worker.held.named_buffers()), *(b.flat for b in gradients)]
    states = random_state(device)
    try:
        with kept_buffers(tensors):
            yield
    finally:
        restore_random_state(device, *states)
        worker.random.state = random


def obstacle(worker: Worker, batches: Sequence[Sequence[torch.Tensor]]) -> str:
    """Why the user's module cannot run on the batches, or empty; all ranks must call this."""
    return different_lengths(batches) or memory_for_reference(worker, batches)


def reference_of(
    worker: Worker,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    before: Mapping[str, torch.Tensor] | None = None,
    slices: Slices | None = None,
) -> Reference:
    """Run the user's module on rank 0 on the rows of all batches; all ranks must call this.

    It runs on the whole batch or, if samples affect one another, on each micro-batch. ``before``
    are values of this rank's buffers before they were updated. ``slices`` is the dropout that this
    rank has drawn: the module draws the same if possible.
    """
    world, graph, held = worker.world, worker.graph, worker.held
    drawn = world.gather_to_first(slices or {}, DropoutCall)
    whole = held.whole_tensors()
    others = {n: t for n, t in whole.items() if held.owns(n) and 0 not in held.holders[n]}
    others.update({n: t for n, t in (before or {}).items() if n in others})
    own = {**whole, **(before or {})} if world.rank == 0 else {}
    values = {**gathered(world, others), **own}
    reason = graph.mixing
    name = f"{IN_PARTS}, because {reason}" if reason else WHOLE
    found: Reference | None = None
    if world.rank == 0:
        try:
            leaves = [torch.cat(parts) for parts in zip(*batches, strict=True)]
            rows = micro_batch_rows(worker, batches) if reason else [range(leaves[0].shape[0])]
            run, masked = run_with_masks(worker, values, leaves, rows, drawn)
            why = f"random operators, which are not dropout: {run.random}" if run.random else ""
            if reason and not isfinite(run.loss):
                why = (
                    f"{name}, gives a loss of {run.loss}, as a mean over no targets does; give "
                    f"each micro-batch some"
                )
            name += ", with the step's own dropout" if masked else ""
            found = Reference(name, run.dropped, why, run, masked)
        except Exception as error:
            text = str(error).partition("\n")[0]
            why = f"{graph.name} does not run by itself on rank 0: {type(error).__name__}: {text}"
            found = Reference(name, False, why, None)
    received = world.from_first(None if found is None else replace(found, run=None), Reference)
    return received if found is None else found


def run_with_masks(
    worker: Worker,
    values: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    rows: Sequence[range],
    drawn: Sequence[Slices],
) -> tuple[OwnRun, bool]:
    """Run the module with the dropout that all ranks have drawn; also whether that was possible."""
    run = partial(
        run_own_module,
        worker.graph,
        values,
        leaves,
        rows,
        device=worker.world.device,
        autocast=worker.autocast_dtype,
    )
    with suppress(OtherMasks):
        masks = masks_of(drawn)
        if masks:
            return run(masks=masks), True
    return run(), False


def different_lengths(batches: Sequence[Sequence[torch.Tensor]]) -> str:
    """Why batches of one step cannot be joined; empty if they can. The same on all ranks."""
    for number, parts in enumerate(zip(*batches, strict=True)):
        shapes = list(dict.fromkeys(tuple(leaf.shape[1:]) for leaf in parts))
        if len(shapes) > 1:
            return (
                f"tensor {number} of the step's {len(batches)} batches has samples of shapes "
                f"{shapes[0]} and {shapes[1]}, and your module takes one shape at a time; compare "
                f"one of the batches with pipe.verify"
            )
    return ""


def micro_batch_rows(worker: Worker, batches: Sequence[Sequence[torch.Tensor]]) -> list[range]:
    """The rows of all micro-batches in the joined batches."""
    found: list[range] = []
    start = 0
    for leaves in batches:
        for rows in cut_batch(worker.plan, leaves[0].shape[0]).micro_batches:
            found.append(range(start + rows.start, start + rows.stop))
        start = found[-1].stop
    return found


def compared(
    worker: Worker, reference: Reference, totals: Totals, seed: float = 1.0
) -> VerifyResult:
    """Compare what the pipeline has just computed with the reference; all ranks must call this.

    Gradients are still sums over ``totals.weight`` terms, times ``seed``; buffers are updated.
    """
    if reference.skipped:
        return not_compared(reference.skipped)
    if not isfinite(totals.loss):
        return not_compared(f"the loss is {totals.loss}")
    world = worker.world
    divisor = totals.weight * seed
    held = {
        name: p.grad
        for name, p in worker.held.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    sums = {n: g for n, g in worker.tensor.whole(held).items() if worker.held.owns(n)}
    names = {name for name, _ in worker.held.named_buffers()}
    buffers = {name: t for name, t in worker.held.owned_tensors().items() if name in names}
    gradients, buffers = gathered(world, sums), gathered(world, buffers)
    result = None
    if reference.run is not None:
        own = reference.run
        for name in gradients:
            # One at a time, so that each gathered sum is freed when its mean is computed.
            gradients[name] = gradients[name] / divisor
        found = Values(totals.loss, gradients, buffers)
        theirs = Values(own.loss, own.gradients, own.buffers)
        result = compare(worker, found, theirs, types=own.types, reference_name=reference.name)
    return world.from_first(result, VerifyResult, Difference)
