"""What every contiguous run of layers costs, as square arrays: row ``lo``, column ``hi``."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

__all__ = [
    "AffineTable",
    "Floats",
    "RunTables",
    "crossing_table",
    "prefix_sums",
    "run_tables",
    "workspace_table",
]

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class AffineTable:
    """For each run the two terms of an `Affine` cost; entries with ``hi <= lo`` mean nothing."""

    fixed: Floats
    per_sample: Floats

    def at(self, samples: float) -> Floats:
        """The cost of every run for ``samples`` samples."""
        return self.fixed + samples * self.per_sample


@dataclass(frozen=True)
class RunTables:
    """All runs of layers of one profile.

    ``held_bytes`` are those that a device keeps all the time: parameters, gradients, optimizer
    state, buffers. ``input_bytes`` are those of the tensors that a run reads from earlier layers.
    """

    forward_s: AffineTable
    backward_s: AffineTable
    saved_bytes: AffineTable
    input_bytes: AffineTable
    parameter_bytes: Floats
    held_bytes: Floats


def run_tables(problem: PlanningProblem) -> RunTables:
    """The tables of a problem's profile; layers squared in time and space."""
    profile = problem.profile
    parameters = parameter_table(profile)
    buffers = run_sums([float(layer.buffer_bytes) for layer in profile.layers])
    return RunTables(
        forward_s=affine_table(profile, lambda layer: layer.forward_s),
        backward_s=affine_table(profile, lambda layer: layer.backward_s),
        saved_bytes=affine_table(profile, lambda layer: layer.saved_bytes),
        input_bytes=input_table(profile),
        parameter_bytes=parameters,
        held_bytes=parameters * (2 + problem.optimizer_bytes_per_parameter_byte) + buffers,
    )


def prefix_sums(figures: Iterable[float]) -> Floats:
    """Entry ``i``: the sum of the first ``i`` figures."""
    return np.concatenate([[0.0], np.cumsum(np.fromiter(figures, dtype=np.float64))])


def run_sums(figures: Iterable[float]) -> Floats:
    """Entry ``[lo, hi]``: the sum of figures ``lo`` to ``hi - 1``."""
    prefix = prefix_sums(figures)
    return prefix[None, :] - prefix[:, None]


def affine_table(profile: ModelProfile, cost: Callable[[LayerCost], Affine]) -> AffineTable:
    """The sums of one affine cost over every run."""
    costs = [cost(layer) for layer in profile.layers]
    return AffineTable(
        fixed=run_sums([c.fixed for c in costs]), per_sample=run_sums([c.per_sample for c in costs])
    )


def parameter_table(profile: ModelProfile) -> Floats:
    """Parameter bytes of every run; a shared parameter counts once where any layer uses it."""
    table = run_sums([float(layer.parameter_bytes) for layer in profile.layers])
    ends = np.arange(len(profile.layers) + 1)
    for shared in profile.shared:
        users = np.array(sorted(set(shared.layers)))
        next_user = np.searchsorted(users, ends)
        first_use = np.append(users, len(profile.layers))[next_user]
        table += shared.bytes * (first_use[:, None] < ends[None, :])
    return table


def input_table(profile: ModelProfile) -> AffineTable:
    """Bytes of the tensors that each run reads from earlier layers, each counted once."""
    size = len(profile.layers) + 1
    fixed, per_sample = np.zeros((size, size)), np.zeros((size, size))
    by_tensor: dict[str, list[Edge]] = {}
    for edge in profile.edges:
        by_tensor.setdefault(edge.tensor, []).append(edge)
    for edges in by_tensor.values():
        consumers = sorted({edge.consumer for edge in edges})
        first = edges[0]
        for lo in range(first.producer + 1, consumers[-1] + 1):
            reader = next(consumer for consumer in consumers if consumer >= lo)
            fixed[lo, reader + 1] += first.bytes.fixed
            per_sample[lo, reader + 1] += first.bytes.per_sample
    return AffineTable(fixed=np.cumsum(fixed, axis=1), per_sample=np.cumsum(per_sample, axis=1))


def crossing_table(profile: ModelProfile, of: Callable[[Edge], Affine]) -> AffineTable:
    """For each cut the bytes of all tensors that cross it, each counted once."""
    by_tensor: dict[str, list[Edge]] = {}
    for edge in profile.edges:
        by_tensor.setdefault(edge.tensor, []).append(edge)
    fixed, per_sample = np.zeros((2, len(profile.layers) + 1))
    for edges in by_tensor.values():
        crossed = slice(edges[0].producer + 1, max(edge.consumer for edge in edges) + 1)
        fixed[crossed] += of(edges[0]).fixed
        per_sample[crossed] += of(edges[0]).per_sample
    return AffineTable(fixed, per_sample)


def workspace_table(profile: ModelProfile, rows: int) -> Floats:
    """The largest workspace of any layer of each run."""
    size = len(profile.layers) + 1
    workspaces = np.array([layer.workspace_bytes.at(rows) for layer in profile.layers])
    table = np.zeros((size, size))
    if workspaces.any():
        for lo in range(size - 1):
            table[lo, lo + 1 :] = np.maximum.accumulate(workspaces[lo:])
    return table
