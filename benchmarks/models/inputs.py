"""Batches for a tiny model: words, pictures, spectrograms; the first kind that runs is taken."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from exceptions import INPUT_EXCEPTIONS
from pictures import special_pictures
from tiny import VOCABULARY, WORDS_FROM
from torch import nn

SAMPLES = 4
WORDS = 16
VALID = (16, 13, 9, 12)
"""Words of each sample that the attention mask lets through."""
CLASSES = 2
IGNORED = -100
MISSING_FEATURES = re.compile(r"features: ?\(?(\d+)|features (\d+)")
FRAMES = 64
WAVE = 2000

Batch = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One batch that may fit the model; ``kind`` says what is in it."""

    kind: str
    batch: Batch


def attempts(model: nn.Module, head: str) -> Iterator[Attempt]:
    """Batches to try, the fullest first."""
    made = {
        "causal": _texts,
        "masked": _texts,
        "seq2seq": _pairs,
        "image": _pictures,
        "speech": _speeches,
        "ctc": _ctc,
        "vision": _with_pictures,
    }[head]
    own = INPUT_EXCEPTIONS.get(type(model).__name__)
    if own is not None:
        yield own(model)
    seen: list[Batch] = []
    for attempt in made(model):
        if not any(_same(attempt.batch, other) for other in seen):
            seen.append(attempt.batch)
            yield attempt


def _same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) if one[k].shape == other[k].shape else False for k in one
    )


