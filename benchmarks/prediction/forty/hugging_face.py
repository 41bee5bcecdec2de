"""Models and data of the jobs in this folder: a T5, a ViT and a residual LSTM."""

from collections.abc import Iterator
from functools import partial
from itertools import count

import torch
from torch import nn
from torch.nn import functional

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


def drawn(seed: int, step: int) -> torch.Generator:
    """The source of a batch; it depends on the step alone."""
    return torch.Generator().manual_seed(1_000_003 * seed + step)


def translations(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Texts to turn around."""
    for step in count(start_step):
        shape, generator = (batch_size, LENGTH), drawn(seed, step)
        words = torch.randint(1, VOCABULARY, shape, generator=generator)
        yield {"input_ids": words, "labels": words.flip(1)}


def noise(
    name: str, shape: tuple[int, ...], split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Samples of noise with a class each."""
    for step in count(start_step):
        values = torch.randn(batch_size, *shape, generator=drawn(seed, step))
        yield {name: values, "labels": torch.arange(batch_size) % 10}


pictures = partial(noise, "pixel_values", (3, 64, 64))
frames = partial(noise, "frames", (LENGTH, 256))
