"""The costs of every contiguous run of layers, as arrays."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.costs.sharding import held_bytes
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

FIXED, EACH = 0, 1
"""Rows of the arrays of affine costs: the fixed part, and the part per sample."""


class RunTables(NamedTuple):
    """The costs of all runs of layers that begin and end at some cuts of a chain.

    Run ``lo, hi`` holds the layers between cut number ``lo`` and cut number ``hi``.

    - ``forward``, ``backward``, ``saved``: sums up to each cut.
    - ``inputs``, ``parameters``, ``held``: a run is row ``lo``, column ``hi``. ``inputs`` are the
      bytes of the tensors that it reads from earlier layers. ``held`` are the bytes that a device
      keeps all the time: parameters, gradients, optimizer state, buffers.
    - ``divided``: where several devices divide some of that, what each keeps whole, and what they
      divide. Else empty. ``gathers``: parameters and gradients are divided, too. ``again``: each
      backward begins with the forward.
    - ``down``, ``up``: bytes that cross each cut, of activations and of their gradients.
    - ``norms``: batch normalisations up to each cut, and in a second row their channels.

    Costs that depend on samples have two rows, `FIXED` and `EACH`.
    """

    forward: Floats
    backward: Floats
    saved: Floats
    inputs: Floats
    parameters: Floats
    held: Floats
    down: Floats
    up: Floats
    norms: Floats
    divided: tuple[Floats, ...]
    gathers: bool
    again: bool

    def held_by(self, devices: int) -> Floats:
        """The bytes that each of so many devices keeps all the time."""
        if devices < 2 or not self.divided:
            return self.held
        whole, shared = self.divided
        return whole + shared / devices


def run_tables(problem: PlanningProblem, cuts: Sequence[int] = ()) -> RunTables:
    """The tables of a problem's profile, between ``cuts`` or all cuts; their square in space."""
    profile = problem.profile
    kept = np.array(cuts or range(len(profile.layers) + 1))
    square = np.ix_(kept, kept)

    def at_cuts(table: Floats) -> Floats:
        return table.take(kept, axis=1)

    parameters = parameter_table(profile)
    buffers = of_runs(prefix_sums(float(layer.held_besides) for layer in profile.layers))
    (sharding,) = problem.shardings if len(problem.shardings) == 1 else ("",)
    two = two_layers_table(parameters) if sharding == "parameters" else parameters

    def table_of(what: str, devices: float) -> Floats:
        state = problem.optimizer_bytes_per_parameter_byte
        table = held_bytes(what, devices, parameters, two, 2.0, state) + buffers
        return np.ascontiguousarray(table[square])

    divided: tuple[Floats, ...] = ()
    if sharding:
        whole = table_of(sharding, inf)
        divided = (whole, table_of(sharding, 1.0) - whole)
    return RunTables(
        forward=at_cuts(sums(profile, lambda layer: layer.forward_s)),
        backward=at_cuts(sums(profile, lambda layer: layer.backward_s)),
        saved=at_cuts(sums(profile, lambda layer: layer.saved_bytes)),
        inputs=np.stack([table[square] for table in input_table(profile)]),
        parameters=np.ascontiguousarray(parameters[square]),
        held=table_of("", 1.0),
        down=at_cuts(crossing_table(profile, lambda edge: edge.bytes)),
        up=at_cuts(crossing_table(profile, lambda edge: edge.gradient_bytes)),
        norms=at_cuts(sums(profile, lambda layer: Affine(layer.norms, layer.norm_channels))),
        divided=divided,
        gathers=sharding == "parameters",
        again=profile.recomputes,
    )


def at(costs: Floats, samples: float) -> Floats:
    """Affine costs for a number of samples."""
    return costs[FIXED] + samples * costs[EACH]


def of_runs(sums: Floats) -> Floats:
    """The sum of every run, from sums up to each cut."""
    return sums[None, :] - sums[:, None]


def runs_at(sums: Floats, samples: float) -> Floats:
    """The cost of every run for so many samples, from sums up to each cut."""
    return of_runs(sums[FIXED]) + samples * of_runs(sums[EACH])


def prefix_sums(values: Iterable[float]) -> Floats:
    """Entry ``i``: the sum of the first ``i`` values."""
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, dtype=np.float64))])


def sums(profile: ModelProfile, cost: Callable[[LayerCost], Affine]) -> Floats:
    """One cost of the layers before each cut."""
    costs = [cost(layer) for layer in profile.layers]
    return np.stack([prefix_sums(c.fixed for c in costs), prefix_sums(c.per_sample for c in costs)])


def parameter_table(profile: ModelProfile) -> Floats:
    """Parameter bytes of every run; a shared parameter counts once where any layer uses it."""
    table = of_runs(prefix_sums(float(layer.parameter_bytes) for layer in profile.layers))
    ends = np.arange(len(profile.layers) + 1)
    for shared in profile.shared:
        users = np.array(sorted(set(shared.layers)))
        next_user = np.searchsorted(users, ends)
        first_use = np.append(users, len(profile.layers))[next_user]
        table += shared.bytes * (first_use[:, None] < ends[None, :])
    return table


def two_layers_table(parameters: Floats) -> Floats:
    """Of every run the bytes of the two largest layers that follow one another.

    >>> two_layers_table(of_runs(prefix_sums([5, 2, 4])))[0].tolist()
    [0.0, 5.0, 7.0, 7.0]
    """
    cuts = np.arange(len(parameters))
    pairs = np.zeros_like(parameters)
    pairs[:, 2:] = parameters[:, 2:] - parameters[:, :-2]
    pairs[cuts[:-1], cuts[1:]] = parameters[cuts[:-1], cuts[1:]]
    return np.maximum.accumulate(np.triu(pairs, 1), axis=1)


def edges_by_tensor(profile: ModelProfile) -> list[list[Edge]]:
    by_tensor: dict[str, list[Edge]] = {}
    for edge in profile.edges:
        by_tensor.setdefault(edge.tensor, []).append(edge)
    return list(by_tensor.values())


def input_table(profile: ModelProfile) -> Floats:
    """Bytes of the tensors that each run reads from earlier layers, each counted once."""
    size = len(profile.layers) + 1
    read = np.zeros((2, size, size))
    for edges in edges_by_tensor(profile):
        consumers = sorted({edge.consumer for edge in edges})
        first = edges[0]
        for lo in range(first.producer + 1, consumers[-1] + 1):
            reader = next(consumer for consumer in consumers if consumer >= lo)
            read[FIXED, lo, reader + 1] += first.bytes.fixed
            read[EACH, lo, reader + 1] += first.bytes.per_sample
    return np.cumsum(read, axis=2)


def crossing_table(profile: ModelProfile, of: Callable[[Edge], Affine]) -> Floats:
    """For each cut the bytes of all tensors that cross it, each counted once."""
    crossing = np.zeros((2, len(profile.layers) + 1))
    for edges in edges_by_tensor(profile):
        crossed = slice(edges[0].producer + 1, max(edge.consumer for edge in edges) + 1)
        crossing[FIXED, crossed] += of(edges[0]).fixed
        crossing[EACH, crossed] += of(edges[0]).per_sample
    return crossing


def workspace_table(profile: ModelProfile, rows: int) -> Floats:
    """The largest workspace of any layer of each run."""
    size = len(profile.layers) + 1
    workspaces = np.array([layer.workspace_bytes.at(rows) for layer in profile.layers])
    table = np.zeros((size, size))
    if workspaces.any():
        for lo in range(size - 1):
            table[lo, lo + 1 :] = np.maximum.accumulate(workspaces[lo:])
    return table
