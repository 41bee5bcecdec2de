"""A model whose weights exceed the memory that each rank may have is trained and saved."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from runtime.weights.limited_memory_cases import (
    STAGES,
    batch,
    bytes_of,
    config,
    load_within,
    train_plainly,
    train_within,
)

from penstock.runtime.processes.launch import launch_workers

ALLOWED_SHARE = 0.85
"""Memory of a rank beyond what it has before it reads anything, as a share of the weights."""


@pytest.mark.parametrize("blocks", [8, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_ranks_train_and_save_a_model_that_none_of_them_could_hold(
    blocks: int, tmp_path: Path
) -> None:
    first = transformers.LlamaForCausalLM(config(blocks))
    first.save_pretrained(tmp_path / "first", max_shard_size="30MB")
    whole_bytes = bytes_of(first)
    limit = ALLOWED_SHARE * whole_bytes
    (failure,) = launch_workers(load_within, (tmp_path, blocks, limit), workers=1)
    assert "can't allocate memory" in failure
    ranks = launch_workers(train_within, (tmp_path, blocks, limit), workers=STAGES)
    assert sum(rank.own_bytes for rank in ranks) == whole_bytes
    assert max(rank.own_bytes for rank in ranks) < 1.05 * whole_bytes / STAGES
    assert all(rank.own_bytes < rank.more_bytes < limit for rank in ranks)
    # The comparison would need the whole model on rank 0: it is left out, and the training goes on.
    (skipped,) = {rank.skipped for rank in ranks}
    assert skipped.startswith("your module left whole needs at least ")
    assert " can be had (RLIMIT_DATA); compare a smaller model of its kind, or " in skipped
    plain, losses = train_plainly(tmp_path / "first")
    for rank in ranks:
        assert rank.losses == pytest.approx(losses, rel=1e-5)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "last")
    index = json.loads((tmp_path / "last" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dict(again.named_parameters()).keys()
    assert index["metadata"]["total_size"] == whole_bytes
    for name, tensor in again.named_parameters():
        torch.testing.assert_close(tensor, plain.get_parameter(name), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        logits = again(batch()["input_ids"]).logits
        torch.testing.assert_close(logits, plain(batch()["input_ids"]).logits, rtol=1e-3, atol=1e-4)
    assert ranks[0].logits is not None
    torch.testing.assert_close(logits, ranks[0].logits, rtol=1e-5, atol=1e-5)
