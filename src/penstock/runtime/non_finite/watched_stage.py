"""A stage that runs layer by layer, and looks at what every layer makes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from penstock.capture.layer_graph import LayerGraph, StageProgram
from penstock.errors import BadInput
from penstock.plan.plan import Stage
from penstock.runtime.non_finite.sign import SignLog, is_sound
from penstock.runtime.stages.partial_recompute import (
    PartlyRecomputed,
    RecomputeRun,
    recompute_run,
)
from penstock.runtime.stages.runner import ModuleRunner, StageInputs, Tensors

__all__ = ["WatchedStage", "single_layers"]


class WatchedStage(PartlyRecomputed):
    """Runs a stage layer by layer; ``log`` gets what is not finite.

    ``options`` are those of `ModuleRunner`.
    """

    def __init__(
        self,
        number: int,
        program: StageProgram,
        layers: tuple[RecomputeRun, ...],
        device: torch.device,
        log: SignLog,
        **options: Any,
    ) -> None:
        make = partial(WatchedLayer, number, log)
        super().__init__(program, layers, device, make=make, **options)

    def begin(self, work: StageInputs) -> None:
        """Discard the last iteration and take the inputs of the next."""
        super().begin(work)
        self._apart = frozenset(range(len(work.rows)))


class WatchedLayer(ModuleRunner):
    """Runs one layer of a stage, and looks at all that it makes."""

    def __init__(
        self, stage: int, log: SignLog, program: StageProgram, *given: Any, **options: Any
    ):
        super().__init__(program, *given, **options)
        self._stage, self._log, self._layer = stage, log, program.layers.start
        self._bad: set[str] = set()

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Run the layer; look at its outputs, and at the loss in the last layer."""
        sent = super().forward(micro_batch, received)
        if self._work.rows[micro_batch]:
            bad_loss = self.program.is_last and self._has_bad_loss(micro_batch)
            if bad_loss or not is_sound(sent, self.program.sent):
                self._log.add("forward", self._stage, self._layer, micro_batch)
        return sent

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the backward; look at all gradients."""
        return self._looked_at(micro_batch, super().backward(micro_batch, gradients))

    def backward_input(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the first half of the backward; look at the gradients that it makes."""
        return self._looked_at(micro_batch, super().backward_input(micro_batch, gradients))

    def backward_weight(self, micro_batch: int) -> Tensors:
        """Run the second half of the backward; look at the parameters' gradients."""
        return self._looked_at(micro_batch, super().backward_weight(micro_batch))

    def _has_bad_loss(self, micro_batch: int) -> bool:
        term = self._loss_places[micro_batch]
        return bool(term.weight > 0) and not bool(term.loss.isfinite())

    def _looked_at(self, micro_batch: int, gradients: Tensors) -> Tensors:
        found = not is_sound(gradients, self.program.received)
        tensor = ""
        for name, parameter in self.program.module.named_parameters():
            # Gradients are added up, so each is bad in all micro-batches after the first.
            gradient = parameter.grad if name not in self._bad else None
            if gradient is not None and not bool(gradient.isfinite().all()):
                self._bad.add(name)
                tensor = tensor or name
        if found or tensor:
            self._log.add("backward", self._stage, self._layer, micro_batch, tensor)
        return gradients


def single_layers(
    graph: LayerGraph, stage: Stage, program: StageProgram
) -> tuple[RecomputeRun, ...]:
    """The layers of a stage one by one, or several together that cannot run apart."""
    parts: list[RecomputeRun] = []
    start = stage.layers.start
    recomputed: Mapping[int, bool] = {
        layer: stage.recompute and layer in (stage.recompute_layers or stage.layers)
        for layer in stage.layers
    }
    for stop in range(start + 1, stage.layers.stop + 1):
        try:
            parts.append(
                recompute_run(graph, range(start, stop), program, recomputed=recomputed[start])
            )
        except BadInput:
            if stop < stage.layers.stop:
                continue
            return (recompute_run(graph, stage.layers, program, recomputed=stage.recompute),)
        start = stop
    return tuple(parts)
