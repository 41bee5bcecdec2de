"""The cases of the benchmark: models whose layers are unequal, and machines that are.

A model is a list of blocks. A block takes what the one before returns, one tensor or several, so
that torch's pipeline can be cut between any two of them. Both runtimes get the same blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import Embedding, Model, make_model, token_loss
from torch import Tensor, nn
from torch.nn import functional

SLOW_LINK = 12.5e6
"""Bytes a second of the slow link: 100 Mb/s."""

WORDS, WIDTH = 4096, 256
"""Vocabulary and width of text, those of the GPT."""


def tokens(rows: int, length: int, words: int = WORDS) -> Tensor:
    """Random words."""
    return torch.randint(0, words, (rows, length))


class T5Start(nn.Module):
    """The embedding that the encoder's and the decoder's words share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The states of encoder and decoder."""
        return self.words(source), self.words(target)


class T5Encoding(nn.Module):
    """A block of the encoder; the decoder's state passes by."""

    def __init__(self, block: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.block, self.norm = block, norm

    def forward(self, read: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """``(rows, length, width)``, twice, to the same."""
        return self.norm(self.block(read)), written


class T5Decoding(nn.Module):
    """A block of the decoder, which looks at the encoder's state."""

    def __init__(self, block: nn.Module, length: int) -> None:
        super().__init__()
        self.block = block
        below = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("mask", below[None, None], persistent=False)

    def forward(self, read: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """``(rows, length, width)``, twice, to the same."""
        return read, self.block(written, attention_mask=self.mask, encoder_hidden_states=read)


class T5End(nn.Module):
    """The decoder's last norm and the head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, read: Tensor, written: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.norm(written))


def t5() -> Model:
    """Six blocks that read 256 words, and six that write 64: T5 as UMT5 has it.

    Its blocks have their positions to themselves, so each can be on a stage of its own.
    """
    from transformers import UMT5Config, UMT5ForConditionalGeneration

    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=64, d_ff=1024, num_layers=6, num_decoder_layers=6,
        num_heads=4, dropout_rate=0.0, is_encoder_decoder=True,
    )  # fmt: skip
    whole = UMT5ForConditionalGeneration(config)
    encoder, decoder = whole.encoder, whole.decoder
    last = len(encoder.block) - 1
    blocks = [
        T5Start(),
        *(
            T5Encoding(block, encoder.final_layer_norm if n == last else nn.Identity())
            for n, block in enumerate(encoder.block)
        ),
        *(T5Decoding(block, 64) for block in decoder.block),
        T5End(decoder.final_layer_norm),
    ]
    return Model(
        blocks,
        token_loss,
        1,
        lambda rows: (tokens(rows, 256), tokens(rows, 64), tokens(rows, 64)),
    )


class PatchEmbedding(nn.Module):
    """Patches of a picture, and words of its caption."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 8, stride=8)
        self.words = Embedding(WORDS, 32, WIDTH)

    def forward(self, pictures: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        """The states of the encoder and of the decoder."""
        seen = self.patches(pictures).flatten(2).transpose(1, 2)
        return seen.contiguous(), self.words(captions)


class Seeing(nn.Module):
    """A block of the encoder of pictures; the caption passes by."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        kind = {"dim_feedforward": 1536, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.block = nn.TransformerEncoderLayer(384, 6, activation="gelu", **kind)
        self.out: nn.Module = nn.Identity()
        if last:  # torch's split backward takes no result that is a view, as a layer's alone is
            self.out = nn.Sequential(nn.Linear(384, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, seen: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """``(rows, length, width)``, twice."""
        return self.out(self.block(seen)), written


class Writing(nn.Module):
    """A block of the decoder of text, which looks at the picture."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"dim_feedforward": 512, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.block = nn.TransformerDecoderLayer(WIDTH, 4, activation="gelu", **kind)
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, seen: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """``(rows, length, width)``, twice."""
        return seen, self.block(written, seen, tgt_mask=self.mask)


class CaptionHead(nn.Module):
    """Logits of a caption."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, seen: Tensor, written: Tensor) -> Tensor:
        """``(rows, length, words)``."""
        return self.head(self.norm(written))


def captions() -> Model:
    """Six wide blocks that see 144 patches, and six narrow ones that write 32 words."""
    torch.manual_seed(0)
    blocks = [PatchEmbedding(), *(Seeing(n == 5) for n in range(6)), *(Writing() for _ in range(6))]
    blocks.append(CaptionHead())
    return Model(
        blocks,
        token_loss,
        1,
        lambda rows: (torch.randn(rows, 3, 96, 96), tokens(rows, 32), tokens(rows, 32)),
    )


def convolved(inner: int, outer: int) -> list[nn.Module]:
    """A convolution of three by three, its norm and activation."""
    return [nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()]


class Down(nn.Module):
    """A level on the way down: its result is kept for the way up, and halved."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.level = nn.Sequential(*convolved(inner, outer), *convolved(outer, outer))

    def forward(self, picture: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """The halved picture, and all that is kept."""
        whole = self.level(picture)
        return functional.avg_pool2d(whole, 2), *kept, whole


class Middle(nn.Module):
    """The lowest level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.level = nn.Sequential(*convolved(width, width), *convolved(width, width))

    def forward(self, picture: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """The same shapes."""
        return self.level(picture), *kept


class Up(nn.Module):
    """A level on the way up, which reads what was kept last; the last one gives the result.

    Both are convolved by themselves and added, which is a convolution of both together. Torch's
    pipeline cannot send the gradient of a concatenation, which has gaps.
    """

    def __init__(self, inner: int, outer: int, last: bool) -> None:
        super().__init__()
        self.below = nn.Conv2d(inner, outer, 3, padding=1)
        self.beside = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.level = nn.Sequential(nn.GroupNorm(8, outer), nn.SiLU(), *convolved(outer, outer))
        self.out = nn.Conv2d(outer, 3, 1) if last else nn.Identity()

    def forward(self, picture: Tensor, *kept: Tensor) -> Any:
        """The doubled picture, and what is still kept."""
        whole = self.below(functional.interpolate(picture, scale_factor=2.0))
        found = self.out(self.level(whole + self.beside(kept[-1])))
        return (found, *kept[:-1]) if len(kept) > 1 else found


def u_net() -> Model:
    """Four levels down, one below, and four up; the highest take the longest."""
    torch.manual_seed(0)
    widths = [32, 64, 96, 128]
    down = [Down(a, b) for a, b in zip([3, *widths], widths, strict=False)]
    below = [128, 128, 96, 64]
    up = [
        Up(inner, kept, last=kept == 32)
        for inner, kept in zip(below, reversed(widths), strict=True)
    ]
    blocks = [*down, Middle(128), Middle(128), *up]

    def batch_of(rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 3, 64, 64), torch.randn(rows, 3, 64, 64)

    return Model(blocks, functional.mse_loss, 2, batch_of)


class ImageHead(nn.Module):
    """The mean over a picture, and its class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 100)

    def forward(self, picture: Tensor) -> Tensor:
        """``(rows, 100)``."""
        return self.head(picture.mean((2, 3)))


def res_net() -> Model:
    """ResNet-50 by Hugging Face, on pictures of 96 pixels."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    whole = ResNetModel(ResNetConfig())
    layers = [layer for stage in whole.encoder.stages for layer in stage.layers]
    blocks = [whole.embedder, *layers, ImageHead(2048)]

    def batch_of(rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 3, 96, 96), torch.randint(0, 100, (rows,))

    return Model(blocks, functional.cross_entropy, 2, batch_of)


class Words(nn.Embedding):
    """The words of ``(rows, length)`` as ``(length, rows, width)``, the order of LSTMs."""

    def forward(self, words: Tensor) -> Tensor:
        """Embed."""
        return super().forward(words.t())


class Recurrent(nn.Module):
    """An LSTM that reads both ways or one."""

    def __init__(self, inner: int, outer: int, ways: int) -> None:
        super().__init__()
        self.level = nn.LSTM(inner, outer // ways, bidirectional=ways == 2)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(length, rows, inner)`` to ``(length, rows, outer)``."""
        return self.level(hidden)[0]


class Tags(nn.Linear):
    """A tag of each word."""

    def forward(self, hidden: Tensor) -> Tensor:
        """``(length, rows, width)`` to ``(rows, length, tags)``."""
        return super().forward(hidden).transpose(0, 1)


def tagger() -> Model:
    """Six LSTMs, the first ones wider and both ways, that give each of 48 words a tag."""
    torch.manual_seed(0)
    levels = [
        (128, 384, 2),
        (384, 384, 2),
        (384, 256, 1),
        (256, 192, 1),
        (192, 192, 1),
        (192, 128, 1),
    ]
    blocks: list[nn.Module] = [Words(WORDS, 128)]
    blocks += [Recurrent(*level) for level in levels]
    blocks.append(Tags(128, 64))
    return Model(blocks, token_loss, 8, lambda rows: (tokens(rows, 48), tokens(rows, 48, 64)))


@dataclass(frozen=True)
class Case:
    """A model on a machine; ``slow_rank`` computes at half the speed of the others."""

    title: str
    make: Callable[[], Model]
    ranks: int = 2
    micro_batches: int = 8
    link_bytes_per_s: float = 0.0
    slow_rank: int | None = None


CASES = {
    "gpt-head": Case("GPT whose head takes as long as five blocks", lambda: make_model("gpt-head")),
    "t5": Case("T5 (UMT5): 256 words read, 64 written", t5),
    "captions": Case("ViT encoder with a decoder of text", captions),
    "u-net": Case("U-Net", u_net),
    "resnet": Case("ResNet-50, pictures of 96 pixels", res_net),
    "tagger": Case("LSTM tagger", tagger),
    "half-speed": Case(
        "GPT, one of four workers at half speed", lambda: make_model("gpt"), 4, 8, 0.0, 2
    ),
    "two-hosts": Case("GPT, two hosts at 100 Mb/s", lambda: make_model("gpt"), 2, 8, SLOW_LINK),
}
