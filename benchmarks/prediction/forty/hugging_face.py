"""Models and data of the jobs in this folder: a T5, a Llama, a ViT and a residual LSTM."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Recurrent", "frames", "llama", "pictures", "t5", "texts", "translations", "vit"]

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


def vit() -> nn.Module:
    """A vision transformer of eight blocks of width 256, 64 patches a picture."""
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(settings)


class Recurrent(nn.Module):
    """Eight LSTM layers of width 256, each added to its input, and a head for the last frame."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(256, 256, batch_first=True) for _ in range(8))
        self.head = nn.Linear(256, 10)

    def forward(self, frames: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross entropy of ``(rows, LENGTH, 256)`` frames."""
        for layer in self.layers:
            frames = frames + layer(frames)[0]
        return functional.cross_entropy(self.head(frames[:, -1]), labels)


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


def pictures(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Pictures of noise with a class each."""
    while True:
        generator = torch.Generator().manual_seed(1_000_003 * seed + start_step)
        values = torch.randn(batch_size, 3, 64, 64, generator=generator)
        yield {"pixel_values": values, "labels": torch.arange(batch_size) % 10}
        start_step += 1


def frames(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of noise with a class each."""
    while True:
        generator = torch.Generator().manual_seed(1_000_003 * seed + start_step)
        values = torch.randn(batch_size, LENGTH, 256, generator=generator)
        yield {"frames": values, "labels": torch.arange(batch_size) % 10}
        start_step += 1
