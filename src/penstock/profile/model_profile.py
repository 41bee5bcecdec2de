"""Costs of each layer of a model: seconds and bytes, affine in the number of samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, NamedTuple, cast

from pydantic import BeforeValidator

from penstock.errors import BadInput
from penstock.files import Table
from penstock.text import html_table, seconds_text, size_text

COST_HEADS = ("layer", "name", "forward", "backward", "parameters", "saved")
"""Heads of `ModelProfile.cost_rows`."""


class GroupFactor(NamedTuple):
    """Measured time of groups of ``ranks`` ranks, relative to the computed one."""

    ranks: int
    factor: float


@dataclass(frozen=True)
class TensorParallelCosts(Table):
    """The part of each layer that a tensor group divides, and the group's sums in it.

    ``divided[i]`` is the share of layer ``i``'s compute, and of its parameters' bytes, that t ranks
    divide by t. One forward and backward of the layer takes ``sums[i]`` all-reduces over the group,
    of ``sum_bytes_per_sample[i]`` bytes together for each sample; half of them in the forward.
    Groups that are not in ``factors`` take as long as computed from these numbers. No stage of a
    group ends after one of the layers ``joined``, whose results are divided. ``experts``: among
    what is divided are experts, of which a rank has some.
    """

    divided: tuple[float, ...]
    sums: tuple[float, ...]
    sum_bytes_per_sample: tuple[float, ...]
    factors: tuple[GroupFactor, ...] = ()
    joined: tuple[int, ...] = ()
    experts: bool = False

    def factor(self, ranks: int) -> float:
        """The time of a group of ``ranks``, relative to the computed one; 1 if not measured."""
        return dict(self.factors).get(ranks, 1.0)

    def __post_init__(self) -> None:
        if len({len(self.divided), len(self.sums), len(self.sum_bytes_per_sample)}) > 1:
            raise BadInput(
                f"tensor_parallel has {len(self.divided)} shares, {len(self.sums)} numbers of sums "
                f"and {len(self.sum_bytes_per_sample)} sizes of sums; give one for each layer"
            )
        if not all(0 <= share <= 1 for share in self.divided):
            raise BadInput(
                f"tensor_parallel.divided is {list(self.divided)}; each layer's share must be from "
                f"0 to 1"
            )
        for value in (*self.sums, *self.sum_bytes_per_sample):
            if not 0 <= value < float("inf"):
                raise BadInput(
                    f"tensor_parallel has {value} sums, or bytes of them, in a layer; it must be "
                    f"finite and >= 0"
                )
        for ranks, factor in self.factors:
            if ranks < 2 or not 0 < factor < float("inf"):
                raise BadInput(
                    f"tensor_parallel.factors has {factor} for groups of {ranks} ranks; groups "
                    f"have at least 2, and a factor must be finite and > 0"
                )


SHARES_OFF = 1e-6
"""The shares of all lengths add up to 1 within this tolerance."""


@dataclass(frozen=True, slots=True)
class Affine(Table):
    """A cost that grows with the batch: ``fixed + per_sample * samples``.

    ``fixed`` describes that small slices of a micro-batch are less efficient than large ones.

    >>> Affine(fixed=1.0, per_sample=0.5).at(4)
    3.0
    """

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        """The cost of ``samples`` samples; no samples cost nothing."""
        return self.fixed + self.per_sample * samples if samples else 0.0

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def scaled(self, factor: float) -> "Affine":
        """Both terms multiplied by ``factor``."""
        return Affine(self.fixed * factor, self.per_sample * factor)


@dataclass(frozen=True, slots=True)
class LayerCost(Table):
    """One layer: times in seconds on a device of speed 1, sizes in bytes.

    ``backward_input_s`` and ``backward_weight_s`` are the halves of a split backward; a whole
    backward is their sum. ``saved_bytes`` are kept from a micro-batch's forward to its backward.
    ``workspace_bytes`` are needed only while the layer runs. ``parameter_bytes`` are the trained
    parameters, without gradients and optimizer state, and without parameters shared with other
    layers (see `SharedParameter`). ``buffer_bytes`` are buffers and frozen parameters, and
    ``cast_bytes`` parameters in the autocast type, which all micro-batches of an iteration share.
    ``norms`` are its batch normalisations, which have ``norm_channels`` channels in all; replicas
    exchange their statistics.
    """

    name: str
    forward_s: Affine
    backward_input_s: Affine
    backward_weight_s: Affine
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: Affine = field(default_factory=Affine)
    workspace_bytes: Affine = field(default_factory=Affine)
    norms: int = 0
    norm_channels: int = 0
    cast_bytes: int = 0

    @property
    def backward_s(self) -> Affine:
        """A whole backward: input half plus weight half."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def work_s(self) -> Affine:
        """A forward and a whole backward."""
        return self.forward_s + self.backward_s

    def with_seconds_of(
        self, layers: Sequence["LayerCost"], summary: Callable[[list[Affine]], Affine]
    ) -> "LayerCost":
        """Return the layer with each time as the summary of that of ``layers``."""
        return replace(
            self,
            forward_s=summary([layer.forward_s for layer in layers]),
            backward_input_s=summary([layer.backward_input_s for layer in layers]),
            backward_weight_s=summary([layer.backward_weight_s for layer in layers]),
        )


