"""Reads and writes model profiles as JSON, one line for each layer."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.document import (
    Entry,
    check_document,
    json_text,
    parse_json,
    read_text,
    version_is,
    write_text,
)
from penstock.errors import BadInput
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    LengthCosts,
    ModelProfile,
    SharedParameter,
    TensorParallelCosts,
)

__all__ = ["profile_from_json", "profile_to_json", "read_profile", "write_profile"]


PER_SAMPLE = ("tokens_per_sample", "flops_per_sample")

VERSION = 2
"""Raised whenever the same model gets other layers."""

OLDER = f"since version {VERSION} models have other layers, so profile the model again"


class AffineEntry(Entry):
    """``fixed + per_sample * samples``."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def value(self) -> Affine:
        """The cost that the entry describes."""
        return Affine(self.fixed, self.per_sample)


class LayerEntry(Entry):
    """A layer of the chain."""

    name: str
    forward_s: AffineEntry
    backward_input_s: AffineEntry
    backward_weight_s: AffineEntry
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: AffineEntry = AffineEntry()
    workspace_bytes: AffineEntry = AffineEntry()
    norms: int = 0
    norm_channels: int = 0
    cast_bytes: int = 0

    def value(self) -> LayerCost:
        """The layer that the entry describes."""
        return LayerCost(
            name=self.name,
            forward_s=self.forward_s.value(),
            backward_input_s=self.backward_input_s.value(),
            backward_weight_s=self.backward_weight_s.value(),
            parameter_bytes=self.parameter_bytes,
            buffer_bytes=self.buffer_bytes,
            saved_bytes=self.saved_bytes.value(),
            workspace_bytes=self.workspace_bytes.value(),
            norms=self.norms,
            norm_channels=self.norm_channels,
            cast_bytes=self.cast_bytes,
        )


class EdgeEntry(Entry):
    """A tensor from one layer to a later one."""

    producer: int
    consumer: int
    tensor: str
    bytes: AffineEntry
    gradient_bytes: AffineEntry

    def value(self) -> Edge:
        """The edge that the entry describes."""
        return Edge(
            producer=self.producer,
            consumer=self.consumer,
            tensor=self.tensor,
            bytes=self.bytes.value(),
            gradient_bytes=self.gradient_bytes.value(),
        )


class SharedEntry(Entry):
    """A parameter of several layers."""

    name: str
    bytes: int
    layers: list[int]


class LengthCostsEntry(Entry):
    """The costs of batches of about one length."""

    lengths: dict[str, int]
    share: float
    layers: list[LayerEntry]
    edges: list[EdgeEntry] = Field(default_factory=list[EdgeEntry])

    def value(self) -> LengthCosts:
        """The costs that the entry describes."""
        return LengthCosts(
            tuple(self.lengths.items()),
            self.share,
            tuple(layer.value() for layer in self.layers),
            tuple(edge.value() for edge in self.edges),
        )


class FactorEntry(Entry):
    """How many times as long as computed groups of so many ranks take."""

    ranks: int
    factor: float


class TensorParallelEntry(Entry):
    """What a tensor group divides; see `TensorParallelCosts`."""

    divided: list[float]
    sums: list[float]
    sum_bytes_per_sample: list[float]
    factors: list[FactorEntry] = Field(default_factory=list[FactorEntry])

    def value(self) -> TensorParallelCosts:
        """The costs that the entry describes."""
        return TensorParallelCosts(
            tuple(self.divided),
            tuple(self.sums),
            tuple(self.sum_bytes_per_sample),
            tuple((entry.ranks, entry.factor) for entry in self.factors),
        )


class ProfileEntry(Entry):
    """A whole profile."""

    format: Literal["penstock-profile"]
    schema_version: Annotated[int, AfterValidator(version_is(VERSION, OLDER))]
    name: str
    source: str = "unknown"
    device: str = ""
    batch_size: int = 1
    step_s_per_byte: float = 0.0
    stage_forward_s: float = 0.0
    stage_backward_s: float = 0.0
    layers: list[LayerEntry]
    edges: list[EdgeEntry] = Field(default_factory=list[EdgeEntry])
    shared: list[SharedEntry] = Field(default_factory=list[SharedEntry])
    by_length: list[LengthCostsEntry] = Field(default_factory=list[LengthCostsEntry])
    halves_assumed: bool = False
    tensor_parallel: TensorParallelEntry | None = None
    notes: list[str] = Field(default_factory=list[str])
    tokens_per_sample: float = 0.0
    flops_per_sample: float = 0.0


def read_profile(path: str | Path) -> ModelProfile:
    """The profile that `write_profile` (or a person) wrote.

    Raises:
        BadInput: no such file, a syntax error, an unknown key or a number out of range.
    """
    return profile_from_json(parse_json(read_text(path, "profile"), path, "profile"), path)


def profile_from_json(data: object, path: str | Path) -> ModelProfile:
    """The profile in a JSON value; ``path`` is used in error messages.

    Raises:
        BadInput: an unknown key or a number out of range.
    """
    entry = check_document(ProfileEntry, data, path)
    try:
        return ModelProfile(
            name=entry.name,
            layers=tuple(layer.value() for layer in entry.layers),
            edges=tuple(edge.value() for edge in entry.edges),
            shared=tuple(SharedParameter(s.name, s.bytes, tuple(s.layers)) for s in entry.shared),
            batch_size=entry.batch_size,
            step_s_per_byte=entry.step_s_per_byte,
            stage_forward_s=entry.stage_forward_s,
            stage_backward_s=entry.stage_backward_s,
            source=entry.source,
            device=entry.device,
            by_length=tuple(costs.value() for costs in entry.by_length),
            halves_assumed=entry.halves_assumed,
            tensor_parallel=entry.tensor_parallel.value() if entry.tensor_parallel else None,
            notes=tuple(entry.notes),
            tokens_per_sample=entry.tokens_per_sample,
            flops_per_sample=entry.flops_per_sample,
        )
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def profile_to_json(profile: ModelProfile) -> dict[str, object]:
    """The JSON value of ``profile``; `profile_from_json` restores it exactly."""
    document: dict[str, object] = {
        "format": "penstock-profile",
        "schema_version": VERSION,
        "name": profile.name,
        "source": profile.source,
        **({"device": profile.device} if profile.device else {}),
        **({"notes": list(profile.notes)} if profile.notes else {}),
        **({"halves_assumed": True} if profile.halves_assumed else {}),
        "batch_size": profile.batch_size,
        **{key: getattr(profile, key) for key in PER_SAMPLE if getattr(profile, key)},
        "step_s_per_byte": profile.step_s_per_byte,
        "stage_forward_s": profile.stage_forward_s,
        "stage_backward_s": profile.stage_backward_s,
        "layers": [asdict(layer) for layer in profile.layers],
        "edges": [asdict(edge) for edge in profile.edges],
        "shared": [asdict(shared) for shared in profile.shared],
    }
    if profile.by_length:
        document["by_length"] = [
            {**asdict(costs), "lengths": dict(costs.lengths)} for costs in profile.by_length
        ]
    if profile.tensor_parallel is not None:
        costs = asdict(profile.tensor_parallel)
        factors = [{"ranks": ranks, "factor": factor} for ranks, factor in costs.pop("factors")]
        document["tensor_parallel"] = costs | ({"factors": factors} if factors else {})
    return document


def write_profile(profile: ModelProfile, path: str | Path) -> None:
    """Write ``profile``; `read_profile` restores it exactly.

    Raises:
        BadInput: the file cannot be written.
    """
    write_text(path, json_text(profile_to_json(profile)))
