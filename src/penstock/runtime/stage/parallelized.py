"""Stages that a function ``parallelize(model, mesh)`` divides among the ranks that share them.

The function is the user's own, as in torchtitan, or one of `penstock.capture.cut.tensor_split`. It
calls `parallelize_module`, or what else makes parameters DTensors, in place. Afterwards:

    parameter        the user's own object, with this rank's shard as its values
    while a stage    a DTensor of the shard in its place, in forwards and in backwards
    runs
    other stages     as the user made them: what the function did to their modules is undone

So gradient buckets, optimizer, clipping and checkpoints see plain tensors of this rank alone.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from penstock.capture.cut.tensor_split import function_of
from penstock.capture.forward.call import ProgramCall
from penstock.capture.forward.deferred_weights import DeferredGradients
from penstock.capture.forward.materialise import named_tensors
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.model_state import MISSING, Place, put_value, value_at
from penstock.capture.record.outside_state import random_state, same_state
from penstock.capture.record.user_lines import line_of
from penstock.errors import BadInput
from penstock.plan.ordering import stage_refusal
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import make_groups
from penstock.runtime.processes.world import World
from penstock.runtime.stage.batch_norm import uses_batch_norm
from penstock.runtime.stage.random_stream import on_trial
from penstock.runtime.stage.shards import Shards, copy_values
from penstock.torch_internals import (
    forget_groups,
    gradient_hooks,
    own_buffers,
    own_parameters,
    pytree,
)

MESHES = count()
"""Numbers the meshes of this process."""


@dataclass(frozen=True)
class Division:
    """Division of a tensor by a function: its placement, and the whole's shape and stride."""

    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]


