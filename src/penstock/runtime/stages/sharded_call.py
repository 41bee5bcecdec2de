"""Calls a stage whose linear layers are divided among the ranks of a tensor group.

The stage's graph runs node by node. Between a divided layer and the next sum over the group,
tensors are `DTensor`, so that torch finds out how each operator acts on shards. All others are
plain tensors that are equal on all ranks of the group. So only the operators between divided layers
need a rule of DTensor, and they alone have its overhead. A plain tensor that enters there is
wrapped, and its gradient is summed over the group on the way back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from penstock.capture.deferred_weights import DeferredGradients
from penstock.errors import BadInput
from penstock.runtime.stages.call import DIRECT

__all__ = ["ShardedCall"]

aten = torch.ops.aten

WHOLE = (Replicate(),)

MASK = 3
"""The place of the mask among the arguments of attention, after queries, keys and values."""


class ShardedCall:
    """Runs a traced stage of which this rank holds shards; see `StageCall`.

    ``dims`` are the divided dimensions of parameters by their names in ``module``.
    """

    def __init__(self, module: fx.GraphModule, dims: Mapping[str, int], mesh: DeviceMesh) -> None:
        self._nodes = ShardedNodes(module, dims, mesh)

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Within, what cannot run on shards is refused as bad input, not a failed run."""
        self._nodes.running = False
        try:
            yield
        finally:
            self._nodes.running = True

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage. All weight gradients are computed in the first half of a backward."""
        return self._nodes.run(*leaves, *inputs)

    def others(self) -> list[nn.Parameter]:
        """None: ``deferred`` has no products."""
        return []


class ShardedNodes(fx.Interpreter):
    """Runs the nodes of a stage; plain tensors in, plain tensors out."""

    def __init__(self, module: fx.GraphModule, dims: Mapping[str, int], mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.running = True
        self._dims, self._mesh = dims, mesh
        self._wrapped: dict[int, tuple[torch.Tensor, DTensor]] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph on plain tensors; all results are plain and whole."""
        try:
            return super().run(*args, **options)
        finally:
            self._wrapped.clear()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; the first time, what DTensor cannot do is refused with its layer."""
        try:
            return super().run_node(n)
        except (NotImplementedError, RuntimeError, ValueError) as cause:
            on_shards = any(isinstance(self.env.get(each), DTensor) for each in n.all_input_nodes)
            if self.running or not on_shards:
                raise
            why = str(cause).partition("\n")[0]
            raise BadInput(
                f"operator {n.target} in layer '{layer_of(n)}' cannot run on shards of a tensor "
                f"group ({why}); leave the linear layers around it out of tensor_parallel, or "
                f"plan without tensor groups"
            ) from cause

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of the module; a shard as part of the whole."""
        found = super().get_attr(target, args, kwargs)
        dim = self._dims.get(target)
        if dim is None:
            return found
        return DTensor.from_local(found, self._mesh, (Shard(dim),), run_check=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, on shards if one of its arguments has been divided."""
        function: Callable[..., Any] = DIRECT.get(target, target)
        given = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(each, DTensor) for each in given):
            return function(*args, **kwargs)
        if target is aten.scaled_dot_product_attention.default:
            return self._attention(args, kwargs)
        refuse_chance(target)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._shared, (args, kwargs))
        return pytree.tree_map_only(DTensor, settled, function(*args, **kwargs))

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The stage's results, whole."""
        return pytree.tree_map_only(DTensor, whole, super().output(target, args, kwargs))

    def _shared(self, tensor: torch.Tensor) -> DTensor:
        """A plain tensor as one that is whole on every rank; wrapped once, so summed once."""
        if isinstance(tensor, DTensor):
            return tensor
        known = self._wrapped.get(id(tensor))
        if known is None:
            wrapped = DTensor.from_local(tensor, self._mesh, WHOLE, run_check=False)
            # The tensor is kept, so that no other gets its id.
            known = self._wrapped[id(tensor)] = tensor, wrapped
        return known[1]

    def _attention(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Attention of the heads that this rank holds, by torch's function for plain tensors."""
        if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0:
            refuse_chance(aten.dropout.default)
        heads = args[0].dim() - 3
        local = [self._local_heads(each, heads) for each in args[:MASK]]
        rest = list(args[MASK:])
        named = dict(kwargs)
        if rest and isinstance(rest[0], torch.Tensor):
            rest[0] = self._local_mask(rest[0], args[0].shape[heads])
        elif isinstance(named.get("attn_mask"), torch.Tensor):
            named["attn_mask"] = self._local_mask(named["attn_mask"], args[0].shape[heads])
        found = aten.scaled_dot_product_attention.default(*local, *rest, **named)
        return DTensor.from_local(found, self._mesh, (Shard(heads),), run_check=False)

    def _local_heads(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """The heads of a tensor that this rank works on."""
        if tensor.shape[heads] % self._mesh.size():
            raise ValueError(
                f"{tensor.shape[heads]} heads are no multiple of {self._mesh.size()} ranks"
            )
        divided = self._shared(tensor).redistribute(placements=(Shard(heads),))
        return divided.to_local(grad_placements=(Shard(heads),))

    def _local_mask(self, mask: torch.Tensor, heads: int) -> torch.Tensor:
        """The mask of this rank's heads; one for all heads stays as it is."""
        if mask.dim() >= 3 and mask.shape[-3] == heads > 1:
            return self._local_heads(mask, mask.dim() - 3)
        if mask.requires_grad or isinstance(mask, DTensor):
            raise ValueError("attention has a trained mask that all heads share")
        return mask


def settled(tensor: DTensor) -> torch.Tensor:
    """A result without shards as a plain tensor, summed over the group if it is a partial sum."""
    if any(placement.is_shard() for placement in tensor.placements):
        return tensor
    return whole(tensor)


def whole(tensor: DTensor) -> torch.Tensor:
    """The whole of a tensor on every rank, plain; its gradient is whole on every rank, too."""
    return tensor.redistribute(placements=WHOLE).to_local(grad_placements=WHOLE)


def refuse_chance(target: Any) -> None:
    """Raise for an operator that draws random numbers, which would differ from one device's."""
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise ValueError(
            "it draws random numbers, such as dropout with p > 0 between divided layers"
        )


def layer_of(node: fx.Node) -> str:
    """The module that a node comes from, by its name in the model; else the node's own name."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    names = [str(path) for path, _ in stack.values()]
    return names[-1] if names and names[-1] else node.name
