"""Finds where a step became NaN or infinite, by carrying it out again layer by layer.

A step costs nothing more for this. Only when its loss or gradient norm is not finite, every rank
runs it again, from the same weights, random numbers and batches. It looks at the output of every
layer, and at the gradients of every layer's backward. Of all ranks' signs, the one nearest to the
cause is the place.

    weights    a parameter was bad before the step
    forward    of two micro-batches the earlier one, of two layers the earlier one
    backward   of two micro-batches the earlier one, of two layers the later one
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from penstock.capture.batch_part import Leaf, PartialLeaf
from penstock.capture.kept_buffers import kept_buffers
from penstock.runtime.non_finite.sign import PASSES, Sign, SignLog
from penstock.runtime.non_finite.watched_stage import WatchedStage, single_layers
from penstock.runtime.rank import Worker
from penstock.runtime.rank_stages import RankStages
from penstock.runtime.stages.random_stream import RandomState

__all__ = ["Inspection", "inspect_step"]

Batches: TypeAlias = Sequence[Sequence[Leaf]]


class Inspection:
    """What was found: ``sign`` (``None``: nothing) and the place in words."""

    def __init__(self, worker: Worker, sign: Sign | None, in_batch: str) -> None:
        self.sign = sign
        self._names, self._in_batch = worker.graph.layer_names, in_batch

    @property
    def is_of_weights(self) -> bool:
        """Whether weights were bad before the step, so that no batch is to blame."""
        return self.sign is not None and PASSES[self.sign.number] == "weights"

    def __str__(self) -> str:
        """The place in words."""
        sign = self.sign
        if sign is None:
            return (
                "carried out again, the step made no such number (look for failing hardware, or "
                "for an operator whose results vary)"
            )
        layer = f"layer '{self._names[sign.layer]}' (stage {sign.stage}, rank {sign.rank}"
        if self.is_of_weights:
            return f"parameter '{sign.tensor}' of {layer}) was not finite before the step"
        kind = PASSES[sign.number]
        gradient = f", gradient of '{sign.tensor}'" if sign.tensor else ""
        return (
            f"it appeared first in the {kind} of {layer}, micro-batch {sign.micro_batch}"
            f"{gradient}){self._in_batch}"
        )


def inspect_step(worker: Worker, batches: Batches, seed: float, random: RandomState) -> Inspection:
    """Carry out a step again and look for its first bad number; all ranks must call this.

    ``random`` is the state of this rank's random numbers before the step. Weights, buffers and
    random numbers are kept; gradients are not.

    Raises:
        RunFailed: this rank or another failed; the worker cannot be used again.
    """
    log = SignLog(worker.world.rank)
    note_weights(worker, log)
    stages = worker.world.agreed(lambda: watched_stages(worker, log))
    worker.clock.restart()
    worker.buckets.zero()
    after, worker.random.state = worker.random.state, random
    named = [dict(enumerate(leaves)) for leaves in batches]
    buffers = [buffer for _, buffer in worker.held.named_buffers()]
    with kept_buffers(buffers), worker.failures.shared(), worker.random.drawn():
        for leaves in named:
            lengths = worker.graph.lengths_of(leaves)
            ready = stages.prepared(leaves[0].shape[0], True, lengths)
            # No batch is the last one: gradients of replicas are looked at before their sum.
            stages.take(leaves, ready.iteration, seed, last=False)
            stages.run(ready)
    worker.random.state = after
    found = [sign for sign in worker.world.gather(log.first, Sign) if sign is not None]
    in_batch = nan_in(batches)
    if any(isinstance(leaf, PartialLeaf) for leaf in batches[0]):
        # Each rank looks at the rows that it has.
        in_batch = next(filter(None, worker.world.gather(in_batch)), "")
    return Inspection(worker, min(found, default=None), in_batch)


def nan_in(batches: Batches) -> str:
    """What is wrong with the batch itself, if anything."""
    for leaves in batches:
        for number, leaf in enumerate(leaves):
            rows, values = range(leaf.shape[0]), leaf
            if isinstance(leaf, PartialLeaf):
                rows, values = [n for own in leaf.rows for n in own], leaf.held
            if isinstance(values, torch.Tensor) and values.is_floating_point():
                bad = values.isnan().reshape(len(rows), -1).any(1).nonzero()
                if len(bad):
                    return f"; tensor {number} of the batch has NaN in row {rows[int(bad[0])]}"
    return ""


def note_weights(worker: Worker, log: SignLog) -> None:
    """Note the parameters of this rank that are not finite."""
    layers = {use.name: use.layers for use in worker.graph.parameter_uses}
    own = [layer for program in worker.stages.programs.values() for layer in program.layers]
    for name, parameter in worker.held.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            # A tied parameter is also used by layers of other ranks.
            layer = next(layer for layer in layers[name] if layer in own)
            log.add("weights", worker.plan.stage_of_layer(layer), layer, tensor=name)


def watched_stages(worker: Worker, log: SignLog) -> RankStages[WatchedStage]:
    """This rank's stages, layer by layer."""
    programs = worker.stages.programs
    runners: dict[int, WatchedStage] = {}
    for place in worker.places:
        number, program = place.stage, programs[place.stage]
        layers = single_layers(worker.graph, worker.plan.stages[number], program)
        norm = worker.norm_of(place, program)
        runners[number] = WatchedStage(
            number,
            program,
            layers,
            worker.world.device,
            log,
            autocast=worker.autocast_dtype,
            synchronised=norm is not None,
            around_forward=norm.counting if norm is not None else None,
        )
    return RankStages(
        worker.plan,
        worker.world,
        worker.transport,
        worker.clock,
        boundaries=worker.stages.boundaries,
        programs=programs,
        runners=runners,
        metrics=None,
    )
