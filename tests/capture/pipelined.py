"""One batch through the pipeline, in one process, against the user's module left whole."""

import copy
from typing import Any

import torch
from torch import nn

from penstock import InProcessPipeline, Plan
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.trace import capture_model
from penstock.plan.plan import Stage

RELATIVE_TOLERANCE = 1e-9


class KeepGradients(torch.optim.SGD):
    """Changes no weight, and remembers the gradient of each."""

    def __init__(self, parameters: list[nn.Parameter], kept: dict[int, torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.0)
        self._kept = kept

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._kept[id(parameter)] = parameter.grad.clone()


def three_stages(graph: LayerGraph, rows: int) -> Plan:
    """Three stages of about equally many layers (fewer for fewer layers), two micro-batches."""
    layers = len(graph.layer_names)
    stages = min(3, layers)
    ends = [layers * k // stages for k in range(stages + 1)]
    return Plan(
        tuple(Stage(range(ends[k], ends[k + 1]), (k,), (rows // 2,)) for k in range(stages)),
        2,
        rows // 2,
        "gpipe",
    )


def pipelined(
    model: nn.Module, batch: Any, loss: Any = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of the captured ``model``, by name; the model is unchanged."""
    graph = capture_model(model, batch, loss=loss)
    kept: dict[int, torch.Tensor] = {}
    rows = graph.batch_leaves(batch)[0].shape[0]
    player = InProcessPipeline(
        graph,  # pyright: ignore[reportArgumentType]
        three_stages(graph, rows),
        batch,
        optimizer=lambda parameters: KeepGradients(parameters, kept),
    )
    loss_value = player.step(batch).loss
    found = {n: kept[id(p)] for n, p in model.named_parameters() if id(p) in kept}
    return loss_value, found


def assert_pipeline_equals_model(model: nn.Module, batch: Any, loss: Any = None) -> None:
    """Loss and every gradient of three stages and two micro-batches are those of the model."""
    whole = copy.deepcopy(model).train()
    if loss is not None:
        expected = loss(whole(*batch[:-1]), batch[-1])
    else:
        expected = whole(**batch).loss if isinstance(batch, dict) else whole(*batch)
    expected.backward()
    value, gradients = pipelined(model, batch, loss)
    assert abs(value - expected.item()) <= RELATIVE_TOLERANCE * abs(expected.item())
    compared = 0
    for name, parameter in whole.named_parameters():
        found = gradients.get(name)
        if parameter.grad is None:
            assert found is None or not found.any(), name
            continue
        assert found is not None, name
        difference = (found - parameter.grad).norm()
        assert difference <= RELATIVE_TOLERANCE * parameter.grad.norm() + 1e-14, name
        compared += bool(parameter.grad.any())
    assert compared, "every gradient is zero, so nothing was compared"
