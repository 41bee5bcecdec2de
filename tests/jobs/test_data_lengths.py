"""Jobs whose batches have different lengths: what is captured, and what a plan is made of."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.lengths import Length
from penstock.errors import BadInput
from penstock.jobs.data_lengths import data_lengths
from penstock.jobs.job import Job
from penstock.jobs.job_file import read_job
from penstock.jobs.profile_job import build_and_capture, profile_job

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


def loss_of(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def job(**changes: object) -> Job:
    dynamic = {"tokens": {1: "length"}, "labels": {1: "length"}}
    settings = {"data": batches, "loss": loss_of, "batch_size": 4, "dynamic": dynamic, **changes}
    return Job("words", Words, **settings)  # pyright: ignore


def test_times_are_of_the_mean_length_and_bytes_of_the_longest() -> None:
    found = data_lengths(job())
    assert (found.typical_lengths, found.longest_lengths) == ((14,), (30,))
    graph = build_and_capture(job())
    assert [spec.shape for spec, _, _ in graph.crossings] == [(4, 14, WIDTH), (4, 14, 10)]
    profile = profile_job(job(), estimate_for="H100-80GB")
    usual, longest = (
        profile_job(job(data=partial(batches_of, length)), estimate_for="H100-80GB")
        for length in (14, 30)
    )
    assert "timed at length 14 (near the mean of 40 batches)" in profile.source
    assert "bytes of length 30" in profile.source
    assert profile.edges == usual.edges != longest.edges
    assert [c.forward_s for c in profile.layers] == [c.forward_s for c in usual.layers]
    saved = [[c.saved_bytes for c in found.layers] for found in (profile, usual, longest)]
    assert saved[0] == saved[2] != saved[1]


def test_dynamic_is_a_table_of_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "words.toml"
    whole = f'model = "{__name__}:Words"\ndata = "{__name__}:batches"\nbatch_size = 4\n[dynamic]\n'
    file.write_text(whole + 'tokens = { 1 = "length" }\n0 = { 2 = { name = "width", max = 9 } }')
    assert read_job(file).dynamic == {"tokens": {1: "length"}, 0: {2: Length("width", max=9)}}
    file.write_text(whole + 'tokens = { words = "length" }')
    with pytest.raises(BadInput, match=r"dynamic.tokens has the key 'words', but dimensions are"):
        read_job(file)
