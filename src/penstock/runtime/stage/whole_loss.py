"""The last stage where the loss is a function of all samples of a step at once.

    F0 F1 F2 F3 | ends of all samples, the loss once, slopes of its ends | B0 B1 B2 B3

The stage's other layers, the network, run micro-batch by micro-batch. What enters the loss, its
ends, is kept. With the last forward the loss is computed on the ends of all micro-batches and
replicas, equally by every replica, and each backward starts from the gradients of its own ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch

from penstock.capture.contract import TensorSpec
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.runtime.stage.partial_recompute import RecomputeRun, detached, names, recompute_run
from penstock.runtime.stage.runner import (
    LossTerm,
    ModuleRunner,
    StageInputs,
    TakeOutputs,
    Tensors,
)

MakeNetwork: TypeAlias = Callable[[StageProgram], ModuleRunner]
"""Factory of the runner of a stage's layers without the loss."""


class EndOfPipeline(ModuleRunner):
    """Runner of a last stage with such a loss; ``network`` makes the runner of its other layers.

    ``add_up`` sums a tensor over the stage's replicas in place. All other arguments are those of
    `ModuleRunner`.
    """

    def __init__(
        self,
        graph: LayerGraph,
        program: StageProgram,
        device: torch.device,
        network: MakeNetwork,
        *,
        add_up: Callable[[torch.Tensor], object] | None,
        autocast: torch.dtype | None,
        take_outputs: TakeOutputs | None,
    ) -> None:
        super().__init__(program, device, autocast=autocast)
        self._specs_of_outputs = graph.outputs.specs if program.outputs else ()
        self._give_outputs, self._add_up = take_outputs, add_up
        start, last = program.layers.start, program.layers.stop - 1
        self._end = recompute_run(graph, range(last, last + 1), program, recomputed=False)
        take = self._take_outputs_of_all if take_outputs is not None else None
        self._loss = ModuleRunner(self._end.program, device, autocast=autocast, take_outputs=take)
        self._first: RecomputeRun | None = None
        if start < last:
            self._first = recompute_run(graph, range(start, last), program, recomputed=False)
            self._network = network(self._first.program)
        self._ends: dict[int, dict[str, torch.Tensor]] = {}
        self._slopes: dict[str, torch.Tensor | None] = {}
        self._forwards = 0

    def begin(self, work: StageInputs) -> None:
        """Discard the last iteration and take the inputs of the next."""
        super().begin(work)
        if self._first is not None:
            self._network.begin(replace(work, leaves=self._first.leaves_of(work)))
        self._ends, self._slopes, self._forwards = {}, {}, 0

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Run the network; with the last micro-batch also the loss of all."""
        known = dict(zip(names(self.program.received), received, strict=False))
        if self._first is not None:
            inputs = [known.get(name) for name in names(self._first.program.received)]
            sent = self._network.forward(micro_batch, inputs)
            known |= zip(names(self._first.program.sent), sent, strict=False)
        if self._work.rows[micro_batch]:
            ends = {name: detached(known[name]) for name in names(self._end.program.received)}
            self._ends[micro_batch] = {n: t for n, t in ends.items() if t is not None}
        self._forwards += 1
        if self._forwards == len(self._work.rows):
            self._run_loss()
        return ()

    def _run_loss(self) -> None:
        work = self._work
        specs = [spec.at(work.lengths) for spec in self._end.program.received]
        ends = [
            self._of_all(spec, {m: own[spec.name] for m, own in self._ends.items()})
            for spec in specs
        ]
        leaves: list[torch.Tensor] = []
        end = self._end.program
        read = zip(end.batch_inputs, *self._end.leaves_of(work), strict=True)
        for number, *own in read:
            shape, dtype = (work.samples, *own[0].shape[1:]), own[0].dtype
            has_values = number not in end.sized
            known = {m: leaf for m, leaf in enumerate(own) if work.rows[m] and has_values}
            leaves.append(self._of_all(TensorSpec("", shape, dtype, 0), known))
        self._ends.clear()
        self._loss.begin(
            StageInputs(
                (tuple(leaves),),
                (work.samples,),
                training=work.training,
                lengths=work.lengths,
                names=work.names[-1:],
            )
        )
        self._loss.seed = self.seed
        self._loss.forward(0, ends)
        (term,) = self._loss.loss_terms
        own = sum(work.rows)
        self.loss_terms = [LossTerm(term.loss, term.weight * (own / work.samples))] if own else []
        if work.training:
            slopes = self._loss.backward(0, ())
            self._slopes = dict(zip(names(specs), slopes, strict=False))

    def _of_all(self, spec: TensorSpec, own: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """A tensor of all samples, from this replica's rows of it and those of the others.

        One without samples is equal in all of them; it comes from the first sample's.
        """
        work = self._work
        whole = spec.zeros(work.samples, work.lengths, self.device)
        for micro_batch, tensor in own.items():
            rows = work.ranges[micro_batch]
            if spec.batch_dim >= 0:
                rows_of_samples(spec, whole, rows).copy_(tensor)
            elif rows.start == 0:
                whole.copy_(tensor)
        if self._add_up is not None:
            # As bytes, of which all but one summand are zero, so that each type stays exact.
            self._add_up(whole.reshape(-1).view(torch.uint8))
        return whole

    def _slopes_of(self, micro_batch: int) -> dict[str, torch.Tensor | None]:
        """The gradients of a micro-batch's ends; those of an end without samples are shared out."""
        work, found = self._work, dict[str, torch.Tensor | None]()
        for spec in self._end.program.received:
            slope, rows = self._slopes.get(spec.name), work.ranges[micro_batch]
            if slope is not None and spec.batch_dim >= 0:
                slope = rows_of_samples(spec.at(work.lengths), slope, rows)
            elif slope is not None:
                slope = slope * (len(rows) / work.samples)
            found[spec.name] = slope
        return found

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the network's backward from the gradients of the ends."""
        return self._back(micro_batch, lambda given: self._network.backward(micro_batch, given))

    def backward_input(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the first half of the network's backward."""
        network = self._network
        return self._back(micro_batch, lambda given: network.backward_input(micro_batch, given))

    def _back(self, micro_batch: int, run: Callable[[Tensors], Tensors]) -> Tensors:
        known = self._slopes_of(micro_batch)
        if self._first is not None:
            program = self._first.program
            found = run([known.pop(name, None) for name in names(program.sent)])
            for name, gradient in zip(names(program.received), found, strict=False):
                direct = known.get(name)
                if gradient is not None:
                    known[name] = gradient if direct is None else gradient + direct
        return [known.get(name) for name in names(self.program.received)]

    def backward_weight(self, micro_batch: int) -> Tensors:
        """Run the second half of the network's backward."""
        return self._network.backward_weight(micro_batch) if self._first is not None else ()

    def recompute(self, micro_batch: int) -> Tensors:
        """Run the network again; the ends are kept."""
        return self._network.recompute(micro_batch) if self._first is not None else ()

    def _take_outputs_of_all(
        self, _: int, outputs: Mapping[int, torch.Tensor], weight: torch.Tensor | None
    ) -> None:
        """Hand the model's outputs on, micro-batch by micro-batch."""
        work = self._work
        assert self._give_outputs is not None
        for micro_batch, rows in enumerate(work.ranges):
            own = {
                number: tensor if spec.batch_dim < 0 else rows_of_samples(spec, tensor, rows)
                for (number, tensor), spec in zip(
                    sorted(outputs.items()),
                    (spec.at(work.lengths) for spec in self._specs_of_outputs),
                    strict=True,
                )
            }
            self._give_outputs(micro_batch, own, weight)


def rows_of_samples(spec: TensorSpec, tensor: torch.Tensor, rows: range) -> torch.Tensor:
    """The rows of some samples, of a tensor with samples."""
    each = spec.rows_per_sample
    return tensor.narrow(spec.batch_dim, rows.start * each, len(rows) * each)
