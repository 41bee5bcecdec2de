"""Models and data of `t5.toml` and `llama.toml`: an encoder and decoder, and a decoder."""

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["llama", "t5", "texts", "translations"]

LENGTH, VOCABULARY = 64, 1024


def t5() -> nn.Module:
    """An encoder and a decoder of four blocks of width 256."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings = T5Config(
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=4,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(settings)


def llama() -> nn.Module:
    """A decoder of six blocks of width 384."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(settings)


def drawn(seed: int, step: int, batch_size: int) -> torch.Tensor:
    """Numbers of words; they depend on the step alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randint(1, VOCABULARY, (batch_size, LENGTH), generator=generator)


def texts(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Texts to continue."""
    while True:
        words = drawn(seed, start_step, batch_size)
        yield {"input_ids": words, "labels": words}
        start_step += 1


def translations(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Texts to turn around."""
    while True:
        words = drawn(seed, start_step, batch_size)
        yield {"input_ids": words, "labels": words.flip(1)}
        start_step += 1
