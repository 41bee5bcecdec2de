"""A planning problem as flat arrays, for the compiled part of the search."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.link_matrices import link_matrices
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import input_table, parameter_table, prefix_sums
from penstock.profile.model_profile import Affine, ModelProfile

__all__ = ["Integers", "Reals", "SearchArrays", "search_arrays"]

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]


class SearchArrays(NamedTuple):
    """Profile and cluster of a problem; costs come in pairs, fixed and for each sample.

    Entry ``i`` of ``forward``, ``backward``, ``saved`` and ``buffers`` sums layers ``0..i-1``.
    Row ``lo``, column ``hi`` of ``parameters`` and ``inputs`` belong to layers ``lo..hi-1``.
    The rows of ``edges`` are producer, consumer and a number of the tensor, sorted by tensor and
    consumer; those of ``edge_bytes`` its activation and its gradient. ``host_slots`` are the
    devices of a host that compute at full speed at once, 0 for all.
    """

    forward: Reals
    backward: Reals
    saved: Reals
    buffers: Reals
    parameters: Reals
    inputs: Reals
    layer_parameters: Reals
    workspace: Reals
    edges: Integers
    edge_bytes: Reals
    speed: Reals
    memory: Reals
    host: Integers
    host_slots: Integers
    bandwidth: Reals
    latency: Reals
    port: NDArray[np.uint8]
    scalars: Reals
    """Optimizer seconds per byte; bytes of model state per byte of parameters."""


def search_arrays(problem: PlanningProblem) -> SearchArrays:
    """The arrays of a problem; the links between all pairs of devices among them."""
    profile, cluster = problem.profile, problem.cluster
    layers = profile.layers
    edges, edge_bytes = edge_table(profile)
    links = link_matrices(cluster)
    state = 2 + problem.optimizer_bytes_per_parameter_byte
    return SearchArrays(
        forward=prefix([layer.forward_s for layer in layers]),
        backward=prefix([layer.backward_s for layer in layers]),
        saved=prefix([layer.saved_bytes for layer in layers]),
        buffers=prefix_sums(float(layer.buffer_bytes) for layer in layers),
        parameters=np.ascontiguousarray(parameter_table(profile)),
        inputs=input_table(profile),
        layer_parameters=np.array([float(layer.parameter_bytes) for layer in layers]),
        workspace=columns([layer.workspace_bytes for layer in layers]),
        edges=edges,
        edge_bytes=edge_bytes,
        speed=np.array([device.speed for device in cluster.devices]),
        memory=np.array([device.memory_bytes for device in cluster.devices]),
        host=np.array(cluster.host_index, dtype=np.int64),
        host_slots=np.array([host.full_speed_devices for host in cluster.hosts], dtype=np.int64),
        bandwidth=links.bytes_per_s,
        latency=links.latency_s,
        port=links.uses_port.astype(np.uint8),
        scalars=np.array([profile.step_s_per_byte, state]),
    )


def columns(costs: Sequence[Affine]) -> Reals:
    """Row 0 the fixed terms, row 1 those for each sample."""
    return np.array([[c.fixed for c in costs], [c.per_sample for c in costs]])


def prefix(costs: Sequence[Affine]) -> Reals:
    """`columns` of the sums of the first 0, 1, 2, ... costs."""
    return np.concatenate([np.zeros((2, 1)), np.cumsum(columns(costs), axis=1)], axis=1)


def edge_table(profile: ModelProfile) -> tuple[Integers, Reals]:
    """``edges`` and ``edge_bytes`` of `SearchArrays`."""
    number: dict[str, int] = {}
    for edge in profile.edges:
        number.setdefault(edge.tensor, len(number))
    ordered = sorted(profile.edges, key=lambda edge: (number[edge.tensor], edge.consumer))
    edges = np.zeros((3, len(ordered)), dtype=np.int64)
    sizes = np.zeros((4, len(ordered)))
    for i, edge in enumerate(ordered):
        edges[:, i] = edge.producer, edge.consumer, number[edge.tensor]
        sizes[:2, i] = edge.bytes.fixed, edge.bytes.per_sample
        sizes[2:, i] = edge.gradient_bytes.fixed, edge.gradient_bytes.per_sample
    return edges, sizes