@dataclass(frozen=True, slots=True)
class Edge(Table):
    """One tensor that a later layer reads.

    A tensor with several consumers has one edge for each, all with the same ``tensor`` name; it is
    sent once to each *device* that reads it. ``gradient_bytes`` flow back (zero for integers and
    masks).
    """

    producer: int
    consumer: int
    tensor: str
    bytes: Affine
    gradient_bytes: Affine

    @property
    def made(self) -> tuple[int, str]:
        """The key of the tensor: other layers may use the same name for theirs."""
        return self.producer, self.tensor

    @property
    def goes_whole(self) -> bool:
        """Return whether the tensor has no rows, so every replica that reads it gets all of it."""
        return self.bytes.fixed > 0 and self.bytes.per_sample == 0


@dataclass(frozen=True, slots=True)
class SharedParameter(Table):
    """A tied parameter: several layers use it, and each stage with such a layer holds a copy."""

    name: str
    bytes: int
    layers: tuple[int, ...]


def pairs_of_table(table: object) -> object:
    """The keys and values of a table as pairs; anything else as it is."""
    return tuple(cast("Mapping[str, int]", table).items()) if isinstance(table, dict) else table


@dataclass(frozen=True)
class LengthCosts(Table):
    """The costs of batches of about one length, and the fraction of all batches that they are.

    ``lengths`` are the measured lengths by name.
    """

    lengths: Annotated[tuple[tuple[str, int], ...], BeforeValidator(pairs_of_table)]
    share: float
    layers: tuple[LayerCost, ...]
    edges: tuple[Edge, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.lengths)


