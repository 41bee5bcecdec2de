"""Compare a pipeline with the user's own module: loss, gradients, buffers.

    rank 0    gathers the values, runs the user's module ----+
    all ranks run the batch through the pipeline            compare
    rank 0    gathers its gradients and buffers -------------+

Dropout is off in both. Without dropout a training step itself can be compared, before its optimizer
changes the weights. Where something differs in low precision, the module runs again in float64:
the limit then follows from how much rounding moves its own results (`second_look`).

A sum in another order moves a number by its last place. Where a ReLU's input is that close to zero,
its gradient is then there or not, and a whole filter's differs by a percent. So the user's module
runs in float64: as it is, and then with every number moved at random by the rounding of float32.
Each tensor of the pipeline must be that of one of these runs, within the usual limit or twice the
largest distance at which the module's own tensors are from one. Or all must be the module's own
within that limit, as where a deep net turns rounding into percents and no run is near another. A
gradient that is zero but for rounding, as of a bias before a batch norm, is judged by others of its
kind, or may be the rounding of the largest gradient.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import Any

import torch

from penstock.capture.batch.layout import BatchLayout
from penstock.capture.batch.part import Leaf
from penstock.capture.forward.restored import kept_buffers
from penstock.capture.record.outside_state import kept_random_state
from penstock.device import free_memory, without_tf32
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import Totals
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.verify.own_module import Reference, Values, in_double, run_own_module
from penstock.runtime.verify.result import (
    NOISE_SHARE,
    TOLERANCES,
    Difference,
    VerifyResult,
    compare_values,
    not_compared,
    pairs_of,
    tolerance_of,
)
from penstock.runtime.verify.step_state import StepState, begin_of, with_attributes
from penstock.runtime.verify.without_dropout import WithoutDropout
from penstock.text import size_text

WHOLE = "your module on the whole batch"
IN_PARTS = "your module, micro-batch by micro-batch"
NO_ROOM = "the memory of rank 0 is too small for the whole batch"


@without_tf32()
def verify(engine: Engine, batches: Sequence[Sequence[torch.Tensor]]) -> VerifyResult:
    """Run a step's batches through the user's module and the pipeline, without dropout; compare.

    Weights, gradients, buffers, optimizer and random states are restored afterwards. All ranks must
    call this, and all get the same result.
    """
    why = obstacle(engine, batches)
    if why:
        return not_compared(why)
    return verify_with(engine, reference_of(engine, batches), batches)


def verify_with(
    engine: Engine, reference: Reference, batches: Sequence[Sequence[torch.Tensor]]
) -> VerifyResult:
    """Run batches through the pipeline, without dropout, and compare with the reference."""
    if reference.skipped:
        return not_compared(reference.skipped)
    again = partial(reference_of, engine, batches, begin_of(engine))
    with untouched(engine):
        with WithoutDropout():
            totals = engine.run(*batches)
        return compared(engine, reference, totals, again)


@contextmanager
def untouched(engine: Engine) -> Iterator[None]:
    """Restore the pipeline's buffers, gradients and random states after runs of it."""
    gradients = engine.buckets.buckets
    tensors = [*engine.held.changed_by_forward().values(), *(b.flat for b in gradients)]
    states = kept_random_state(engine.world.device), engine.random.set_aside()
    with states[0], states[1], engine.graph.untouched_state(), kept_buffers(tensors):
        yield


def obstacle(engine: Engine, batches: Sequence[Sequence[torch.Tensor]]) -> str:
    """The reason why the module cannot run on the batches, or empty; all ranks must call this."""
    return different_lengths(batches) or memory_for_reference(engine, batches)


