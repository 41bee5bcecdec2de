"""Stages that run layer by layer, and recompute each layer right before its own backward.

Each layer runs like a stage of its own, so autograd has one graph for each. It keeps only its input
tensors, and one layer at a time has its activations (Chen et al., Training Deep Nets with Sublinear
Memory Cost, 2016). Where somebody watches the layers, the stage may also keep or recompute as a
whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from penstock.capture.contract import TensorSpec
from penstock.capture.forward.call import StageCall
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.runtime.stage.parameter_shards import gather_ahead
from penstock.runtime.stage.runner import ModuleRunner, StageInputs, Tensors

Watch: TypeAlias = Callable[[Literal["forward", "backward"], ModuleRunner, int, Tensors], None]
"""Callback with a part's results: sent tensors, or gradients of received ones and parameters."""

CallOf: TypeAlias = Callable[[StageProgram], StageCall | None]
"""Factory of the call in training of a stage, or of a part of it (``None``: the fastest)."""


def fastest_call(_: StageProgram) -> None:
    """The `CallOf` of stages that are neither compiled nor divided."""


@dataclass(frozen=True)
class RecomputeRun:
    """A layer of a stage, or several together that cannot run separately.

    ``leaves`` are the indexes, among the stage's leaves of the batch, of those that it reads.
    """

    program: StageProgram
    leaves: tuple[int, ...]

    def leaves_of(self, work: StageInputs) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The leaves of the batch that it reads, by micro-batch."""
        return tuple(tuple(own[i] for i in self.leaves) for own in work.leaves)


def recompute_run(graph: LayerGraph, layers: range, program: StageProgram) -> RecomputeRun:
    """The part ``layers`` of the stage ``program``, with the user's own parameters and buffers."""
    part = graph.stage(layers)
    if not set(part.batch_inputs) <= set(program.batch_inputs):
        raise BadInput(
            f"layers {layers[0]} to {layers[-1]} cannot be run apart from their stage, because "
            f"they take the number of samples from elsewhere; recompute the whole stage"
        )
    leaves = tuple(program.batch_inputs.index(leaf) for leaf in part.batch_inputs)
    return RecomputeRun(part, leaves)


def single_layers(graph: LayerGraph, program: StageProgram) -> tuple[RecomputeRun, ...]:
    """The layers of a stage one by one, or several together that cannot run separately."""
    parts: list[RecomputeRun] = []
    start, last = program.layers.start, program.layers.stop
    for stop in range(start + 1, last + 1):
        try:
            parts.append(recompute_run(graph, range(start, stop), program))
        except BadInput:
            if stop == last:
                return (recompute_run(graph, program.layers, program),)
            continue
        start = stop
    return tuple(parts)


class PartlyRecomputed(ModuleRunner):
    """A stage that runs part by part in training, and as a whole in evaluation.

    With ``by_block`` each part keeps only its inputs, and runs again right before its own backward.
    ``call_of`` creates the calls of stage and parts in training (``None``: the fastest). ``watch``
    receives what every part makes in its forwards and backwards of a micro-batch; then each runs
    alone. All other options are those of `ModuleRunner`.
    """

    def __init__(
        self,
        graph: LayerGraph,
        program: StageProgram,
        device: torch.device,
        *,
        call_of: CallOf = fastest_call,
        watch: Watch | None = None,
        by_block: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(program, device, call=call_of(program), **options)
        options.pop("around_last_backward", None)
        self._parts = parts = single_layers(graph, program)
        calls = [call_of(part.program) for part in parts]
        if by_block and watch is None:
            gather_ahead(calls)
        self._runners = [
            ModuleRunner(part.program, device, call=call, **options)
            for part, call in zip(parts, calls, strict=True)
        ]
        every = (p for part in parts for p in part.program.module.parameters())
        trained = [id(parameter) for parameter in every if parameter.requires_grad]
        # Then the gradient of a parameter arrives several times.
        self._share_parameters = len(set(trained)) < len(trained)
        self._watch = watch
        self._by_block = by_block

    def begin(self, work: StageInputs) -> None:
        if self._by_block:
            work = replace(work, recomputed=frozenset(range(len(work.rows))))
        super().begin(work)
        for part, runner in zip(self._parts, self._runners, strict=True):
            runner.begin(replace(work, leaves=part.leaves_of(work), last_backward=-1))
        self._runners[-1].loss_terms = self.loss_terms

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Run the parts; those that recompute keep only their inputs."""
        without_rows = self._work.rows[micro_batch] == 0 and not self._synchronised
        if without_rows or not self._work.training:
            return super().forward(micro_batch, received)
        known = dict(zip(names(self.program.received), received, strict=False))
        for part, runner in zip(self._parts, self._runners, strict=True):
            runner.seed = self.seed
            # A tensor that several parts read is a separate leaf in each.
            inputs = [detached(known.get(name)) for name in names(part.program.received)]
            sent = runner.forward(micro_batch, inputs)
            if self._watch is not None and self._work.rows[micro_batch]:
                self._watch("forward", runner, micro_batch, sent)
            known |= zip(names(part.program.sent), sent, strict=False)
        return [known[name] for name in names(self.program.sent)]

    def recompute(self, micro_batch: int) -> Tensors:
        """Run again the parts that have kept only their inputs."""
        for runner in self._runners:
            runner.recompute(micro_batch)
        return ()

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the backwards of the parts, last part first."""
        return self._around_parts(micro_batch, lambda: self._backwards("B", micro_batch, gradients))

    def backward_input(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the first halves of the parts' backwards."""
        return self._backwards("I", micro_batch, gradients)

    def backward_weight(self, micro_batch: int) -> Tensors:
        """Run the second halves of the parts' backwards."""

        def halves() -> Tensors:
            for runner in reversed(self._runners):
                runner.backward_weight(micro_batch)
                if self._watch is not None:
                    self._watch("backward", runner, micro_batch, ())
            return ()

        return self._around_parts(micro_batch, halves)

    def _backwards(self, kind: Literal["B", "I"], micro_batch: int, gradients: Tensors) -> Tensors:
        known = dict(zip(names(self.program.sent), gradients, strict=False))
        for runner in reversed(self._runners):
            program = runner.program
            given = [known.pop(name, None) for name in names(program.sent)]
            if self._by_block:
                runner.recompute(micro_batch)
            found = runner.work(kind)(micro_batch, given)
            if self._watch is not None:
                self._watch("backward", runner, micro_batch, found)
            add_gradients(known, program.received, found)
        return [known.get(name) for name in names(self.program.received)]

    def _around_parts(self, micro_batch: int, work: Callable[[], Tensors]) -> Tensors:
        """Run ``work``, and start sums over ranks when the gradients of all parts are complete."""
        if self._share_parameters:
            found = work()
            with self._around_backward(micro_batch):
                return found
        with self._around_backward(micro_batch):
            return work()


def add_gradients(
    known: dict[str, torch.Tensor | None], specs: Sequence[TensorSpec], found: Tensors
) -> None:
    """Add gradients of tensors to those that are known, by name."""
    for name, gradient in zip(names(specs), found, strict=False):
        before = known.get(name)
        if before is not None and gradient is not None:
            gradient = before + gradient
        known[name] = before if gradient is None else gradient


def names(specs: Sequence[TensorSpec]) -> Iterator[str]:
    """The names of tensors."""
    return (spec.name for spec in specs)


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same values without autograd history."""
    return None if tensor is None else tensor.detach()
