"""Evaluation and prediction with a pipeline that is being trained."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.capture.batch.part import BatchPart
from penstock.capture.contract import Batch, TensorSpec
from penstock.capture.forward.materialise import named_tensors
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.batch_reading import WHOLE, BatchReading
from penstock.runtime.engine import Engine
from penstock.runtime.micro_batches import BatchCut, cut_batch
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.processes.world import World
from penstock.runtime.program import RankStages
from penstock.runtime.stage.building import stages_of
from penstock.runtime.stage.runner import ModuleRunner
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of
from penstock.runtime.user_metrics import Evaluation


def share_tensors(programs: Mapping[int, StageProgram], engine: Engine) -> None:
    """Make the stages use the same parameters and buffers that this rank trains.

    Otherwise a stage of a model that was captured on another device (meta, CPU) would use those of
    the capture.
    """
    held = engine.held.held_tensors()
    tied = engine.graph.tied_names
    for program in programs.values():
        for name, tensor in named_tensors(program.module):
            own = held.get(tied.get(name, name))
            place, key = program.module.graph.program.places(name)
            place[key] = tensor.to(engine.world.device) if own is None else own


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


class Inference:
    """Forward passes with an engine's stages, with the same parameters that are trained."""

    def __init__(self, engine: Engine, reading: BatchReading, view: PredictionView) -> None:
        self._engine, self._reading, self._view = engine, reading, view
        self._stages = dict[int, RankStages[ModuleRunner]]()
        self._outputs = RankOutputs()

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
        """The model's result on one batch."""
        engine, graph = self._engine, self._view.graph
        if isinstance(batch, BatchPart):
            raise BadInput(WHOLE.format("predict()"))
        with self.evaluating():
            engine.take_kind([batch], graph)
            graph = graph.kinds[engine.kinds.number]
            leaves = graph.known_leaves(batch)
            if engine.kinds.number not in self._stages:
                self._stages[engine.kinds.number] = self._without_loss(graph)
            stages = self._stages[engine.kinds.number]
            return predict(engine, graph, stages, self._outputs, leaves, everywhere=everywhere)

    def _without_loss(self, graph: LayerGraph) -> RankStages[ModuleRunner]:
        """The stages of a graph without its loss."""
        engine, take = self._engine, self._outputs.take
        programs = stages_of(graph, engine.plan, engine.world.rank)
        share_tensors(programs, engine)
        runners: dict[int, ModuleRunner] = {}
        for place in engine.places:
            program, shards = programs[place.stage], engine.shards_of(place.stage)
            runners[place.stage] = ModuleRunner(
                program,
                engine.world.device,
                call=shards.call_of(program) if shards is not None else None,
                take_outputs=take,
                **engine.options_of(place, program),
            )
        return engine.stages_with(self._view.boundaries[engine.kinds.number], programs, runners)


class RankOutputs:
    """The model's outputs that this rank's stages computed, by output and micro-batch."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Drop all outputs."""
        self._found.clear()

    def take(
        self, micro_batch: int, outputs: Mapping[int, torch.Tensor], _: torch.Tensor | None
    ) -> None:
        """Keep outputs of one micro-batch, given by number."""
        for number, tensor in outputs.items():
            self._found[number, micro_batch] = tensor.detach()

    def of(self, number: int, micro_batch: int, spec: TensorSpec) -> torch.Tensor:
        """One of them on the CPU, contiguous, in the type that it had at capture."""
        return self._found[number, micro_batch].to("cpu", spec.dtype).contiguous()


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of output ``number`` that ``rank`` computes of one micro-batch."""

    number: int
    micro_batch: int
    rank: int
    rows: range


def predict(
    engine: Engine,
    graph: LayerGraph,
    stages: RankStages[ModuleRunner],
    found: RankOutputs,
    leaves: Mapping[int, torch.Tensor],
    *,
    everywhere: bool,
) -> Any:
    """The model's result on a batch, on rank 0 or ``everywhere``; ``None`` on other ranks.

    ``found`` takes what the ``stages`` of ``graph`` make. Tensors are on the CPU, with samples in
    the order of the batch. An output without a batch dimension that is computed from samples (such
    as an auxiliary loss) is the mean over the slices, weighted by their numbers of samples.
    """
    world, plan = engine.world, engine.plan
    rows, lengths = next(iter(leaves.values())).shape[0], graph.lengths_of(leaves)
    cut, specs = cut_batch(plan, rows), [spec.at(lengths) for spec in graph.outputs.specs]
    makers = [plan.stage_of_layer(layer) for layer in graph.output_layers]
    pieces = [list(pieces_of(i, stage, plan, cut)) for i, stage in enumerate(makers)]
    for spec, own in zip(specs, pieces, strict=True):
        check_joinable(spec, own)
    engine.run(leaves, stages=stages, training=False)
    wanted = everywhere or world.rank == 0
    tensors: list[torch.Tensor] = []
    try:
        with engine.failures.shared():
            for spec, own in zip(specs, pieces, strict=True):
                whole = torch.zeros(spec.shape_for(rows) if wanted else 0, dtype=spec.dtype)
                put_together(whole, spec, own, found, world)
                if everywhere:
                    whole = world.broadcast(whole)
                tensors.append(whole)
    finally:
        found.clear()
    return graph.outputs.rebuild(tensors) if wanted else None


def pieces_of(number: int, stage: int, plan: Plan, cut: BatchCut) -> Iterator[OutputRows]:
    """Yield the ranks and their rows of an output of ``stage``, in the order of the batch."""
    for micro_batch in range(len(cut.micro_batches)):
        for replica, device in enumerate(plan.holder(stage, micro_batch).devices):
            rows = cut.rows(micro_batch, stage, replica)
            if rows:
                # All ranks of a tensor group have the whole output.
                yield OutputRows(number, micro_batch, plan.ranks_of(device)[0], rows)


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


def put_together(
    whole: torch.Tensor,
    spec: TensorSpec,
    pieces: Sequence[OutputRows],
    found: RankOutputs,
    world: World,
) -> None:
    """Fill ``whole`` on rank 0 with an output of the whole batch, from all ranks."""
    # Without a batch dimension and independent of the samples, it is the same everywhere.
    needed = pieces if spec.batch_dim >= 0 or spec.reduced else pieces[:1]
    total = sum(len(piece.rows) for piece in needed)
    for piece in needed:
        tensor = carried(spec, piece, found, world)
        if tensor is None:
            continue
        if spec.batch_dim >= 0:
            factor = spec.rows_per_sample
            start, length = piece.rows.start * factor, len(piece.rows) * factor
            whole.narrow(spec.batch_dim, start, length).copy_(tensor)
        elif spec.reduced and spec.dtype.is_floating_point:
            whole += tensor * (len(piece.rows) / total)
        else:
            whole.copy_(tensor)


def carried(
    spec: TensorSpec, piece: OutputRows, found: RankOutputs, world: World
) -> torch.Tensor | None:
    """A piece, sent to rank 0 if another rank computed it; ``None`` on other ranks."""
    name = "an output of a micro-batch"
    own = found.of(piece.number, piece.micro_batch, spec) if piece.rank == world.rank else None
    return world.gather_tensors({} if own is None else {name: own}).get(name)
