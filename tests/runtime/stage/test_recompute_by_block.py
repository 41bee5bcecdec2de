"""Recomputing each layer of a stage by itself changes nothing but its memory."""

from collections import Counter

import pytest
import torch
from runtime.stage.by_block_cases import trained_under
from torch import nn

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stage.building import runner_of
from penstock.runtime.stage.partial_recompute import fastest_call
from penstock.runtime.stage.runner import StageInputs


@pytest.mark.parametrize("traced", [False, True])
def test_random_numbers_and_buffers_are_those_of_a_run_that_keeps_everything(traced: bool) -> None:
    stages = (Stage(range(3), (0,), (4,)), Stage(range(3, 5), (1,), (4,)))
    kept = Plan(stages, 3, 4, "gpipe")
    plans = [kept, with_recompute(kept, True), with_recompute(kept, False, by_block=True)]
    for found in launch_workers(trained_under, (plans, traced), workers=2, threads=1):
        expected, *others = found
        assert len(expected) > 2
        for other in others:
            assert other.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(other[name], expected[name], rtol=1e-12, atol=1e-14)


CALLS = Counter[int]()
"""Forwards by layer. No attribute of the layers: a recompute would put that back."""


class Counting(nn.Module):
    """A layer that saves one large tensor, and counts its forwards."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[self.number] += 1
        return torch.tanh(self.linear(x).repeat(1, 1000)).view(x.shape[0], -1, 4).mean(1)


def test_every_layer_runs_again_and_frees_what_it_saved() -> None:
    model = nn.Sequential(*(Counting(number) for number in range(4)))
    x = torch.randn(2, 4)
    graph = capture_model(model, (x, x), loss=nn.MSELoss(), granularity="block")
    program = graph.stage(range(5))
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    def run(by_block: bool) -> tuple[list[int], int, list[torch.Tensor]]:
        stage = Stage(range(5), (0,), (2,), by_block=by_block)
        runner = runner_of(graph, stage, program, torch.device("cpu"), call_of=fastest_call)
        runner.begin(StageInputs(((x, x),), (2,), frozenset()))
        CALLS.clear()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.forward(0, [])
        kept = sum(saved)
        runner.backward(0, [])
        gradients = [p.grad.clone() for p in program.module.parameters() if p.grad is not None]
        program.module.zero_grad()
        return [CALLS[number] for number in range(4)], kept, gradients

    calls, kept_bytes, gradients = run(by_block=False)
    # Each layer saves the 2 x 4000 values that tanh made.
    assert calls == [1, 1, 1, 1] and kept_bytes >= 4 * 2 * 4000 * 4
    every_call, no_bytes, others = run(by_block=True)
    assert (every_call, no_bytes) == ([2, 2, 2, 2], 0)
    assert len(gradients) == 8
    for one, other in zip(gradients, others, strict=True):
        assert torch.equal(one, other)


def test_by_block_autocast_and_clipped_steps_are_those_of_a_run_that_keeps_everything() -> None:
    torch.manual_seed(0)
    model, loss = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.MSELoss()
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    graph = capture_model(model, batch, loss=loss, granularity="module")
    kept = Plan((Stage(range(len(graph.layer_names)), (0,), (4,)),), 2, 4, "gpipe")
    found: list[list[float]] = []
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for plan in (kept, with_recompute(kept, False, by_block=True)):
        model.load_state_dict(first)
        with Pipeline(
            graph,
            batch,
            plan=plan,
            optimizer=lambda p: torch.optim.SGD(p, 0.5),
            clip_norm=0.1,
            autocast=torch.bfloat16,
        ) as pipe:
            found.append([pipe.step(batch).loss for _ in range(3)])
            pipe.close(gather=True)
    # Between parts tensors have the type of the capture, within one stage that of autocast.
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[0][2] < found[0][0]
