"""Profiles in the JSON of Piper (NeurIPS 2021)."""

from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from penstock.document import Entry, check_document, parse_json, read_text
from penstock.errors import BadInput
from penstock.profile.antichain_order import chain_order
from penstock.profile.batch_inputs import without_batch_inputs
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

__all__ = ["piper_from_json", "read_piper"]

FORWARD_SHARE = 1 / 3
"""A file has one time for forward and backward together; a backward takes about two forwards."""

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PiperEntry(Entry):
    """An entry of Piper's format; keys that are not used here are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True, strict=True)


class ConfigurationEntry(PiperEntry):
    """A configuration of a node: ``A`` bytes for each micro-batch in flight, ``B`` bytes once."""

    time: Figure = Field(alias="timePerSample")
    parameter_bytes: Figure = Field(alias="parameterSize")
    bytes_in_flight: Figure = Field(alias="memoryUsageA")
    bytes_once: Figure = Field(alias="memoryUsageB")


class NodeEntry(PiperEntry):
    """A node, with its configurations by degree of tensor parallelism."""

    id: int
    name: str = ""
    configurations: dict[str, list[ConfigurationEntry]] = Field(alias="TMPCs")


class PiperEdge(PiperEntry):
    """Bytes from one node to another."""

    source: int = Field(alias="sourceId")
    target: int = Field(alias="destId")
    bytes: Figure = Field(alias="communicationCost")


class GraphEntry(PiperEntry):
    """A whole file."""

    nodes: list[NodeEntry]
    edges: list[PiperEdge]


def read_piper(path: str | Path) -> ModelProfile:
    """The chain in a Piper file.

    Raises:
        BadInput: no such file, a syntax error, or a node or edge without its figures.
    """
    return piper_from_json(parse_json(read_text(path, "profile"), path, "profile"), path)


def piper_from_json(data: object, path: str | Path) -> ModelProfile:
    """The chain in a Piper graph; ``path`` gives the name and is used in error messages.

    Each node's first configuration without tensor parallelism is used. Piper's sample is one
    micro-batch of the profiled size, so the profile's ``batch_size`` is 1 and its samples are
    micro-batches. The forward takes a third of the time. Of the bytes needed once, those beyond
    parameters and gradients are workspace.

    Raises:
        BadInput: a node or edge without its numbers, a repeated or unknown id, or a cycle.
    """
    graph = check_document(GraphEntry, data, path)
    names = {node.id: node for node in graph.nodes}
    if len(names) < len(graph.nodes):
        counts = Counter(node.id for node in graph.nodes)
        raise BadInput(
            f"profile '{path}': {max(counts.values())} nodes have the id "
            f"{max(counts, key=counts.__getitem__)}; give each its own"
        )
    consumers: dict[str, tuple[str, ...]] = {}
    for edge in graph.edges:
        for end in (edge.source, edge.target):
            if end not in names:
                raise BadInput(
                    f"profile '{path}': the edge {edge.source} -> {edge.target} names node {end}, "
                    f"which is not there; add the node or remove the edge"
                )
        known = consumers.get(str(edge.source), ())
        consumers[str(edge.source)] = (*known, str(edge.target))
    order = chain_order([str(n) for n in names], consumers, f"profile '{path}'")
    index = {int(name): i for i, name in enumerate(order)}
    inputs = set(names) - {edge.target for edge in graph.edges}
    profile = ModelProfile(
        name=Path(path).stem,
        layers=tuple(layer_of(names[int(name)], path) for name in order),
        edges=tuple(edge_of(edge, index, edge.source in inputs) for edge in graph.edges),
        batch_size=1,
        source=f"Piper {Path(path).name}; a sample is one micro-batch of the profiled size",
        halves_assumed=True,
    )
    return without_batch_inputs(profile)


def layer_of(node: NodeEntry, path: str | Path) -> LayerCost:
    """The layer of a node."""
    alone = node.configurations.get("1")
    if not alone:
        raise BadInput(
            f"profile '{path}': node {node.id} has no configuration without tensor parallelism "
            f"(key '1' of TMPCs); profile it with one"
        )
    configuration = alone[0]
    return LayerCost(
        name=f"{node.id} {node.name}",
        forward_s=Affine(0.0, configuration.time * FORWARD_SHARE),
        backward_input_s=Affine(0.0, configuration.time * (1 - FORWARD_SHARE) / 2),
        backward_weight_s=Affine(0.0, configuration.time * (1 - FORWARD_SHARE) / 2),
        parameter_bytes=round(configuration.parameter_bytes),
        saved_bytes=Affine(0.0, configuration.bytes_in_flight),
        workspace_bytes=Affine(
            max(0.0, configuration.bytes_once - 2 * configuration.parameter_bytes), 0.0
        ),
    )


def edge_of(edge: PiperEdge, index: dict[int, int], is_input: bool) -> Edge:
    """The tensor of an edge; no gradient flows back to an input."""
    size = Affine(0.0, edge.bytes)
    gradient = Affine() if is_input else size
    tensor = f"{edge.source} ({edge.bytes:g} bytes)"
    return Edge(index[edge.source], index[edge.target], tensor, size, gradient)
