"""Runs the forwards of this rank's stages in evaluation mode, for evaluation and prediction."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import fx

from penstock.capture.batch_part import Leaf, PartialLeaf
from penstock.capture.evaluation import set_training
from penstock.capture.layer_graph import LayerGraph, StageProgram
from penstock.runtime.metrics import Totals
from penstock.runtime.rank import Worker
from penstock.runtime.rank_stages import RankStages, Ready
from penstock.runtime.stages.call import ModuleCall
from penstock.runtime.stages.runner import LossTerm, StageInputs, Tensors, Work
from penstock.runtime.transport.messages import BoundaryTensors
from penstock.runtime.user_metrics import Means, MetricSums
from penstock.schedule.action import ActionKind

__all__ = ["ForwardPass"]

TakeOutputs = Callable[[int, Mapping[int, torch.Tensor]], None]
"""Takes the number of a micro-batch and this rank's rows of the model's outputs, by number."""


class ForwardPass:
    """The stages of ``graph`` on this rank, with the same parameters that are trained.

    ``graph`` is the trained graph or a view of it, ``boundaries`` are its boundary tensors.
    ``take_outputs`` receives the model's outputs from the stages that compute them. ``metrics`` are
    updated with them.
    """

    def __init__(
        self,
        worker: Worker,
        graph: LayerGraph,
        boundaries: Sequence[BoundaryTensors],
        take_outputs: TakeOutputs,
        metrics: MetricSums | None = None,
    ) -> None:
        self.graph = graph
        self._metrics, self._worker = metrics, worker
        programs = {
            place.stage: graph.stage(worker.plan.stages[place.stage].layers)
            for place in worker.places
        }
        share_tensors(programs, worker)
        runners = {
            stage: ForwardRunner(program, worker, take_outputs)
            for stage, program in programs.items()
        }
        self._stages = RankStages(
            worker.plan,
            worker.world,
            worker.transport,
            worker.clock,
            boundaries=boundaries,
            programs=programs,
            runners=runners,
            metrics=metrics,
        )

    def run(self, leaves: Mapping[int, Leaf]) -> tuple[Totals, Means]:
        """Run all forwards on one batch. Returns the totals and the means of the metrics.

        No weights or buffers change.

        Raises:
            BadInput: the ranks were given different batches.
            RunFailed: this rank or another failed; the worker cannot be used again.
        """
        worker, numbers = self._worker, self._worker.numbers
        worker.restart_clock()
        ready = self.prepared(leaves)
        if not any(isinstance(leaf, PartialLeaf) for leaf in leaves.values()):
            worker.agree_on_lengths([ready.iteration.size])
        modules = [program.module for program in self._stages.programs.values()]
        for module in modules:
            set_training(module, False)
        try:
            with worker.failures.shared(), worker.random.set_aside():
                if self._metrics is not None:
                    self._metrics.begin()
                self._stages.take(leaves, ready.iteration)
                terms = self._stages.run(ready)
                # The ranks of a tensor group have equal terms, of which the first rank's count.
                counted = [] if worker.held.place else terms
                own = numbers.own([list(leaves.values())], counted, None, self._metrics)
                rows = numbers.exchange(own, "the end of the iteration")
            return numbers.put_together(rows, self._metrics)
        finally:
            for module in modules:
                # A traced stage has its own graph here; a chain's modules belong to the user.
                if not isinstance(module, fx.GraphModule):
                    set_training(module, True)

    def prepared(self, leaves: Mapping[int, Leaf]) -> Ready:
        """The prepared work for batches of this size.

        Raises:
            BadInput: the captured model does not accept the lengths of this batch.
        """
        rows = next(iter(leaves.values())).shape[0]
        return self._stages.prepared(rows, False, self.graph.lengths_of(leaves))


class ForwardRunner:
    """Runs the forwards of one stage for the action loop."""

    def __init__(self, program: StageProgram, worker: Worker, take_outputs: TakeOutputs) -> None:
        self.loss_terms: list[LossTerm] = []
        self.seed = 1.0
        self._program = program
        divided = worker.tensor.is_divided
        self._call = worker.tensor.call_of(program) if divided else ModuleCall(program.module)
        self._autocast = worker.autocast if worker.autocast_dtype is not None else nullcontext
        self._take_outputs = take_outputs
        self._work = StageInputs((), ())

    def begin(self, work: StageInputs) -> None:
        """Take the inputs of the next iteration."""
        self._work = work
        self.loss_terms = []

    def has_work(self, kind: ActionKind) -> bool:
        """Whether this is a forward."""
        return kind == "F"

    def work(self, kind: ActionKind) -> Work:
        """The function that runs forwards; there are no other actions."""
        assert kind == "F"
        return self.forward

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Run the stage on this rank's rows; a replica without rows does nothing."""
        if not self._work.rows[micro_batch]:
            return ()
        program = self._program
        with torch.no_grad(), self._autocast():
            made = self._call.run(self._work.leaves[micro_batch], received)  # pyright: ignore[reportArgumentType]
        if program.is_last:
            place = len(program.sent)
            self.loss_terms.append(LossTerm(made[place], made[place + 1]))
        if program.outputs:
            found = made[-len(program.outputs) :]
            self._take_outputs(micro_batch, dict(zip(program.outputs, found, strict=True)))
        return [tensor.to(spec.dtype) for spec, tensor in zip(program.sent, made, strict=False)]


def share_tensors(programs: Mapping[int, StageProgram], worker: Worker) -> None:
    """Make the stages use the same parameters and buffers that this rank trains.

    Otherwise a stage of a model that was captured on another device (meta, CPU) would use those of
    the capture.
    """
    held = worker.held.held_tensors()
    tied = worker.graph.tied_names
    for program in programs.values():
        module = program.module
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            own = held.get(tied.get(name, name))
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            places = owner._parameters if last in owner._parameters else owner._buffers
            places[last] = tensor.to(worker.world.device) if own is None else own  # pyright: ignore[reportArgumentType]
