"""A traced graph with the model's outputs: beside the loss, or instead of it.

training          layers 0 .. n-1                  the last stage returns  loss, weight
with outputs      the same, and what they read     ...                     and the outputs
without loss      only what the outputs need       the stage that makes an output returns it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from penstock.capture.crossings import Crossings, crossings_of, layer_of_work, needs_of
from penstock.capture.dataflow import Dataflow
from penstock.capture.layers import Layers
from penstock.capture.model_outputs import Flattened, StructuredOutputs
from penstock.capture.operators import is_check
from penstock.capture.stage_module import leaves_of_lengths
from penstock.capture.tensor_specs import TensorFacts
from penstock.errors import BadInput

__all__ = ["OutputView", "describe_outputs", "outputs_beside_loss", "outputs_without_loss"]


@dataclass(frozen=True)
class OutputView:
    """What crosses between layers if outputs are wanted.

    ``returned_by[i]`` is the layer whose stage returns output ``i``. ``work`` is the part of the
    graph's work that is done (``None``: all).
    """

    crossings: Crossings
    returned_by: tuple[int, ...]
    work: frozenset[fx.Node] | None = None
    leaves: frozenset[fx.Node] = frozenset()


def describe_outputs(
    found: Flattened, flow: Dataflow, facts: TensorFacts, batch_size: int
) -> StructuredOutputs:
    """The layout of a model's outputs, which are nodes of the cleaned graph."""
    if found.problem:
        return StructuredOutputs(None, (), found.problem)
    unknown = [node.name for node in flow.clean.outputs if not facts.can_cross(node)]
    if unknown:
        return StructuredOutputs(
            None,
            (),
            f"the size of the model's output '{unknown[0]}' is not a multiple of the samples; "
            f"return tensors with the samples along one dimension",
        )
    specs = tuple(
        facts.spec(node, f"output {i}", batch_size) for i, node in enumerate(flow.clean.outputs)
    )
    return StructuredOutputs(found.structure, specs)


def outputs_beside_loss(
    flow: Dataflow, facts: TensorFacts, layers: Layers, batch_size: int, trained: Crossings
) -> OutputView:
    """The view in which the last layer returns all outputs after the loss."""
    layer_of = layer_of_work(flow, layers)
    needs = needs_of(flow, layer_of, layers)
    output = next(n for n in flow.clean.graph.nodes if n.op == "output")
    for node in (output, *flow.clean.outputs):
        needs[-1] |= flow.needs[node] | own(node, layer_of)
    check_crossings(needs, layer_of, facts)
    found = crossings_of(needs, layer_of, facts, layers, batch_size)
    # Tensors that cross only for the outputs need no gradient.
    specs = {
        node: spec if node in trained.specs else replace(spec, requires_grad=False)
        for node, spec in found.specs.items()
    }
    last = len(layers.names) - 1
    return OutputView(replace(found, specs=specs), (last,) * len(flow.clean.outputs))


def outputs_without_loss(
    flow: Dataflow, facts: TensorFacts, layers: Layers, batch_size: int
) -> OutputView:
    """The view in which each output is returned by the stage that makes it, and nothing else runs.

    Work that no training step does is done by the last layer, which holds its parameters.
    """
    reached = reached_from(flow)
    layer_of = {node: k for node, k in layer_of_work(flow, layers).items() if node in reached}
    needs = needs_of(flow, layer_of, layers)
    last, returned_by = len(layers.names) - 1, list[int]()
    for node in flow.clean.outputs:
        read = flow.needs[node] | own(node, layer_of)
        made = max((layer_of[n] for n in read if n in layer_of), default=0)
        is_trained = node.op != "call_function" or node in flow.trained
        returned_by.append(made if is_trained else last)
        needs[returned_by[-1]] |= read
    check_crossings(needs, layer_of, facts)
    crossings = crossings_of(needs, layer_of, facts, layers, batch_size)
    leaves = [node for node in flow.clean.leaves if node in reached]
    leaves += leaves_of_lengths(flow, reached, leaves)
    return OutputView(crossings, tuple(returned_by), frozenset(layer_of), frozenset(leaves))


def own(node: fx.Node, layer_of: Mapping[fx.Node, int]) -> frozenset[fx.Node]:
    """An output that is work must itself be sent to the layer that returns it."""
    return frozenset([node]) if node in layer_of else frozenset()


def reached_from(flow: Dataflow) -> set[fx.Node]:
    """Everything that the outputs are computed from, including earlier writes to the same storage.

    Checks of values are included, except those of targets, which predictions do not have.
    """
    found = _reached(flow, flow.clean.outputs)
    output = next(n for n in flow.clean.graph.nodes if n.op == "output")
    targets = _reached(flow, output.all_input_nodes) - found
    targets = {leaf for leaf in flow.clean.leaves if leaf in targets}
    checks = [_reached(flow, [node]) for node in flow.work if is_check(node)]
    return found.union(*(check for check in checks if not targets & check))


def _reached(flow: Dataflow, ends: Sequence[fx.Node]) -> set[fx.Node]:
    pending, found = list(ends), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if node not in flow.clean.found_by_stage:
                pending += [*node.all_input_nodes, *flow.after.get(node, ())]
    return found


def check_crossings(
    needs: list[set[fx.Node]], layer_of: Mapping[fx.Node, int], facts: TensorFacts
) -> None:
    """Raise `BadInput` if a tensor would have to be sent that no spec can describe."""
    for layer, read in enumerate(needs):
        for node in read:
            if layer_of.get(node, layer) < layer and not facts.can_cross(node):
                raise BadInput(
                    f"the model's outputs need '{node.name}' of an earlier layer, whose size is no "
                    f"multiple of the samples, so it cannot be sent; compute them in one module"
                )
