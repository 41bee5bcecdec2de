"""Small models of transformers that many tests train; ``changes`` are fields of the configuration.

None drops anything out unless it is told to.
"""

from typing import Any

from torch import nn

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
"""Fields that decoders and encoders have in common."""

DECODER: dict[str, Any] = SIZES | {"num_key_value_heads": 1}


def gpt2(dropout: float = 0.0, **changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40}
    words = {"n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
    dropouts = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes | words | dropouts | changes))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER | changes))


def qwen2_tied(**changes: Any) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**DECODER | {"tie_word_embeddings": True} | changes))


def bert_config(dropout: float = 0.0, **changes: Any) -> Any:
    """Of an encoder: several heads are tested."""
    from transformers import BertConfig

    names = ["hidden_dropout_prob", "attention_probs_dropout_prob"]
    return BertConfig(**SIZES | dict.fromkeys(names, dropout) | changes)


def t5(**changes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    words = {"vocab_size": 40, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes | words | changes))


def resnet(width: int = 8) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[width, 2 * width],
        depths=[2, 1],
        num_labels=5,
        layer_type="basic",
    )
    return ResNetForImageClassification(config)
