"""How a stage's module is called: directly, or as a function generated from its graph.

In every call, a traced stage's module looks up each parameter by its dotted name and each
operator's schema. On small layers that takes longer than the layers. So a function is generated
from the graph once: parameters are its arguments, and common operators are called through torch's
own Python functions. A second function is for backwards in two halves (see
`penstock.capture.deferred_weights`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.capture.bucket_stage import BucketStage
from penstock.capture.deferred_weights import (
    LARGE,
    DeferredGradients,
    DeferredWeights,
    accumulating_linear,
    deferred_addmm,
    deferred_linear,
)
from penstock.capture.graph_weight import count_rows
from penstock.capture.operators import written_inputs
from penstock.capture.record.recording import checkpoint_here
from penstock.capture.stage.stage_tensors import RunContext, StageModule, weight_of_rows

__all__ = ["ModuleCall", "ProgramCall", "StageCall", "TracedCall", "stage_call"]

aten = torch.ops.aten
losses: Any = getattr(torch._C, "_nn")  # noqa: B009 (its stubs do not name it)


def rows_as_weight(loss: torch.Tensor, rows: int) -> torch.Tensor:
    """`count_rows`, with one read-only tensor shared by all micro-batches of a size."""
    if torch.compiler.is_compiling():
        return count_rows(loss, rows)
    return weight_of_rows(rows, loss.device)


def squared_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """`aten.mse_loss`, whose ``reduction`` is a number, unlike in `functional.mse_loss`."""
    return losses.mse_loss(x, target, reduction)


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`aten.cross_entropy_loss`, whose ``reduction`` is a number."""
    return losses.cross_entropy_loss(x, target, weight, reduction, ignore_index, label_smoothing)


