"""Evaluation and prediction with a pipeline that is being trained."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.capture.batch.part import BatchPart
from penstock.capture.contract import Batch, TensorSpec
from penstock.capture.forward.materialise import named_tensors
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.batch_reading import WHOLE, BatchReading
from penstock.runtime.engine import Engine
from penstock.runtime.micro_batches import BatchCut, cut_batch
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.program import RankStages
from penstock.runtime.stage.building import stages_of
from penstock.runtime.stage.runner import ModuleRunner
from penstock.runtime.stage.whole_loss import rows_of_samples
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of
from penstock.runtime.user_metrics import Evaluation


class PredictionView:
    """A graph without its loss, and its boundary tensors under a plan for each kind of batch.

    ``problem`` says why there is none.
    """

    def __init__(self, graph: LayerGraph, plan: Plan) -> None:
        self.problem = ""
        self.boundaries: tuple[tuple[BoundaryTensors, ...], ...] = ((),) * len(graph.kinds)
        self._graph = graph
        try:
            first, *others = (kind.in_evaluation or kind for kind in graph.kinds)
            self._graph = replace(first, others=tuple(others)).without_loss()
            self.boundaries = tuple(boundaries_of(kind, plan) for kind in self._graph.kinds)
        except BadInput as problem:
            self.problem = str(problem)

    @property
    def graph(self) -> LayerGraph:
        """The graph without its loss."""
        if self.problem:
            raise BadInput(f"the model cannot predict: {self.problem}")
        return self._graph


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of an output that ``rank`` computes of one micro-batch."""

    micro_batch: int
    rank: int
    rows: range


