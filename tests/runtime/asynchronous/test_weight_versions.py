"""Every asynchronous method gives the weights that its paper defines, update by update."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from reference.asynchronous_training import METHODS, Settings
from runtime.asynchronous.asynchronous_cases import (
    OPTIMIZERS,
    TOLERANCE,
    TwoLayers,
    as_array,
    assert_equal_histories,
    batches_of,
    chain,
    data,
    defined,
    first_weights,
    make_optimizer,
    make_schedule,
    noting,
    plan_of_stages,
)

from penstock.capture.chain import Chain
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.runtime.asynchronous.predicted_step import PredictedSteps
from penstock.runtime.options import Safety, Update
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.shape import StageCost
from penstock.simulate.instances import instances_of


def in_process(
    stages: int,
    method: str,
    micro_batches: int,
    *,
    model=None,
    costs: tuple[StageCost, ...] = (),
    **options,
) -> Pipeline:
    """All stages of the linear toy (or ``model``) in this process."""
    (batch,) = batches_of(1, micro_batches)
    plan = replace(plan_of_stages(stages, method, micro_batches), costs=costs)
    model = model or chain(first_weights(stages))
    options = {"safety": Safety(transport="in-process"), "verify": "off", **options}
    return Pipeline(model, batch, plan=plan, **options)


def played(
    method: str,
    stages: int,
    settings: Settings,
    micro_batches: int,
    batches: int,
    *,
    drain_every: int = 0,
    toy: str = "linear",
    costs: tuple[StageCost, ...] = (),
) -> tuple[list[list[np.ndarray]], Pipeline]:
    player = in_process(
        stages,
        method,
        micro_batches,
        model=chain(first_weights(stages, toy)),
        costs=costs,
        optimizer=make_optimizer(settings),
        learning_rate_schedule=make_schedule(settings),
    )
    found, every = noting(player), batches_of(batches, micro_batches)
    for start in range(0, batches, drain_every or batches):
        for _ in player.stream(every[start : start + (drain_every or batches)]):
            pass
    return found, player


@pytest.mark.parametrize("toy", ["quadratic", "linear"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stages", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_every_sequence_of_weights_is_that_of_the_definition(
    method: str, stages: int, name: str, toy: str
) -> None:
    settings = OPTIMIZERS[name]
    micro_batches, batches = 2 * stages, 4
    expected = defined(method, stages, settings, micro_batches * batches, toy=toy)
    found, _ = played(method, stages, settings, micro_batches, batches, toy=toy)
    assert_equal_histories(found, expected)


@pytest.mark.parametrize("stages", [4, 5])
def test_spectrain_predicts_as_published_where_the_plan_has_equal_passes(stages: int) -> None:
    settings, micro_batches, batches = OPTIMIZERS["momentum"], 2 * stages, 4
    longer, alike = (
        defined("spectrain", stages, settings, micro_batches * batches, slots_of_backward=slots)
        for slots in (2, 1)
    )
    costs = (StageCost(1.0, 0.5, 0.5),) * stages
    found, _ = played("spectrain", stages, settings, micro_batches, batches, costs=costs)
    assert_equal_histories(found, alike)
    assert np.abs(longer[-1][-1] - alike[-1][-1]).max() > 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stages", [3, 4])
def test_the_definitions_differ_from_one_another(stages: int, name: str) -> None:
    """Otherwise the test above would not tell the methods apart."""
    last: dict[str, np.ndarray] = {}
    for method in METHODS:
        weights = defined(method, stages, OPTIMIZERS[name], 8 * stages)
        last[method] = np.stack([stage[-1] for stage in weights])
    for method, ours in last.items():
        for other, theirs in last.items():
            assert method == other or np.abs(ours - theirs).max() > 1e-6, (method, other)


@pytest.mark.parametrize("method", METHODS)
def test_a_drained_pipeline_starts_anew(method: str) -> None:
    stages, settings = 3, OPTIMIZERS["adamw"]
    expected = defined(method, stages, settings, 2 * stages * 6, drain_every=4 * stages)
    found, _ = played(method, stages, settings, 2 * stages, 6, drain_every=2)
    assert_equal_histories(found, expected)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("2bw", "xpipe")])
def test_a_batch_may_have_fewer_micro_batches_than_there_are_stages(method: str) -> None:
    settings = OPTIMIZERS["momentum"]
    expected = defined(method, 4, settings, 12)
    found, _ = played(method, 4, settings, 1, 12)
    assert_equal_histories(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_one_stage_is_plain_training(method: str) -> None:
    settings = OPTIMIZERS["nesterov with decay"]
    found, _ = played(method, 1, settings, 2, 6)
    inputs, targets = (torch.from_numpy(part) for part in data(12))
    model = chain(first_weights(1))
    parameters = list(model.parameters())
    optimizer = make_optimizer(settings)(parameters)
    for update, (x, target) in enumerate(zip(inputs, targets, strict=True), 1):
        optimizer.zero_grad()
        model.loss(model(x), target).backward()
        optimizer.step()
        assert np.abs(found[0][update] - as_array(parameters)).max() <= TOLERANCE


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_as_many_copies_are_kept_as_the_schedule_and_the_simulator_count(
    method: str, stages: int
) -> None:
    micro_batches = 2 * stages
    _, player = played(method, stages, OPTIMIZERS["momentum"], micro_batches, 4)
    plan = plan_of_stages(stages, method, micro_batches)
    schedule = order_of(plan)
    counted = tuple(schedule.weights.versions_of(stage) for stage in range(stages))
    assert tuple(each.most_copies for each in player.weight_versions.values()) == counted
    instances = instances_of(schedule, plan)
    assert tuple(use.versions for use in instances.uses) == counted


@pytest.mark.parametrize("method", METHODS)
def test_the_version_difference_is_measured(method: str) -> None:
    stages, micro_batches, batches = 4, 8, 4
    _, player = played(method, stages, OPTIMIZERS["momentum"], micro_batches, batches)
    size = stages if method in ("2bw", "xpipe") else 1
    for stage, versions in player.weight_versions.items():
        passes = list(versions.log.passes)
        assert [p.micro_batch for p in passes] == list(range(micro_batches * batches))
        steady = passes[2 * stages : -2 * stages]
        mean = sum(p.difference for p in steady) / len(steady)
        # As many updates as backwards of others come between the two passes, over the size.
        assert mean == pytest.approx((stages - stage - 1) / size)
        new = versions.log.take_new()
        assert list(new[0]) == passes[len(passes) - len(new[0]) :], (
            "what no batch's metrics had yet"
        )
        assert versions.log.take_new() == ([], [])


def test_predictions_are_compared_with_what_came() -> None:
    """On a steady descent a step is like the one before, so momentum tells the next ones."""
    stages, settings = 3, Settings("sgd", 0.01)
    inputs, targets = (torch.from_numpy(part[:1]) for part in data(1))
    made = make_optimizer(settings)
    player = in_process(
        stages, "spectrain", 1, optimizer=made, update=Update(prediction_error_every=1)
    )
    history = noting(player)
    for _ in player.stream([(inputs[0], targets[0])] * 40):
        pass
    for stage, versions in player.weight_versions.items():
        errors = list(versions.log.errors)
        assert len(errors) >= 40 // (max(error.lead for error in errors) + 1) - stages
        for error in errors[-5:]:
            assert 0 < error.predicted < 0.5 * error.stale
        # The last one again, by hand: how far the weights had moved in as many updates.
        moved = [
            np.linalg.norm(history[stage][u + errors[-1].lead] - history[stage][u])
            for u in range(len(history[stage]) - errors[-1].lead)
        ]
        assert np.min(np.abs(np.array(moved) - errors[-1].stale)) < 1e-12


def tied_chain(stages: int) -> Chain:
    """The first and the last stage have a weight in common, which counts and steps once."""
    model = chain(first_weights(stages))
    layers = [layer for layer in model.modules() if isinstance(layer, TwoLayers)]
    layers[-1].second.weight = layers[0].first.weight
    return model


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_with_a_flush_tied_stages_in_one_process_train_as_one_device(schedule: str) -> None:
    made, model = make_optimizer(OPTIMIZERS["adamw"]), tied_chain(3)
    player = in_process(3, schedule, 4, model=tied_chain(3), optimizer=made, clip_norm=0.05)
    optimizer = made(list(model.parameters()))
    for x, target in batches_of(4, 4):
        optimizer.zero_grad()
        loss = model.loss(model(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        assert player.step((x, target)).loss == pytest.approx(float(loss.detach()), rel=1e-12)


def test_clipping_is_that_of_one_stage_at_one_update() -> None:
    stages, limit = 2, 1e-3
    inputs, targets = (torch.from_numpy(part) for part in data(1))
    descent = partial(torch.optim.SGD, lr=1.0)
    player = in_process(stages, "vanilla", 1, optimizer=descent, clip_norm=limit)
    found = noting(player)
    player.step((inputs[0], targets[0]))
    for stage in found:
        assert np.linalg.norm(stage[1] - stage[0]) == pytest.approx(limit, rel=1e-2)


def test_what_cannot_be_done_is_refused() -> None:
    inputs, targets = (torch.from_numpy(part) for part in data(2))

    def player(method: str, optimizer: Any, model: Any = None) -> Pipeline:
        return in_process(2, method, 2, model=model, optimizer=optimizer)

    with pytest.raises(BadInput, match=r"SGD has momentum 0.*'pipedream'"):
        player("spectrain", lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(BadInput, match=r"RMSprop has no known prediction.*Adam, AdamW"):
        player("xpipe", lambda p: torch.optim.RMSprop(p))
    tied = tied_chain(2)
    with pytest.raises(BadInput, match=r"used by stages 0 and 1, which update"):
        player("pipedream", lambda p: torch.optim.SGD(p, lr=0.1), tied)
    with pytest.raises(BadInput, match=r"1 samples cannot be cut into the plan's 2"):
        player("pipedream", lambda p: torch.optim.SGD(p, lr=0.1)).step(
            (inputs[0][:1], targets[0][:1])
        )


@pytest.mark.parametrize("nesterov", [False, True])
def test_muons_step_is_told_beforehand_for_a_gradient_that_stays(nesterov: bool) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = torch.optim.Muon([parameter], lr=0.1, nesterov=nesterov)
    gradient = torch.randn(4, 3, dtype=torch.float64)
    steps = PredictedSteps(optimizer)
    told = torch.empty_like(parameter)
    steps.predict([parameter], 1, [told])
    assert torch.equal(told, parameter), "nothing is known before the first step"
    for _ in range(3):
        parameter.grad = gradient.clone()
        steps.predict([parameter], 1, [told])
        before = parameter.detach().clone()
        optimizer.step()
    # Muon turns its direction in bfloat16, in five steps that magnify rounding.
    gap = (told - parameter).norm() / (before - parameter).norm()
    assert gap < 0.1
