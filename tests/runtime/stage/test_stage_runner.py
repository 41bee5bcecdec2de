"""One stage by itself: split backward, recompute, and what it keeps."""

import gc
import weakref

import pytest
import torch
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.forward.stage_module import StageProgram
from penstock.runtime.stage.runner import ModuleRunner, StageInputs

ROWS, WIDTH = 4, 6


def middle_stage() -> StageProgram:
    """The second of four layers of a chain, with dropout and BatchNorm in it."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh()),
        nn.Linear(WIDTH, WIDTH),
    ]
    chain = Chain(layers, loss=nn.MSELoss()).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    return capture_model(chain, (x, x)).stage(range(1, 2))


def run(kinds: str, recomputed: bool = False) -> dict[str, torch.Tensor]:
    """Gradients and buffers after the given actions on one micro-batch."""
    program = middle_stage()
    runner = ModuleRunner(program, torch.device("cpu"))
    recompute = frozenset({0}) if recomputed else frozenset()
    halved = frozenset({0}) if "I" in kinds else frozenset()
    runner.begin(StageInputs(((),), (ROWS,), recompute, halved=halved))
    torch.manual_seed(1)
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    runner.forward(0, [x])
    torch.rand(5)
    found: dict[str, torch.Tensor] = {}
    for kind in kinds:
        match kind:
            case "R":
                runner.recompute(0)
            case "B":
                (found["input"],) = runner.backward(0, [gradient])
            case "I":
                (found["input"],) = runner.backward_input(0, [gradient])
                # Those of the linear layer wait; BatchNorm's two come at once.
                missing = [p.shape for p in program.module.parameters() if p.grad is None]
                assert missing == [(WIDTH, WIDTH), (WIDTH,)]
            case "W":
                runner.backward_weight(0)
    found |= {name: p.grad for name, p in program.module.named_parameters() if p.grad is not None}
    found |= {name: b.clone() for name, b in program.module.named_buffers()}
    found["random"] = torch.rand(3)
    return found


@pytest.mark.parametrize(("kinds", "recomputed"), [("IW", False), ("RB", True), ("RIW", True)])
def test_every_way_backward_gives_the_same(kinds: str, recomputed: bool) -> None:
    expected = run("B")
    assert len(expected) == 1 + 4 + 3 + 1
    found = run(kinds, recomputed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_an_output_that_the_backward_does_not_need_is_freed_after_sending() -> None:
    chain = Chain([nn.Linear(2, 2), nn.Linear(2, 2)], loss=nn.MSELoss())
    x = torch.randn(ROWS, 2)
    program = capture_model(chain, (x, x)).stage(range(1))
    runner = ModuleRunner(program, torch.device("cpu"))
    runner.begin(StageInputs(((x,),), (ROWS,)))
    (sent,) = runner.forward(0, [])
    assert sent is not None
    watched = weakref.ref(sent)
    del sent
    gc.collect()
    assert watched() is None
    runner.backward(0, [torch.ones(ROWS, 2)])
    assert all(p.grad is not None for p in program.module.parameters())
