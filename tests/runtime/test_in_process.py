"""All stages of a plan in one process: as over ranks, and as on one device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.pipeline_life_cases import all_stages_in_one_process
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.plan.in_one_process import in_one_process
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.schedule.dependencies import predecessors
from penstock.schedule.registry import FAMILIES

ROWS = 4


def plan_for(schedule: str, micro_batches: int = 4) -> Plan:
    """Four stages as the schedule places them; stages of one device each, but for replicas."""
    devices = {
        "looped": [(0,), (1,), (0,), (1,)],
        "folded": [(0,), (1,), (1,), (0,)],
    }.get(FAMILIES[schedule].placement, [(0,), (1,), (2,), (3,)])
    if schedule == "1f1b":
        devices[1] = (1, 4)
    stages = tuple(
        Stage(range(k, k + 1 + (k == 3)), own, (ROWS,) if len(own) == 1 else (3, 1))
        for k, own in enumerate(devices)
    )
    return Plan(stages, micro_batches, ROWS, schedule)


def model() -> Chain:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)] + [nn.Linear(6, 2)]
    return Chain(layers, functional.mse_loss).double()


def batches(count: int, samples: int = 4 * ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(samples, 6), draw(samples, 2)) for _ in range(count)]


def pipeline(plan: Plan, **options: Any) -> Pipeline:
    options = {"safety": Safety(transport="in-process"), **options}
    return Pipeline(model(), batches(1)[0], plan=plan, optimizer=partial(AdamW, lr=0.01), **options)


@pytest.mark.parametrize("schedule", FAMILIES)
def test_the_order_of_all_stages_is_that_of_every_device(schedule: str) -> None:
    plan = plan_for(schedule)
    (merged,), own = order_of(in_one_process(plan)).orders, order_of(plan)
    assert len(merged) == own.actions
    if not own.concurrent:
        for order in own.orders:
            assert [action for action in merged if action in set(order)] == list(order)
    done = set()
    for action in merged:
        present = set(predecessors(action, plan.shape())) & set(merged)
        assert present <= done, action
        done.add(action)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_a_loop_may_set_gradients_to_none_between_steps(schedule: str) -> None:
    def trained(*, zeroed: bool) -> tuple[list[float], list[torch.Tensor]]:
        own, found = model(), []
        make = partial(AdamW, lr=0.01)
        safety = Safety(transport="in-process")
        with Pipeline(
            own, batches(1)[0], plan=plan_for(schedule), optimizer=make, safety=safety
        ) as p:
            for batch in batches(4):
                found.append(p.step(batch).loss)
                if zeroed:
                    own.zero_grad()
        return found, [parameter.detach() for parameter in own.parameters()]

    (kept, left), (zeroed, weights) = trained(zeroed=False), trained(zeroed=True)
    assert zeroed == kept
    assert all(torch.equal(*pair) for pair in zip(left, weights, strict=True))


@pytest.mark.parametrize("schedule", [name for name in FAMILIES if FAMILIES[name].flushes])
def test_with_a_flush_losses_are_those_of_one_device(schedule: str) -> None:
    plain = model()
    optimizer = AdamW(plain.parameters(), lr=0.01)
    with pipeline(plan_for(schedule)) as pipe:
        for x, target in [*batches(3), *batches(1, samples=9)]:
            optimizer.zero_grad()
            loss = functional.mse_loss(plain(x), target)
            assert pipe.evaluate((x, target)).loss == pytest.approx(loss.item(), rel=1e-12)
            loss.backward()
            optimizer.step()
            assert pipe.step((x, target)).loss == pytest.approx(loss.item(), rel=1e-12)
        assert pipe.verified is not None and pipe.verified.equal
        assert pipe.plan == plan_for(schedule)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "spectrain"])
def test_a_checkpoint_of_stages_that_update_apart_goes_on_exactly(
    schedule: str, tmp_path: Path
) -> None:
    """Each stage has an optimizer and a learning-rate schedule of its own."""

    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    options = {"learning_rate_schedule": halved, "verify": "off"}
    with pipeline(plan_for(schedule), **options) as pipe:
        losses = [metrics.loss for metrics in pipe.stream(batches(6)[:3])]
        pipe.save(tmp_path)
        losses += [metrics.loss for metrics in pipe.stream(batches(6)[3:])]
        weights = pipe.model_state_dict()
    with pipeline(plan_for(schedule), **options) as pipe:
        assert pipe.load(tmp_path) == 3
        assert [metrics.loss for metrics in pipe.stream(batches(6)[3:])] == losses[3:]
        for name, tensor in pipe.model_state_dict().items():
            assert torch.equal(tensor, weights[name]), name


def test_a_step_that_is_left_out_counts_as_one() -> None:
    first, second = batches(2)
    with pipeline(plan_for("1f1b")) as pipe:
        before = pipe.step(first)
        pipe.skip_step()
        assert (before.step, pipe.step(second).step) == (1, 3)


def test_several_processes_are_refused_in_a_line() -> None:
    for line in launch_workers(all_stages_in_one_process, (), workers=2, threads=1):
        assert line.startswith("transport 'in-process' holds all stages in one process, and 2 run")


def test_a_request_to_stop_holds_though_parameters_are_thawed_before_the_next_step() -> None:
    """Ranks connect again for the thawed parameters, as where a callback does both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    batch = torch.randn(4, 4), torch.randn(4, 2)
    graph = capture_model(model, batch, loss=functional.mse_loss)
    layers = range(len(graph.layer_names))
    plan = Plan((Stage(layers, (0,), (4,)),), 1, 4, "1f1b")
    with Pipeline(graph, batch, plan=plan, optimizer=lambda of: torch.optim.SGD(of)) as pipe:
        pipe.step(batch)
        pipe.stop()
        model[0].requires_grad_(True)
        pipe.step(batch)
        assert pipe.stopping
