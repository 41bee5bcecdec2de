"""Models on the meta device: every rank gives values to its own stage only."""

import models
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.forward.materialise import materialise
from penstock.errors import BadInput


def _built(build, batch, cuts, pipeline, seed=3):
    """A model built on meta, its stages with values, and these values by name."""
    with torch.device("meta"):
        model, _ = build()
    graph = capture_model(model, batch)
    return model, *_values(graph, cuts, pipeline, seed)


def _values(graph, cuts, pipeline, seed=3):
    programs = pipeline.split(graph, cuts)
    found = {}
    for program in programs:
        materialise(program, device="cpu", seed=seed)
        tensors = [*program.module.named_parameters(), *program.module.named_buffers()]
        for name, tensor in tensors:
            assert not tensor.is_meta
            if name in found:
                assert torch.equal(found[name], tensor), "tied, and equal on every stage"
            found[name] = tensor.detach().clone()
    return graph, programs, found


def test_values_depend_on_names_and_not_on_cuts(pipeline, model_name):
    build = pipeline.models[model_name]
    real, batch = build()
    _, _, _, whole = _built(build, batch, [], pipeline)
    model, graph, programs, parts = _built(build, batch, [2, 4], pipeline)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    own = dict(model.named_parameters())
    for program in programs:
        for name, parameter in program.module.named_parameters():
            assert parameter is own[name], "the user's own objects get the values"
    real.load_state_dict({name: whole[name] for name in real.state_dict() if name in whole}, False)
    found = pipeline.run_programs(graph, programs, batch).loss
    torch.testing.assert_close(found, real(**batch).loss)


_SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
}


def _llama():
    words = torch.randint(40, (3, 6))
    return models.llama(), {"input_ids": words, "labels": words}


def _mixtral():
    config = transformers.MixtralConfig(
        **_SMALL, num_key_value_heads=2, num_local_experts=4, vocab_size=40
    )
    words = torch.randint(40, (3, 6))
    return transformers.MixtralForCausalLM(config), {"input_ids": words, "labels": words}


def _vit():
    config = transformers.ViTConfig(**_SMALL, image_size=16, patch_size=8)
    pixels = torch.randn(3, 3, 16, 16, dtype=torch.bfloat16)
    batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1])}
    return transformers.ViTForImageClassification(config), batch


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(_llama, torch.float32), (_mixtral, torch.bfloat16), (_vit, torch.bfloat16)],
)
def test_every_tensor_is_drawn_as_the_model_would(build, dtype, pipeline):
    with torch.device("meta"):
        model = build()[0].to(dtype)
    real, batch = build()
    real.to(dtype)
    graph = capture_model(model, batch)
    _, _, found = _values(graph, [], pipeline)
    for name, tensor in [*real.named_parameters(), *real.named_buffers()]:
        assert found[name].dtype == tensor.dtype
        spread = float(tensor.detach().double().std())
        # Of 256 values and more, the standard deviation is within a fifth.
        if tensor.numel() >= 256 and spread > 0:
            assert float(found[name].double().std()) == pytest.approx(spread, rel=0.2), name
        elif not isinstance(tensor, nn.Parameter) or spread == 0:
            assert torch.equal(found[name], tensor), name


def test_another_seed_gives_other_values(pipeline):
    build = pipeline.models["gpt2"]
    batch = build()[1]
    one, other = (_built(build, batch, [], pipeline, seed=seed)[3] for seed in (1, 2))
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


def test_a_chain_on_meta_is_captured_and_given_values(pipeline):
    def build():
        norm = nn.BatchNorm1d(8)
        return Chain([nn.Linear(4, 8), norm, nn.Linear(8, 3)], functional.cross_entropy)

    with torch.device("meta"):
        chain = build()
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    graph = capture_model(chain, batch)
    assert graph.crossings[0][0].shape == (3, 8)
    _, programs, _ = _values(graph, [2], pipeline)
    assert torch.isfinite(pipeline.run_programs(graph, programs, batch).loss)


def test_a_loss_module_on_meta_gets_values(pipeline):
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, hidden, targets):
            return functional.cross_entropy(self.layer(hidden), targets)

    with torch.device("meta"):
        net, loss = nn.Sequential(nn.Linear(4, 4)), Probe()
    batch = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    graph = capture_model(net, batch, loss=loss)
    _, programs, found = _values(graph, [1], pipeline)
    assert {"0.weight", "loss.layer.weight"} < set(found)
    run = pipeline.run_programs(graph, programs, batch)
    torch.testing.assert_close(run.loss, loss(net(batch[0]), batch[1]))


def test_only_what_is_on_meta_gets_new_values():
    """A body with values, and a head that is not made yet."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, device="meta"))
    net[0].register_buffer("places", torch.arange(4.0))
    before = {name: tensor.clone() for name, tensor in net[:2].state_dict().items()}
    own = list(net.parameters())
    batch = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    graph = capture_model(net, batch, loss=functional.cross_entropy)
    program = graph.stage(range(len(graph.layer_names)))
    materialise(program, device="cpu", seed=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net[:2].state_dict().items())
    assert all(one is two for one, two in zip(net.parameters(), own, strict=True))
    assert not any(parameter.is_meta for parameter in own)


@pytest.mark.parametrize("as_buffer", [False, True])
def test_a_tensor_that_only_the_constructor_sets_is_refused(as_buffer):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            if as_buffer:
                self.register_buffer("scale", torch.arange(4) * 2)
            else:
                self.scale = nn.Parameter(torch.rand(4))

        def forward(self, values):
            return values * self.scale

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Scale())
    batch = (torch.randn(3, 4), torch.randn(3, 4))
    program = capture_model(model, batch, loss=functional.mse_loss).stage(range(0, 1))
    with pytest.raises(BadInput, match=r"'1\.scale' of Scale .*reset_parameters"):
        materialise(program, device="cpu", seed=0)