def reference_of(
    engine: Engine,
    batches: Sequence[Sequence[torch.Tensor]],
    before: StepState | None = None,
    draw: int | None = None,
    limit: float | None = None,
) -> Reference:
    """Run the user's module on rank 0 on the rows of all batches; all ranks must call this.

    It runs on the whole batch or, if samples affect one another or memory is too small for that,
    on each micro-batch. It begins with the state ``before``, or with that of now. With a ``draw``
    it runs in float64, on `moved_by_rounding` numbers. With a ``limit`` it runs to find the cause
    of a difference, which is the reference's name.
    """
    world, graph, held = engine.world, engine.graph, engine.held
    double = draw is not None
    why = memory_for_reference(engine, batches, double=True) if double else ""
    if why:
        return Reference(skipped=why)
    before = before or begin_of(engine)
    whole = held.whole_tensors()
    owned = {n: t for n, t in whole.items() if held.owns(n)}
    others = {n: t for n, t in owned.items() if 0 not in held.holders[held.whole_name(n)]}
    others.update({n: t for n, t in before.tensors.items() if n in others})
    own = {**whole, **before.tensors} if world.rank == 0 else {}
    values = {**own, **world.gather_tensors(others)}  # what is not this rank's may be stale here
    name = ""
    found: Reference | None = None
    if world.rank == 0:
        rows = sum(leaves[0].shape[0] for leaves in batches)
        no_room = lacking(engine, batches, rows, double=double)
        reason = graph.mixing or own_entries(graph.layout, batches) or (NO_ROOM if no_room else "")
        autocast = None if double else engine.autocast_dtype
        try:
            leaves = [torch.cat(parts) for parts in zip(*batches, strict=True)]
            if draw is not None:
                values = dict(zip(values, moved_by_rounding([*values.values()], draw), strict=True))
                leaves = moved_by_rounding(leaves, draw)
            options: Any = {"device": world.device, "autocast": autocast, "double": double}

            def run(rows: Sequence[range]) -> Reference:
                attributes = with_attributes(graph, before, world.device, double=double)
                with engine.shards.left_whole(), attributes:
                    return run_own_module(graph, values, leaves, rows, limit=limit, **options)

            if limit is not None:
                return world.broadcast(run(micro_batch_rows(engine, batches)), Reference)
            if not reason:
                name = WHOLE
                with suppress(torch.OutOfMemoryError):
                    found = run([range(leaves[0].shape[0])])
            if found is None and graph.whole_loss:
                found = Reference(
                    skipped=f"the loss is of the whole batch, but {reason or NO_ROOM}"
                )
            if found is None:
                reason = reason or NO_ROOM
                name = f"{IN_PARTS}, because {reason}"
                found = run(micro_batch_rows(engine, batches))
            rounded = " in float64, up to rounding" * double
            skipped = found.skipped or not_finite(found, reason)
            found = replace(found, name=name + rounded, skipped=skipped)
        except Exception as error:
            text = str(error).partition("\n")[0]
            why = f"{graph.name} does not run by itself on rank 0: {type(error).__name__}: {text}"
            found = Reference(name, skipped=why)
    summary = found and replace(found, values=None, types=())
    received = world.broadcast(summary, Reference)
    return received if found is None else found


def not_finite(found: Reference, mixing: str) -> str:
    """The reason why numbers that are not finite cannot be compared; empty if they can.

    ``mixing`` is the reason if it ran micro-batch by micro-batch.
    """
    assert found.values is not None
    loss, gradients = found.values.loss, found.values.gradients
    if not isfinite(loss):
        if not mixing:
            return ""
        return (
            f"{IN_PARTS}, because {mixing}, gives a loss of {loss}, as a mean over no targets "
            f"does; give each micro-batch some"
        )
    bad = next((name for name, gradient in gradients.items() if not gradient.isfinite().all()), "")
    return f"the gradient of '{bad}' in your module is not finite" if bad else ""


def different_lengths(batches: Sequence[Sequence[torch.Tensor]]) -> str:
    """The reason why batches of one step cannot be joined; empty if none. Equal on all ranks."""
    for number, parts in enumerate(zip(*batches, strict=True)):
        shapes = list(dict.fromkeys(tuple(leaf.shape[1:]) for leaf in parts))
        if len(shapes) > 1:
            return (
                f"tensor {number} of the step's {len(batches)} batches has samples of shapes "
                f"{shapes[0]} and {shapes[1]}, and your module takes one shape at a time; compare "
                f"one of the batches with pipe.verify"
            )
    return ""


def own_entries(layout: BatchLayout, batches: Sequence[Sequence[torch.Tensor]]) -> str:
    """Describe the shared entry that differs between the batches of a step; empty if none does."""
    for index in sorted(layout.shared):
        if any(not torch.equal(leaves[index][0], batches[0][index][0]) for leaves in batches[1:]):
            return f"each batch of the step has its own {layout.leaves[index].name}"
    return ""