def broadcast(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`torch.broadcast_tensors` of a list; tensors of equal shapes are returned as they are."""
    shape = tensors[0].shape
    if all(tensor.shape == shape for tensor in tensors):
        return tensors
    return torch.broadcast_tensors(*tensors)


DIRECT: Mapping[object, Callable[..., Any]] = {
    aten.linear.default: functional.linear,
    aten.relu.default: torch.relu,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.gelu.default: functional.gelu,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.matmul.default: torch.matmul,
    aten.addmm.default: torch.addmm,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.view.default: torch.Tensor.view,
    aten.reshape.default: torch.reshape,
    aten.sym_size.int: torch.Tensor.size,
    aten.broadcast_tensors.default: broadcast,
    aten.mse_loss.default: squared_loss,
    aten.cross_entropy_loss.default: cross_entropy,
    count_rows: rows_as_weight,
}
"""Operators, with functions that do the same with the same arguments."""

DEFERRED: Mapping[object, Callable[..., Any]] = {
    functional.linear: deferred_linear,
    torch.addmm: deferred_addmm,
}
"""Layers whose weight gradients can be deferred, with functions that do so."""


class StageCall(Protocol):
    """Calls a stage's module in a forward."""

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage; if ``deferred`` is given, linear layers defer weight gradients to it."""
        ...

    def tell(self, context: RunContext) -> None:
        """Say which run the next one is."""
        ...

    def others(self) -> list[nn.Parameter]:
        """Parameters that get gradients in the first half although ``deferred`` has products."""
        ...


class ModuleCall:
    """Calls any module directly; a mode that intercepts functions defers weight gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Call the module, with the mode if gradients are deferred."""
        if deferred is None:
            return self._module(*leaves, *inputs)
        with DeferredWeights(deferred):
            return self._module(*leaves, *inputs)

    def others(self) -> list[nn.Parameter]:
        """None: with the mode ``deferred`` has no products."""
        return []

    def tell(self, context: RunContext) -> None:
        """Say which run the next one is."""
        if isinstance(self._module, StageModule):
            self._module.tell(context)


class ProgramCall:
    """Calls a stage that runs the user's program.

    While it runs, linear layers of its own units have another ``forward``: it defers the gradients
    of their weights, or accumulates them directly.
    """

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._deferred: DeferredGradients | None = None
        self._held: list[nn.Parameter] | None = None
        self._small: list[tuple[dict[str, Any], Any]] = []
        self._large: list[tuple[dict[str, Any], Any]] = []
        for part in module.own_modules():
            if type(part) is nn.Linear:
                large = part.weight.numel() >= LARGE
                (self._large if large else self._small).append((part.__dict__, self._linear(part)))
            elif type(part).__name__ == "Conv1D" and hasattr(part, "nf"):
                self._small.append((part.__dict__, self._conv1d(part)))

    def _linear(self, part: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        tensors = part._parameters

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = tensors.get("weight"), tensors.get("bias")
            # In a checkpoint the backward runs this again, by itself; and a weight that is computed
            # is no parameter.
            if weight is None or checkpoint_here() is not None:
                return nn.Linear.forward(part, x)
            if self._deferred is None:
                return accumulating_linear(x, weight, bias)
            return deferred_linear(self._deferred, x, weight, bias)

        return forward

    def _conv1d(self, part: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """The linear layer of GPT-2 in transformers, whose weight is transposed."""
        tensors = part._parameters

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = tensors.get("weight"), tensors.get("bias")
            if self._deferred is None or weight is None or checkpoint_here() is not None:
                return type(part).forward(part, x)
            rows = x.view(-1, x.size(-1))
            made = deferred_addmm(self._deferred, bias, rows, weight)
            return made.view((*x.size()[:-1], part.nf))

        return forward

    def tell(self, context: RunContext) -> None:
        """Say which run the next one is."""
        self._module.tell(context)

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage, with other forwards of its linear layers."""
        self._deferred = deferred
        replaced = self._large if deferred is None else [*self._large, *self._small]
        put: list[dict[str, Any]] = []
        for place, forward in replaced:
            if "forward" not in place:  # the user's own stays
                place["forward"] = forward
                put.append(place)
        try:
            return self._module.run(leaves, inputs)
        finally:
            for place in put:
                place.pop("forward", None)

    def others(self) -> list[nn.Parameter]:
        """All that is trained: a weight may also be read by other code than its linear layer."""
        if self._held is None:
            self._held = list(self._module.parameters())
        return [parameter for parameter in self._held if parameter.requires_grad]


class TracedCall:
    """Calls a traced stage in training, as functions generated from its graph.

    The module's tensors are read at each call, so they may be replaced in between.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        graph, held = with_tensors_as_arguments(module)
        self._held = [holder_of(module, name) for name in held.values()]
        halved, others = with_deferred_weights(graph, set(held))
        self._halved = function_of(halved)
        self._others = [holder_of(module, name) for node, name in held.items() if node in others]
        large = {node for node, name in held.items() if is_large(module, name)}
        for node in graph.nodes:
            if node.target is functional.linear and node.args[1] in large and not node.kwargs:
                node.target = accumulating_linear
        self._whole = function_of(graph)

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage; linear layers record in ``deferred`` the factors of their gradients."""
        held = [holder[name] for holder, name in self._held]
        if deferred is None:
            return self._whole(*held, *leaves, *inputs)
        return self._halved(*held, *leaves, *inputs, deferred)

    def others(self) -> list[nn.Parameter]:
        """The parameters with gradients in the first half, because other layers use them too."""
        found = (holder[name] for holder, name in self._others)
        return [p for p in found if isinstance(p, nn.Parameter) and p.requires_grad]

    def tell(self, context: RunContext) -> None:
        """Nothing: the graph has no state of its own."""


class BucketCall:
    """Calls a stage that was captured for several lengths, each in its fastest form."""

    def __init__(self, module: BucketStage) -> None:
        self._module = module
        self._calls = {id(part): stage_call(part.module) for part in module.parts.values()}

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage for the length of this batch."""
        part = self._module.part_for(leaves)
        own = [leaves[place] for place in part.places]
        return self._calls[id(part)].run(own, inputs, deferred)

    def others(self) -> list[nn.Parameter]:
        """The parameters that get gradients in the first half at any length."""
        found = [parameter for call in self._calls.values() for parameter in call.others()]
        return list({id(parameter): parameter for parameter in found}.values())

    def tell(self, context: RunContext) -> None:
        """Nothing: the graph has no state of its own."""


def stage_call(module: nn.Module) -> StageCall:
    """The fastest form of calling ``module``."""
    if isinstance(module, StageModule):
        return ProgramCall(module)
    if isinstance(module, BucketStage):
        return BucketCall(module)
    if isinstance(module, fx.GraphModule) and is_plain(module):
        return TracedCall(module)
    return ModuleCall(module)


def is_plain(module: fx.GraphModule) -> bool:
    """Whether the graph only calls functions, which write to nothing but the module's buffers."""
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            return False
        if any(source.op != "get_attr" for source in written_inputs(node)):
            return False
    return True


def with_tensors_as_arguments(module: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, str]]:
    """The graph with the module's tensors as its first arguments, and the names of these."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    arguments: dict[str, fx.Node] = {}
    reads = [node for node in module.graph.nodes if node.op == "get_attr"]
    for node in reads:
        name = str(node.target)
        if name not in arguments:
            arguments[name] = graph.placeholder(f"held_{len(arguments)}")
        new[node] = arguments[name]
    for node in module.graph.nodes:
        if node not in new:
            copied = graph.node_copy(node, lambda old: new[old])
            if node.op == "call_function":
                copied.target = DIRECT.get(node.target, node.target)
            new[node] = copied
    return graph, {node: name for name, node in arguments.items()}


def with_deferred_weights(graph: fx.Graph, held: set[fx.Node]) -> tuple[fx.Graph, set[fx.Node]]:
    """A copy whose linear layers get one more argument; and those of ``held`` with other uses."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    others: set[fx.Node] = set()
    store: fx.Node | None = None
    for node in graph.nodes:
        if store is None and node.op != "placeholder":
            store = copy.placeholder("deferred")
        copied = new[node] = copy.node_copy(node, lambda old: new[old])
        deferred = DEFERRED.get(node.target) if not node.kwargs else None
        if deferred is not None:
            copied.target, copied.args = deferred, (store, *copied.args)
            x = node.args[0 if node.target is functional.linear else 1]
            others |= held & {x}
        else:
            others |= held & set(node.all_input_nodes)
    return copy, others


def is_large(module: nn.Module, path: str) -> bool:
    """Whether ``path`` is a parameter so large that its gradient is best accumulated at once."""
    holder, name = holder_of(module, path)
    tensor = holder[name]
    return isinstance(tensor, nn.Parameter) and tensor.numel() >= LARGE


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of its placeholders."""
    return fx.GraphModule(nn.Module(), graph, "StageFunction").forward


def holder_of(module: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a parameter, buffer or module of ``module``, and its name there."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    for held in (owner._parameters, owner._buffers, owner._modules, owner.__dict__):
        if name in held:
            return held, name
    raise AssertionError(f"{path} is nowhere in the module")
