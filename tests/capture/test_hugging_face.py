"""Hugging Face models, untouched: the stages together are the model."""

import pytest
import torch
import transformers
from plain_training import assert_pipeline_equals_plain

from penstock.capture.capture import capture_model


def _in_double(pipeline, name):
    model, batch = pipeline.models[name]()
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    return model.double(), doubled


def test_stages_together_equal_the_model(pipeline, model_name):
    model, batch = _in_double(pipeline, model_name)
    graph = capture_model(model, batch)
    layers = len(graph.layer_names)
    cut_lists = [[], [layers // 2], list(range(1, layers)), [2, 4]]
    for cuts, rows in zip(cut_lists, (3, 2, 1, 7), strict=True):
        pipeline.assert_composition_equals_model(graph, model, batch, cuts, rows=rows)


@pytest.mark.parametrize(
    ("name", "granularity"), [("llama", "block"), ("gpt2", "operator"), ("resnet", "operator")]
)
def test_stages_together_equal_the_model_at_every_granularity(pipeline, name, granularity):
    model, batch = _in_double(pipeline, name)
    graph = capture_model(model, batch, granularity=granularity)
    cuts = list(range(1, len(graph.layer_names)))
    pipeline.assert_composition_equals_model(graph, model, batch, cuts, rows=5)


def test_a_model_captured_with_one_row_runs_with_more(pipeline):
    model, batch = _in_double(pipeline, "gpt2")
    graph = capture_model(model, pipeline.resize(batch, 1))
    assert graph.batch_size == 1
    assert graph.crossings[0][0].shape[0] == 1
    pipeline.assert_composition_equals_model(graph, model, batch, [2, 4], rows=3)


def test_a_transformer_can_be_cut_inside_a_block_and_blocks_are_layers_if_asked_for(pipeline):
    graph = capture_model(*pipeline.models["gpt2"]())
    assert graph.layer_names == (
        "transformer.wte",
        *(f"transformer.h.{block}.{part}" for block in (0, 1) for part in ("attn", "mlp")),
        "lm_head",
        "loss",
    )
    for _, producer, consumers in graph.crossings:
        assert consumers == (producer + 1,), "one tensor between neighbours, the residual stream"
    graph = capture_model(*pipeline.models["llama"](), granularity="block")
    assert graph.layer_names == (
        *("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", "loss"),
    )


def test_tied_parameters_are_named_and_placed_on_every_layer_that_reads_them(pipeline):
    model, batch = pipeline.models["t5"]()
    graph = capture_model(model, batch)
    assert graph.tied_names == {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }
    use = next(use for use in graph.parameter_uses if use.name == "shared.weight")
    names = [graph.layer_names[layer] for layer in use.layers]
    assert names == ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]


@pytest.mark.parametrize("name", ["qwen2_tied", "t5"])
def test_stages_hold_the_very_parameters_of_the_model(pipeline, name):
    model, batch = pipeline.models[name]()
    graph = capture_model(model, batch)
    own = dict(model.named_parameters())
    held = {}
    for program in pipeline.split(graph, [2, 5]):
        for name, parameter in program.module.named_parameters():
            assert parameter is own[name]
            held[name] = parameter
    assert held.keys() == own.keys()


def test_an_encoder_output_skips_to_every_decoder_layer(pipeline):
    model, batch = pipeline.models["t5"]()
    graph = capture_model(model, batch)
    readers = {
        graph.layer_names[producer]: [graph.layer_names[c] for c in consumers]
        for spec, producer, consumers in graph.crossings
        if spec.batch_dim == 0
    }
    assert readers["encoder.block.1.layer.1.DenseReluDense"] == [
        "decoder.block.0.layer.1.EncDecAttention",
        "decoder.block.1.layer.1.EncDecAttention",
    ]


def test_a_position_bias_crosses_without_samples_and_masks_do_not_cross(pipeline):
    model, batch = pipeline.models["t5"]()
    graph = capture_model(model, batch)
    without_samples = [spec for spec, _, _ in graph.crossings if spec.batch_dim < 0]
    # Of encoder, decoder, and the decoder's attention to the encoder.
    assert [spec.shape for spec in without_samples] == [(1, 2, 6, 6)] * 3
    assert [spec.requires_grad for spec in without_samples] == [True, True, False]
    assert not any(spec.reduced for spec in without_samples)


@pytest.mark.parametrize("name", ["t5", "resnet"])
def test_capture_changes_nothing_of_the_model(pipeline, name):
    model, batch = pipeline.models[name]()
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    capture_model(model, batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    if hasattr(model.config, "use_cache"):
        assert model.config.use_cache


def test_a_vision_language_model_that_collects_hidden_states_by_hooks_is_right():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(
            **sizes, num_key_value_heads=1, vocab_size=40, pad_token_id=0
        ),
        image_token_index=39,
        vision_feature_layer=-2,
    )
    words = torch.randint(2, 38, (4, 8))
    words[:, 1:5] = 39
    labels = words.masked_fill(words == 39, -100)
    labels[0, 6:] = -100
    batch = {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(4, 3, 8, 8, dtype=torch.float64),
        "labels": labels,
    }
    model = transformers.LlavaForConditionalGeneration(config).double()
    # The model computes its loss in float32.
    assert_pipeline_equals_plain(model, batch, tolerance=1e-6)


def test_mamba_is_right():
    config = transformers.MambaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        vocab_size=20,
        state_size=4,
        time_step_rank=2,
        pad_token_id=0,
    )
    words = torch.randint(20, (4, 24))
    labels = words.clone()
    labels[0, 5:] = -100
    model = transformers.MambaForCausalLM(config).double()
    assert_pipeline_equals_plain(model, {"input_ids": words, "labels": labels}, tolerance=1e-5)
