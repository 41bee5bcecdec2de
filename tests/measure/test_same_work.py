"""Layers that do the same work are run once; layers that may not are each run."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.measure.layer_runs import LayerRun
from penstock.measure.roofline import estimate_profile

Run = Callable[["Net", torch.Tensor, list[torch.Tensor]], torch.Tensor]


class Block(nn.Module):
    """A block that knows its number, as those of Hugging Face models do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.layer_idx, self.window = nn.Linear(8, 8), number, 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.linear(x) * mask


class Net(nn.Module):
    """Five blocks between two linear layers; ``run`` calls the blocks on masks of the batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(number) for number in range(5))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.run(self, self.first(x), [x[:, :1] > 0, x[:, 1:2] > 0]))


def plain(net: Net, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    for block in net.blocks:
        x = block(x, masks[0])
    return x


def with_other_masks(net: Net, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    for number, block in enumerate(net.blocks):
        x = block(x, masks[number % 2])
    return x


def with_other_arguments(net: Net, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    for number, block in enumerate(net.blocks):
        x = block(x, masks[0], scale=1.0 + number % 2)
    return x


def with_other_functions(net: Net, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    for number, block in enumerate(net.blocks):
        x = block(x, masks[0])
        x = functional.gelu(x) if number % 2 else functional.relu(x)
    return x


def with_other_numbers(net: Net, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    for number, block in enumerate(net.blocks):
        x = functional.leaky_relu(block(x, masks[0]), 0.1 * (1 + number % 2))
    return x


def layers_run(model: Net, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that an estimate runs."""
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    graph = capture_model(model, batch, loss=functional.cross_entropy, granularity="block")
    found: list[int] = []
    forward = LayerRun.forward

    def noted(run: LayerRun, *given: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        found.append(run.program.layers.start)
        return forward(run, *given)

    with monkeypatch.context() as patch:
        patch.setattr(LayerRun, "forward", noted)
        estimate_profile(graph, batch, "cpu", batch_sizes=(4,))
    return found


def test_of_equal_blocks_one_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers_run(Net(plain), monkeypatch) == [0, 1, 6, 7]


@pytest.mark.parametrize(
    "run", [with_other_masks, with_other_arguments, with_other_functions, with_other_numbers]
)
def test_blocks_that_are_called_otherwise_are_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert layers_run(Net(run), monkeypatch) == [0, 1, 2, 6, 7]


def window(block: Block) -> None:
    block.window = 8


def frozen(block: Block) -> None:
    block.linear.requires_grad_(False)


def other_class(block: Block) -> None:
    block.linear = type("Linear", (nn.Linear,), {})(8, 8)


def hooked(block: Block) -> None:
    block.linear.register_forward_hook(lambda *given: None)


def own_object(block: Block) -> None:
    vars(block)["helper"] = object()


@pytest.mark.parametrize("change", [window, frozen, other_class, hooked, own_object])
def test_a_block_that_differs_is_run(
    change: Callable[[Block], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(plain)
    block = model.blocks[2]
    assert isinstance(block, Block)
    change(block)
    assert 3 in layers_run(model, monkeypatch)
