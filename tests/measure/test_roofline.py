"""Estimates for absent hardware follow from operations and bytes, without computing anything."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.chain import Chain
from penstock.capture.chain_graph import chain_graph
from penstock.errors import BadInput
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import HARDWARE, estimate_profile

ROWS, WIDTH = 64, 2048


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)


def wide(device: str = "cpu") -> Chain:
    with torch.device(device):
        return Chain(
            {
                "first": nn.Linear(WIDTH, WIDTH, bias=False),
                "relu": nn.ReLU(),
                "last": nn.Linear(WIDTH, 10),
            },
            functional.cross_entropy,
        )


def test_a_matrix_product_takes_its_operations_at_peak_rate(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    profile = estimate_profile(chain_graph(wide(), batch), batch, "cpu", batch_sizes=(ROWS,))
    expected_s = 2 * ROWS * WIDTH * WIDTH / HARDWARE["cpu"].flops_per_s
    assert profile.layers[0].forward_s.at(ROWS) == pytest.approx(expected_s, rel=1e-6)
    assert profile.layers[0].backward_weight_s.at(ROWS) == pytest.approx(expected_s, rel=0.1)
    assert profile.layers[0].backward_input_s.at(ROWS) == 0  # the batch wants no gradient


def test_an_elementwise_layer_takes_its_bytes_at_memory_rate(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    profile = estimate_profile(chain_graph(wide(), batch), batch, "cpu", batch_sizes=(ROWS,))
    expected_s = 2 * ROWS * WIDTH * 4 / HARDWARE["cpu"].bytes_per_s
    assert profile.layers[1].forward_s.at(ROWS) == pytest.approx(expected_s, rel=1e-6)


def test_small_work_on_a_large_device_takes_its_launches(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    profile = estimate_profile(chain_graph(wide(), batch), batch, "H200-141GB", batch_sizes=(1, 2))
    launch_s = HARDWARE["H200-141GB"].launch_s
    assert profile.layers[1].forward_s.at(1) == pytest.approx(launch_s)
    assert profile.layers[1].forward_s.at(2) == pytest.approx(launch_s)


def test_bytes_are_those_that_a_measurement_counts(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    graph = chain_graph(wide(), batch)
    estimated = estimate_profile(graph, batch, "A100-80GB", batch_sizes=(8, 16))
    measured = measure_profile(graph, batch, batch_sizes=(8, 16), repeats=1)
    for guess, count in zip(estimated.layers, measured.layers, strict=True):
        assert guess.saved_bytes == count.saved_bytes
        assert guess.parameter_bytes == count.parameter_bytes
    assert estimated.edges == measured.edges


def test_a_faster_device_is_never_slower(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    graph = chain_graph(wide(), batch)
    totals = [
        estimate_profile(graph, batch, name).forward_s(range(4), ROWS)
        for name in ("cpu", "V100-16GB", "A100-80GB", "H100-80GB", "H200-141GB")
    ]
    assert totals == sorted(totals, reverse=True)


def test_a_model_on_the_meta_device_can_be_estimated(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    real = estimate_profile(chain_graph(wide(), batch), batch, "cpu")
    meta = estimate_profile(chain_graph(wide("meta"), batch), batch, "cpu")
    assert meta.layers == real.layers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_autocast_counts_as_the_type_that_it_computes_in(
    device: str, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    rows = 4096

    def seconds(dtype: torch.dtype, autocast: torch.dtype | None) -> float:
        chain, example = wide(device).to(dtype), (batch[0].to(dtype), batch[1])
        graph = chain_graph(chain, example)
        costs = estimate_profile(
            graph, example, "H100-80GB", autocast=autocast, batch_sizes=(rows,)
        )
        return costs.layers[0].forward_s.at(rows)

    single, half = seconds(torch.float32, None), seconds(torch.bfloat16, None)
    # Beside the product there are the casts of its inputs.
    assert half < seconds(torch.float32, torch.bfloat16) < 2.5 * half < single


def test_an_estimate_leaves_the_model_its_own_tensors(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    chain = wide()
    before = dict(chain.named_parameters())
    estimate_profile(chain_graph(chain, batch), batch, "cpu", batch_sizes=(2,))
    assert all(p is before[name] for name, p in chain.named_parameters())


def test_unknown_hardware_lists_what_there_is(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(BadInput, match="hardware 'TPU' is not in the table; use one of V100-16GB"):
        estimate_profile(chain_graph(wide(), batch), batch, "TPU")
