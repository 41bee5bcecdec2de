"""Tensor parallelism inside a stage: which tensors a group's ranks divide, and their shards.

Every rank of a tensor group holds one shard of each divided linear layer: of its outputs
("colwise") or of its inputs ("rowwise"). A colwise layer followed by a rowwise one needs one sum
over the group in the forward and one in the backward (Shoeybi et al., Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism, 2019, section 3). A shard is an
ordinary parameter of the stage's module, so gradients, optimizer and its state are local tensors.
All other tensors are whole on every rank of the group.

Calls a stage whose linear layers are divided among the ranks of a tensor group.

The stage's graph runs node by node. Between a divided layer and the next sum over the group,
tensors are `DTensor`, so that torch finds out how each operator acts on shards. All others are
plain tensors that are equal on all ranks of the group. So only the operators between divided layers
need a rule of DTensor, and they alone have its overhead. A plain tensor that enters there is
wrapped, and its gradient is summed over the group on the way back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from penstock.capture.deferred_weights import DeferredGradients
from penstock.capture.layer_graph import LayerGraph, StageProgram
from penstock.capture.lengths import LengthsOf
from penstock.capture.materialise import named_tensors
from penstock.capture.stage.stage_tensors import RunContext
from penstock.capture.tensor_split import SplitTable, divided_dims
from penstock.capture.training_flags import kept_buffers
from penstock.errors import BadInput
from penstock.plan.ordering import stage_refusal
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import make_groups
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.processes.world import World
from penstock.runtime.stages.batch_norm import uses_batch_norm
from penstock.runtime.stages.call import DIRECT, is_plain

__all__ = ["TensorShards", "copy_values"]

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

    def tell(self, context: RunContext) -> None:
        """Nothing: the graph has no state of its own."""


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


MESHES = count()
"""Numbers the meshes of this process."""


class TensorShards:
    """The tensor group of this rank, and the shards that it holds.

    ``ranks`` are the group's ranks (one: no tensor parallelism here), and ``place`` is this rank's
    index among them. ``dims`` are the divided dimensions by the first names of parameters.

    Raises:
        BadInput: the table does not fit the model, or tied parameters would be divided.
    """

    def __init__(
        self, graph: LayerGraph, plan: Plan, world: World, table: SplitTable | None
    ) -> None:
        device = plan.device_of(world.rank)
        self.ranks = plan.ranks_of(device) if device >= 0 else (world.rank,)
        self.place = self.ranks.index(world.rank)
        self.dims: dict[str, int] = {}
        self._tied = graph.tied_names
        self._world = world
        self._group: dist.ProcessGroup | None = None
        if plan.tensor_groups:
            check_ties(graph, plan)
            self.dims = divided_dims(graph, table)
            groups = make_groups(world, [plan.ranks_of(device) for device in plan.devices])
            self._group = groups.get(self.ranks)
        self._mesh: DeviceMesh | None = None
        if self._group is not None:
            # DTensor keeps what it found out for meshes of the same ranks and names, so the mesh of
            # a pipeline that was closed must not look like this one.
            name = f"tensor group {next(MESHES)}"
            kind = world.device.type
            self._mesh = DeviceMesh.from_group(self._group, kind, mesh_dim_names=(name,))

    @property
    def is_divided(self) -> bool:
        """Whether this rank shares its stages with others."""
        return len(self.ranks) > 1

    def dim_of(self, name: str) -> int | None:
        """The dimension in which this rank holds a shard of a tensor; ``None``: it is whole."""
        return self.dims.get(self._tied.get(name, name)) if self.is_divided else None

    def divide(self, programs: Mapping[int, StageProgram]) -> None:
        """Give all ranks of the group the values of its first, then keep this rank's shards.

        Raises:
            BadInput: a stage cannot be divided, or a size is no multiple of the group's.
        """
        if self._group is None:
            return
        for stage, program in programs.items():
            check_stage(stage, program, len(self.ranks))
            for name, tensor in named_tensors(program.module):
                copy_values(tensor, self.ranks[0], self._group, self._world)
                dim = self.dim_of(name)
                if dim is not None:
                    self._keep_shard(program.module, name, tensor, dim)

    def _keep_shard(self, module: nn.Module, name: str, tensor: torch.Tensor, dim: int) -> None:
        count = len(self.ranks)
        if tensor.shape[dim] % count:
            raise BadInput(
                f"parameter '{name}' has {tensor.shape[dim]} rows or columns to divide, no "
                f"multiple of the {count} ranks of its tensor group; leave its layer out of "
                f"tensor_parallel, or plan groups of another size"
            )
        shard = tensor.detach().chunk(count, dim)[self.place].clone().contiguous()
        path, _, last = name.rpartition(".")
        kept = nn.Parameter(shard, requires_grad=tensor.requires_grad)
        setattr(module.get_submodule(path), last, kept)

    def whole(
        self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """``tensors`` with divided ones gathered, whole on the first rank of the group.

        All ranks of the group must call this. ``names`` gives the parameter to which a tensor (such
        as a state of the optimizer) belongs, where it is not called like it. Tensors that are no
        part of it, such as a count of steps, are kept.

        Raises:
            Stalled: a rank of the group did not take part in time.
            RunFailed: a rank of the group has ended.
        """
        found = dict(tensors)
        if self._group is None:
            return found
        for key in sorted(tensors):
            dim = self.dim_of((names or {}).get(key, key))
            if dim is None or tensors[key].dim() <= dim:
                continue
            shard = tensors[key].detach().contiguous()
            parts = [torch.empty_like(shard) for _ in self.ranks]
            work = dist.all_gather(parts, shard, group=self._group, async_op=True)
            await_work(work, self._world, f"the shards of '{key}'", size_bytes=shard.nbytes)
            if not self.place:
                found[key] = torch.cat(parts, dim)
        return found

    def room(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A tensor to read all of the parameter ``name`` into; ``shard`` itself if it is whole."""
        dim = self.dim_of(name)
        if dim is None:
            return shard
        shape = list(shard.shape)
        shape[dim] *= len(self.ranks)
        return torch.empty(shape, dtype=shard.dtype, device=shard.device)

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that belongs to the parameter ``name``, or all of it."""
        dim = self.dim_of(name)
        if dim is None or tensor.dim() <= dim:
            return tensor
        return tensor.chunk(len(self.ranks), dim)[self.place].contiguous()

    def leave(self) -> None:
        """Leave the group, so that after a failure its other ranks do not wait for this one."""
        # Its connections are closed when nothing refers to it any more, and the mesh does.
        getattr(self._mesh, "_pg_registry", dict[str, object]()).clear()
        group, self._group = self._group, None
        if group is not None:
            self._world.abandon(group)

    def call_of(self, program: StageProgram) -> ShardedCall:
        """How a stage of this rank's group, or a part of it, is called."""
        assert self._mesh is not None and isinstance(program.module, fx.GraphModule)
        names = [name for name, _ in program.module.named_parameters()]
        dims = {name: self.dim_of(name) for name in names}
        divided = {name: dim for name, dim in dims.items() if dim is not None}
        return ShardedCall(program.module, divided, self._mesh)

    def attempt(
        self, program: StageProgram, leaves: Sequence[torch.Tensor], lengths: LengthsOf
    ) -> None:
        """Run a stage forward and backward on one sample, to see that every operator can.

        All ranks of the group must call this. Gradients are changed, buffers are not.

        Raises:
            BadInput: an operator cannot run on shards.
        """
        own = [leaves[index][:1].to(self._world.device) for index in program.batch_inputs]
        received = [
            torch.zeros(spec.at(lengths).shape_for(1), dtype=spec.dtype, device=self._world.device)
            for spec in program.received
        ]
        for spec, tensor in zip(program.received, received, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        call = self.call_of(program)
        with kept_buffers(program.module.buffers()), call.attempted():
            found = pytree.tree_leaves(call.run(own, received))
            roots = [
                each for each in found if isinstance(each, torch.Tensor) and each.requires_grad
            ]
            try:
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
            except (NotImplementedError, RuntimeError) as cause:
                why = str(cause).partition("\n")[0]
                raise BadInput(
                    f"the backward of stage of layers {program.layers.start} to "
                    f"{program.layers.stop - 1} cannot run on shards of a tensor group ({why}); "
                    f"leave layers out of tensor_parallel, or plan without tensor groups"
                ) from cause


def copy_values(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, world: World) -> None:
    """Give all ranks of ``group`` the values that ``tensor`` has on rank ``source``."""
    value = tensor.detach().contiguous()
    plain = value.view(torch.uint8) if value.dtype == torch.bool else value
    work = dist.broadcast(plain, source, group=group, async_op=True)
    await_work(work, world, f"values of rank {source}", peer=source, size_bytes=plain.nbytes)
    with torch.no_grad():
        tensor.copy_(value)


def check_stage(stage: int, program: StageProgram, ranks: int) -> None:
    """Raise `BadInput` for a stage that a tensor group of so many ranks cannot run."""
    module = program.module
    why = ""
    if not isinstance(module, fx.GraphModule) or not is_plain(module):
        why = "is not one graph of torch's functions without writes to its inputs"
    else:
        why = stage_refusal(norms=uses_batch_norm(module), ranks=ranks)
    if why:
        raise BadInput(
            f"stage {stage} {why}, which a tensor group cannot run; plan without tensor groups, "
            f"or give the stage a device of one rank"
        )


def check_ties(graph: LayerGraph, plan: Plan) -> None:
    """Raise `BadInput` if a tied parameter is used by stages with groups of different sizes."""
    for use in graph.parameter_uses:
        stages = sorted({plan.stage_of_layer(layer) for layer in use.layers})
        sizes = [len(plan.ranks_of(plan.stages[stage].devices[0])) for stage in stages]
        if use.requires_grad and len(set(sizes)) > 1:
            raise BadInput(
                f"parameter '{use.name}' is tied between stages {stages}, whose tensor groups have "
                f"{sizes} ranks; give these stages groups of one size"
            )
