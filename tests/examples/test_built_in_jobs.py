"""The built-in jobs: real data, batches that depend on the step only, models that learn."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from penstock.errors import BadInput
from penstock.examples import digits, gpt_text
from penstock.train import JOBS
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.optimizers import learning_rate_schedule, optimizer_factory

JOB_NAMES = tuple(JOBS)


def losses(job: Job, steps: int) -> list[float]:
    """Plain training of the job on one device."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = optimizer_factory(job.optimizer)(model.named_parameters())
    schedule = learning_rate_schedule(job.optimizer, job.steps)(optimizer)
    found: list[float] = []
    assert job.loss is not None
    for inputs, target in islice(job.batches("train"), steps):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", JOB_NAMES)
def test_a_batch_depends_on_seed_and_step_only(name: str) -> None:
    job = find_job(name)
    through = list(islice(job.batches("train"), 40))
    resumed = list(islice(job.batches("train", 30), 10))
    for (x, y), (again_x, again_y) in zip(through[30:], resumed, strict=True):
        assert torch.equal(x, again_x)
        assert torch.equal(y, again_y)
    other = next(job.data("train", job.seed + 1, 0, job.batch_size))
    assert not torch.equal(through[0][0], other[0])
    assert through[0][0].shape[0] == job.batch_size


def test_targets_are_the_following_bytes_of_real_text() -> None:
    tokens, following = find_job("gpt-text").example_batch()
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert tokens.shape == (32, gpt_text.SEQUENCE)
    text = bytes(gpt_text.text("train").tolist()).decode(errors="ignore")
    assert "statement" in text
    assert len(gpt_text.text("held-out")) > 5 * gpt_text.SEQUENCE


def test_an_untrained_gpt_guesses_any_byte() -> None:
    assert losses(find_job("gpt-text"), 1)[0] == pytest.approx(math.log(256), abs=0.15)


def test_gpt_learns_within_twenty_steps() -> None:
    assert losses(find_job("gpt-text"), 20)[-1] < 3.6


def test_digits_learns_within_forty_steps() -> None:
    found = losses(find_job("digits"), 40)
    assert found[0] == pytest.approx(math.log(10), abs=0.3)
    assert found[-1] < 1.0


def test_a_resnet_of_twenty_layers_learns_digits_within_twenty_steps() -> None:
    job = find_job("resnet-digits")
    kinds = [type(module) for module in job.model().modules()]
    # Stem, two in each of nine blocks, the dense layer; projections do not count as layers.
    assert kinds.count(nn.Conv2d) - 2 + kinds.count(nn.Linear) == 20
    assert kinds.count(nn.BatchNorm2d) == kinds.count(nn.Conv2d) == 21
    found = losses(job, 20)
    assert found[0] == pytest.approx(math.log(10), abs=0.8)
    assert found[-1] < 0.5


def test_held_out_digits_are_never_trained_on_and_end() -> None:
    held_out = list(find_job("digits").batches("held-out"))
    assert sum(len(labels) for _, labels in held_out) == digits.HELD_OUT
    assert len(digits.images("train")[0]) + digits.HELD_OUT == 1797


def test_an_epoch_shows_every_digit_at_most_once() -> None:
    job = find_job("digits")
    steps = len(digits.images("train")[0]) // job.batch_size
    seen = torch.cat([images for images, _ in islice(job.batches("train"), steps)])
    known = digits.images("train")[0]
    assert len(torch.unique(seen.flatten(1), dim=0)) >= 0.99 * len(
        torch.unique(known.flatten(1), dim=0)[: len(seen)]
    )


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(BadInput, match="1437 training images, fewer than the batch size 2000"):
        next(digits.batches("train", 0, 0, 2000))


@pytest.mark.parametrize(("steps", "warm_up"), [(100, 20), (100, 1), (10, 10), (5, 20)])
def test_the_rate_warms_up_and_then_falls_to_a_tenth(steps: int, warm_up: int) -> None:
    settings = replace(find_job("gpt-text").optimizer, warm_up_steps=warm_up)
    optimizer = optimizer_factory(settings)([("weight", torch.nn.Parameter(torch.zeros(1)))])
    schedule = learning_rate_schedule(settings, steps)(optimizer)
    rates: list[float] = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    rises = min(warm_up, steps // 2)
    assert rates[0] == pytest.approx(settings.learning_rate / rises)
    assert max(rates) == rates[rises - 1] == pytest.approx(settings.learning_rate)
    assert steps < 100 or rates[-1] == pytest.approx(0.1 * settings.learning_rate, rel=0.02)
