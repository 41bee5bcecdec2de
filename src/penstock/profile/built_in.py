"""The models of the papers with their published costs, as tables that come with the package."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.profile.model_profile import ModelProfile
from penstock.profile.model_table import read_model_table

__all__ = ["MODELS"]


def packaged(name: str) -> ModelProfile:
    """A model of the package; comments in its file name the source of its numbers."""
    return read_model_table(Path(__file__).parent / "models" / f"{name}.toml")


MODELS: dict[str, Callable[[], ModelProfile]] = {
    "bert-48": partial(packaged, "bert-48"),
    "xlnet-36": partial(packaged, "xlnet-36"),
    "gnmt-16": partial(packaged, "gnmt-16"),
    "amoebanet-36": partial(packaged, "amoebanet-36"),
    "vgg-19": partial(packaged, "vgg-19"),
    "resnet-50": partial(packaged, "resnet-50"),
    "vgg-16": partial(packaged, "vgg-16"),
    "inception-v3": partial(packaged, "inception-v3"),
    "gnmt-8": partial(packaged, "gnmt-8"),
    "bert-32": partial(packaged, "bert-32"),
}
