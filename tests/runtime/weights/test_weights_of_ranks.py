"""Each rank reads, makes and writes the weights of its own stages only."""

from pathlib import Path

import peft
import pytest
import torch
import transformers
from plain_training import plain_step
from runtime.weights.weights_cases import (
    RATE,
    STEPS,
    adapted,
    batch,
    initial_values,
    llama,
    read_train_and_save,
    refusals,
    save_with_loss,
    scored_model,
    train_and_save_adapters,
    train_plainly,
)
from safetensors.torch import load_file

from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.weights.safetensors_file import read_header


def test_ranks_train_from_files_and_write_files_as_plain_training_does(tmp_path: Path) -> None:
    first = torch.nn.Module.to(llama(), torch.float64)
    first.save_pretrained(tmp_path / "first", max_shard_size=3000)
    for found in launch_workers(read_train_and_save, (tmp_path,), workers=3):
        assert found == {"replicas on meta": [], "stages on meta": []}
    plain = train_plainly(tmp_path / "first")
    moved = [n for n, p in plain.named_parameters() if not torch.equal(p, first.get_parameter(n))]
    assert len(moved) == len(list(plain.named_parameters()))
    for name in ("replicas", "stages"):
        files = [read_header(path) for path in (tmp_path / name).glob("*.safetensors")]
        held = [tensor for file in files for tensor in file]
        assert sorted(held) == sorted(dict(plain.named_parameters())), "each once"
        again, report = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not any(report.values())
        assert again.dtype == torch.float64
        # Llama rounds parts of its forward to float32, whatever the type of its weights.
        for one, other in zip(again.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        ids = batch(2)["input_ids"]
        torch.testing.assert_close(again(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-6)


def test_weights_of_a_loss_have_a_file_beside_those_of_the_model(tmp_path: Path) -> None:
    found, _ = launch_workers(save_with_loss, (tmp_path,), workers=2, threads=1)
    assert torch.equal(found["1 loss.score.weight"], found["2 loss.score.weight"])
    of_loss = load_file(tmp_path / "loss.safetensors")
    assert sorted(of_loss) == ["loss.scale", "loss.score.bias", "loss.score.weight"]
    assert torch.equal(of_loss["loss.score.weight"], found["1 loss.score.weight"])
    files = [load_file(path) for path in tmp_path.glob("model*.safetensors")]
    scored_model(3).load_state_dict({name: t for own in files for name, t in own.items()})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_alone_are_read_by_peft_with_equal_outputs(tmp_path: Path) -> None:
    for refusal in launch_workers(train_and_save_adapters, (tmp_path,), workers=3):
        assert (
            "layers.0.mlp.up_proj.weight' is trained, but no part of adapter 'default'" in refusal
        )
    plain = adapted(["norm"])
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=RATE)
    for _ in range(STEPS):
        plain_step(optimizer, plain(**batch()).loss)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not (tmp_path / "other").exists()
    again = peft.PeftModel.from_pretrained(adapted().unload(), tmp_path / "adapter")
    ids = batch(2)["input_ids"]
    fresh = adapted(["norm"])(ids).logits
    torch.testing.assert_close(again(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(fresh, plain(ids).logits, rtol=1e-3)


def test_first_values_are_the_same_to_the_bit_under_every_plan() -> None:
    values = launch_workers(initial_values, workers=3)[0]
    first, *others = values.values()
    assert {t.dtype for n, t in first.items() if n.endswith("weight")} == {torch.bfloat16}
    assert len(others) == 2
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_what_one_rank_cannot_initialise_all_refuse(tmp_path: Path) -> None:
    for unset, absent in launch_workers(refusals, (tmp_path,), workers=3):
        assert unset.startswith("'2.scale' of Unset is on the meta device and nothing initialises")
        assert absent == (
            f"weights '{tmp_path / 'nowhere'}' are no directory; name one with model.safetensors "
            "in it"
        )
