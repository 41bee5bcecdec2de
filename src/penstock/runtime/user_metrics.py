"""The user's metrics, computed where the model's outputs are and summed over all slices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeAlias

import torch

from penstock.capture.batch.part import Leaf
from penstock.capture.layer_graph import LayerGraph
from penstock.device import copied_to
from penstock.errors import BadInput

Metric: TypeAlias = Callable[[Any, Any], Any] | str
"""``metric(output, target)`` returns the mean over the given samples, or ``(mean, weight)``. Or
``"losses.words"`` is a part of the loss, by its place in the model's output: its mean is exact.

It gets the same arguments as a loss function: ``target`` is the last entry of a tuple batch, or the
whole batch if that is a dict or the model returns its loss itself. ``weight`` is the number of
terms in the mean (default: the number of samples).
"""


Means: TypeAlias = Mapping[str, tuple[float, float]]
"""Mean and weight of each metric."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss and metrics of a batch in evaluation mode, equal on every rank.

    ``weight`` is the number of terms in the loss, ``metric_weights`` those of the metrics.
    """

    loss: float
    samples: int
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metric_weights: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def combined(cls, parts: Sequence["Evaluation"]) -> "Evaluation":
        """Combine several batches: every mean is weighted by its number of terms.

        >>> one = Evaluation(1.0, 2, 2.0, {"accuracy": 0.5}, {"accuracy": 2.0})
        >>> other = Evaluation(4.0, 1, 1.0, {"accuracy": 1.0}, {"accuracy": 1.0})
        >>> both = Evaluation.combined([one, other])
        >>> both.loss, round(both.metrics["accuracy"], 3)
        (2.0, 0.667)
        """
        names = list(parts[0].metrics) if parts else []
        weights = {name: sum(part.metric_weights[name] for part in parts) for name in names}
        return cls(
            mean([part.loss for part in parts], [part.weight for part in parts]),
            sum(part.samples for part in parts),
            sum(part.weight for part in parts),
            {
                name: mean(
                    [part.metrics[name] for part in parts],
                    [part.metric_weights[name] for part in parts],
                )
                for name in names
            },
            weights,
        )


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; values of weight 0 do not count, even if they are not finite."""
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True) if w) / total if total else nan


class MetricSums:
    """This rank's sums for each metric of an iteration: of value times weight, and of weight.

    ``graph`` is that of the kind of batch that runs.
    """

    def __init__(self, metrics: Mapping[str, Metric], graph: LayerGraph) -> None:
        self._parts = {
            (id(kind), path): kind.part_at(path)
            for kind in graph.kinds
            for path in metrics.values()
            if isinstance(path, str)
        }
        self.names = tuple(metrics)
        self._metrics = tuple(metrics.values())
        self.graph = graph
        self._leaves: Mapping[int, Leaf] = {}
        self._rows: Sequence[range] = ()
        self._sums: list[list[tuple[Any, Any]]] = []

    def begin(self) -> None:
        """Start a new iteration."""
        self._sums = [[] for _ in self._metrics]

    def take_batch(self, leaves: Mapping[int, Leaf], rows: Sequence[range]) -> None:
        """Set the batch of later outputs; ``rows[m]`` are this rank's rows of micro-batch ``m``."""
        self._leaves, self._rows = leaves, rows

    def take_outputs(
        self, micro_batch: int, outputs: Mapping[int, torch.Tensor], weight: torch.Tensor | None
    ) -> None:
        """Compute the metrics of one slice from its outputs, by number, and its loss's weight."""
        rows = self._rows[micro_batch]
        if not rows or not self._metrics:
            return
        tensors = [outputs[number].detach() for number in sorted(outputs)]
        device = tensors[0].device if tensors else torch.device("cpu")
        with torch.no_grad():
            call = self.graph.program.call
            leaves = {i: self._leaves[i][rows.start : rows.stop] for i in call.target_leaves}
            target = call.target({i: copied_to(device, leaf) for i, leaf in leaves.items()})
            output = self.graph.outputs.rebuild(tensors)
            for name, metric, sums in zip(self.names, self._metrics, self._sums, strict=True):
                if isinstance(metric, str):
                    key = id(self.graph), metric
                    if key not in self._parts:  # of evaluation mode
                        self._parts[key] = self.graph.part_at(metric)
                    number = self._parts[key]
                    counts = self.graph.recorded.output_counting[number] == "loss"
                    sums.append((outputs[number].detach(), weight if counts else len(rows)))
                else:
                    sums.append(value_and_weight(name, metric(output, target), len(rows)))

    def totals(self) -> list[float]:
        """Sums of value times weight, then of weight, for each metric."""
        found: list[float] = []
        for sums in self._sums:
            pairs = [(float(value), float(weight)) for value, weight in sums]
            found += [sum(v * w for v, w in pairs if w), sum(w for _, w in pairs)]
        return found

    def combined(self, rows: Sequence[Sequence[float]]) -> Means:
        """Mean and weight of each metric, from the `totals` of every rank."""
        found: dict[str, tuple[float, float]] = {}
        for place, name in enumerate(self.names):
            total, weight = (sum(row[2 * place + k] for row in rows) for k in (0, 1))
            found[name] = (total / weight if weight else nan, weight)
        return found


def value_and_weight(name: str, result: Any, samples: int) -> tuple[Any, Any]:
    """The result of a metric for one slice as a pair; tensors are not read yet."""
    value, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, samples)
    for number in (value, weight):
        is_scalar = isinstance(number, torch.Tensor) and number.numel() == 1
        if not is_scalar and not isinstance(number, int | float):
            raise BadInput(
                f"metric '{name}' gave {describe(number)}; return the mean over the samples as a "
                f"number, or a pair (mean, weight)"
            )
    return value, weight


def describe(value: object) -> str:
    """A value in words, for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raise `BadInput` for metrics that cannot be called."""
    for name, metric in metrics.items():
        if not callable(metric) and not isinstance(metric, str):
            raise BadInput(
                f"metric '{name}' is a {type(metric).__name__}; give a function "
                f"metric(output, target), or the place of a part of the loss, as 'losses.words'"
            )