def words(model: nn.Module, count: int = WORDS, prefix: torch.Tensor | None = None) -> Batch:
    """Words, mask and labels; ``prefix`` comes before the words of every sample, unmasked."""
    vocabulary = _text_config(model).get("vocab_size") or VOCABULARY
    made = torch.Generator().manual_seed(1)
    low = min(WORDS_FROM, max(4, vocabulary // 2))
    ids = torch.randint(low, vocabulary, (SAMPLES, count), generator=made)
    mask = torch.arange(count).unsqueeze(0) < torch.tensor(VALID).unsqueeze(1)
    padding = _text_config(model).get("pad_token_id")
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        ids = torch.where(mask, ids, padding)
    ignored = torch.rand((SAMPLES, count), generator=made) < torch.tensor(
        [0.1, 0.5, 0.3, 0.0]
    ).unsqueeze(1)
    labels = torch.where(mask & ~ignored, ids, IGNORED)
    if prefix is not None:
        head = prefix.repeat(SAMPLES, 1)
        ids = torch.cat([head, ids], dim=1)
        mask = torch.cat([torch.ones_like(head, dtype=torch.bool), mask], dim=1)
        labels = torch.cat([torch.full_like(head, IGNORED), labels], dim=1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def _text_config(model: nn.Module) -> Mapping[str, Any]:
    config: Any = model.config
    try:
        found = config.get_text_config(decoder=True)
    except Exception:
        found = config
    both = {**vars(config), **vars(found)}
    return {k: v for k, v in both.items() if v is not None}


def _names(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _texts(model: nn.Module) -> Iterator[Attempt]:
    batch = words(model)
    yield Attempt("text", batch)
    config = _text_config(model)
    if "bbox" in _names(model):
        yield Attempt("text", {**batch, "bbox": torch.zeros(SAMPLES, WORDS, 4, dtype=torch.long)})
    if "decoder_input_ids" in _names(model):
        yield Attempt("text", {**batch, "decoder_input_ids": batch["input_ids"].clone()})
    without = {k: v for k, v in batch.items() if k != "attention_mask"}
    yield Attempt("text, no mask", without)
    books = config.get("num_codebooks")
    if isinstance(books, int):
        yield Attempt("codes", _codes(batch, books))
    yield from _with_pictures(model)


def _codes(batch: Batch, books: int) -> Batch:
    """Codes of sounds: the ids are books x samples in one dimension, as these models want them."""
    ids = batch["input_ids"].repeat_interleave(books, dim=0)
    labels = batch["labels"].unsqueeze(-1).repeat(1, 1, books)
    return {"input_ids": ids, "labels": labels}


def _pairs(model: nn.Module) -> Iterator[Attempt]:
    batch = words(model)
    yield from _with_sounds(model)
    yield Attempt("text", batch)
    shifted = {**batch, "decoder_input_ids": batch["input_ids"].clone()}
    yield Attempt("text", shifted)


def _picture_size(model: nn.Module) -> tuple[int, int, int]:
    config: Any = model.config
    for part in (config, getattr(config, "vision_config", None), getattr(config, "encoder", None)):
        size = getattr(part, "image_size", None) or getattr(part, "img_size", None)
        if isinstance(size, list | tuple):
            return (_channels(part), int(size[0]), int(size[1]))
        if isinstance(size, int):
            return (_channels(part), size, size)
    return (_channels(config), 32, 32)


def _channels(config: Any) -> int:
    for name in ("num_channels", "in_channels", "in_chans"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 3


def picture(shape: tuple[int, ...]) -> torch.Tensor:
    """Random pictures."""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2))


def _pictures(model: nn.Module) -> Iterator[Attempt]:
    labels = torch.arange(SAMPLES) % CLASSES
    if "spatial_shapes" in _names(model):
        patches = {
            "pixel_values": picture((16, 192)),
            "pixel_attention_mask": torch.ones(SAMPLES, 16, dtype=torch.long),
            "spatial_shapes": torch.full((SAMPLES, 2), 4),
        }
        yield Attempt("patches of a picture", {**patches, "labels": labels})
    for shape in (_picture_size(model), (3, 64, 64), (3, 224, 224)):
        names = _names(model)
        key = "pixel_values" if "pixel_values" in names else "inputs"
        yield Attempt("picture", {key: picture(shape), "labels": labels})
    yield Attempt(
        "words of a picture",
        {k: v for k, v in words(model).items() if k != "labels"} | {"labels": labels},
    )


def _speeches(model: nn.Module) -> Iterator[Attempt]:
    yield from _with_sounds(model)


def _sounds(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    names, config = _names(model), {**vars(model.config)}
    for part in ("audio_config", "encoder_config", "encoder"):
        if hasattr(config.get(part), "to_dict"):
            config.update(vars(config[part]))
    made = torch.Generator().manual_seed(3)
    mels = next(
        (
            config[k]
            for k in (
                "num_mel_bins",
                "input_feat_per_channel",
                "feature_projection_input_dim",
                "input_dim",
                "feature_size",
            )
            if isinstance(config.get(k), int)
        ),
        80,
    )
    positions = config.get("max_source_positions")
    if "input_features" in names:
        for frames in (FRAMES, 2 * positions if isinstance(positions, int) else FRAMES, 3000):
            yield "input_features", torch.randn(SAMPLES, mels, frames, generator=made)
            yield "input_features", torch.randn(SAMPLES, frames, mels, generator=made)
    if "input_values" in names:
        yield "input_values", torch.randn(SAMPLES, WAVE, generator=made)
        yield "input_values", torch.randn(SAMPLES, 1, WAVE, generator=made)
        yield "input_values", torch.randn(SAMPLES, FRAMES, mels, generator=made)


def _with_sounds(model: nn.Module) -> Iterator[Attempt]:
    names, batch = _names(model), words(model)
    for key, sound in _sounds(model):
        labels = {"labels": batch["labels"]}
        yield Attempt("sound", {key: sound, **labels})
        if "decoder_input_ids" in names:
            decoder = {"decoder_input_ids": batch["input_ids"].clone()}
            yield Attempt("sound", {key: sound, **decoder, **labels})
        lengths = torch.ones(
            SAMPLES, sound.shape[1] if key == "input_features" else sound.shape[-1]
        )
        yield Attempt("sound", {key: sound, "attention_mask": lengths.long(), **labels})
        token = _token(model, "audio")
        if token is not None:
            for count in _feature_counts(model, {key: sound}, token):
                prefix = torch.full((count,), token)
                yield Attempt("sound and text", {key: sound, **words(model, prefix=prefix)})


def _ctc(model: nn.Module) -> Iterator[Attempt]:
    made = torch.Generator().manual_seed(4)
    labels = torch.randint(1, 20, (SAMPLES, 5), generator=made)
    labels[1, 3:] = IGNORED
    labels[3, 4:] = IGNORED
    for key, sound in _sounds(model):
        yield Attempt("sound", {key: sound, "labels": labels})
        frames = sound.shape[1] if sound.dim() > 2 else sound.shape[-1]
        mask = torch.ones(SAMPLES, frames, dtype=torch.long)
        yield Attempt("sound", {key: sound, "attention_mask": mask, "labels": labels})


def _token(model: nn.Module, kind: str) -> int | None:
    config = {**vars(model.config)}
    for name in (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_token"):
        if isinstance(config.get(name), int):
            return config[name]
        value = getattr(model.config, name, None)
        if isinstance(value, int):
            return value
    return None


def _feature_counts(model: nn.Module, parts: Batch, token: int) -> list[int]:
    """Words that a picture or sound takes: what the model says when it is given one."""
    prefix = torch.full((1,), token)
    try:
        _ = model(**parts, **words(model, prefix=prefix))
        return [1]
    except Exception as error:
        found = MISSING_FEATURES.findall(str(error))
        numbers = [int(a or b) for a, b in found if int(a or b) > 0]
        # Some messages count features, some the numbers in them.
        width = SAMPLES * int(_text_config(model).get("hidden_size", 1))
        counts = [n // width for n in numbers if n % width == 0]
        counts += [n // SAMPLES for n in numbers if n % SAMPLES == 0] + numbers
        return [n for n in dict.fromkeys(counts) if n <= 512]


def _picture_parts(model: nn.Module) -> Iterator[tuple[str, Batch]]:
    names = _names(model)
    channels, high, wide = _picture_size(model)
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    if "image_grid_thw" in names or "grid_thw" in names:
        yield "patches of pictures", _patches(vision, channels)
    one, pixels = picture((channels, high, wide)), "pixel_values"
    yield from special_pictures(model, names, vision, one)
    yield "picture", {pixels: one}
    sizes = torch.full((SAMPLES, 2), high)
    if "image_sizes" in names:
        yield "picture", {pixels: one, "image_sizes": sizes}
        for tiles in (3, 5, 2):
            many = picture((tiles, channels, high, wide))
            yield "tiles of pictures", {pixels: many, "image_sizes": sizes}
    single = one.unsqueeze(1)
    yield "list of pictures", {pixels: single}
    if "pixel_attention_mask" in names:
        mask = torch.ones(SAMPLES, 1, high, wide, dtype=torch.long)
        yield "list of pictures", {pixels: single, "pixel_attention_mask": mask}
    if "aspect_ratio_ids" in names:
        tiles = getattr(vision, "max_num_tiles", 4)
        yield (
            "tiles of pictures",
            {
                pixels: picture((1, tiles, channels, high, wide)),
                "aspect_ratio_ids": torch.ones(SAMPLES, 1, dtype=torch.long),
                "aspect_ratio_mask": torch.ones(SAMPLES, 1, tiles, dtype=torch.long),
            },
        )
    if "qformer_input_ids" in names:
        question = {"qformer_input_ids": torch.arange(4).repeat(SAMPLES, 1) + WORDS_FROM}
        yield "picture", {pixels: one, **question}
        yield "film", {pixels: picture((4, channels, high, wide)), **question}
    if "image_attention_mask" in names:
        seen = torch.ones(SAMPLES, WORDS, 1, dtype=torch.long)
        yield "list of pictures", {pixels: single, "image_attention_mask": seen}
    if "image_embeds_position_mask" in names:
        latent = getattr(config, "latent_query_num", 4)
        places = (torch.arange(WORDS) < latent).long().repeat(SAMPLES, 1)
        yield "picture", {pixels: one, "image_embeds_position_mask": places}
    if "flattened_patches" in names:
        size = getattr(vision, "patch_embed_hidden_size", 768)
        patches = picture((8, size + 2))
        patches[..., :2] = torch.arange(8).float().view(1, 8, 1)
        yield "patches of pictures", {"flattened_patches": patches}


def _patches(vision: Any, channels: int) -> Batch:
    """Four patches a side for every sample, the patches of all samples in one list."""
    side, time = getattr(vision, "patch_size", 8), getattr(vision, "temporal_patch_size", 1)
    made = torch.Generator().manual_seed(2)
    size = channels * (time or 1) * side * side
    grid = torch.tensor([[1, 4, 4]] * SAMPLES)
    return {
        "pixel_values": torch.randn(SAMPLES * 16, size, generator=made),
        "image_grid_thw": grid,
    }


def _with_pictures(model: nn.Module) -> Iterator[Attempt]:
    names = _names(model)
    token = _token(model, "image")
    if "pixel_values" in names or "flattened_patches" in names:
        for kind, parts in _picture_parts(model):
            if token is not None:
                for count in _feature_counts(model, parts, token):
                    batch = {**parts, **words(model, prefix=torch.full((count,), token))}
                    yield Attempt(f"{kind} and text", _typed(batch, names, token))
            yield Attempt(f"{kind} and text", {**parts, **words(model)})
            labels = {"labels": words(model)["labels"]}
            yield Attempt(kind, {**parts, **labels})
            if "decoder_input_ids" in names:
                yield Attempt(
                    kind, {**parts, "decoder_input_ids": words(model)["input_ids"], **labels}
                )
    batch = words(model)
    yield Attempt("text only", _typed(batch, names, -1))


def _typed(batch: Batch, names: set[str], token: int) -> Batch:
    """Inputs with the kinds of tokens, if the model reads them."""
    kinds = (batch["input_ids"] == token).long()
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            batch = {**batch, name: kinds}
    return batch