class ParallelizedShards(Shards):
    """The shards of a tensor group (one rank: nothing is divided here)."""

    def __init__(self, graph: LayerGraph, plan: Plan, world: World) -> None:
        device = plan.device_of(world.rank)
        ranks = plan.ranks_of(device) if device >= 0 else (world.rank,)
        super().__init__(world, ranks, graph.tied_names)
        self._graph = graph
        self._divisions: dict[str, Division] = {}
        self._changed: list[tuple[Place, Any]] = []
        """The attributes that the function has changed, with what they were before."""
        self._mesh: DeviceMesh | None = None
        if not plan.tensor_groups:
            return
        check_ties(graph, plan)
        self._parallelize = function_of(graph)
        self._called = f"tensor_parallel={getattr(graph.tensor_parallel, '__name__', 'a table')}"
        self.group = make_groups(world, [*map(plan.ranks_of, plan.devices)]).get(self.ranks)
        if self.group is not None:
            # DTensor keeps what it found out for meshes of the same ranks and names, so the mesh of
            # a pipeline that was closed must not look like this one.
            name = f"tensor group {next(MESHES)}"
            kind = world.device.type
            self._mesh = DeviceMesh.from_group(self.group, kind, mesh_dim_names=(name,))

    def divide(self, programs: Mapping[int, StageProgram]) -> None:
        """Give all ranks of the group the values of its first, then keep this rank's shards."""
        if self.group is None or self._mesh is None:
            return
        own, values = set[int](), dict[int, torch.Tensor]()
        for stage, each in programs.items():
            if why := stage_refusal(norms=uses_batch_norm(each.module), ranks=len(self.ranks)):
                raise BadInput(
                    f"stage {stage} {why}, which a tensor group cannot run; plan without tensor "
                    f"groups, or give the stage a device of one rank"
                )
            for _, module in each.module.own:
                own |= {*map(id, (module.__dict__, own_parameters(module), own_buffers(module)))}
            values |= {id(tensor): tensor for _, tensor in named_tensors(each.module)}
        for tensor in values.values():
            copy_values(tensor, self.ranks[0], self.group, self.world)
        program, model = self._graph.program, self._graph.model
        modules = [module for _, module in program.named_modules()]
        before = [(m.__dict__, {n: kept(v) for n, v in m.__dict__.items()}) for m in modules]
        named = (*program.named_parameters(), *program.named_buffers())
        tensors = [(name, program.places(name), tensor) for name, tensor in named]
        made = self._parallelize(model, self._mesh)
        now = [module for _, module in program.named_modules()]
        if made not in (None, model) or now != modules:
            raise BadInput(
                f"{self._called} returns another model, or replaces modules, but layers were "
                f"captured with these; let it change parameters and forwards of those there are"
            )
        for name, (held, key), tensor in tensors:
            new, held[key] = held.get(key), tensor
            if new is not tensor and id(held) in own:
                self._take(name, tensor, new)
        changed = [
            ((place, name), old.get(name, MISSING))
            for place, old in before
            for name in place.keys() | old.keys()
            if marks(place.get(name, MISSING)) != marks(old.get(name, MISSING))
        ]
        put_each(each for each in changed if id(each[0][0]) not in own)
        self._changed = [each for each in changed if id(each[0][0]) in own]

    def _take(self, name: str, tensor: torch.Tensor, new: object) -> None:
        """Keep the shard of this rank in the user's tensor, in whose place is a ``new`` one."""
        first = self.tied.get(name, name)
        if first in self._divisions:
            return
        placed = new if isinstance(new, DTensor) and new.device_mesh == self._mesh else None
        if placed is None or placed.placements[0].is_partial():
            raise BadInput(
                f"{self._called} gives '{name}' another tensor that is no DTensor of the mesh that "
                f"it was given, with Shard or Replicate; use distribute_tensor(tensor, mesh, "
                f"placements)"
            )
        (placement,) = placed.placements
        found = self._divisions[first] = Division(placement, placed.shape, placed.stride())
        tensor.grad = None
        tensor.data = placed.to_local().detach().clone()
        if not placement.is_replicate():
            dim: int = getattr(placement, "dim", 0) % len(found.shape)
            self.dims[first], self.sizes[first] = dim, found.shape[dim]

    def left_whole(self) -> AbstractContextManager[None]:
        return contents_exchanged(self._changed)

    def as_dtensor(self, name: str, shard: torch.Tensor) -> DTensor:
        """A shard of this rank as a part of the whole."""
        found = self._divisions[self.tied.get(name, name)]
        whole: Any = {"shape": found.shape, "stride": found.stride}
        return DTensor.from_local(shard, self._mesh, (found.placement,), run_check=False, **whole)

    def gathered(self, key: str, name: str, shard: torch.Tensor) -> torch.Tensor:
        """The whole of a shard; that of packed weights by torch, without a limit of time."""
        if self._strided(name) is None:
            return super().gathered(key, name, shard)
        return self.as_dtensor(name, shard).full_tensor().contiguous()

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        placement, dim = self._strided(name), self.dim_of(name)
        if placement is None or dim is None or tensor.dim() <= dim:
            return super().own_part(name, tensor)
        assert self._mesh is not None
        placed = distribute_tensor(tensor, self._mesh, (placement,), src_data_rank=None)
        return placed.to_local().contiguous()

    def _strided(self, name: str) -> Placement | None:
        """The placement of packed weights, whose rows on a rank are no neighbours in the whole."""
        found = self._divisions.get(self.tied.get(name, name))
        placement = found.placement if found is not None else None
        return None if type(placement) in (Replicate, Shard) else placement

    def leave(self) -> None:
        put_each(self._changed)
        self._changed.clear()
        # Its connections are closed when nothing refers to it any more, and the mesh does.
        forget_groups(self._mesh)
        super().leave()

    def divides(self, stage: int) -> bool:
        """Return whether this rank has shards of a stage: of all, or of none."""
        return self.is_divided

    def places_of(self, program: StageProgram) -> dict[str, Place]:
        """The places of a stage's tensors that the function has made DTensors, by name."""
        module, whole = program.module, program.module.graph.program
        named = (*module.named_parameters(), *module.named_buffers())
        own = {self.tied.get(name, name) for name, _ in named} & self._divisions.keys()
        every = (n for n, _ in (*whole.named_parameters(), *whole.named_buffers()))
        return {name: whole.places(name) for name in every if self.tied.get(name, name) in own}

    def call_of(self, program: StageProgram) -> "ParallelizedCall":
        """Create the call of a stage of this rank's group, or of a part of it."""
        return ParallelizedCall(self, program)


