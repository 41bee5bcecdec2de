"""Steps whose loss or gradients are not finite: find the place layer by layer, then raise or skip.

A step costs nothing more for this. Only when its loss or gradient norm is not finite, every rank
runs it again, from the same weights, random numbers and batches, and looks at what every layer
makes. Of what all ranks find, that which is nearest to the cause is the place: parameters that were
bad before the step, then forwards, then backwards; then the earlier micro-batch; then the layer
that comes first in the pass.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from penstock.capture.batch.part import Leaf, PartialLeaf
from penstock.capture.contract import TensorSpec
from penstock.capture.forward.restored import kept_buffers
from penstock.errors import LossNotFinite
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import NoTerms
from penstock.runtime.program import RankStages
from penstock.runtime.stage.partial_recompute import PartlyRecomputed, fastest_call
from penstock.runtime.stage.runner import ModuleRunner, Tensors
from penstock.runtime.update.training import StepBegin, Training, Updated

Batches: TypeAlias = Sequence[Sequence[Leaf]]

Found: TypeAlias = tuple[int, int, int, int, str]
"""Parameters (0), forward (1) or backward (2); micro-batch; layer (negative backwards); rank; the
place in words. The smallest is nearest to the cause."""


def inspect_step(
    engine: Engine, batches: Batches, seed: float, begin: StepBegin
) -> tuple[str, bool]:
    """The place of a step's first bad number in words, and whether it is a parameter.

    All ranks must call this. ``begin`` is what was before the step.
    Weights, buffers and random numbers are kept; gradients are not.
    """
    layers = LayersInspected(engine)
    stages = engine.world.all_succeed(layers.stages)
    after, engine.random.state = engine.random.state, begin.random
    buffers = kept_buffers(engine.held.changed_by_forward().values())
    with engine.graph.untouched_state(), buffers:
        # Gradients of replicas are looked at before their sum.
        engine.run(*batches, stages=stages, sums=False, seed=seed, step=begin.step)
    engine.random.state = after
    # Each rank looks at the rows of the batch that it has.
    in_batch = next(filter(None, engine.world.all_gather(nan_in(batches))), "")
    found = [one for one in engine.world.all_gather(layers.first) if one is not None]
    if not found:
        return (
            "carried out again, the step made no such number (look for failing hardware, or for an "
            "operator whose results vary)",
            False,
        )
    first = min(found)
    return (first[-1], True) if first[0] == 0 else (f"{first[-1]}{in_batch}", False)


class LayersInspected:
    """Inspection of what every layer of this rank makes; ``first`` is nearest to the cause."""

    def __init__(self, engine: Engine) -> None:
        self.first: Found | None = None
        self._engine, self._bad = engine, set[str]()
        layers = {use.name: use.layers for use in engine.graph.parameter_uses}
        own = [layer for program in engine.stages.programs.values() for layer in program.layers]
        for name, parameter in engine.held.named_parameters():
            if not is_finite(parameter):
                # A tied parameter is also used by layers of other ranks.
                layer = next(layer for layer in layers[name] if layer in own)
                place = (
                    f"parameter '{name}' of {self._layer(layer)}) was not finite before the step"
                )
                self._note((0, 0, layer, engine.world.rank, place))

    def stages(self) -> RankStages[ModuleRunner]:
        """This rank's stages, layer by layer."""
        engine, programs = self._engine, self._engine.stages.programs
        runners: dict[int, ModuleRunner] = {}
        for place in engine.places:
            stage, program = engine.plan.stages[place.stage], programs[place.stage]
            shards = engine.shards_of(place.stage)
            runners[place.stage] = PartlyRecomputed(
                engine.graph,
                program,
                engine.world.device,
                call_of=shards.call_of if shards is not None else fastest_call,
                watch=self.look,
                by_block=stage.by_block,
                **engine.options_of(place, program),
            )
        return engine.stages_with(engine.stages.boundaries, programs, runners)

    def look(
        self,
        kind: Literal["forward", "backward"],
        layer: ModuleRunner,
        micro_batch: int,
        made: Tensors,
    ) -> None:
        """Look at what a layer has made of a micro-batch."""
        program, gradient = layer.program, ""
        if kind == "forward":
            counted = [term.loss for term in layer.loss_terms[-1:] if term.weight > 0]
            bad = not (are_sound(made, program.sent) and all(map(is_finite, counted)))
        else:
            for name, parameter in program.module.named_parameters():
                # Gradients are added up, so each is bad in all micro-batches after the first.
                if name not in self._bad and not is_finite(parameter.grad):
                    self._bad.add(name)
                    gradient = gradient or f", gradient of '{name}'"
            bad = bool(gradient) or not are_sound(made, program.received)
        if bad:
            number, start = program.layers.start, self._layer(program.layers.start)
            place = (
                f"it appeared first in the {kind} of {start}, micro-batch {micro_batch}{gradient})"
            )
            passed, order = (1, number) if kind == "forward" else (2, -number)
            self._note((passed, micro_batch, order, self._engine.world.rank, place))

    def _layer(self, layer: int) -> str:
        name, stage = self._engine.graph.layer_names[layer], self._engine.plan.stage_of_layer(layer)
        return f"layer '{name}' (stage {stage}, rank {self._engine.world.rank}"

    def _note(self, found: Found) -> None:
        self.first = found if self.first is None else min(self.first, found)


def is_finite(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor, if there is one, has only finite numbers."""
    return tensor is None or bool(tensor.isfinite().all())


def are_sound(tensors: Tensors, specs: Sequence[TensorSpec]) -> bool:
    """Return whether tensors between layers are finite.

    A tensor without a gradient may have infinite values: masks of attention do.
    """
    for tensor, spec in zip(tensors, specs, strict=False):
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            bad = ~tensor.isfinite() if spec.requires_grad else tensor.isnan()
            if bad.any():
                return False
    return True


def nan_in(batches: Batches) -> str:
    """Describe the first NaN of the batch itself; empty if there is none."""
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


MOST_IN_A_ROW = 10
"""Steps left out one after another at which a run ends: it does not learn any more."""


def after_bad_step(
    engine: Engine,
    training: Training,
    begin: StepBegin,
    batches: Batches,
    seed: float,
    failure: LossNotFinite,
) -> Updated:
    """Find the place of a bad step whose weights are unchanged, then raise or leave the step out.

    All ranks must call this, with equal arguments.
    """
    place = ""
    # Layer by layer, a stage cannot be run on the shards of a tensor group, nor can a micro-batch
    # where the loss needs them all.
    as_a_whole = engine.plan.tensor_groups or engine.graph.whole_loss
    if not isinstance(failure, NoTerms) and not as_a_whole:
        place, is_parameter = inspect_step(engine, batches, seed, begin)
        failure = failure.at(place)
        if is_parameter:
            raise failure
    if training.on_non_finite == "stop":
        raise failure
    if training.left_out == MOST_IN_A_ROW:
        raise failure.at(f"the {MOST_IN_A_ROW} steps before were left out for the same reason")
    begin.restore_buffers()
    return training.leave_out(place or str(failure))
