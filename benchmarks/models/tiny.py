"""A tiny version of any Hugging Face architecture: its own default config, shrunk by names."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from exceptions import CONFIG_EXCEPTIONS, KEPT, THREE_POSITIONS
from transformers import PreTrainedConfig

VOCABULARY = 128
WORDS_FROM = 64
"""Numbers below are for special tokens; the words of the batch are those from here on."""

LAYERS = 2
HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM
LIMITS: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|vocab_size_per_layer_input|vocabulary_size|codebook_size)$", VOCABULARY),
    (r"(qk_rope_head_dim|qk_nope_head_dim)$", HEAD_DIM // 2),
    (r"(head_dim|d_kv|d_head|head_size|dim_head|d_rel)$", HEAD_DIM),
    (r"(lora_rank|laurel_rank|index_topk)$", HEAD_DIM),
    (r"(experts_per_tok|experts_per_token|moe_topk|moe_k|top_k|topk)$", 2),
    (r"(^num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", HEADS),
    (r"^n_group$|^topk_group$|^num_expert_group$|^n_groups$|mamba_n_groups$", 1),
    (r"(intermediate_size|ffn_dim|d_ff|d_inner|ffn_hidden_size|n_inner|mlp_dim)$", 2 * WIDTH),
    (r"(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|hidden_dim)$", WIDTH),
    (r"(projection_dim|projector_dim|output_dim|hidden_size_\w+|embedding_dim|width)$", WIDTH),
    (r"(attention_heads|num_heads|n_heads?|num_head|heads|_n_heads|attn_heads)$", HEADS),
    (r"(key_heads|value_heads)$", HEADS),
    (r"(mel_bins|input_feat_per_channel)$", HEAD_DIM),
    (r"(hidden_layers|n_layers?|num_layers|depth|num_blocks|attention_layers)$", LAYERS),
    (r"(encoder_layers|decoder_layers|adapter_layers|resampler_depth|encoder_depth)$", LAYERS),
    (r"^(max_position_embeddings|n_positions|max_seq_len|n_ctx)$", 512),
    (r"^max_(source|target)_positions$", 64),
    (r"(image_size|img_size)$", 32),
    (r"patch_size$", 8),
    (r"(first_k_dense_replace|num_dense_layers|num_kv_shared_layers)$", 1),
)
"""The largest value that an attribute whose name matches may keep; the first match counts."""

SECTIONS = [4, 2, 2]
"""Half of a head among time, height and width."""

ABSENT = {
    "head_dim": HEAD_DIM,
    "n_routed_experts": HEADS,
    "num_experts": HEADS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": WIDTH,
}
"""Values for attributes whose default is None, and which a model needs."""

GROWING = re.compile(r"(hidden_sizes|embed_dims?|embed_dim|channels|widths|dims?|conv_dim)$")


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the tiny version: the same class, with other numbers."""
    seen: dict[str, int] = {}
    return _shrunk(config, seen)


def _shrunk(config: PreTrainedConfig, tokens: dict[str, int]) -> PreTrainedConfig:
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    own = CONFIG_EXCEPTIONS.get(config.model_type, {})
    own = {**own, **CONFIG_EXCEPTIONS.get(type(config).__name__, {})}
    changed: dict[str, Any] = {}
    deep = _layer_count(config)
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    kept = _kept_layers(values, deep) if deep is not None else []
    aliases = {stored: name for name, stored in type(config).attribute_map.items()}
    for stored, value in values.items():
        name = stored if stored in fields else aliases.get(stored, stored)
        if name not in fields or name in own or name in KEPT:
            continue
        if isinstance(value, PreTrainedConfig):
            changed[name] = _shrunk(value, tokens)
        elif deep is not None and isinstance(value, list | tuple) and len(value) == deep > LAYERS:
            changed[name] = [_smaller(name, value[index], values, tokens) for index in kept]
        else:
            new, default = _smaller(name, value, values, tokens), fields[name]
            # What a composite model sets in a part of it must stay; what is derived must not.
            given = default is not dataclasses.MISSING and default is not None and value != default
            if new != value or given:
                changed[name] = new
    if deep is not None and "num_hidden_layers" in fields and "num_hidden_layers" not in own:
        changed["num_hidden_layers"] = len(kept)
    if config.model_type in THREE_POSITIONS:
        rotary = dict(changed.get("rope_parameters") or config.rope_parameters or {})
        changed["rope_parameters"] = rotary | {"mrope_section": SECTIONS}
    changed.update({name: value for name, value in own.items() if name in fields})
    return type(config)(**changed)