@dataclass(frozen=True, repr=False)
class ModelProfile(Table):
    """A chain of layers with measured or estimated costs.

    ``batch_size`` is the largest batch (samples) that was measured. ``step_s_per_byte`` is the
    optimizer's seconds per byte of parameters, ``host_step_s_per_byte`` those of a step in host
    memory with the copies to and from it (0: not known). Every run of a stage takes
    ``stage_forward_s`` or ``stage_backward_s`` beyond the sum of its layers (at speed 1;
    simulations count it, planners' own estimates do not). Each sum of batch norm's statistics over
    replicas takes ``statistics_s`` beyond its message, for small operators whose start takes longer
    than their work. All times are those of an idle machine; while they were measured, work took
    longer by the share ``other_load`` because of other programs, and the same work took now more,
    now less time: ``variation`` is the standard deviation, relative to the mean (0 on a GPU, whose
    clock is steady), by which ranks that train together wait. ``source`` says where the numbers
    come from. ``device`` is the name of the device model that they hold for, if known. ``notes``
    say what people should know before they trust the numbers, in a line each.

    If batches have different lengths, ``by_length`` has the costs of each, from short to long. Then
    times and edges are means over all batches, and saved bytes those of the longest batch.
    ``tensor_parallel`` says what a tensor group divides, if that is known. A sample has
    ``tokens_per_sample``; its forward and backward take ``flops_per_sample`` floating-point
    operations, without recompute (0: not known, and nothing is predicted by them). With
    ``whole_loss`` the last layer runs once for all samples of a step; its costs are added up here.
    If it ``recomputes``, the backward of each layer begins with its forward (`by_block`).

    Raises:
        BadInput: no layers, a negative or non-finite number, or an edge that does not point
            forward.
    """

    name: str
    layers: tuple[LayerCost, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[SharedParameter, ...] = ()
    batch_size: int = 1
    step_s_per_byte: float = 0.0
    host_step_s_per_byte: float = 0.0
    stage_forward_s: float = 0.0
    stage_backward_s: float = 0.0
    statistics_s: float = 1e-4
    other_load: float = 0.0
    variation: float = 0.0
    source: str = "unknown"
    device: str = ""
    by_length: tuple[LengthCosts, ...] = ()
    tensor_parallel: TensorParallelCosts | None = None
    notes: tuple[str, ...] = ()
    tokens_per_sample: float = 0.0
    flops_per_sample: float = 0.0
    whole_loss: bool = False
    recomputes: bool = False

    def __post_init__(self) -> None:
        check_profile(self)

    def __repr__(self) -> str:
        return f"ModelProfile('{self.name}', {len(self.layers)} layers, {self.source})"

    def _repr_html_(self) -> str:
        return html_table(COST_HEADS, self.cost_rows(), repr(self))

    def cost_rows(self) -> Iterator[tuple[str, ...]]:
        """The costs of each layer for the largest batch that was measured, below `COST_HEADS`."""
        for index, layer in enumerate(self.layers):
            yield (
                str(index),
                layer.name,
                seconds_text(layer.forward_s.at(self.batch_size)),
                seconds_text(layer.backward_s.at(self.batch_size)),
                size_text(layer.parameter_bytes),
                size_text(layer.saved_bytes.at(self.batch_size)),
            )

    @cached_property
    def has_norms(self) -> bool:
        """Return whether any layer has batch normalisation."""
        return any(layer.norms for layer in self.layers)

    @cached_property
    def by_block(self) -> "ModelProfile":
        """The costs of stages that recompute by block.

        Each layer keeps only what it reads. Its backward begins with its forward, and needs as
        workspace what the layer saves beside that. A tensor that several layers read counts for
        each of them, so the sum over layers may be a little high.
        """
        read = [Affine()] * len(self.layers)
        for (consumer, _), edge in {(e.consumer, e.made): e for e in self.edges}.items():
            read[consumer] += edge.bytes
        layers = tuple(map(recomputed, self.layers, read))
        return replace(self, layers=layers, by_length=(), recomputes=True)

    @property
    def stepped_on_host(self) -> "ModelProfile":
        """The costs where the optimizer steps in host memory; a CPU does so in any case.

        Raises:
            BadInput: its seconds are not known.
        """
        if self.device == "cpu":
            return self
        if not self.host_step_s_per_byte:
            raise BadInput(
                f"profile '{self.name}' does not say how long an optimizer's step in host memory "
                f"takes (host_step_s_per_byte); profile the model again, or leave the state on the "
                f"devices (--optimizer-state device)"
            )
        return replace(self, step_s_per_byte=self.host_step_s_per_byte)

    def at(self, costs: LengthCosts) -> "ModelProfile":
        """The profile of batches of one length."""
        return replace(self, layers=costs.layers, edges=costs.edges, by_length=())

    @property
    def whole_s(self) -> float:
        """Seconds for one forward and backward of all layers on the profiled batch at speed 1."""
        return self.work_s(range(len(self.layers)), self.batch_size)

    def forward_s(self, layers: range, samples: float) -> float:
        """Seconds for one forward of ``layers`` on ``samples`` samples at speed 1."""
        return sum(self.layers[i].forward_s.at(samples) for i in layers)

    def backward_s(self, layers: range, samples: float) -> float:
        """Seconds for one whole backward of ``layers`` on ``samples`` samples at speed 1."""
        return sum(self.layers[i].backward_s.at(samples) for i in layers)

    def work_s(self, layers: range, samples: float) -> float:
        """Seconds for one forward and one whole backward of ``layers``, in the same way."""
        return sum(self.layers[i].work_s.at(samples) for i in layers)

    def parameter_bytes(self, layers: range) -> int:
        """Bytes of the parameters that a stage of ``layers`` holds; shared ones count once."""
        own = sum(self.layers[i].parameter_bytes for i in layers)
        return own + sum(
            shared.bytes for shared in self.shared if any(i in layers for i in shared.layers)
        )

    def prefix_sums(self, samples: float) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of layers ``0..i-1``, for ``i = 0..len(layers)``."""
        forward = accumulate((layer.forward_s.at(samples) for layer in self.layers), initial=0.0)
        backward = accumulate((layer.backward_s.at(samples) for layer in self.layers), initial=0.0)
        return list(forward), list(backward)


def recomputed(layer: LayerCost, read: Affine) -> LayerCost:
    """The costs of a layer that keeps only ``read``, and runs again in its backward."""
    saved = layer.saved_bytes
    more = Affine(max(0.0, saved.fixed - read.fixed), max(0.0, saved.per_sample - read.per_sample))
    return replace(
        layer,
        backward_input_s=layer.backward_input_s + layer.forward_s,
        saved_bytes=read,
        workspace_bytes=layer.workspace_bytes + more,
    )


def check_profile(profile: ModelProfile) -> None:
    """Raise `BadInput` for a number out of range or an edge that does not point forward."""
    if not profile.layers:
        raise BadInput(f"profile '{profile.name}' has no layers; it needs at least one")
    if profile.batch_size < 1:
        raise BadInput(f"profile '{profile.name}': batch_size {profile.batch_size} must be >= 1")
    check_numbers(profile, "", profile)
    for index, layer in enumerate(profile.layers):
        check_numbers(profile, f"layer {index} ('{layer.name}'): ", layer)
    for edge in profile.edges:
        if not 0 <= edge.producer < edge.consumer < len(profile.layers):
            raise BadInput(
                f"profile '{profile.name}': tensor '{edge.tensor}' goes from layer "
                f"{edge.producer} to layer {edge.consumer}; edges must point forward within "
                f"0..{len(profile.layers) - 1} (a cyclic graph has no pipeline)"
            )
        check_numbers(profile, f"tensor '{edge.tensor}': ", edge)
    check_shares(profile)
    divided = profile.tensor_parallel
    if divided is not None and len(divided.divided) != len(profile.layers):
        raise BadInput(
            f"profile '{profile.name}' has {len(profile.layers)} layers, and tensor_parallel says "
            f"of {len(divided.divided)} which share is divided; give one share for each layer"
        )
    for shared in profile.shared:
        check_numbers(profile, f"shared parameter '{shared.name}': ", shared)
        if not all(0 <= layer < len(profile.layers) for layer in shared.layers):
            raise BadInput(
                f"profile '{profile.name}': shared parameter '{shared.name}' is used by layers "
                f"{list(shared.layers)}; they must be in 0..{len(profile.layers) - 1}"
            )


def check_shares(profile: ModelProfile) -> None:
    """Raise `BadInput` unless the shares add up to 1 and every length has the same layers."""
    if not profile.by_length:
        return
    total = sum(costs.share for costs in profile.by_length)
    if abs(total - 1) > SHARES_OFF or min(costs.share for costs in profile.by_length) < 0:
        raise BadInput(
            f"profile '{profile.name}': the shares of its lengths add up to {total:g}; they must "
            f"be >= 0 and add up to 1; profile the model again"
        )
    for costs in profile.by_length:
        if len(costs.layers) != len(profile.layers):
            raise BadInput(
                f"profile '{profile.name}' has {len(profile.layers)} layers, and "
                f"{len(costs.layers)} at {costs}; profile the model again"
            )
        profile.at(costs)


def check_numbers(profile: ModelProfile, of: str, table: Table) -> None:
    """Raise if a number of a table is negative or infinite; a cost, at the profiled batch or at 1.

    ``of`` says in messages what the table describes.
    """
    for name in FIGURES[type(table)]:
        figure = getattr(table, name)
        values = {name: figure}
        if isinstance(figure, Affine):
            values = {f"{name} of {n} samples": figure.at(n) for n in (1, profile.batch_size)}
        for words, value in values.items():
            if not 0 <= value < float("inf"):
                raise BadInput(
                    f"profile '{profile.name}', {of}{words} is {value}; it must be finite and "
                    f">= 0; profile the model again"
                )


FIGURES: dict[type[Table], list[str]] = {
    kind: [field.name for field in fields(kind) if field.type in (Affine, float, int)]
    for kind in (ModelProfile, LayerCost, Edge, SharedParameter)
}
"""The numbers and costs of each table, by the names of their fields."""


def without_batch_inputs(profile: ModelProfile) -> ModelProfile:
    """The profile without the edges of layers that depend only on the batch.

    Such a layer is an input; or it has no parameters and no backward, and reads only such layers:
    token ids, attention masks, position codes. Every stage has the batch, so it computes them
    itself in very little time, and no gradient flows back. Published planners leave out input nodes
    for the same reason (DAPPLE's planner, PipeDream's optimizer).
    """
    producers: dict[int, list[int]] = {}
    for edge in profile.edges:
        producers.setdefault(edge.consumer, []).append(edge.producer)
    trained = {layer for shared in profile.shared for layer in shared.layers}
    from_batch: list[bool] = []
    for index, layer in enumerate(profile.layers):
        backward = layer.backward_s
        untrained = not (
            layer.parameter_bytes or index in trained or backward.fixed or backward.per_sample
        )
        from_batch.append(untrained and all(from_batch[p] for p in producers.get(index, ())))
    kept = tuple(edge for edge in profile.edges if not from_batch[edge.producer])
    return replace(profile, edges=kept)


def check_costs_at(profile: ModelProfile, samples: int) -> None:
    """Raise `BadInput` for a cost that is negative for ``samples`` samples."""
    for index, layer in enumerate(profile.layers):
        for cost in (layer.forward_s, layer.backward_s, layer.saved_bytes, layer.workspace_bytes):
            if cost.at(samples) < 0:
                raise BadInput(
                    f"profile '{profile.name}', layer {index} ('{layer.name}'): a cost of "
                    f"{samples} samples comes out at {cost.at(samples)}; it was measured at up to "
                    f"{profile.batch_size} samples only, so use smaller micro-batches or profile "
                    f"larger batches"
                )