class ParallelizedCall(ProgramCall):
    """Call of a stage of which this rank holds shards; all results are plain and whole.

    Weights that are DTensors get their gradients in the first half of a backward.
    """

    def __init__(self, shards: ParallelizedShards, program: StageProgram) -> None:
        self._shards, self._program = shards, program
        self._places = shards.places_of(program)
        held, own = {id(held) for held, _ in self._places.values()}, program.module.own_modules()
        super().__init__(program.module, {id(m) for m in own if id(own_parameters(m)) in held})
        self._held = list(program.module.parameters())  # while it runs, some are DTensors

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage on plain tensors."""
        if self._module.unchecked:
            self._check(leaves, inputs)
        with self.in_backward():
            found = super().run(leaves, inputs, deferred)
        return pytree.tree_map_only(DTensor, DTensor.full_tensor, found)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Hold DTensors in modules, since checkpoints run forwards again in the backward."""
        parts = [
            ((held, key), self._shards.as_dtensor(name, held[key]))
            for name, (held, key) in self._places.items()
        ]
        with contents_exchanged(parts):
            yield

    def _check(self, leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Compare the stage with itself left whole, in runs that leave nothing behind.

        In the first of the two its calls are compared with the record, in which the function's
        hooks have no part. Numbers of a stage that draws, as for dropout, are not compared here.
        """
        module, device, drawn = self._module, self._shards.world.device, set[bool]()
        whole = super().run

        def run(call: Callable[..., Any]) -> list[torch.Tensor]:
            with on_trial(module, device) as state:
                found = call(leaves, [tensor.detach() for tensor in inputs])
                drawn.add(not same_state(state, random_state(device)))
            return [t.detach() for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]

        with self._shards.left_whole(), self._gathered():
            expected = run(whole)
        module.unchecked = False
        hooked = hooked_in(module)
        try:
            found = run(self.run)
        except (RuntimeError, TypeError, ValueError, BadInput) as cause:
            why, line = str(cause).partition("\n")[0], line_of(cause.__traceback__)
            at = f" at {line}" if line and line not in why else ""
            raise self._refusal(f"does not run on its shards{at} ({why})") from cause
        gc.collect()  # compiled code keeps nodes of autograd, which have the shapes of shards
        if added := hooked_in(module) - hooked:
            raise self._refusal(
                f"gets a hook on the gradient of '{min(added)}', which would sum again what other "
                f"micro-batches have summed (as replicated_with_grad_allreduce of transformers)"
            )
        limit = limit_of((*self.others(), *found), device)
        if True not in drawn and any(map(partial(differ, limit), found, expected)):
            raise self._refusal("gives other numbers on its shards than left whole")

    def _gathered(self) -> AbstractContextManager[None]:
        """Hold in modules the whole tensors of which this rank has shards."""
        shards, whole = self._shards, dict[str, torch.Tensor]()
        parts: list[tuple[Place, torch.Tensor]] = []
        for name, (held, key) in self._places.items():
            if shards.dim_of(name) is not None:
                shard, first = held[key], shards.tied.get(name, name)
                if first not in whole:
                    found = shards.gathered(name, name, shard.detach())
                    whole[first] = found.requires_grad_(shard.requires_grad)
                parts.append(((held, key), whole[first]))
        return contents_exchanged(parts)

    def _refusal(self, why: str) -> BadInput:
        """The stage cannot run on shards; with the numbers of the first module around some."""
        divided = {name.rpartition(".")[0] for name in self._places}
        around = divided | {name.rpartition(".")[0] for name in divided}
        numbers = {
            name: [f"self.{n} = {v}" for n, v in vars(m).items() if type(v) is int and v > 1]
            for name, m in self._module.graph.program.named_modules()
            if name in around and not type(m).__module__.startswith("torch.")
        }
        where = next((n for n, found in numbers.items() if found), next(iter(numbers), ""))
        layers = self._program.layers
        return BadInput(
            f"the stage of layers {layers.start} to {layers.stop - 1} {why}; in '{where}' "
            f"({', '.join(numbers.get(where, ())) or 'no numbers'}) divide what counts heads or "
            f"widths by the size of the mesh, in a function tensor_parallel=parallelize(model, "
            f"mesh), or plan without tensor groups"
        )


def kept(value: Any) -> Any:
    """The contents of a dict, as of hooks, or the value itself."""
    return dict(value) if isinstance(value, dict) else value


def marks(value: Any) -> Any:
    """Return marks that change if an attribute is another object, or a dict has other contents."""
    return [(n, id(v)) for n, v in value.items()] if isinstance(value, dict) else id(value)


def put_each(values: Iterable[tuple[Place, Any]]) -> None:
    """Put values in their places; a dict keeps its identity, which torch's handles refer to."""
    for place, value in values:
        own = value_at(place)
        if isinstance(value, dict) and isinstance(own, dict):
            own.clear()
            own.update(value)
        else:
            put_value(place, value)


@contextmanager
def contents_exchanged(values: Sequence[tuple[Place, Any]]) -> Iterator[None]:
    """Hold other values in these places; at the end restore the old ones."""
    own = [(place, kept(value_at(place))) for place, _ in values]
    put_each(values)
    try:
        yield
    finally:
        put_each(own)


def hooked_in(module: nn.Module) -> set[str]:
    """The parameters with hooks on the accumulation of their gradients."""
    return {name for name, p in module.named_parameters() if gradient_hooks(p)[1]}


def limit_of(tensors: Iterable[torch.Tensor], device: torch.device) -> float:
    """The share of a result that sums in another order may change, in the coarsest type in use."""
    cast = torch.is_autocast_enabled(device.type)
    types = {torch.float32, *([torch.get_autocast_dtype(device.type)] if cast else [])}
    types |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return max(torch.finfo(dtype).eps ** 0.5 for dtype in types)


def differ(limit: float, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results differ in shape, or by more than a share of the second."""
    a, b = one.double(), other.double()
    return a.shape != b.shape or bool((a - b).norm() > limit * b.norm())


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