def _layer_count(config: PreTrainedConfig) -> int | None:
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) and count > 0 else None


def _kept_layers(values: Mapping[str, Any], deep: int) -> list[int]:
    """Layers that together are of every kind that the default has; at least two."""
    lists = [v for v in values.values() if isinstance(v, list | tuple) and len(v) == deep]
    lists = [v for v in lists if all(isinstance(entry, str | bool | int) for entry in v)]
    kinds: dict[Any, int] = {}
    for index in range(deep):
        kinds.setdefault(tuple(v[index] for v in lists), index)
    found = sorted(kinds.values()) if len(kinds) <= HEADS else sorted(kinds.values())[:HEADS]
    rest = [index for index in range(deep) if index not in found]
    return sorted(found + rest[: max(0, min(LAYERS, deep) - len(found))])


def _smaller(name: str, value: Any, values: Mapping[str, Any], tokens: dict[str, int]) -> Any:
    if value is None:
        return ABSENT.get(name)
    if isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return 0.0 if _is_random(name) else value
    if isinstance(value, dict):
        return _smaller_rope(value) if name.startswith("rope") else value
    if isinstance(value, list | tuple):
        return _smaller_sequence(name, value, tokens)
    if not isinstance(value, int):
        return value
    if _is_random(name):
        return 0
    if re.search(r"token_(id|index)$|_idx$|^(mask|unk|pad|bos|eos)_index$", name):
        return _token(name, value, tokens)
    if re.search(r"(key_value_heads|kv_heads|num_kv|kv_heads)$", name):
        return _few_heads(name, value, values)
    return _limited(name, value)


def _is_random(name: str) -> bool:
    """Return whether an attribute makes forward differ from call to call."""
    if re.search(r"dropout_(position|prob_ratio)", name):
        return True
    return bool(re.search(r"drop(out)?|_pdrop$|jitter|mask_(time|feature)_prob|noise_std", name))


def _limited(name: str, value: int) -> int:
    for pattern, limit in LIMITS:
        if re.search(pattern, name):
            return min(value, limit)
    return value


def _few_heads(name: str, value: int, values: Mapping[str, Any]) -> int:
    heads = name.replace("key_value_heads", "attention_heads").replace("kv_heads", "heads")
    whole = values.get(heads, values.get("num_attention_heads", value))
    if value == 1 or not isinstance(whole, int):
        return min(value, HEADS)
    return HEADS if value >= whole else HEADS // 2


def _token(name: str, value: int, tokens: dict[str, int]) -> int:
    """A number of its own below `WORDS_FROM` for every name of a special token."""
    if 0 <= value < 4 or value < 0:
        return value
    return tokens.setdefault(name.replace("_index", "_id"), 4 + len(tokens))


def _smaller_sequence(name: str, value: Sequence[Any], tokens: dict[str, int]) -> Any:
    same = type(value)
    if not value or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        if all(isinstance(v, float) for v in value) and _is_random(name):
            return same(0.0 for _ in value)
        return value
    if re.search(r"token_(id|index)$", name):
        return _token(name, value[0], tokens)
    if re.search(r"(image_size|img_size)$", name):
        return same(32 for _ in value)
    if re.search(r"^depths$|^layers$|^depth$|^num_layers$", name):
        return same(min(v, 2 if i == 0 else 1) for i, v in enumerate(value))
    if re.search(r"(num_heads|num_attention_heads|attention_heads)$", name):
        return same(max(1, v // value[0]) for v in value)
    if GROWING.search(name) and value[0] > 16:
        return same(max(8, 16 * v // value[0] // 8 * 8) for v in value)
    return value


def _smaller_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Sections of a rotary table must add up to half of a head."""
    new: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, dict):
            new[key] = _smaller_rope(entry)
        elif key == "mrope_section" and isinstance(entry, list | tuple):
            new[key] = SECTIONS if len(entry) == 3 else [2] * len(entry)
        else:
            new[key] = entry
    return new
