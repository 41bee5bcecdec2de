"""What every run of layers computes, sends, receives and holds at least."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats, RunTables, prefix_sums, run_tables
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

__all__ = [
    "Hub",
    "NearTensors",
    "ProfileTables",
    "Traffic",
    "floor_of",
    "has_rows",
    "profile_tables",
    "time_sums",
]


HUB_READERS = 3
"""A tensor with so many readers is followed through the program."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors of every run (row ``lo``, column ``hi``), and how many there are.

    Only tensors of which every replica has a message count in ``tensors``: those with rows, and
    those that are received whole.
    """

    fixed: Floats
    per_sample: Floats
    tensors: Floats

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.fixed + other.fixed,
            self.per_sample + other.per_sample,
            self.tensors + other.tensors,
        )


@dataclass(frozen=True)
class NearTensors:
    """For each cut tensors with rows that surely pass to the next stage from the one before.

    Row 0: the largest tensor that the layer right before the cut makes; its maker is in the stage
    that ends at the cut, and it passes to the next stage where that holds layer ``reader`` (one
    past the last layer: there is no such tensor). Row 1: all such tensors of the two layers before
    the cut, for stages of at least two layers, whose readers all come up to layer ``reader``.
    Columns of ``forward`` and ``backward``: fixed bytes, bytes per sample, tensors. Of all tensors
    that pass a cut, rows of ``passing``: the last layer that is the first from there on to read one
    (a stage from the cut on that holds it reads all of them), the last layer that reads any, and
    the first layer that makes any.
    """

    reader: NDArray[np.int64]
    passing: NDArray[np.int64]
    forward: Floats
    backward: Floats


@dataclass(frozen=True)
class Hub:
    """The tensor with rows that most bytes go out of, if every reader is in a stage of its own.

    ``reader[lo]``: its first reader from layer ``lo`` on, the number of layers where there is none.
    ``size``: fixed bytes, bytes per sample, tensors, of the tensor and of its gradient;
    ``producer`` -1: no tensor has many readers.
    """

    producer: int
    reader: NDArray[np.int64]
    size: Floats


@dataclass(frozen=True)
class ProfileTables:
    """All that does not depend on the micro-batch size."""

    runs: RunTables
    activations_in: Traffic
    gradients_in: Traffic
    sent: Traffic
    activations_out: Traffic
    near: NearTensors
    hub: Hub
    tied_bytes: Floats

    @cached_property
    def all_traffic(self) -> Floats:
        """``traffic`` of `penstock.bounds.headroom.headroom`."""
        kinds = (self.activations_in, self.gradients_in, self.sent, self.activations_out)
        return np.stack(
            [np.stack([kind.fixed, kind.per_sample, kind.tensors], axis=2) for kind in kinds]
        )


def profile_tables(problem: PlanningProblem) -> ProfileTables:
    """The tables of a problem; layers squared in time and space."""
    profile, rows = problem.profile, max(problem.micro_batch_sizes)
    activations_out = made_traffic(profile, rows, lambda edge: edge.bytes)
    return ProfileTables(
        runs=run_tables(problem),
        activations_in=read_traffic(profile, rows, lambda edge: edge.bytes),
        gradients_in=made_traffic(profile, rows, lambda edge: edge.gradient_bytes),
        sent=activations_out + read_traffic(profile, rows, lambda edge: edge.gradient_bytes),
        activations_out=activations_out,
        near=near_tensors(profile, rows),
        hub=hub_of(profile, rows),
        tied_bytes=tied_bytes(profile),
    )


def tied_bytes(profile: ModelProfile) -> Floats:
    """For every run the bytes of shared parameters used in it and outside, and only in it."""
    size = len(profile.layers) + 1
    table = np.zeros((size, size, 2))
    ends = np.arange(size)
    for shared in profile.shared:
        users = np.array(sorted(set(shared.layers)))
        if not len(users):
            continue
        inside = np.searchsorted(users, ends)
        count = inside[None, :] - inside[:, None]
        table[:, :, 0] += shared.bytes * ((count > 0) & (count < len(users)))
        table[:, :, 1] += shared.bytes * (count == len(users))
    return table


def floor_of(cost: Affine, most_samples: int) -> Affine:
    """A cost that for 1 to ``most_samples`` samples is not above ``cost``, and never falls.

    Fitted costs may have a negative term: ``-1 + 3 n`` is at least ``2 n``, and ``9 - n`` at least
    its last.
    """
    if cost.fixed < 0:
        return Affine(0.0, max(0.0, cost.at(1)))
    if cost.per_sample < 0:
        return Affine(max(0.0, cost.at(most_samples)), 0.0)
    return cost


def time_sums(profile: ModelProfile, rows: int) -> Floats:
    """Sums over the first ``i`` layers (columns) of their floors for up to ``rows`` samples.

    Rows: forward fixed, forward per sample, backward fixed, backward per sample.
    """

    def sums(cost: Callable[[LayerCost], Affine]) -> list[Floats]:
        floors = [floor_of(cost(layer), rows) for layer in profile.layers]
        return [
            prefix_sums(floor.fixed for floor in floors),
            prefix_sums(floor.per_sample for floor in floors),
        ]

    forward = sums(lambda layer: layer.forward_s)
    return np.array([*forward, *sums(lambda layer: layer.backward_s)])


def has_rows(edge: Edge) -> bool:
    """Whether a tensor is cut by rows; others go whole (see `penstock.simulate.transfers`)."""
    return not (edge.bytes.fixed > 0 and edge.bytes.per_sample == 0)


def size_of(edge: Edge, size: Affine, rows: int) -> Affine:
    """The floor of a tensor's size; one that goes whole counts as a single row, either way."""
    return floor_of(size, rows) if has_rows(edge) else Affine(max(0.0, size.at(1)))


