"""Weights come from Hugging Face's directories and go back into them; nothing else is read."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.tables import Weights
from penstock.runtime.weights.pretrained import sources_of
from penstock.runtime.weights.safetensors_file import write_tensors


def words() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 40, (4, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def pictures() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1, 0])}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(models.bert_config())


def neox() -> nn.Module:
    """Its files call the head otherwise than the model does."""
    config = transformers.GPTNeoXConfig(**models.SIZES, bos_token_id=1, eos_token_id=1)
    return transformers.GPTNeoXForCausalLM(config)


def vit() -> nn.Module:
    """Its files call nearly everything otherwise than the model does."""
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    """It has buffers that training changes."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2
    )
    return transformers.ResNetForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "bert": bert,
    "t5": models.t5,
    "neox": neox,
    "vit": vit,
    "resnet": resnet,
}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def one_stage(model: nn.Module, batch: Any, **options: Any) -> Pipeline:
    graph = capture_model(model, batch)
    layers = range(len(graph.layer_names))
    return Pipeline(graph, batch, plan=Plan((Stage(layers, (0,), (4,)),), 1, 4, "1f1b"), **options)


def same_values(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "vit", "resnet"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert", "t5", "neox")],
)
def test_a_model_on_meta_gets_the_weights_of_a_directory_and_gives_them_back(
    name: str, tmp_path: Path
) -> None:
    real = MODELS[name]()
    real.save_pretrained(tmp_path / "theirs")
    batch = pictures() if name in ("vit", "resnet") else words()
    with one_stage(
        on_meta(MODELS[name]), batch, update=Update(weights=tmp_path / "theirs")
    ) as pipe:
        held = pipe.model_state_dict()
        expected = real.state_dict()
        assert same_values({n: t for n, t in held.items() if n in expected}, expected)
        pipe.save_pretrained(tmp_path / "ours")
    again, report = type(real).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert same_values(again.state_dict(), expected)
    # A forward writes the kind of its labels into the configuration.
    saved, original = (m.config.to_diff_dict() for m in (again, real))
    assert {k: v for k, v in saved.items() if k != "problem_type"} == original


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    """A tied Llama on meta."""
    return capture_model(on_meta(lambda: models.llama(tie_word_embeddings=True)), words())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Its weights in several files."""
    directory = tmp_path / "saved"
    models.llama(tie_word_embeddings=True).save_pretrained(directory, max_shard_size=5000)
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """One file instead of all, with changed tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (directory / "model.safetensors.index.json").unlink()
    change(tensors)
    write_tensors(directory / "model.safetensors", tensors)


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def test_a_tied_tensor_may_have_any_of_its_names(graph: LayerGraph, saved: Path) -> None:
    whole = sources_of(Weights(saved), graph)
    assert set(whole) == {use.name for use in graph.parameter_uses if not use.is_buffer}
    rewrite(saved, lambda t: t.update({HEAD: t.pop(EMBEDDING)}))
    assert sources_of(Weights(saved), graph)[EMBEDDING].name == HEAD


def test_files_of_the_base_model_need_a_new_head_to_be_named(
    graph: LayerGraph, tmp_path: Path
) -> None:
    base = models.llama(tie_word_embeddings=True).model
    base.save_pretrained(tmp_path)
    assert sources_of(Weights(tmp_path), graph)[NORM].name == "norm.weight"
    untied = capture_model(on_meta(models.llama), words())
    with pytest.raises(
        BadInput, match=r"lacks 'lm_head.weight', which Llama.*Weights\(new=\.\.\.\)"
    ):
        sources_of(Weights(tmp_path), untied)
    assert HEAD not in sources_of(Weights(tmp_path, new=("lm_head.*",)), untied)


def test_what_the_model_lacks_must_be_named_unused(graph: LayerGraph, saved: Path) -> None:
    rewrite(saved, lambda t: t.update({f"extra.{n}": torch.ones(2) for n in range(5)}))
    lists = "has 'extra.0', 'extra.1', 'extra.2' and 2 more, which LlamaForCausalLM has not"
    with pytest.raises(BadInput, match=lists):
        sources_of(Weights(saved), graph)
    assert len(sources_of(Weights(saved, unused=("extra.*",)), graph)) == 20


def test_tables_that_old_files_hold_are_passed_over(graph: LayerGraph, saved: Path) -> None:
    rewrite(saved, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(4)}))
    assert "model.rotary_emb.inv_freq" not in sources_of(Weights(saved), graph)


