"""Every asynchronous method gives the weights that its paper defines, update by update."""

import numpy as np
import pytest
import torch
from reference.asynchronous_training import METHODS, Settings, train
from runtime.asynchronous_cases import (
    OPTIMIZERS,
    as_array,
    chain,
    data,
    first_weights,
    make_optimizer,
    make_schedule,
    plan_of_stages,
)

from penstock.runtime.in_process import InProcessPipeline

TOLERANCE = 1e-12


def histories(player: InProcessPipeline) -> list[list[np.ndarray]]:
    """Every weight that each stage gets from now on, noted at its updates."""
    found: list[list[np.ndarray]] = []
    for versions in player.versions:
        noted = [as_array(versions.parameters)]
        found.append(noted)
        update = versions.update

        def noting(step, update=update, versions=versions, noted=noted):
            update(step)
            noted.append(as_array(versions.parameters))

        versions.update = noting
    return found


def played(
    method: str,
    stages: int,
    settings: Settings,
    micro_batches: int,
    batches: int,
    *,
    drain_every: int = 0,
    recompute: bool = False,
    toy: str = "linear",
) -> tuple[list[list[np.ndarray]], InProcessPipeline]:
    inputs, targets = (
        torch.from_numpy(part).reshape(batches, -1, part.shape[-1])
        for part in data(batches * micro_batches)
    )
    plan = plan_of_stages(stages, method, micro_batches, recompute=recompute)
    player = InProcessPipeline(
        chain(first_weights(stages, toy)),
        plan,
        (inputs[0], targets[0]),
        optimizer=make_optimizer(settings),
        learning_rate_schedule=make_schedule(settings),
    )
    found = histories(player)
    for number, batch in enumerate(zip(inputs, targets, strict=True), 1):
        player.step(batch)
        if drain_every and number % drain_every == 0:
            player.drain()
    player.drain()
    return found, player


def assert_equal_histories(found: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    assert [len(stage) for stage in found] == [len(stage) for stage in expected]
    for stage, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for update, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gap = np.abs(a - b).max()
            assert gap <= TOLERANCE * np.abs(b).max(), (stage, update, gap)


@pytest.mark.parametrize("toy", ["quadratic", "linear"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_sequence_of_weights_is_that_of_the_definition(
    method: str, stages: int, name: str, toy: str
) -> None:
    settings = OPTIMIZERS[name]
    micro_batches, batches = 2 * stages, 4
    size = stages if method in ("2bw", "xpipe") else 1
    inputs, targets = data(micro_batches * batches)
    expected = train(method, first_weights(stages, toy), inputs, targets, settings, size)
    found, _ = played(method, stages, settings, micro_batches, batches, toy=toy)
    assert_equal_histories(found, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stages", [3, 4])
def test_the_definitions_differ_from_one_another(stages: int, name: str) -> None:
    """Otherwise the test above would not tell the methods apart."""
    inputs, targets = data(8 * stages)
    last: dict[str, np.ndarray] = {}
    for method in METHODS:
        size = stages if method in ("2bw", "xpipe") else 1
        weights = train(method, first_weights(stages), inputs, targets, OPTIMIZERS[name], size)
        last[method] = np.stack([stage[-1] for stage in weights])
    for method, ours in last.items():
        for other, theirs in last.items():
            assert method == other or np.abs(ours - theirs).max() > 1e-6, (method, other)


@pytest.mark.parametrize("method", METHODS)
def test_a_drained_pipeline_starts_anew(method: str) -> None:
    stages, settings = 3, OPTIMIZERS["adamw"]
    size = stages if method in ("2bw", "xpipe") else 1
    inputs, targets = data(2 * stages * 6)
    expected = train(
        method, first_weights(stages), inputs, targets, settings, size, drain_every=4 * stages
    )
    found, _ = played(method, stages, settings, 2 * stages, 6, drain_every=2)
    assert_equal_histories(found, expected)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("2bw", "xpipe")])
def test_a_batch_may_have_fewer_micro_batches_than_there_are_stages(method: str) -> None:
    settings = OPTIMIZERS["momentum"]
    inputs, targets = data(12)
    expected = train(method, first_weights(4), inputs, targets, settings, 1)
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
