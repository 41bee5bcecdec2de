"""Evaluation and prediction with a pipeline that is being trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock.capture.batch_part import BatchPart
from penstock.capture.layer_graph import Batch, LayerGraph, TensorSpec
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.batch_reading import WHOLE, BatchReading
from penstock.runtime.evaluation.forward_pass import ForwardPass
from penstock.runtime.micro_batches import BatchCut
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.gathering import as_bytes
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.processes.watch import doing
from penstock.runtime.processes.world import World
from penstock.runtime.rank import Worker
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of
from penstock.runtime.user_metrics import Evaluation, Metric, MetricSums

__all__ = ["Inference", "PredictionView", "RankOutputs", "predict"]


class PredictionView:
    """A graph without its loss and its boundary tensors under a plan, or why there is none."""

    def __init__(self, graph: LayerGraph, plan: Plan) -> None:
        self.problem = ""
        self.boundaries: tuple[BoundaryTensors, ...] = ()
        self._graph = graph
        try:
            self._graph = graph.without_loss()
            self.boundaries = boundaries_of(self._graph, plan)
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
    """Forward passes of a `Worker`'s stages, created when first used."""

    def __init__(
        self,
        worker: Worker,
        reading: BatchReading,
        view: PredictionView,
        metrics: Mapping[str, Metric],
    ) -> None:
        self._worker, self._reading = worker, reading
        self._view = view
        self._sums = MetricSums(metrics, worker.graph) if metrics else None
        self._evaluation: ForwardPass | None = None
        self._prediction: ForwardPass | None = None
        self._outputs = RankOutputs()

    @doing("evaluates", acts=True)
    def evaluate(self, batch: Batch) -> Evaluation:
        """Mean loss and metrics on one batch."""
        worker, sums = self._worker, self._sums
        (leaves,) = self._reading.of_step([batch])
        if self._evaluation is None:
            take = sums.take_outputs if sums is not None else self._outputs.take
            self._evaluation = ForwardPass(
                worker, worker.graph, worker.stages.boundaries, take, sums
            )
        totals, means = self._evaluation.run(dict(enumerate(leaves)))
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
        worker, graph = self._worker, self._view.graph
        if isinstance(batch, BatchPart):
            raise BadInput(WHOLE.format("predict()"))
        leaves = graph.known_leaves(batch)
        if self._prediction is None:
            self._prediction = ForwardPass(worker, graph, self._view.boundaries, self._outputs.take)
        return predict(
            self._prediction,
            self._outputs,
            worker.world,
            worker.plan,
            leaves,
            worker.failures,
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
                    world.share_from_first(as_bytes(whole))
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
    own = None
    if piece.rank == world.rank:
        own = found.of(piece.number, piece.micro_batch, spec)
    if piece.rank == 0 or world.control is None:
        return own
    what = f"an output of micro-batch {piece.micro_batch} on rank {piece.rank}"
    if own is not None:
        work = dist.isend(as_bytes(own), group_dst=0, group=world.control)
        await_work(work, world, what, "gloo", peer=0, size_bytes=own.nbytes)
        return None
    if world.rank != 0:
        return None
    tensor = torch.empty(spec.shape_for(len(piece.rows)), dtype=spec.dtype)
    work = dist.irecv(as_bytes(tensor), group_src=piece.rank, group=world.control)
    await_work(work, world, what, "gloo", peer=piece.rank, size_bytes=tensor.nbytes)
    return tensor
