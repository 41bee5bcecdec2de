"""Names of devices: short ones such as "H100-80GB", and a driver's, "NVIDIA H100 80GB HBM3"."""

import re

__all__ = ["model_and_memory", "same_memory"]

SAY_NOTHING = re.compile(r"nvidia|tesla|geforce|amd|instinct|oam|sxm\d?|hbm\de?")
"""Words that tell no two models apart; a device whose name lacks them counts as on a module."""


def model_and_memory(kind: str) -> tuple[frozenset[str], str]:
    """The words that name a model, and its memory, empty where the name does not say it.

    >>> model_and_memory("NVIDIA A100-SXM4-80GB") == model_and_memory("A100-80GB")
    True
    >>> model_and_memory("NVIDIA GeForce RTX 4090")
    (frozenset({'rtx4090'}), '')
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"\brtx (?=\d)", "rtx", kind.lower()))
    memory = next((word for word in words if re.fullmatch(r"\d+gb", word)), "")
    model = frozenset(word for word in words if not SAY_NOTHING.fullmatch(word))
    return model - {memory}, memory


def same_memory(one: str, other: str) -> bool:
    """Whether two names do not say different memories."""
    return not (one and other) or one == other
