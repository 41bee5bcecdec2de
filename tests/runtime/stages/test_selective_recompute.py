"""Recomputing some layers of a stage, or each by itself, changes nothing but its memory."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from runtime.stages.selective_cases import compare_selective, trained_under
from torch import nn

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stages.partial_recompute import PartlyRecomputed, parts_of_stage
from penstock.runtime.stages.runner import StageInputs


def assert_equal(
    names: list[str],
    schedules: list[str],
    replications: list[tuple[int, ...]],
    by_block: bool = False,
):
    workers = max(map(sum, replications))
    results = launch_workers(
        compare_selective, (names, schedules, replications, by_block), workers=workers, threads=1
    )
    for rank, found in enumerate(results):
        assert len(found) == len(names) * len(schedules) * len(replications)
        wrong = {case: what for case, what in found.items() if what}
        assert not wrong, f"rank {rank}: {wrong}"


def test_gradients_are_those_of_one_device() -> None:
    assert_equal(["mlp"], ["gpipe", "zb-h1", "interleaved"], [(1, 1), (2, 1)])
    assert_equal(["convolutions"], ["gpipe", "zb-h1"], [(1, 1), (2, 1)])


def test_tied_weights_and_skip_tensors_cross_parts() -> None:
    assert_equal(["gpt2", "t5"], ["zb-h1"], [(2, 1)])


def test_by_block_gradients_are_those_of_one_device() -> None:
    assert_equal(["gpt2", "t5"], ["1f1b", "chimera"], [(2, 2)], by_block=True)
    assert_equal(["convolutions"], ["gpipe", "interleaved"], [(2, 1)], by_block=True)


@pytest.mark.parametrize("traced", [False, True])
def test_random_numbers_and_buffers_are_those_of_a_run_that_keeps_everything(traced: bool) -> None:
    stages = (Stage(range(3), (0,), (4,)), Stage(range(3, 5), (1,), (4,)))
    kept = Plan(stages, 3, 4, "gpipe")
    chosen = ((1,), (3,)), ((0, 2), (4,))
    plans = [kept] + [
        replace(
            kept,
            stages=tuple(
                replace(stage, recompute=True, recompute_layers=again)
                for stage, again in zip(stages, layers, strict=True)
            ),
        )
        for layers in chosen
    ]
    plans.append(with_recompute(kept, False, by_block=True))
    for found in launch_workers(trained_under, (plans, traced), workers=2, threads=1):
        expected, *others = found
        assert len(expected) > 2
        for other in others:
            assert other.keys() == expected.keys()
            assert other["losses"] == pytest.approx(expected["losses"], rel=1e-12)
            for name in expected.keys() - {"losses"}:
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


def test_only_the_layers_named_run_again_and_free_what_they_saved() -> None:
    model = nn.Sequential(*(Counting(number) for number in range(4)))
    x = torch.randn(2, 4)
    graph = capture_model(model, (x, x), loss=nn.MSELoss(), granularity="block")
    program = graph.stage(range(5))
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    def run(
        again: tuple[int, ...], by_block: bool = False
    ) -> tuple[list[int], int, list[torch.Tensor]]:
        stage = Stage(range(5), (0,), (2,), not by_block, again, by_block)
        parts = parts_of_stage(graph, stage, program)
        runner = PartlyRecomputed(program, parts, torch.device("cpu"), by_block=by_block)
        runner.begin(StageInputs(((x, x),), (2,), frozenset({0})))
        CALLS.clear()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.forward(0, [])
        kept = sum(saved)
        if not by_block:
            runner.recompute(0)
        runner.backward(0, [])
        gradients = [p.grad.clone() for p in program.module.parameters() if p.grad is not None]
        program.module.zero_grad()
        return [CALLS[number] for number in range(4)], kept, gradients

    calls, kept_bytes, gradients = run((1, 2))
    assert calls == [1, 2, 2, 1]
    more_calls, fewer_bytes, others = run((0, 1, 2))
    assert more_calls == [2, 2, 2, 1]
    # Each layer saves the 2 x 4000 values that tanh made.
    assert kept_bytes - fewer_bytes >= 2 * 4000 * 4
    assert len(gradients) == 8
    every_call, no_bytes, by_block = run((), by_block=True)
    assert (every_call, no_bytes) == ([2, 2, 2, 2], 0)
    for one, other, third in zip(gradients, others, by_block, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


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
            plan,
            batch,
            optimizer=lambda p: torch.optim.SGD(p, 0.5),
            clip_norm=0.1,
            autocast=torch.bfloat16,
        ) as pipe:
            found.append([pipe.step(batch).loss for _ in range(3)])
            pipe.close(gather=True)
    # Between parts tensors have the type of the capture, within one stage that of autocast.
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[0][2] < found[0][0]
