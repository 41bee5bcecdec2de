"""Evaluation and prediction with a pipeline that is being trained."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from penstock.capture.batch_part import BatchPart, Leaf, PartialLeaf
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.stage.call import ProgramCall
from penstock.capture.stage_program import Batch, StageProgram, TensorSpec
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.batch_reading import WHOLE, BatchReading
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import Totals
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.processes.world import World
from penstock.runtime.rank_stages import RankStages, Ready
from penstock.runtime.stages.runner import LossTerm, StageInputs, Tensors, Work, row_of_zeros
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of
from penstock.runtime.user_metrics import Evaluation, Means, Metric, MetricSums
from penstock.schedule.action import ActionKind
from penstock.torch_internals import holder_of

__all__ = ["Inference", "PredictionView", "RankOutputs", "predict"]

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
        engine: Engine,
        graph: LayerGraph,
        boundaries: Sequence[BoundaryTensors],
        take_outputs: TakeOutputs,
        metrics: MetricSums | None = None,
    ) -> None:
        self.graph = graph
        self._metrics, self._engine = metrics, engine
        programs = {
            place.stage: graph.stage(engine.plan.stages[place.stage].layers)
            for place in engine.places
        }
        share_tensors(programs, engine)
        runners = {
            stage: ForwardRunner(stage, program, engine, take_outputs)
            for stage, program in programs.items()
        }
        self._stages = RankStages(
            engine.plan,
            engine.world,
            engine.transport,
            engine.clock,
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
            RunFailed: this rank or another failed; the engine cannot be used again.
        """
        engine, numbers = self._engine, self._engine.numbers
        engine.restart_clock()
        ready = self.prepared(leaves)
        if not any(isinstance(leaf, PartialLeaf) for leaf in leaves.values()):
            engine.agree_on_lengths([ready.iteration.size])
        self.graph.set_training(False)
        try:
            with engine.failures.shared(), engine.random.set_aside():
                if self._metrics is not None:
                    self._metrics.begin()
                self._stages.take(leaves, ready.iteration)
                terms = self._stages.run(ready)
                # The ranks of a tensor group have equal terms, of which the first rank's count.
                counted = [] if engine.held.place else terms
                own = numbers.own([list(leaves.values())], counted, None, self._metrics)
                rows = numbers.exchange(own, "the end of the iteration")
            return numbers.put_together(rows, self._metrics)
        finally:
            self.graph.set_training(True)

    def prepared(self, leaves: Mapping[int, Leaf]) -> Ready:
        """The prepared work for batches of this size.

        Raises:
            BadInput: the captured model does not accept the lengths of this batch.
        """
        rows = next(iter(leaves.values())).shape[0]
        return self._stages.prepared(rows, False, self.graph.lengths_of(leaves))


class ForwardRunner:
    """Runs the forwards of one stage for the action loop."""

    def __init__(
        self, stage: int, program: StageProgram, engine: Engine, take_outputs: TakeOutputs
    ) -> None:
        self.loss_terms: list[LossTerm] = []
        self.seed = 1.0
        self._program = program
        divides = engine.shards.divides(stage)
        self._call = engine.shards.call_of(program) if divides else ProgramCall(program.module)
        self._gathers = engine.plan.stages[stage].sharding == "parameters"
        self._device = engine.world.device
        self._autocast = engine.autocast if engine.autocast_dtype is not None else nullcontext
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
        """Run the stage on this rank's rows; without rows it only helps to gather weights."""
        program, work = self._program, self._work
        borrowed = not work.rows[micro_batch]
        if borrowed:
            if not self._gathers:
                return ()
            received = row_of_zeros(program.received, work.lengths, self._device)
        with torch.no_grad(), self._autocast():
            made = self._call.run(work.leaves[micro_batch], received)  # pyright: ignore[reportArgumentType]
        if borrowed:
            return ()
        if program.is_last:
            place = len(program.sent)
            self.loss_terms.append(LossTerm(made[place], made[place + 1]))
        if program.outputs:
            found = made[-len(program.outputs) :]
            self._take_outputs(micro_batch, dict(zip(program.outputs, found, strict=True)))
        return [tensor.to(spec.dtype) for spec, tensor in zip(program.sent, made, strict=False)]


def share_tensors(programs: Mapping[int, StageProgram], engine: Engine) -> None:
    """Make the stages use the same parameters and buffers that this rank trains.

    Otherwise a stage of a model that was captured on another device (meta, CPU) would use those of
    the capture.
    """
    held = engine.held.held_tensors()
    tied = engine.graph.tied_names
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
            value = tensor.to(engine.world.device) if own is None else own
            holder_of(owner, last)[last] = value


