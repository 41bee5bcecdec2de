"""Tensor parallelism inside a stage: which tensors a group's ranks divide, and their shards.

Every rank of a tensor group holds one shard of each divided linear layer: of its outputs
("colwise") or of its inputs ("rowwise"). A colwise layer followed by a rowwise one needs one sum
over the group in the forward and one in the backward (Shoeybi et al., Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism, 2019, section 3). A shard is an
ordinary parameter of the stage's module, so gradients, optimizer and its state are local tensors.
All other tensors are whole on every rank of the group.

Calls a stage whose linear layers are divided among the ranks of a tensor group.

The user's own forward runs. Between a divided layer and the next sum over the group, tensors are
`DTensor`, so that torch finds out how each function acts on shards. All others are plain tensors
that are equal on all ranks of the group. So only the calls between divided layers need a rule of
DTensor, and they alone have its overhead. A plain tensor that enters there is wrapped, and its
gradient is summed over the group on the way back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from penstock.capture.deferred_weights import DeferredGradients
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import LengthsOf
from penstock.capture.materialise import named_tensors
from penstock.capture.record.absent import VALUES, Absent, absent_like, call_name, writes_first
from penstock.capture.record.recording import draws
from penstock.capture.restored import kept_buffers
from penstock.capture.stage.call import StageCall
from penstock.capture.stage.stage import RunContext
from penstock.capture.stage.stage_tensors import StageModule
from penstock.capture.stage_program import StageProgram
from penstock.capture.tensor_split import divided_dims
from penstock.capture.torch_calls import TorchCalls
from penstock.errors import BadInput
from penstock.plan.ordering import stage_refusal
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import make_groups
from penstock.runtime.processes.world import World
from penstock.runtime.stages.batch_norm import uses_batch_norm
from penstock.runtime.stages.shards import Shards, copy_values
from penstock.torch_internals import forget_groups, pytree, write_count

WHOLE = (Replicate(),)

ATTENTION = functional.scaled_dot_product_attention

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The arguments of attention that may be given by position."""


class ShardedCall(StageCall):
    """Runs a stage of which this rank holds shards; see `StageCall`.

    While it runs, the user's modules have these shards as parts of the whole. ``dims`` are the
    divided dimensions of parameters by name.
    """

    def __init__(self, module: StageModule, dims: Mapping[str, int], mesh: DeviceMesh) -> None:
        self._module, self._mesh = module, mesh
        self._places = [(module.graph.program.places(name), dim) for name, dim in dims.items()]
        self._calls = CallsOnShards(mesh)

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Within, what cannot run on shards is refused as bad input, not a failed run."""
        names = {id(module): name for name, module in self._module.graph.program.named_modules()}
        with modules_running() as running:
            self._calls.layer = lambda: next(
                (names[id(part)] for part in reversed(running) if names.get(id(part))), ""
            )
            try:
                yield
            finally:
                self._calls.layer = None

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage on plain tensors; all results are plain and whole.

        All weight gradients are computed in the first half of a backward.
        """
        with self._parts_of_wholes(), self._calls:
            found = self._module.run(leaves, inputs)
        self._calls.forget()
        return pytree.tree_map_only(DTensor, whole, found)

    @contextmanager
    def _parts_of_wholes(self) -> Iterator[None]:
        """Within, the user's modules have shards as parts of the whole."""
        shards = [held[name] for (held, name), _ in self._places]
        try:
            for ((held, name), dim), shard in zip(self._places, shards, strict=True):
                held[name] = DTensor.from_local(shard, self._mesh, (Shard(dim),), run_check=False)
            yield
        finally:
            for ((held, name), _), shard in zip(self._places, shards, strict=True):
                held[name] = shard

    def others(self) -> list[nn.Parameter]:
        """None: ``deferred`` has no products."""
        return []

    def tell(self, context: RunContext) -> None:
        """Say which run the next one is."""
        self._module.tell(context)


