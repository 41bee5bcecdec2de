"""What a profile says of tensor groups is what the model's layers have."""

from dataclasses import replace
from pathlib import Path

import pytest
from runtime.parallelized_cases import by_transformers, of_transformers
from runtime.pipeline_cases import tokens
from runtime.tensor_cases import SEQUENCE, WIDTH, batch_of, captured_gpt, small_gpt

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.measure.roofline import estimate_profile
from penstock.measure.tensor_parallel import with_tensor_parallel
from penstock.measure.workers import median_profile
from penstock.profile.json_file import read_profile, write_profile


def test_shares_and_sums_of_a_small_gpt(tmp_path: Path) -> None:
    batch = batch_of(0)
    graph = captured_gpt(small_gpt(), granularity="block")
    profile = estimate_profile(graph, batch, "cpu")
    found = with_tensor_parallel(profile, graph, batch)
    costs = found.tensor_parallel
    assert costs is not None
    names = graph.layer_names
    blocks = [index for index, name in enumerate(names) if name.startswith("blocks.")]
    assert len(blocks) == 2
    # Six linear layers of a block are divided; rowwise biases, norms and the scale are whole. The
    # layer of the last block has the norm after it, too.
    divided = 4 * WIDTH * WIDTH + 3 * WIDTH + 8 * WIDTH * WIDTH + 4 * WIDTH
    whole = divided + 2 * WIDTH + 4 * WIDTH + 4
    for index in range(len(names)):
        after = 2 * WIDTH if index == blocks[-1] else 0
        expected = divided / (whole + after) if index in blocks else 0.0
        assert costs.divided[index] == pytest.approx(expected)
        assert costs.sums[index] == (4 if index in blocks else 0)
        size = 4 * SEQUENCE * WIDTH * 8 if index in blocks else 0
        assert costs.sum_bytes_per_sample[index] == size
    write_profile(found, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found
    workers = [
        replace(found, tensor_parallel=replace(costs, factors=((2, factor), (4, 2 * factor))))
        for factor in (1.5, 9.0, 1.25)
    ]
    median = median_profile(workers)
    assert median.tensor_parallel == replace(costs, factors=((2, 1.5), (4, 3.0)))
    write_profile(median, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == median


def test_a_profile_of_another_model_is_refused() -> None:
    batch = batch_of(0)
    graph = captured_gpt(small_gpt())
    coarse = captured_gpt(small_gpt(), granularity="block")
    profile = estimate_profile(coarse, batch, "cpu")
    with pytest.raises(BadInput, match="profile this captured model"):
        with_tensor_parallel(profile, graph, batch)


@pytest.mark.parametrize("kind", ["tensor", "experts"])
def test_experts_of_mixtral_are_seen_where_its_expert_plan_divides_them(kind: str) -> None:
    batch = tokens(8)
    graph = capture_model(
        of_transformers("mixtral").bfloat16(),  # estimates of grouped_mm have no other type
        batch,
        granularity="block",
        tensor_parallel=by_transformers(kind),
    )
    found = with_tensor_parallel(estimate_profile(graph, batch, "cpu"), graph, batch)
    costs = found.tensor_parallel
    assert costs is not None and costs.experts == (kind == "experts")
    # Tensor parallelism divides the embedding and the head, too.
    mostly = [share > 0.5 for share in costs.divided]
    assert sum(mostly) == (4 if kind == "experts" else 6), costs.divided
