"""What a bridge is given and what it gives back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from penstock.bridges.layout import AskedLayout, PipelineLayout
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile

__all__ = ["ExportRequest", "Exported", "Exporter", "ImportRequest", "Importer"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A plan, the profile of its model, and where the layout is to stand.

    ``joined`` names modules without a layer in the profile, each with the module that it follows.
    """

    plan: Plan
    profile: ModelProfile
    path: Path
    joined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of a layout, and what the reader must know that it does not say.

    ``stages`` are the module names of each stage. ``actions`` is the order of work as CSV, to stand
    beside the layout under the name ``csv_name(path)``; empty where the framework reads none.
    """

    layout: PipelineLayout
    stages: tuple[tuple[str, ...], ...]
    text: str
    actions: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """A layout on disk, the profile of its model, and what the user says besides."""

    path: Path
    profile: ModelProfile
    asked: AskedLayout = field(default_factory=AskedLayout)


Exporter: TypeAlias = Callable[[ExportRequest], Exported]
"""Writes a plan in a framework's words; raises BadInput for what it has no words for."""

Importer: TypeAlias = Callable[[ImportRequest], PipelineLayout]
"""Reads a framework's layout; raises BadInput for one that does not fit to the profile."""