class CallsOnShards(TorchCalls):
    """While active, functions run on shards where one of their arguments has been divided.

    With ``layer``, which names the module that is running, what DTensor cannot do is refused.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layer: Callable[[], str] | None = None
        self._mesh = mesh
        self._wrapped: dict[tuple[int, int], tuple[torch.Tensor, DTensor]] = {}

    def forget(self) -> None:
        """End a run: forget what has been wrapped."""
        self._wrapped.clear()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, on shards if one of its arguments has been divided."""
        if not holds(DTensor, (args, kwargs)):
            return func(*args, **kwargs)
        if self.layer is None:
            return self._on_shards(func, args, kwargs)
        try:
            return self._on_shards(func, args, kwargs)
        except (NotImplementedError, RuntimeError, ValueError) as cause:
            why = str(cause).partition("\n")[0]
            raise BadInput(
                f"{call_name(func).strip('.')} in layer '{self.layer()}' cannot run on shards of a "
                f"tensor group ({why}); leave the linear layers around it out of tensor_parallel, "
                f"or plan without tensor groups"
            ) from cause

    def _on_shards(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = call_name(func)
        refuse_chance(name, args, kwargs)
        if holds(Absent, (args, kwargs)):
            args, kwargs = pytree.tree_map_only(DTensor, absent, (args, kwargs))
            return func(*args, **kwargs)
        into_plain = bool(args) and type(args[0]) is not DTensor and writes_first(name)
        if into_plain or name in VALUES:
            args, kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
            return func(*args, **kwargs)
        if func is ATTENTION:
            return self._attention(dict(zip(ARGUMENTS, args, strict=False)) | kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._shared, (args, kwargs))
        return pytree.tree_map_only(DTensor, settled, func(*args, **kwargs))

    def _shared(self, tensor: torch.Tensor) -> DTensor:
        """A plain tensor as one that is whole on every rank; wrapped once, so summed once."""
        if isinstance(tensor, DTensor):
            return tensor
        key = id(tensor), write_count(tensor)
        known = self._wrapped.get(key)
        if known is None:
            wrapped = DTensor.from_local(tensor, self._mesh, WHOLE, run_check=False)
            # The tensor is kept, so that no other gets its id.
            known = self._wrapped[key] = tensor, wrapped
        return known[1]

    def _attention(self, given: dict[str, Any]) -> Any:
        """Attention of the heads that this rank holds, by torch's function for plain tensors."""
        heads = given["query"].dim() - 3
        mask = given.get("attn_mask")
        if mask is not None:
            given["attn_mask"] = self._local_mask(mask, given["query"].shape[heads])
        for name in ARGUMENTS[:3]:
            given[name] = self._local_heads(given[name], heads)
        found = ATTENTION(**given)
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


def holds(kind: type, value: Any) -> bool:
    """Whether ``value``, or what it contains, is of this kind."""
    if isinstance(value, tuple | list):
        return any(holds(kind, each) for each in value)
    if isinstance(value, dict):
        return any(holds(kind, each) for each in value.values())
    return type(value) is kind


def absent(tensor: DTensor) -> torch.Tensor:
    """An absent tensor in place of one that is here; what else is absent decides about a result."""
    return absent_like(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def settled(tensor: DTensor) -> torch.Tensor:
    """A result without shards as a plain tensor, summed over the group if it is a partial sum."""
    if any(placement.is_shard() for placement in tensor.placements):
        return tensor
    return whole(tensor)


def whole(tensor: DTensor) -> torch.Tensor:
    """The whole of a tensor on every rank, plain; its gradient is whole on every rank, too."""
    return tensor.redistribute(placements=WHOLE).to_local(grad_placements=WHOLE)


def refuse_chance(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a function that draws random numbers, which would differ from one device's."""
    if "dropout" in name and not (args[1] if len(args) > 1 else kwargs.get("p", 0.5)):
        return
    if draws(name, args, kwargs):
        raise ValueError(
            "it draws random numbers, such as dropout with p > 0 between divided layers"
        )


@contextmanager
def modules_running() -> Iterator[list[nn.Module]]:
    """Within, the list that is given holds the modules whose calls are going on, innermost last."""
    running: list[nn.Module] = []

    def ended(*_: Any) -> None:
        running.pop()

    before = register_module_forward_pre_hook(lambda module, _: running.append(module))
    after = register_module_forward_hook(ended, always_call=True)
    try:
        yield running
    finally:
        before.remove()
        after.remove()


MESHES = count()
"""Numbers the meshes of this process."""


class TensorShards(Shards):
    """The shards of a tensor group (one rank: no tensor parallelism here)."""

    def __init__(self, graph: LayerGraph, plan: Plan, world: World) -> None:
        device = plan.device_of(world.rank)
        super().__init__(
            world, plan.ranks_of(device) if device >= 0 else (world.rank,), graph.tied_names
        )
        if plan.tensor_groups:
            check_ties(graph, plan)
            self.dims = divided_dims(graph)
            groups = make_groups(world, [plan.ranks_of(device) for device in plan.devices])
            self.group = groups.get(self.ranks)
        self._mesh: DeviceMesh | None = None
        if self.group is not None:
            # DTensor keeps what it found out for meshes of the same ranks and names, so the mesh of
            # a pipeline that was closed must not look like this one.
            name = f"tensor group {next(MESHES)}"
            kind = world.device.type
            self._mesh = DeviceMesh.from_group(self.group, kind, mesh_dim_names=(name,))

    def divide(self, programs: Mapping[int, StageProgram]) -> None:
        """Give all ranks of the group the values of its first, then keep this rank's shards."""
        if self.group is None:
            return
        done: set[int] = set()
        for stage, program in programs.items():
            check_stage(stage, program, len(self.ranks))
            for name, tensor in named_tensors(program.module):
                if id(tensor) in done:  # stages of a rank share the user's parameters
                    continue
                done.add(id(tensor))
                copy_values(tensor, self.ranks[0], self.group, self.world)
                dim = self.dim_of(name)
                if dim is not None:
                    self._keep_shard(name, tensor, dim)

    def _keep_shard(self, name: str, tensor: torch.Tensor, dim: int) -> None:
        count = len(self.ranks)
        if tensor.shape[dim] % count:
            raise BadInput(
                f"parameter '{name}' has {tensor.shape[dim]} rows or columns to divide, no "
                f"multiple of the {count} ranks of its tensor group; leave its layer out of "
                f"tensor_parallel, or plan groups of another size"
            )
        # The parameter stays the user's own object.
        tensor.grad = None
        self.sizes[self.tied.get(name, name)] = tensor.shape[dim]
        tensor.data = self.own_part(name, tensor.detach()).clone()

    def leave(self) -> None:
        """Leave the group, so that after a failure its other ranks do not wait for this one."""
        # Its connections are closed when nothing refers to it any more, and the mesh does.
        forget_groups(self._mesh)
        super().leave()

    def divides(self, stage: int) -> bool:
        """Whether this rank has shards of a stage: of all, or of none."""
        return self.is_divided

    def call_of(self, program: StageProgram) -> ShardedCall:
        """How a stage of this rank's group, or a part of it, is called."""
        assert self._mesh is not None
        names = [name for name, _ in program.module.named_parameters()]
        dims = {name: self.dim_of(name) for name in names}
        divided = {name: dim for name, dim in dims.items() if dim is not None}
        return ShardedCall(program.module, divided, self._mesh)

    def attempt(
        self, program: StageProgram, leaves: Sequence[torch.Tensor], lengths: LengthsOf
    ) -> None:
        """Run a stage forward and backward on one sample, to see that every operator can.

        All ranks of the group must call this. Gradients are changed; the model's state is not.
        """
        own = [leaves[index][:1].to(self.world.device) for index in program.batch_inputs]
        received = [
            torch.zeros(spec.at(lengths).shape_for(1), dtype=spec.dtype, device=self.world.device)
            for spec in program.received
        ]
        for spec, tensor in zip(program.received, received, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        call = self.call_of(program)
        call.tell(RunContext(trial=True))
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


def check_stage(stage: int, program: StageProgram, ranks: int) -> None:
    """Raise `BadInput` for a stage that a tensor group of so many ranks cannot run."""
    why = stage_refusal(norms=uses_batch_norm(program.module), ranks=ranks)
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