def by_tensor(profile: ModelProfile) -> dict[str, list[Edge]]:
    """The edges of each tensor, nearest consumer first."""
    edges: dict[str, list[Edge]] = {}
    for edge in profile.edges:
        edges.setdefault(edge.tensor, []).append(edge)
    return {name: sorted(ones, key=lambda edge: edge.consumer) for name, ones in edges.items()}


class Rectangles:
    """Traffic gathered as rectangles of runs: corners now, sums at the end."""

    def __init__(self, layers: int) -> None:
        self.corners = np.zeros((3, layers + 2, layers + 2))

    def add(self, los: range, his: range, size: Affine, counts: bool) -> None:
        """Let every run with ``lo`` and ``hi`` in these ranges have a tensor of ``size``."""
        if size.at(1) <= 0 or not los or not his:
            return
        figures = np.array([size.fixed, size.per_sample, float(counts)])
        self.corners[:, los.start, his.start] += figures
        self.corners[:, los.stop, his.start] -= figures
        self.corners[:, los.start, his.stop] -= figures
        self.corners[:, los.stop, his.stop] += figures

    def traffic(self) -> Traffic:
        """The sums."""
        sums = self.corners.cumsum(axis=1).cumsum(axis=2)[:, :-1, :-1]
        # Rounding of sums that cancel must not leave less than nothing.
        return Traffic(*(np.ascontiguousarray(np.maximum(part, 0.0)) for part in sums))


def read_traffic(profile: ModelProfile, rows: int, of: Callable[[Edge], Affine]) -> Traffic:
    """Tensors that a run reads from layers before it, once each."""
    layers = len(profile.layers)
    found = Rectangles(layers)
    for edges in by_tensor(profile).values():
        after = edges[0].producer
        for edge in edges:
            los, his = range(after + 1, edge.consumer + 1), range(edge.consumer + 1, layers + 1)
            found.add(los, his, size_of(edge, of(edge), rows), True)
            after = max(after, edge.consumer)
    return found.traffic()


def made_traffic(profile: ModelProfile, rows: int, of: Callable[[Edge], Affine]) -> Traffic:
    """Tensors that a run makes and layers after it read, once each."""
    found = Rectangles(len(profile.layers))
    for edges in by_tensor(profile).values():
        first, last = edges[0], edges[-1]
        los, his = range(first.producer + 1), range(first.producer + 1, last.consumer + 1)
        least = min((size_of(edge, of(edge), rows) for edge in edges), key=lambda size: size.at(1))
        found.add(los, his, least, has_rows(first))
    return found.traffic()