def spoil(saved: Path, how: str) -> None:
    index = saved / "model.safetensors.index.json"
    first = min(saved.glob("*.safetensors"))
    places = json.loads(index.read_text())
    config = json.loads((saved / "config.json").read_text())
    match how:
        case "file missing":
            first.unlink()
        case "file cut off":
            first.write_bytes(first.read_bytes()[:-1])
        case "index missing":
            index.unlink()
        case "index of others":
            places["weight_map"][NORM] = places["weight_map"][EMBEDDING]
            index.write_text(json.dumps(places))
        case "index is text":
            index.write_text("none")
        case "no map":
            index.write_text("{}")
        case "other model":
            config |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
            (saved / "config.json").write_text(json.dumps(config))
        case "shape":
            rewrite(saved, lambda t: t.update({NORM: torch.ones(7)}))
        case "kind":
            rewrite(saved, lambda t: t.update({NORM: torch.ones(16, dtype=torch.int64)}))
        case "missing":
            rewrite(saved, lambda t: t.pop(NORM))
        case "pickled":
            for path in [*saved.glob("*.safetensors"), index]:
                path.unlink()
            (saved / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("file missing", r"names 1 of \d+ files that are not there, 'model-00001-of-"),
        ("file cut off", "model-00001-of-.*' is not a whole safetensors file"),
        ("index missing", "model.safetensors.index.json is missing: copy it too"),
        ("index of others", "has tensor 'model.norm.weight' in 'model-"),
        ("index is text", "index.json' is not valid JSON"),
        ("no map", "has no weight_map"),
        (
            "other model",
            r"type 'gpt2' \(GPT2LMHeadModel\), the model is a LlamaForCausalLM of type",
        ),
        ("shape", r"'model.norm.weight' has shape \(7,\) in '.*' and \(16,\) in the model"),
        ("kind", "'model.norm.weight' is torch.int64 in '.*' and torch.float32 in the model"),
        ("missing", "lacks 'model.norm.weight', which LlamaForCausalLM has"),
        ("pickled", "pickled weights are not read"),
    ],
)
def test_a_wrong_directory_is_refused(how: str, why: str, graph: LayerGraph, saved: Path) -> None:
    spoil(saved, how)
    with pytest.raises(BadInput, match=why) as refusal:
        sources_of(Weights(saved), graph)
    assert "\n" not in str(refusal.value)


def test_there_must_be_a_directory(graph: LayerGraph, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere' are no directory"):
        sources_of(Weights(tmp_path / "nowhere"), graph)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_new_and_begin_as_peft_has_them(saved: Path) -> None:
    def adapted() -> nn.Module:
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(models.llama(tie_word_embeddings=True), settings)

    plain = transformers.LlamaForCausalLM.from_pretrained(saved)
    with one_stage(on_meta(adapted), words(), update=Update(weights=saved)) as pipe:
        held = pipe.model_state_dict()
        trained = [name for name, p in pipe.named_parameters() if p.requires_grad]
    assert len(trained) == 8 and all(".lora_" in name for name in trained)
    for name, tensor in held.items():
        if ".lora_B." in name:
            assert not tensor.any(), name
        elif ".lora_A." in name:
            assert 0 < tensor.abs().max() < 0.3, name
    found = {n.replace(".base_layer.", "."): t for n, t in held.items()}
    for name, tensor in plain.named_parameters():
        assert torch.equal(found[f"base_model.model.{name}"], tensor), name


def test_experts_that_transformers_merges_are_refused_with_the_way_out(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**models.SIZES, num_key_value_heads=2, num_local_experts=4)
    real = transformers.MixtralForCausalLM(config)
    mixtral = SimpleNamespace(model=real, tied_names={}, name="MixtralForCausalLM")
    real.save_pretrained(tmp_path / "merged")
    with pytest.raises(BadInput, match=r"transformers merges .*save_original_format=False"):
        sources_of(Weights(tmp_path / "merged"), mixtral)
    real.save_pretrained(tmp_path / "plain", save_original_format=False)
    assert sources_of(Weights(tmp_path / "plain"), mixtral).keys() == real.state_dict().keys()


class Twice(nn.Module):
    """Tied by hand, with a buffer that a state dict has and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("made", torch.ones(4), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(values) * self.kept) + self.made


def test_a_module_of_ones_own_is_written_and_read(tmp_path: Path) -> None:
    batch = (torch.ones(4, 4), torch.ones(4, 4))
    options = {"loss": nn.functional.mse_loss}
    graph = capture_model(Twice(), batch, **options)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (4,)),), 1, 4, "1f1b")
    with Pipeline(graph, batch, plan=plan) as pipe:
        pipe.save_pretrained(tmp_path / "new" / "weights")
        expected = pipe.model_state_dict()
    stored = load_file(tmp_path / "new" / "weights" / "model.safetensors")
    assert sorted(stored) == ["first.bias", "first.weight", "kept", "second.bias"]
    with Pipeline(
        capture_model(Twice(), batch, **options),
        batch,
        plan=plan,
        update=Update(weights=tmp_path / "new" / "weights"),
    ) as pipe:
        assert same_values(pipe.model_state_dict(), expected)
        with pytest.raises(BadInput, match="holds weights already, which are not overwritten"):
            pipe.save_pretrained(tmp_path / "new" / "weights")
        with pytest.raises(BadInput, match="is a file; name another"):
            pipe.save_pretrained(tmp_path / "new" / "weights" / "model.safetensors")
        (tmp_path / "beside").mkdir()
        (tmp_path / "beside" / "tokenizer.json").write_text("{}")
        pipe.save_pretrained(tmp_path / "beside", max_shard_bytes=20)
    assert sorted(path.name for path in (tmp_path / "beside").iterdir()) == [
        *(f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)),
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert not list(tmp_path.glob(".*"))
