"""Estimates under autocast follow the policy of GPUs, not that of the CPU that makes them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.measure.gpu_autocast import gpu_autocast
from penstock.measure.roofline import estimate_profile

LOW, WIDE = torch.bfloat16, torch.float32
CALLS: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = {
    "pow": (WIDE, lambda x: torch.pow(x, 3)),
    "power of a number": (WIDE, lambda x: 2**x),
    "exp": (WIDE, torch.exp),
    "rsqrt": (WIDE, lambda x: torch.rsqrt(x.abs())),
    "layer_norm": (WIDE, lambda x: functional.layer_norm(x, (8,))),
    "softmax": (WIDE, lambda x: x.softmax(-1)),
    "softmax in a given type": (LOW, lambda x: x.softmax(-1, LOW)),
    "sum": (WIDE, lambda x: x.sum(0)),
    "sum in a given type": (LOW, lambda x: x.sum(0, dtype=LOW)),
    "norm": (WIDE, torch.norm),
    "cross_entropy": (WIDE, lambda x: functional.cross_entropy(x, torch.arange(4))),
    "mse_loss": (WIDE, lambda x: functional.mse_loss(x, x.detach())),
    "linear": (LOW, lambda x: functional.linear(x.float(), torch.ones(3, 8))),
    "matmul": (LOW, lambda x: x.float() @ x.float().T),
    "gelu": (LOW, functional.gelu),
    "relu": (LOW, functional.relu),
    "mean": (LOW, lambda x: x.mean(0)),
    "tanh": (LOW, torch.tanh),
}
"""Types by PyTorch's manual: "CUDA Ops that can autocast to float32", and the others."""


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_types_of_the_manual(name: str) -> None:
    expected, call = CALLS[name]
    x = torch.randn(4, 8, dtype=LOW, requires_grad=True)
    with torch.autocast("cpu", LOW):
        before = call(x).dtype
        with gpu_autocast():
            result = call(x)
        assert call(x).dtype == before
    assert result.dtype == expected
    result.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == LOW


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.pow(x, 3)


def test_a_power_saves_its_argument_in_float32() -> None:
    model = nn.Sequential(nn.Linear(16, 32), Cube(), nn.Linear(32, 4))
    batch = torch.randn(8, 16), torch.arange(8) % 4
    graph = capture_model(model, batch, loss=functional.cross_entropy, granularity="block")
    profile = estimate_profile(graph, batch, "H100-80GB", autocast=LOW)
    first = sum(layer.saved_bytes.per_sample for layer in profile.layers if layer.name != "loss")
    # The linear layers save what they read in the lower type, and the power its own in float32.
    of_first, of_power, of_last = 2 * 16, 4 * 32, 2 * 32
    assert first == of_first + of_power + of_last
