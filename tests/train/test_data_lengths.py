"""Jobs whose batches have different lengths: what is captured, and what a plan is made of."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recurrent_models import batch_of, loss_of, tagger
from torch import nn

from penstock.advice.plan_pipeline import plan_pipeline
from penstock.capture.batch.lengths import Length
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import local_cluster
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.by_length import LengthPrediction, expected_s, predict_lengths
from penstock.simulate.simulation import simulate_plan
from penstock.train.data_lengths import data_lengths, mean_profile, mean_s, measured_lengths
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.profile_job import build_and_capture, estimate_job

LENGTHS = (8, 30, 12, 14)
WIDTH = 64


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens))


def batches(split: str, seed: int, start: int, size: int) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(start, start + 40):
        tokens = torch.full((size, LENGTHS[step % len(LENGTHS)]), 3)
        yield {"tokens": tokens, "labels": tokens}


def batches_of(length: int, *where: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Those of one length only."""
    return (batch for batch in batches(*where) if batch["tokens"].shape[1] == length)


def job(**changes: object) -> Job:
    dynamic = {"tokens": {1: "length"}, "labels": {1: "length"}}
    settings = {"data": batches, "loss": loss_of, "batch_size": 4, "dynamic": dynamic, **changes}
    return Job("words", Words, **settings)  # pyright: ignore


def estimated(**changes: object) -> ModelProfile:
    return estimate_job(job(**changes), ["H100-80GB"])[0]


def test_a_profile_has_the_mean_times_over_lengths_and_the_bytes_of_the_longest() -> None:
    found = data_lengths(job())
    assert found is not None
    assert [group.lengths for group in found.groups] == [(8,), (12,), (14,), (30,)]
    assert {group.share for group in found.groups} == {0.25}
    assert (found.typical.lengths, found.longest.lengths) == ((14,), (30,))
    graph = build_and_capture(job())
    assert [spec.shape for spec, _, _ in graph.crossings] == [(4, 14, WIDTH), (4, 14, 10)]
    profile = estimated()
    # The profiles that a job has whose data is of one length only.
    alone = [estimated(data=partial(batches_of, length)) for length in (8, 12, 14, 30)]
    assert [costs.lengths for costs in profile.by_length] == [
        (("length", length),) for length in (8, 12, 14, 30)
    ]
    for costs, own in zip(profile.by_length, alone, strict=True):
        assert (costs.layers, costs.edges) == (own.layers, own.edges)
    for layer in range(3):
        mean = sum(own.layers[layer].forward_s.at(4) for own in alone) / 4
        assert profile.layers[layer].forward_s.at(4) == pytest.approx(mean, rel=1e-12)
        assert profile.layers[layer].saved_bytes == alone[-1].layers[layer].saved_bytes
    assert profile.edges[0].bytes.at(4) == pytest.approx(
        sum(own.edges[0].bytes.at(4) for own in alone) / 4
    )
    assert "length 8 for 25 %" in profile.source
    assert "bytes of length 30" in profile.source


def test_the_prediction_of_a_mixture_is_the_mean_of_each_length_simulated_alone() -> None:
    plan = Plan((Stage(range(1), (0,), (2,)), Stage(range(1, 3), (1,), (2,))), 2, 2, "1f1b")
    cluster = local_cluster(2, 2, 1e9)

    def seconds(profile: ModelProfile) -> float:
        return simulate_plan(plan, replace(profile, device=""), cluster).iteration_s

    alone = [seconds(estimated(data=partial(batches_of, length))) for length in (8, 12, 14, 30)]
    mixed = predict_lengths(estimated(), seconds)
    assert [found.iteration_s for found in mixed] == pytest.approx(alone, rel=1e-12)
    assert expected_s(mixed) == pytest.approx(sum(alone) / 4, rel=1e-12)
    # The mean costs, which planners use, never take longer.
    assert seconds(estimated()) <= expected_s(mixed) * (1 + 1e-12)


def test_plans_balance_the_distribution_and_not_the_mean_length() -> None:
    """Costs that grow with the square of a length weigh more where lengths are spread."""

    def profile_at(length: int) -> ModelProfile:
        linear, square = length * 1e-3, length**2 / 18 * 1e-3
        seconds = (square, linear, linear, linear)
        layers = [
            LayerCost(f"layer{n}", Affine(0, s), Affine(0, s), Affine(0, s), 10**9)
            for n, s in enumerate(seconds)
        ]
        return ModelProfile("spread", tuple(layers))

    lengths = (4, 4, 4, 60)
    mixed = mean_profile([((("length", n),), 0.25, profile_at(n)) for n in lengths], profile_at(60))
    host = Host("slow", (Device("cpu", 1e12),) * 2, link_bytes_per_s=1e8, link_latency_s=1e-4)
    cluster = Cluster("slow", (host,))
    chosen = plan_pipeline(mixed, cluster, 8, planner="dynamic-program", schedule="1f1b")
    usual = plan_pipeline(profile_at(18), cluster, 8, planner="dynamic-program", schedule="1f1b")
    expected = [
        sum(simulate_plan(plan, profile_at(n), cluster).iteration_s for n in lengths) / 4
        for plan in (chosen, usual)
    ]
    assert [len(plan.stages) for plan in (chosen, usual)] == [2, 2]
    assert expected[0] < 0.9 * expected[1]


