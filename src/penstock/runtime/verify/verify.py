"""Whether the pipeline computes what the user's own module computes: loss, gradients, buffers.

    rank 0    gathers the values, runs the user's module ----+
    all ranks run the batch through the pipeline            compare
    rank 0    gathers its gradients and buffers -------------+

Dropout is off in both. A step of training can be compared itself, before its optimizer changes the
weights, if there is no dropout or the module draws the masks of the step (`same_dropout`).
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
from penstock.runtime.verify.result import (
    Difference,
    Values,
    VerifyResult,
    compare,
    not_compared,
)
from penstock.runtime.verify.room import room_for_reference
from penstock.runtime.verify.same_dropout import OtherMasks, Slices, masks_of
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
    """What the user's module gives; ``run`` is there on rank 0 only, the rest on all ranks.

    ``dropped`` says that its dropout was off, ``masked`` that it had the masks of a step;
    ``skipped`` why there is nothing to compare with.
    """

    name: str
    dropped: bool
    skipped: str
    run: OwnRun | None
    masked: bool = False


def verify(worker: Worker, leaves: Sequence[torch.Tensor]) -> VerifyResult:
    """Run a batch through the user's module and through the pipeline, without dropout; compare.

    Weights, gradients, buffers, optimizer and random states are as before afterwards. Every rank
    calls, and gets the same result.

    Raises:
        BadInput: the batch is not the same on all ranks.
        RunFailed: a rank failed.
    """
    return compared_without_dropout(worker, [leaves])


def compared_without_dropout(
    worker: Worker, batches: Sequence[Sequence[torch.Tensor]]
) -> VerifyResult:
    """`verify` of batches that make one step."""
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
    """Within, the pipeline may run; then its buffers, gradients and random states are as before."""
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
    """Why the user's module cannot be run on the batches; empty where it may. Every rank calls."""
    return different_lengths(batches) or room_for_reference(worker, batches)


def reference_of(
    worker: Worker,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    before: Mapping[str, torch.Tensor] | None = None,
    slices: Slices | None = None,
) -> Reference:
    """The user's module on the rows of all batches, run on rank 0; every rank calls.

    On the whole batch, unless samples of it act on one another: then micro-batch by micro-batch.
    ``before`` are values of this rank's buffers that are newer by now, ``slices`` the dropout that
    it has drawn: the module draws the same where it can.
    """
    world, graph, held = worker.world, worker.graph, worker.held
    drawn = world.gather_to_first(slices or {})
    others = {
        n: t for n, t in worker.held.owned_tensors().items() if 0 not in worker.held.holders[n]
    }
    others.update({n: t for n, t in (before or {}).items() if n in others})
    own = {**held.named_tensors(), **(before or {})} if world.rank == 0 else {}
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
    told = world.from_first(None if found is None else replace(found, run=None))
    return told if found is None else found


def run_with_masks(
    worker: Worker,
    values: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    rows: Sequence[range],
    drawn: Sequence[Slices],
) -> tuple[OwnRun, bool]:
    """The module with the dropout that all ranks have drawn, and whether it could be had."""
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
    """Why batches of one step cannot be put together; empty where they can, on all ranks alike."""
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
    """The rows of all micro-batches, in the order of the batches put together."""
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
    """Compare what the pipeline has just computed with the reference; every rank calls.

    Gradients are still sums over ``totals.weight`` terms, times ``seed``; buffers are new.
    """
    if reference.skipped:
        return not_compared(reference.skipped)
    if not isfinite(totals.loss):
        return not_compared(f"the loss is {totals.loss}")
    world = worker.world
    divisor = totals.weight * seed
    sums = {
        name: p.grad
        for name, p in worker.held.named_parameters()
        if p.requires_grad and p.grad is not None and worker.held.owns(name)
    }
    names = {name for name, _ in worker.held.named_buffers()}
    buffers = {name: t for name, t in worker.held.owned_tensors().items() if name in names}
    gradients, buffers = gathered(world, sums), gathered(world, buffers)
    result = None
    if reference.run is not None:
        own = reference.run
        for name in gradients:
            # One at a time: a sum that was sent here goes as its quotient comes.
            gradients[name] = gradients[name] / divisor
        found = Values(totals.loss, gradients, buffers)
        theirs = Values(own.loss, own.gradients, own.buffers)
        result = compare(worker, found, theirs, types=own.types, reference_name=reference.name)
    return world.from_first(result)
