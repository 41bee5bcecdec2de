"""A planning problem as flat arrays, for the compiled part of the search."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.link_matrices import link_matrices
from penstock.plan.problem import PlanningProblem
from penstock.plan.problem_memo import remembered
from penstock.plan.run_tables import Floats, Integers, run_tables
from penstock.profile.model_profile import ModelProfile

__all__ = ["SearchArrays", "search_arrays"]


class SearchArrays(NamedTuple):
    """Profile and cluster of a problem.

    ``forward``, ``backward``, ``saved``, ``parameters``, ``held``, ``inputs`` and ``norms`` are the
    tables of `penstock.plan.run_tables.RunTables`. The rows of ``workspace`` are the fixed part of
    each layer and the part for each sample. The rows of ``edges`` are producer, consumer and a
    number of the tensor, sorted by tensor and consumer; those of ``edge_bytes`` are the two parts
    of its activation and of its gradient. ``host_slots`` are the devices of a host that compute at
    full speed at once, 0 for all. ``half_duplex`` is 1 for hosts whose messages of both directions
    take turns. ``duplex_bandwidth`` is the rate of a link while both of its ends also send or
    receive the other way.
    """

    forward: Floats
    backward: Floats
    saved: Floats
    parameters: Floats
    held: Floats
    inputs: Floats
    norms: Floats
    layer_parameters: Floats
    workspace: Floats
    edges: Integers
    edge_bytes: Floats
    speed: Floats
    memory: Floats
    host: Integers
    host_slots: Integers
    half_duplex: Integers
    bandwidth: Floats
    duplex_bandwidth: Floats
    latency: Floats
    port: NDArray[np.uint8]
    step_s_per_byte: float


@remembered
def search_arrays(problem: PlanningProblem) -> SearchArrays:
    """The arrays of a problem, with the links between all pairs of devices."""
    profile, cluster = problem.profile, problem.cluster
    edges, edge_bytes = edge_table(profile)
    tables, links = run_tables(problem), link_matrices(cluster)
    workspaces = [layer.workspace_bytes for layer in profile.layers]
    half_duplex = np.array([host.half_duplex for host in cluster.hosts], dtype=np.int64)
    turns = half_duplex[np.array(cluster.host_index)]
    return SearchArrays(
        forward=tables.forward,
        backward=tables.backward,
        saved=tables.saved,
        parameters=tables.parameters,
        held=tables.held,
        inputs=tables.inputs,
        norms=tables.norms,
        layer_parameters=np.array([float(layer.parameter_bytes) for layer in profile.layers]),
        workspace=np.array([[w.fixed for w in workspaces], [w.per_sample for w in workspaces]]),
        edges=edges,
        edge_bytes=edge_bytes,
        speed=np.array([device.speed for device in cluster.devices]),
        memory=np.array([device.memory_bytes for device in cluster.devices]),
        host=np.array(cluster.host_index, dtype=np.int64),
        host_slots=np.array([host.full_speed_devices for host in cluster.hosts], dtype=np.int64),
        half_duplex=half_duplex,
        bandwidth=links.bytes_per_s,
        duplex_bandwidth=links.bytes_per_s / (1 + (turns[:, None] | turns[None, :])),
        latency=links.latency_s,
        port=links.uses_port.astype(np.uint8),
        step_s_per_byte=profile.step_s_per_byte,
    )


def edge_table(profile: ModelProfile) -> tuple[Integers, Floats]:
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
