"""The gradient noise scale of a problem whose noise is known."""

import pytest
import torch
from torch import nn

from penstock.capture.chain import Chain
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

WIDTH, ROWS, STEPS, SPREAD = 6, 8, 400, 0.5


class Offset(nn.Module):
    """Adds a vector to the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.full((WIDTH,), 1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add it."""
        return x + self.vector


def test_the_average_over_steps_finds_the_noise_scale() -> None:
    """The gradient of a sample is x + 1, where x is normal: mean 1, variance SPREAD squared."""
    chain = Chain([Offset()], loss=lambda y, _: 0.5 * y.square().sum(1).mean())
    torch.manual_seed(0)
    batches = [
        (SPREAD * torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.zeros(ROWS))
        for _ in range(2 * STEPS)
    ]
    plan = Plan((Stage(range(2), (0,), (ROWS // 2,)),), 2, ROWS // 2, "gpipe")
    with Pipeline(chain, plan, batches[0], gradient_noise=True) as pipe:
        found = [
            pipe.step(first, second).gradient_noise
            for first, second in zip(batches[::2], batches[1::2], strict=True)
        ]
    noises = [noise for noise in found if noise is not None]
    assert len(noises) == STEPS
    variance = sum(noise.variance for noise in noises) / STEPS
    square_norm = sum(noise.square_norm for noise in noises) / STEPS
    assert variance == pytest.approx(WIDTH * SPREAD**2, rel=0.1)
    assert square_norm == pytest.approx(WIDTH, rel=0.02)
    scales = [noise.scale for noise in noises[100:] if noise.scale is not None]
    assert sum(scales) / len(scales) == pytest.approx(SPREAD**2, rel=0.1)


def test_one_batch_on_one_replica_has_no_smaller_batch() -> None:
    torch.manual_seed(0)
    chain = Chain([nn.Linear(2, 2)], loss=nn.MSELoss())
    batch = (torch.randn(4, 2), torch.randn(4, 2))
    plan = Plan((Stage(range(2), (0,), (2,)),), 2, 2, "gpipe")
    with Pipeline(chain, plan, batch) as pipe:
        assert pipe.step(batch).gradient_noise is None
    with (
        Pipeline(chain, plan, batch, gradient_noise=True) as pipe,
        pytest.raises(BadInput, match=r"'0\.weight' has one replica and the step one batch"),
    ):
        pipe.step(batch)
