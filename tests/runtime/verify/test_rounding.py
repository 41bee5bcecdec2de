"""In float32 a difference that rounding explains is no error; an error is still found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime.verify.verify_cases import Reversed, hooking
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.verify.result import Difference
from penstock.runtime.verify.verify import VerifyResult, explained

ROWS = 512


class AtZero(nn.Module):
    """The second unit of the last row is exactly at the kink of its ReLU: 1 * 1 - 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)
        with torch.no_grad():
            self.first.weight[1] = torch.tensor([1.0, 0.0, 0.0, 0.0])
            self.first.bias[1] = -1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.last(self.relu(self.first(x)))


class OnlyFloat32(AtZero):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores, with a product that no other type can enter."""
        return self.last(self.relu(self.first(x)).float() @ torch.eye(8))


class Scaled(Reversed):
    """Passes numbers on, and gradients that are larger by 2 %."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The gradient, scaled."""
        return 1.02 * gradients[0]


def just_above(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
    """ReLU after a sum that was rounded up."""
    return torch.relu(given[0] + 2.0**-24)


def verified(
    model: nn.Module,
    hook: Callable[..., Any],
    *names: str,
    autocast: torch.dtype | None = None,
) -> VerifyResult:
    """What `verify` says of a pipeline in which these modules have a hook."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 4, generator=generator), torch.arange(ROWS) % 3
    x[-1, 0] = 1.0
    graph = capture_model(model, (x, y), loss=functional.cross_entropy)
    hooking(graph, hook, *names)
    stage = Stage(range(len(graph.layer_names)), (0,), (ROWS // 2,))
    with Pipeline(
        graph, (x, y), plan=Plan((stage,), 2, ROWS // 2, "1f1b"), autocast=autocast
    ) as pipe:
        return pipe.verify((x, y))


def test_a_unit_that_rounding_turns_on_is_no_error() -> None:
    result = verified(AtZero(), just_above, "relu")
    assert result.equal, str(result)
    assert result.reference == "your module on the whole batch in float64, up to rounding"
    assert result.largest < result.tolerance == 2e-4


class Normed(AtZero):
    """The gradient of the first bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())  # type: ignore[assignment]


def in_other_order(module: Any, given: Any, made: torch.Tensor) -> torch.Tensor:
    """A linear layer that adds its bias by itself."""
    return functional.linear(given[0], module.weight) + module.bias


def too_large(module: Any, given: Any, made: torch.Tensor) -> torch.Tensor:
    """The same, and an error."""
    return 1.5 * in_other_order(module, given, made)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_error_in_bfloat16() -> None:
    linear, in_bfloat16 = ("first", "last"), {"autocast": torch.bfloat16}
    result = verified(Normed(), in_other_order, *linear, **in_bfloat16)
    assert result.equal, str(result)
    assert result.reference.endswith(" in float64, up to rounding")
    assert not verified(Normed(), too_large, *linear, **in_bfloat16).equal


@pytest.mark.parametrize("model", [AtZero, OnlyFloat32])
def test_an_error_of_two_percent_is_refused(model: type[nn.Module]) -> None:
    result = verified(model(), lambda module, given, made: Scaled.apply(made), "relu")
    assert str(result).startswith("gradient of 'first.weight' on stage 0 is ")
    assert result.difference is not None and 0.005 < result.difference.relative < 0.05
    assert result.tolerance == 2e-4


@pytest.mark.parametrize(
    ("gap", "moved", "equal"),
    [(3e-4, 1e-2, True), (9e-4, 1e-2, False), (3e-4, 1e-4, False), (3e-4, 2e-4, True)],
)
def test_a_gap_is_no_error_where_rounding_moves_the_module_as_far(
    gap: float, moved: float, equal: bool
) -> None:
    """A deep net: its own gradient and the pipeline's are equally far from any run in float64."""
    wrong = Difference("w", "gradient", 0, 1.0 + gap, 1.0, gap)
    first = VerifyResult(1.0, 1.0, 1, gap, 2e-4, wrong, "your module")
    result = explained(first, "in float64", {"w": 0.05}, {"w": moved}, ())
    assert result.equal == equal
    assert result.reference == "your module"
    assert result.tolerance == (min(2 * moved, 8e-4) if equal else 2e-4)
