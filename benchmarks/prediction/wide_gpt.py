"""The model of the default job, larger: its shortest action takes some 15 ms instead of 2."""

from torch import nn

from penstock.examples.gpt_text import Gpt

__all__ = ["build_model"]


def build_model() -> nn.Module:
    """Eight blocks of width 384."""
    return Gpt(width=384, heads=6, blocks=8)
