"""Ranges that quantisation observes, random tensors, and what optimizers and outputs cannot be."""

from typing import Any

import pytest
import torch
from runtime.pipeline_cases import normal, plan_of
from runtime.ranges_cases import RANGES, ROWS, WIDTH, Net, batches, compared_ranges, masked
from torch import nn
from torch.ao import quantization
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stage.building import check_counts


def test_ranges_and_random_tensors_are_those_of_accumulated_steps() -> None:
    for found in launch_workers(compared_ranges, (), workers=2, threads=1):
        assert found == dict.fromkeys(RANGES, "")


def test_numbers_of_numpy_are_told_and_left_in_step() -> None:
    (said, first), (_, second) = launch_workers(masked, (), workers=2, threads=1)
    assert "random operators, which are not dropout: those of Python's random or of NumPy" in said
    assert first == second


def in_process(model: nn.Module, batch: Any, loss: Any, **options: Any) -> Pipeline:
    graph = capture_model(model, batch, loss=loss)
    plan = plan_of(len(graph.layer_names), (1, 1), micro_batches=2, rows=ROWS // 2)
    return Pipeline(graph, batch, plan=plan, safety=Safety(transport="in-process"), **options)


def test_replicas_would_observe_other_ranges() -> None:
    net = Net(quantization.FusedMovingAvgObsFakeQuantize)
    graph = capture_model(net, batches()[0], loss=functional.cross_entropy)
    with pytest.raises(BadInput, match=r"between\.scale.* give this stage one worker"):
        check_counts(plan_of(len(graph.layer_names), (2, 2)), graph)
    net.between.disable_observer()
    graph = capture_model(net, batches()[0], loss=functional.cross_entropy)
    assert not [name for name in graph.recorded.counts if "between" in name]


class Offloading(torch.optim.SGD):
    """Frees gradients in the backward."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def test_an_optimizer_that_takes_gradients_by_hooks_is_refused() -> None:
    with pytest.raises(BadInput, match=r"Offloading takes the gradient of 'first\.weight' .* hook"):
        in_process(Net(), batches()[0], functional.cross_entropy, optimizer=Offloading)


class Contrast(nn.Module):
    """Compares samples with each other in the model, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, and the products of all samples."""
        products = self.seen(x) @ self.read(x).t()
        loss = functional.cross_entropy(products, torch.arange(len(x)))
        return {"loss": loss, "products": products}


def test_an_output_that_compares_all_samples_is_refused_by_what_needs_it() -> None:
    batch = (normal(ROWS, WIDTH, 0).float(),)
    with in_process(Contrast(), batch, None) as pipe:
        assert pipe.evaluate(batch).samples == ROWS
        with pytest.raises(BadInput, match=r"cannot predict: the size of output 0 .* with all"):
            pipe.predict(batch)
        pipe.step(batch)
    mean = {"mean": lambda output, _: output["products"].mean()}
    with pytest.raises(BadInput, match=r"output 0 .* is not a multiple of the samples"):
        in_process(Contrast(), batch, None, metrics=mean)