def test_what_varies_is_found_in_the_data() -> None:
    assert data_lengths(job(dynamic="auto", data=partial(batches_of, 14))) is None
    found = data_lengths(job(dynamic="auto"))
    assert found is not None
    assert found.names == ("length",)
    assert found.longest.lengths == (30,)
    assert build_and_capture(job(dynamic="auto")).layout.lengths[0].name == "length"


def uneven(*where: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The third batch has a label less than words."""
    for number, batch in enumerate(batches(*where)):
        short = batch["labels"][:, :-1]
        yield batch if number != 2 else {**batch, "labels": short}


def test_a_batch_that_does_not_vary_as_declared_is_refused_before_anything_is_trained() -> None:
    declared = r"batch 2 of the training data: 'length' is declared to be one length, but dimension"
    with pytest.raises(BadInput, match=declared):
        estimate_job(job(data=uneven), ["H100-80GB"])
    narrow = {"tokens": {1: Length("length", max=20)}, "labels": {1: "length"}}
    with pytest.raises(BadInput, match=r"batch 1 .* is 30, but 'length' is declared to be at most"):
        estimate_job(job(dynamic=narrow), ["H100-80GB"])


def recurrent_batches(
    split: str, seed: int, start: int, size: int
) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(start, start + 40):
        yield batch_of((3, 6, 4)[step % 3], size, step)


def test_a_job_whose_model_goes_through_the_words_is_profiled_at_the_lengths_of_its_data() -> None:
    own = job(data=recurrent_batches, loss=loss_of, granularity="block")
    own = replace(own, model=tagger)
    assert build_and_capture(own).layer_names[1:4] == ("blocks.0", "blocks.1", "blocks.2")
    by_length = estimate_job(own, ["H100-80GB"])[0].by_length
    assert [dict(found.lengths) for found in by_length] == [{"length": n} for n in (3, 4, 6)]
    seconds = [sum(layer.forward_s.at(2) for layer in found.layers) for found in by_length]
    assert seconds[0] < seconds[2]


def test_steps_are_measured_at_the_nearest_length() -> None:
    predicted = [
        LengthPrediction((("length", size),), 0.5, seconds)
        for size, seconds in ((8, 1.0), (32, 3.0))
    ]
    rows = [
        {"step": step, "iteration_s": seconds, "lengths": {"length": size}}
        for step, (size, seconds) in enumerate([(8, 9.0), (8, 1.0), (15, 2.0), (17, 4.0)], 1)
    ]
    short, long = measured_lengths(predicted, [*rows, {"step": 5, "evaluation_loss": 1.0}], 1)
    assert (short.measured_s, short.steps, long.measured_s, long.steps) == (1.5, 2, 4.0, 1)
    assert mean_s([short, long]) == pytest.approx((2 * 1.5 + 4.0) / 3)
    assert str(long) == "length 32: predicted 3000.0 ms, measured 4000.0 ms over 1 steps (-25.0 %)"


def test_a_profile_of_lengths_is_read_back(tmp_path: Path) -> None:
    profile = estimated()
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    with pytest.raises(BadInput, match=r"shares of its lengths add up to 0\.75"):
        replace(profile, by_length=profile.by_length[1:])


def test_dynamic_is_a_table_of_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "words.toml"
    whole = f'model = "{__name__}:Words"\ndata = "{__name__}:batches"\nbatch_size = 4\n[dynamic]\n'
    file.write_text(whole + 'tokens = { 1 = "length" }\n0 = { 2 = { name = "width", max = 9 } }')
    assert find_job(file).dynamic == {
        "tokens": {1: Length("length")},
        0: {2: Length("width", max=9)},
    }
    file.write_text(whole.replace("[dynamic]", 'dynamic = "auto"'))
    assert find_job(file).dynamic == "auto"
    file.write_text(whole.replace("[dynamic]", 'dynamic = "all"'))
    with pytest.raises(BadInput, match="dynamic is 'all'; write \"auto\", or a table of the dim"):
        find_job(file)
    file.write_text(whole + 'tokens = { 1 = { nam = "length" } }')
    with pytest.raises(
        BadInput, match=r"dynamic\.tokens\.1: unknown key 'nam'; did you mean 'name'"
    ):
        find_job(file)
    file.write_text(whole + 'tokens = { words = "length" }')
    with pytest.raises(BadInput, match=r"dynamic.tokens.words.*is 'words'; .* a valid integer"):
        find_job(file)


def test_rows_are_a_table_of_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    whole = f'model = "{__name__}:Words"\ndata = "{__name__}:batches"\nbatch_size = 4\n[rows]\n'
    file.write_text(whole + "tokens = 2\n1 = 3\n")
    assert find_job(file).rows == {"tokens": 2, 1: 3}
    file.write_text(whole + "tokens = 1.5\n")
    with pytest.raises(BadInput, match=r"rows.tokens"):
        find_job(file)


def test_a_job_is_captured_with_its_rows() -> None:
    assert build_and_capture(job(dynamic={}, rows={"tokens": 2, "labels": 2})).batch_size == 2
    with pytest.raises(BadInput, match="rows names 'words', but the batch has no tensor there"):
        build_and_capture(job(dynamic={}, rows={"words": 2}))
    with pytest.raises(BadInput, match="batch 0 of the training data: rows names 'words'"):
        data_lengths(job(rows={"words": 2}))
