"""The costs of layers for the core, and of every contiguous run of layers, as arrays."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.collectives import BUCKET_BYTES, STATISTIC_BYTES
from penstock.core.native import Layers, ReduceRules, RunCosts
from penstock.plan.plan import SHARDINGS
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, ModelProfile

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

FIXED, EACH = 0, 1
"""Rows of the arrays of affine costs: the fixed part, and the part per sample."""


def run_tables(problem: PlanningProblem, cuts: Sequence[int] = ()) -> RunCosts:
    """The tables of a problem's profile, between ``cuts`` or all cuts; their square in space."""
    sharding = problem.shardings[0] if len(problem.shardings) == 1 else ""
    return RunCosts(
        layers_in_core(problem.profile),
        cuts or range(len(problem.profile.layers) + 1),
        SHARDINGS.index(sharding),
        problem.optimizer_bytes_per_parameter_byte,
    )


def layers_in_core(profile: ModelProfile) -> Layers:
    """Return the costs of layers and the tensors between them for the core."""
    costs = [
        (
            *(layer.forward_s, layer.backward_input_s, layer.backward_weight_s),
            *(layer.saved_bytes, Affine(layer.norms, layer.norm_channels), layer.workspace_bytes),
        )
        for layer in profile.layers
    ]
    held = [
        (layer.parameter_bytes, layer.buffer_bytes, layer.cast_bytes) for layer in profile.layers
    ]
    rows = [
        [*(part for cost in own for part in (cost.fixed, cost.per_sample)), *sizes]
        for own, sizes in zip(costs, held, strict=True)
    ]
    return Layers(
        np.ascontiguousarray(np.array(rows, dtype=np.float64).T),
        *edge_table(profile),
        [(shared.bytes, shared.layers) for shared in profile.shared],
        (profile.stage_forward_s, profile.stage_backward_s, profile.step_s_per_byte),
        profile.recomputes,
        ReduceRules(BUCKET_BYTES, STATISTIC_BYTES, profile.statistics_s),
    )


def edge_table(profile: ModelProfile) -> tuple[Integers, Floats]:
    """Return the edges, sorted by tensor and consumer: producer, consumer, number of the tensor.

    Then their bytes: the two parts of the activation's, and of its gradient's.
    """
    number: dict[tuple[int, str], int] = {}
    for edge in profile.edges:
        number.setdefault(edge.made, len(number))
    ordered = sorted(profile.edges, key=lambda edge: (number[edge.made], edge.consumer))
    edges = np.zeros((3, len(ordered)), dtype=np.int64)
    sizes = np.zeros((4, len(ordered)))
    for i, edge in enumerate(ordered):
        edges[:, i] = edge.producer, edge.consumer, number[edge.made]
        sizes[:2, i] = edge.bytes.fixed, edge.bytes.per_sample
        sizes[2:, i] = edge.gradient_bytes.fixed, edge.gradient_bytes.per_sample
    return edges, sizes


def at(costs: Floats, samples: float) -> Floats:
    """Affine costs for a number of samples."""
    return costs[FIXED] + samples * costs[EACH]


def runs_at(sums: Floats, samples: float) -> Floats:
    """The cost of every run for ``samples`` samples, from sums up to each cut."""
    fixed, each = (own[None, :] - own[:, None] for own in (sums[FIXED], sums[EACH]))
    return fixed + samples * each


def prefix_sums(values: Iterable[float]) -> Floats:
    """Entry ``i``: the sum of the first ``i`` values."""
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, dtype=np.float64))])


def workspace_table(profile: ModelProfile, rows: int) -> Floats:
    """The largest workspace of any layer of each run."""
    size = len(profile.layers) + 1
    workspaces = np.array([layer.workspace_bytes.at(rows) for layer in profile.layers])
    table = np.zeros((size, size))
    if workspaces.any():
        for lo in range(size - 1):
            table[lo, lo + 1 :] = np.maximum.accumulate(workspaces[lo:])
    return table
