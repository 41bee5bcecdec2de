"""Jobs whose model is built on the meta device, where no tensor has values."""

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from torch import nn

from penstock.train.job import Job
from penstock.train.profile_job import estimate_job


def llama(dtype: torch.dtype) -> nn.Module:
    model = models.llama(hidden_size=32, intermediate_size=64, num_key_value_heads=2)
    return nn.Module.to(model, dtype)


def llama_on_meta() -> nn.Module:
    with torch.device("meta"):
        return llama(torch.float32)


def half_llama_on_meta() -> nn.Module:
    with torch.device("meta"):
        return llama(torch.bfloat16)


def half_llama() -> nn.Module:
    return llama(torch.bfloat16)


def words(split: str, seed: int, start_step: int, batch_size: int) -> Iterator[Any]:
    """The same words for ever."""
    while True:
        ids = torch.arange(batch_size * 16).view(batch_size, 16) % 100
        yield {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_a_model_without_values_is_estimated_as_one_with_values(autocast: Any) -> None:
    meta, real = (
        estimate_job(Job("llama", build, words, batch_size=4, autocast=autocast), ["H100-80GB"])[0]
        for build in (half_llama_on_meta, half_llama)
    )
    assert meta.layers == real.layers
    assert [e.bytes for e in meta.edges] == [e.bytes for e in real.edges]