def micro_batch_rows(engine: Engine, batches: Sequence[Sequence[Leaf]]) -> list[range]:
    found: list[range] = []
    start = 0
    for leaves in batches:
        for rows in cut_batch(engine.plan, leaves[0].shape[0]).micro_batches:
            found.append(range(start + rows.start, start + rows.stop))
        start = found[-1].stop
    return found


def mixing_warning(engine: Engine, batches: Sequence[Sequence[Leaf]]) -> str:
    """Warn of a module that mixes samples, in a line; empty where nothing is lost."""
    rows, reason = micro_batch_rows(engine, batches), engine.graph.mixing
    if not reason or len(rows) == 1:
        return ""
    return (
        f"warning: your module is computed for each of {len(rows)} micro-batches of at most "
        f"{max(map(len, rows))} samples by itself, as in gradient accumulation, and not for the "
        f"{rows[-1].stop} samples of a step at once, because {reason}"
    )


def counter_warning(engine: Engine, batches: Sequence[Sequence[Leaf]]) -> str:
    """Warn of a number that forward changes, in a line; empty if there is none."""
    count, counters = len(micro_batch_rows(engine, batches)), engine.graph.recorded.counters
    if not counters or count == 1:
        return ""
    return (
        f"warning: forward changes '{counters[0].name}' with each of the {count} micro-batches of "
        f"a step, and your module alone changes it once; count steps outside of forward if that "
        f"matters"
    )