class Inference:
    """Forward passes with an engine's stages, with the same parameters that are trained."""

    def __init__(self, engine: Engine, reading: BatchReading, view: PredictionView) -> None:
        self._engine, self._reading, self._view = engine, reading, view
        self._stages = dict[int, RankStages[ModuleRunner]]()
        self._outputs = dict[tuple[int, int], torch.Tensor]()
        """Of this rank's stages, by output and micro-batch."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run batches on the path of evaluation; tensors that are kept can be trained on."""
        self._engine.kinds.trains = False
        try:
            with torch.inference_mode(False):
                yield
        finally:
            self._engine.graph.set_training(True)
            self._engine.kinds.trains = True
            self._engine.take(self._engine.kinds.number)

    @doing("evaluates", acts=True)
    def evaluate(self, batch: Batch) -> Evaluation:
        """Mean loss and metrics on one batch."""
        engine = self._engine
        with self.evaluating():
            (leaves,) = self._reading.of_step([batch])
            if engine.graph.wants == "outputs":
                raise BadInput(
                    f"{engine.graph.name} has no loss in evaluation mode, so there is none to "
                    f"evaluate; call predict(), or let it (or the loss function) give one there"
                )
            totals = engine.run(leaves, training=False)
        return Evaluation(
            totals.loss,
            leaves[0].shape[0],
            totals.weight,
            {name: value for name, (value, _) in totals.means.items()},
            {name: weight for name, (_, weight) in totals.means.items()},
        )

    @doing("predicts", acts=True)
    def predict(self, batch: Batch, *, everywhere: bool) -> Any:
        """The model's result on one batch, on rank 0 or ``everywhere``; ``None`` on other ranks.

        Tensors are on the CPU, with samples in the order of the batch. An output without a batch
        dimension that is computed from samples (such as an auxiliary loss) is the mean over the
        slices, weighted by their numbers of samples.
        """
        engine, graph = self._engine, self._view.graph
        if isinstance(batch, BatchPart):
            raise BadInput(WHOLE.format("predict()"))
        with self.evaluating():
            engine.take_kind([batch], graph)
            number = engine.kinds.number
            graph = graph.kinds[number]
            leaves = graph.known_leaves(batch)
            if number not in self._stages:
                self._stages[number] = self._without_loss(graph)
            samples = next(iter(leaves.values())).shape[0]
            lengths = graph.lengths_of(leaves)
            specs = [spec.at(lengths) for spec in graph.outputs.specs]
            cut = cut_batch(engine.plan, samples)
            pieces = [
                [*pieces_of(engine.plan.stage_of_layer(layer), engine.plan, cut)]
                for layer in graph.output_layers
            ]
            for spec, own in zip(specs, pieces, strict=True):
                check_joinable(spec, own)
            engine.run(leaves, stages=self._stages[number], training=False)
            tensors: list[torch.Tensor] = []
            try:
                with engine.failures.shared():
                    for output, (spec, own) in enumerate(zip(specs, pieces, strict=True)):
                        whole = self._gathered(output, spec, own, samples, everywhere=everywhere)
                        tensors.append(whole)
            finally:
                self._outputs.clear()
        wanted = everywhere or engine.world.rank == 0
        return graph.outputs.rebuild(tensors) if wanted else None

    def _take(
        self, micro_batch: int, outputs: Mapping[int, torch.Tensor], _: torch.Tensor | None
    ) -> None:
        """Keep outputs of one micro-batch that a stage of this rank has made, by number."""
        for number, tensor in outputs.items():
            self._outputs[number, micro_batch] = tensor.detach()

    def _gathered(
        self,
        number: int,
        spec: TensorSpec,
        pieces: Sequence[OutputRows],
        samples: int,
        *,
        everywhere: bool,
    ) -> torch.Tensor:
        """An output of the whole batch, from all ranks; empty where it is not wanted."""
        world = self._engine.world
        wanted = everywhere or world.rank == 0
        whole = torch.zeros(spec.shape_for(samples) if wanted else 0, dtype=spec.dtype)
        # Without a batch dimension and independent of the samples, it is the same everywhere.
        needed = pieces if spec.batch_dim >= 0 or spec.reduced else pieces[:1]
        total = sum(len(piece.rows) for piece in needed)
        name = "an output of a micro-batch"
        for piece in needed:
            own: dict[str, torch.Tensor] = {}
            if piece.rank == world.rank:
                made = self._outputs[number, piece.micro_batch]
                # In the type that it had at capture.
                own[name] = made.to("cpu", spec.dtype).contiguous()
            tensor = world.gather_tensors(own).get(name)
            if tensor is None:
                continue
            if spec.batch_dim >= 0:
                rows_of_samples(spec, whole, piece.rows).copy_(tensor)
            elif spec.reduced and spec.dtype.is_floating_point:
                whole += tensor * (len(piece.rows) / total)
            else:
                whole.copy_(tensor)
        return world.broadcast(whole) if everywhere else whole

    def _without_loss(self, graph: LayerGraph) -> RankStages[ModuleRunner]:
        """The stages of a graph without its loss, with the tensors that this rank trains."""
        engine = self._engine
        programs = stages_of(graph, engine.plan, engine.world.rank)
        held, tied = engine.held.held_tensors(), engine.graph.tied_names
        runners: dict[int, ModuleRunner] = {}
        for place in engine.places:
            program, shards = programs[place.stage], engine.shards_of(place.stage)
            # Those of a model that was captured on another device (meta, CPU) are not trained.
            for name, tensor in named_tensors(program.module):
                own = held.get(tied.get(name, name))
                parameters, key = program.module.graph.program.places(name)
                parameters[key] = tensor.to(engine.world.device) if own is None else own
            runners[place.stage] = ModuleRunner(
                program,
                engine.world.device,
                call=shards.call_of(program) if shards is not None else None,
                take_outputs=self._take,
                **engine.options_of(place, program),
            )
        return engine.stages_with(self._view.boundaries[engine.kinds.number], programs, runners)


def pieces_of(stage: int, plan: Plan, cut: BatchCut) -> Iterator[OutputRows]:
    """Yield the ranks and their rows of an output of ``stage``, in the order of the batch."""
    for micro_batch in range(len(cut.micro_batches)):
        for replica, device in enumerate(plan.holder(stage, micro_batch).devices):
            rows = cut.rows(micro_batch, stage, replica)
            if rows:
                # All ranks of a tensor group have the whole output.
                yield OutputRows(micro_batch, plan.ranks_of(device)[0], rows)


def check_joinable(spec: TensorSpec, pieces: Sequence[OutputRows]) -> None:
    """Raise `BadInput` if the results of slices cannot be joined to that of the whole batch."""
    if len(pieces) == 1 or not spec.reduced:
        return
    if spec.batch_dim >= 0:
        raise BadInput(
            f"the rows of {spec.name} are not ordered by sample, so those of {len(pieces)} slices "
            f"cannot be joined; return it with the samples first, or predict with a batch "
            f"of one sample"
        )
    if not spec.dtype.is_floating_point:
        raise BadInput(
            f"{spec.name} ({spec.dtype}) is computed from all samples of a slice, and only "
            f"floating-point numbers can be averaged over {len(pieces)} slices; return it for each "
            f"sample"
        )
