"""Float16 with a scaled loss, in one process: as torch's own scaler does it, and when it fails."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock.capture.chain import Chain
from penstock.errors import BadInput, LossNotFinite
from penstock.plan.plan import Plan, Stage
from penstock.runtime.gradients.loss_scaling import LossScaler
from penstock.runtime.options import Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.tables import LossScaling

ROWS, WIDTH, MICRO_BATCHES = 16, 8, 4
PLAN = Plan((Stage(range(4), (0,), (ROWS // MICRO_BATCHES,)),), MICRO_BATCHES, 4, "gpipe")


def model_and_batch(size: float = 1.0) -> tuple[Chain, tuple[torch.Tensor, torch.Tensor]]:
    """A chain in float32 whose loss, and so its gradients, are in proportion to ``size``."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return size * nn.functional.mse_loss(output, target)

    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return Chain(layers, loss=loss), batch


def pipeline(
    model: Chain, batch: Any, scaling: LossScaling | None = None, rate: float = 0.1
) -> Pipeline:
    return Pipeline(
        model,
        batch,
        plan=PLAN,
        optimizer=lambda parameters: SGD(parameters, lr=rate),
        autocast=torch.float16,
        update=Update(loss_scaling=scaling),
    )


def test_scale_skipped_steps_and_weights_are_those_of_torchs_scaler() -> None:
    """The first steps overflow, and again after the scale has grown."""
    model, batch = model_and_batch(size=64.0)
    whole = copy.deepcopy(model)
    optimizer = SGD(whole.parameters(), lr=1e-3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    expected: list[tuple[float, bool]] = []
    scaling = LossScaling(initial=2.0**20, growth_interval=3)
    with pipeline(model, batch, scaling, rate=1e-3) as pipe:
        found: list[tuple[float, bool]] = []
        for _ in range(16):
            optimizer.zero_grad()
            for rows in range(0, ROWS, 4):
                with torch.autocast("cpu", torch.float16):
                    x, y = (leaf[rows : rows + 4] for leaf in batch)
                    loss = whole.loss(whole(x), y) / MICRO_BATCHES
                theirs.scale(loss).backward()
            before, weight = theirs.get_scale(), next(whole.parameters()).clone()
            theirs.step(optimizer)
            theirs.update()
            expected.append((before, torch.equal(weight, next(whole.parameters()))))
            metrics = pipe.step(batch)
            found.append((metrics.loss_scale, metrics.skipped))
            assert math.isfinite(metrics.gradient_norm) != metrics.skipped
        named = dict(whole.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, named[name], rtol=1e-5, atol=1e-7)
    assert found == expected
    skipped = [number for number, (_, skip) in enumerate(expected) if skip]
    assert skipped[0] == 0
    assert any(not expected[number - 1][1] for number in skipped[1:])


def gradients(size: float, autocast: torch.dtype | None, initial: float) -> list[torch.Tensor]:
    """Gradients over ``size`` after a step in float16, or (no ``autocast``) in float32."""
    model, batch = model_and_batch(size)
    scaling = LossScaling(initial=initial) if autocast is not None else None
    update = Update(loss_scaling=scaling)
    with Pipeline(model, batch, plan=PLAN, autocast=autocast, verify="off", update=update) as pipe:
        pipe.step(batch)
        return [p.grad / size for p in pipe.parameters() if p.grad is not None]


def test_gradients_that_float16_cannot_hold_survive_when_scaled() -> None:
    exact = gradients(1e-7, None, 0.0)
    scaled = gradients(1e-7, torch.float16, 2.0**20)
    lost = gradients(1e-7, torch.float16, 1.0)
    assert len(exact) == 6
    for right, near, zero in zip(exact, scaled, lost, strict=True):
        size = right.abs().max()
        assert (near - right).abs().max() < 0.01 * size
        assert (zero - right).abs().max() > 0.1 * size


def test_a_loss_that_is_not_a_number_ends_the_run_whatever_the_scale() -> None:
    model, batch = model_and_batch()
    with pipeline(model, batch) as pipe:
        before = [p.detach().clone() for p in pipe.parameters()]
        with pytest.raises(LossNotFinite, match="loss is nan at step 1"):
            pipe.step((batch[0] * float("nan"), batch[1]))
        assert all(torch.equal(p, b) for p, b in zip(pipe.parameters(), before, strict=True))
        metrics = pipe.step(batch)
        assert (metrics.step, metrics.loss_scale, metrics.skipped) == (1, 65536.0, False)


def test_gradients_that_overflow_at_every_scale_end_the_run() -> None:
    model, batch = model_and_batch()
    scaling = LossScaling(initial=4.0, smallest=1.0)
    with pipeline(model, batch, scaling) as pipe:
        next(iter(pipe.parameters())).register_hook(lambda gradient: gradient * float("inf"))
        steps = [pipe.step(batch) for _ in range(2)]
        assert [(m.step, m.skipped, m.loss_scale) for m in steps] == [(1, True, 4), (2, True, 2)]
        with pytest.raises(LossNotFinite, match=r"overflow float16 at step 3 .*scaled by 1 only"):
            pipe.step(batch)


def test_a_checkpoint_keeps_scale_count_and_the_steps_that_were_skipped(tmp_path: Path) -> None:
    scaling = LossScaling(initial=2.0**18, growth_interval=4)

    def run(save_at: int, steps: int) -> list[tuple[int, bool, float, float]]:
        model, batch = model_and_batch(size=64.0)
        with pipeline(model, batch, scaling) as pipe:
            start = pipe.load(tmp_path) if save_at < 0 else 0
            found = []
            for step in range(start, steps):
                if step == save_at:
                    pipe.save(tmp_path)
                metrics = pipe.step(batch)
                found.append((metrics.step, metrics.skipped, metrics.loss_scale, metrics.loss))
        return found

    through = run(7, 14)
    assert any(skipped for _, skipped, _, _ in through[:7])
    assert len({scale for _, _, scale, _ in through[7:]}) > 1
    assert run(-1, 14) == through[7:]


def test_the_rule_grows_after_good_steps_and_cuts_at_an_overflow() -> None:
    scaler = LossScaler(LossScaling(initial=8.0, growth_interval=2, smallest=1.0))
    scales = []
    for step, overflow in enumerate([False, False, False, True, False, False], 1):
        scaler.update(overflow, 16.0, step)
        scales.append(scaler.scale)
    assert scales == [8, 16, 16, 8, 8, 16]


@pytest.mark.parametrize("terms", [1.0, 3.0, 1000.0])
def test_a_seed_is_the_scale_of_the_mean_loss(terms: float) -> None:
    """But for a power of two next to the number of terms, so that nothing is rounded."""
    scaler = LossScaler(LossScaling())
    assert scaler.seed(16) == 65536 / 16
    scaler.update(False, terms, 1)
    seed = scaler.seed(16)
    assert math.log2(seed) == int(math.log2(seed))
    assert 0.7 < seed * terms / 65536 < 1.42


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"growth": 0.5}, "growth of the loss scaling is 0.5; it must be >= 1"),
        ({"backoff": 1.0}, "backoff of the loss scaling is 1.0; it must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval of the loss scaling is 0; it must be >= 1"),
        ({"initial": 0.0}, "initial of the loss scaling is 0.0; it must be >= smallest"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LossScaling(**settings)


def test_float16_is_refused_where_it_cannot_work() -> None:
    model, batch = model_and_batch()
    with pytest.raises(BadInput, match=r"autocast is torch\.float64; use torch\.bfloat16, torch"):
        Pipeline(model, batch, plan=PLAN, autocast=torch.float64)
    with pytest.raises(BadInput, match=r"autocast is torch\.bfloat16: only float16 needs it"):
        Pipeline(
            model,
            batch,
            plan=PLAN,
            autocast=torch.bfloat16,
            update=Update(loss_scaling=LossScaling()),
        )
    half = tuple(leaf.half() for leaf in batch)
    with pytest.raises(BadInput, match=r"parameter '0\.0\.weight' is float16, as are 5 more"):
        pipeline(model.half(), half)