def compared(
    engine: Engine,
    reference: Reference,
    totals: Totals,
    again: Callable[..., Reference],
    seed: float = 1.0,
) -> VerifyResult:
    """Compare what the pipeline has just computed with the reference; all ranks must call this.

    If they differ, ``again`` makes references for a `second_look`, and looks for the cause.

    Gradients are still sums over ``totals.weight`` terms, times ``seed``; buffers are updated.
    """
    if reference.skipped:
        return not_compared(reference.skipped)
    if not isfinite(totals.loss):
        return not_compared(f"the loss is {totals.loss}")
    world = engine.world
    divisor = totals.weight * seed
    held = {
        name: p.grad
        for name, p in engine.held.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    sums = {n: g for n, g in engine.shards.whole(held).items() if engine.held.owns(n)}
    names = {name for name, _ in engine.held.named_buffers()}
    buffers = {name: t for name, t in engine.held.owned_tensors().items() if name in names}
    gradients, buffers = world.gather_tensors(sums), world.gather_tensors(buffers)
    for name in gradients:
        # One at a time, so that each gathered sum is freed when its mean is computed.
        gradients[name] = gradients[name] / divisor
    found = Values(totals.loss, totals.gradient_norm, gradients, buffers)
    own = reference.values
    result = None
    if own is not None:
        limit = tolerance_of(engine, reference.types)
        result = compare_values(engine, found, own, limit, reference.name)
    result = world.broadcast(result, VerifyResult, Difference)
    result = second_look(engine, result, found, own, again)
    if result.difference is None:
        return result
    return replace(result, cause=again(None, result.tolerance).name)


def memory_for_reference(
    engine: Engine, batches: Sequence[Sequence[torch.Tensor]], *, double: bool = False
) -> str:
    """The reason why no micro-batch fits on rank 0; empty if one may. All ranks must call this."""
    why = ""
    if engine.world.rank == 0:
        most = max(map(len, micro_batch_rows(engine, batches)))
        why = lacking(engine, batches[:1], most, double=double)
    return engine.world.broadcast(why)


def lacking(
    engine: Engine, batches: Sequence[Sequence[torch.Tensor]], rows: int, *, double: bool = False
) -> str:
    """The reason why the reference does not fit here, ``rows`` rows at once; empty if it may.

    The estimate is a lower bound: operators inside a layer may keep more than their results. A
    ``double`` reference is in float64, taken to be twice as large.
    """
    uses = engine.graph.parameter_uses
    others = sum(use.bytes for use in uses if 0 not in engine.held.holders.get(use.name, (0,)))
    divided = sum(use.bytes for use in uses if engine.shards.dim_of(use.name) is not None)
    others += divided * (1 - 1 / len(engine.shards.ranks))
    gradients = sum(use.bytes for use in uses if use.requires_grad and not use.is_buffer)
    kept = activation_bytes(engine, batches[0], rows)
    to_run = {"weights of other ranks": others, "gradients": gradients, "activations": kept}
    to_compare = {"gradients": gradients, "gradients of the pipeline": gradients}
    for parts, device in ((to_run, engine.world.device), (to_compare, torch.device("cpu"))):
        free, wanted = free_memory(device), sum(parts.values())
        if wanted * (2 if double else 1) > free.bytes:
            listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
            return (
                f"your module left whole needs at least {size_text(wanted)} more on rank 0 "
                f"({listed}), where {size_text(free.bytes)} can be had ({free.limit}); compare "
                f"a smaller model of its kind, or give rank 0 more memory"
            )
    return ""


def activation_bytes(engine: Engine, leaves: Sequence[torch.Tensor], rows: int) -> float:
    """The bytes kept for the backward: the tensors between layers that require gradients."""
    graph, autocast = engine.graph, engine.autocast_dtype
    lengths = graph.lengths_of(dict(enumerate(leaves)))
    total = 0.0
    for crossing, _, _ in graph.crossings:
        if crossing.requires_grad:
            spec = crossing.at(lengths)
            size = spec.dtype.itemsize
            share = min(size, autocast.itemsize) / size if autocast is not None else 1.0
            total += share * spec.bytes_for(rows)
    return total


RUNS = 16
"""Most runs of the module. A ReLU at zero changes sides in about every second run."""

MOVED_BY = 2.0**-22
"""The relative size of a move: that of a few sums in float32."""

ROOM = 2.0
"""Multiple of the module's own difference that a tensor's may reach."""

IN_A_SUM = 16.0
"""Roundings of float32, in which sums are taken, that may add up in a gradient that is zero."""

MOST = 4.0
"""Multiple of the usual limit beyond which no tensor may be."""


def second_look(
    engine: Engine,
    first: VerifyResult,
    found: Values,
    own: Values | None,
    again: Callable[[int], Reference],
) -> VerifyResult:
    """``first``, or that everything is equal up to rounding; all ranks must call this.

    ``found`` are the pipeline's values and ``own`` the module's, on rank 0. ``again`` runs the
    module in float64, on numbers that are `moved_by_rounding` by a draw.
    """
    if first.equal or first.tolerance <= TOLERANCES[torch.float64]:
        return first
    ours, theirs, negligible = dict[str, float](), dict[str, float](), set[str]()
    for draw in range(RUNS):
        reference = again(draw)
        if reference.skipped:
            return first
        second: VerifyResult | None = None
        if reference.values is not None and own is not None:
            for nearest, values in ((ours, found), (theirs, own)):
                for pair in pairs_of(engine, values, reference.values):
                    nearest[pair.name] = min(nearest.get(pair.name, inf), pair.gap)
                    negligible |= {pair.name} if pair.is_negligible else set()
            second = explained(first, reference.name, ours, theirs, negligible)
        second = engine.world.broadcast(second, VerifyResult, Difference)
        if second.equal:
            return second
    return first


def explained(
    first: VerifyResult,
    name: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    negligible: Collection[str],
) -> VerifyResult:
    """``first``, or its tensors as equal to its reference or ``name`` if rounding explains it."""
    usual = first.tolerance
    noise = ROOM * max(gap for n, gap in theirs.items() if n not in negligible)
    limit = max(usual, min(noise, MOST * usual))
    if first.largest <= limit:
        return replace(first, tolerance=limit, difference=None)
    coarsest = next(dtype for dtype, known in TOLERANCES.items() if known == usual)
    summed = IN_A_SUM * torch.finfo(torch.float32).eps
    of_largest = max(torch.finfo(coarsest).eps, summed) / NOISE_SHARE
    small = max(usual, of_largest, *(ROOM * theirs[n] for n in negligible if n in theirs))
    if any(not gap <= (small if n in negligible else limit) for n, gap in ours.items()):
        return first
    largest = max(gap for n, gap in ours.items() if n not in negligible)
    return replace(first, largest=largest, tolerance=limit, difference=None, reference=name)


def moved_by_rounding(tensors: Sequence[torch.Tensor], draw: int) -> list[torch.Tensor]:
    """The tensors in float64, moved by rounding unless ``draw`` is 0."""
    generator = torch.Generator().manual_seed(draw)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        found = in_double(tensor)
        if not draw or not found.is_floating_point():
            return found
        signs = 2 * torch.randint(2, found.shape, generator=generator) - 1
        return found * (1 + MOVED_BY * signs.to(found.device))

    return [*map(one, tensors)]