def hub_of(profile: ModelProfile, rows: int) -> Hub:
    """The tensor of `Hub`; only one with at least `HUB_READERS` readers."""
    layers = len(profile.layers)
    none = Hub(-1, np.full(layers + 1, layers, dtype=np.int64), np.zeros((2, 3)))
    best, most_bytes = none, 0.0
    for edges in by_tensor(profile).values():
        least = min((floor_of(edge.bytes, rows) for edge in edges), key=lambda size: size.at(1))
        if len(edges) < HUB_READERS or not has_rows(edges[0]):
            continue
        if least.at(rows) * len(edges) > most_bytes:
            most_bytes = least.at(rows) * len(edges)
            readers = np.array([edge.consumer for edge in edges] + [layers])
            reader = readers[np.searchsorted(readers, np.arange(layers + 1))]
            floors = [floor_of(edge.gradient_bytes, rows) for edge in edges]
            back = min(floors, key=lambda size: size.at(1))
            counts = float(back.at(1) > 0)
            size = [[least.fixed, least.per_sample, 1.0], [back.fixed, back.per_sample, counts]]
            best = Hub(edges[0].producer, reader.astype(np.int64), np.array(size))
    return best


def near_tensors(profile: ModelProfile, rows: int) -> NearTensors:
    """The tensors of `NearTensors`."""
    layers = len(profile.layers)
    reader = np.full((2, layers + 1), layers, dtype=np.int64)
    forward, backward = np.zeros((2, layers + 1, 3)), np.zeros((2, layers + 1, 3))
    for edges in by_tensor(profile).values():
        edge = edges[0]
        cut = edge.producer + 1
        size, gradient = sizes_of(edge, rows)
        held = forward[0, cut, :2].sum() + backward[0, cut, :2].sum()
        if has_rows(edge) and size[:2].sum() > 0 and size[:2].sum() + gradient[:2].sum() > held:
            reader[0, cut] = edge.consumer
            forward[0, cut], backward[0, cut] = size, gradient
    for edges in by_tensor(profile).values():
        for cut in range(edges[0].producer + 1, min(edges[0].producer + 3, layers)):
            nearest = next((edge for edge in edges if edge.consumer >= cut), None)
            if nearest is None or not has_rows(nearest):
                continue
            size, gradient = sizes_of(nearest, rows)
            near = nearest.consumer <= reader[0, cut] < layers
            if size[:2].sum() > 0 and near:
                reader[1, cut] = reader[0, cut]
                forward[1, cut] += size
                backward[1, cut] += gradient
    return NearTensors(reader, passing(profile), forward, backward)


def sizes_of(edge: Edge, rows: int) -> tuple[Floats, Floats]:
    """Fixed bytes, bytes per sample and number of a tensor, and of its gradient."""
    size, gradient = floor_of(edge.bytes, rows), floor_of(edge.gradient_bytes, rows)
    counts = float(gradient.at(1) > 0)
    back = np.array([gradient.fixed, gradient.per_sample, 1.0]) * counts
    return np.array([size.fixed, size.per_sample, 1.0]), back


def passing(profile: ModelProfile) -> NDArray[np.int64]:
    """``passing`` of `NearTensors`."""
    layers = len(profile.layers)
    found = np.full((3, layers + 1), -1, dtype=np.int64)
    found[2] = layers
    for edges in by_tensor(profile).values():
        after, last = edges[0].producer + 1, edges[-1].consumer
        passed = slice(after, last + 1)
        found[1, passed] = np.maximum(found[1, passed], last)
        found[2, passed] = np.minimum(found[2, passed], edges[0].producer)
        for edge in edges:
            passed = slice(after, edge.consumer + 1)
            found[0, passed] = np.maximum(found[0, passed], edge.consumer)
            after = max(after, edge.consumer + 1)
    return found