class PredictionView:
    """A graph without its loss, and its boundary tensors under a plan for each kind of batch.

    ``problem`` says why there is none.
    """

    def __init__(self, graph: LayerGraph, plan: Plan) -> None:
        self.problem = ""
        self.boundaries: tuple[tuple[BoundaryTensors, ...], ...] = ((),) * len(graph.kinds)
        self._graph = graph
        try:
            self._graph = graph.without_loss()
            self.boundaries = tuple(boundaries_of(kind, plan) for kind in self._graph.kinds)
        except BadInput as problem:
            self.problem = str(problem)

    @property
    def graph(self) -> LayerGraph:
        """The graph without its loss.

        Raises:
            BadInput: the model cannot predict without its loss.
        """
        if self.problem:
            raise BadInput(f"the model cannot predict: {self.problem}")
        return self._graph


class Inference:
    """Forward passes of a `Engine`'s stages, created when first used."""

    def __init__(
        self,
        engine: Engine,
        reading: BatchReading,
        view: PredictionView,
        metrics: Mapping[str, Metric],
    ) -> None:
        self._engine, self._reading = engine, reading
        self._view = view
        self._sums = MetricSums(metrics, engine.graph) if metrics else None
        self._evaluations = dict[int, ForwardPass]()
        self._predictions = dict[int, ForwardPass]()
        self._outputs = RankOutputs()

    @doing("evaluates", acts=True)
    def evaluate(self, batch: Batch) -> Evaluation:
        """Mean loss and metrics on one batch."""
        engine, sums = self._engine, self._sums
        (leaves,) = self._reading.of_step([batch])
        if sums is not None:
            sums.graph = engine.graph
        if engine.kind not in self._evaluations:
            take = sums.take_outputs if sums is not None else self._outputs.take
            self._evaluations[engine.kind] = ForwardPass(
                engine, engine.graph, engine.stages.boundaries, take, sums
            )
        totals, means = self._evaluations[engine.kind].run(dict(enumerate(leaves)))
        return Evaluation(
            totals.loss,
            leaves[0].shape[0],
            totals.weight,
            {name: value for name, (value, _) in means.items()},
            {name: weight for name, (_, weight) in means.items()},
        )

    @doing("predicts", acts=True)
    def predict(self, batch: Batch, *, everywhere: bool) -> Any:
        """The model's result on one batch."""
        engine, graph = self._engine, self._view.graph
        if isinstance(batch, BatchPart):
            raise BadInput(WHOLE.format("predict()"))
        engine.take_kind([batch], graph)
        graph = graph.kinds[engine.kind]
        leaves = graph.known_leaves(batch)
        if engine.kind not in self._predictions:
            boundaries = self._view.boundaries[engine.kind]
            self._predictions[engine.kind] = ForwardPass(
                engine, graph, boundaries, self._outputs.take
            )
        return predict(
            self._predictions[engine.kind],
            self._outputs,
            engine.world,
            engine.plan,
            leaves,
            engine.failures,
            everywhere=everywhere,
        )


class RankOutputs:
    """The model's outputs that this rank's stages computed, by output and micro-batch."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()

    def take(self, micro_batch: int, outputs: Mapping[int, torch.Tensor]) -> None:
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
    forward: ForwardPass,
    found: RankOutputs,
    world: World,
    plan: Plan,
    leaves: Mapping[int, torch.Tensor],
    failures: Failures,
    *,
    everywhere: bool,
) -> Any:
    """The model's result on a batch, on rank 0 or ``everywhere``; ``None`` on other ranks.

    Tensors are on the CPU, with samples in the order of the batch. An output without a batch
    dimension that is computed from samples (such as an auxiliary loss) is the mean over the slices,
    weighted by their numbers of samples.

    Raises:
        BadInput: an output cannot be assembled from slices of the batch.
        RunFailed: this rank or another failed, which ``failures`` tells all.
    """
    graph = forward.graph
    rows = next(iter(leaves.values())).shape[0]
    stages = [plan.stage_of_layer(layer) for layer in graph.output_layers]
    iteration = forward.prepared(leaves).iteration
    cut, specs = iteration.cut, [spec.at(iteration.lengths) for spec in graph.outputs.specs]
    pieces = [list(pieces_of(i, stage, plan, cut)) for i, stage in enumerate(stages)]
    for spec, own in zip(specs, pieces, strict=True):
        check_joinable(spec, own)
    forward.run(leaves)
    wanted = everywhere or world.rank == 0
    tensors: list[torch.Tensor] = []
    try:
        with failures.shared():
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
    """Which ranks compute which rows of an output of ``stage``, in the order of the batch."""
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
