"""Evaluation and prediction with a pipeline that is being trained."""

from collections.abc import Mapping
from typing import Any

from penstock.capture.batch_part import BatchPart
from penstock.capture.layer_graph import Batch, LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.batch_reading import WHOLE, BatchReading
from penstock.runtime.evaluation.forward_pass import ForwardPass
from penstock.runtime.evaluation.prediction import RankOutputs, predict
from penstock.runtime.processes.watch import doing
from penstock.runtime.rank import Worker
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of
from penstock.runtime.user_metrics import Evaluation, Metric, MetricSums

__all__ = ["Inference", "PredictionView"]


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
