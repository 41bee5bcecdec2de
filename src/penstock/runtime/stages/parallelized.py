"""Stages that a function ``parallelize(model, mesh)`` divides among the ranks that share them.

The function is the user's own, as in torchtitan, or one of `penstock.capture.tensor_split`. It
calls `parallelize_module`, or what else makes parameters DTensors, in place. Afterwards:

    parameter        the user's own object, with this rank's shard as its values
    while a stage    a DTensor of the shard in its place, in forwards and in backwards
    runs
    other stages     as the user made them: what the function did to their modules is undone

So gradient buckets, optimizer, clipping and checkpoints see plain tensors of this rank alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from penstock.capture.deferred_weights import DeferredGradients
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import LengthsOf
from penstock.capture.materialise import named_tensors
from penstock.capture.record.outside_state import random_state, same_state
from penstock.capture.stage.call import ProgramCall
from penstock.capture.stage.stage import RunContext
from penstock.capture.stage_program import StageProgram
from penstock.capture.tensor_split import function_of
from penstock.capture.user_lines import line_of
from penstock.errors import BadInput
from penstock.plan.ordering import stage_refusal
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import make_groups
from penstock.runtime.processes.world import World
from penstock.runtime.stages.batch_norm import uses_batch_norm
from penstock.runtime.stages.random_stream import replayed
from penstock.runtime.stages.shards import Shards, copy_values
from penstock.torch_internals import (
    forget_groups,
    gradient_hooks,
    is_strided,
    own_buffers,
    own_parameters,
    pytree,
)

MESHES = count()
"""Numbers the meshes of this process."""

Place = tuple[dict[str, Any], str]
"""The dict of a module that holds a tensor, and its key there."""


@dataclass(frozen=True)
class Division:
    """How a function has divided a tensor: its placement, and the whole's shape and stride."""

    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]


class Changes:
    """The attributes of modules, hooks among them, that a function has changed.

    Those of parameters and buffers are none: their places are kept, and values change in steps.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, copied(module.__dict__)) for module in modules]
        self._changed: list[tuple[dict[str, Any], str, Any]] = []

    def find(self, own: set[int]) -> None:
        """Note what has changed since, and undo it in modules that are not among ``own``."""
        for module, before in self._before:
            place, tensors = module.__dict__, (own_parameters(module), own_buffers(module))
            for name in place.keys() | before.keys():
                is_held = any(place.get(name) is held for held in tensors)
                if not is_held and is_changed(name, place, before):
                    self._changed.append((place, name, before.get(name, MISSING)))
        foreign = [change for change in self._changed if id(change[0]) not in own]
        self._put(foreign)
        self._changed = [change for change in self._changed if id(change[0]) in own]
        self._before.clear()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within, modules are as they were before the function."""
        now = [(place, name, kept(place.get(name, MISSING))) for place, name, _ in self._changed]
        self._put(self._changed)
        try:
            yield
        finally:
            self._put(now)

    def undo(self) -> None:
        """Leave modules as they were before the function."""
        self._put(self._changed)
        self._changed.clear()

    def _put(self, changes: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        for place, name, value in changes:
            if value is MISSING:
                place.pop(name, None)
            elif isinstance(value, dict) and isinstance(place.get(name), dict):
                place[name].clear()  # torch's handles, and what was recorded, hold this dict
                place[name].update(value)
            else:
                place[name] = value


MISSING = object()


def kept(value: Any) -> Any:
    """The contents of a dict, as of hooks, or the value itself."""
    return dict(value) if isinstance(value, dict) else value


def copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kept(value) for name, value in attributes.items()}


def is_changed(name: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether an attribute is another object, or a dict with other contents."""
    one, other = now.get(name, MISSING), before.get(name, MISSING)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) != list(other) or any(one[key] is not other[key] for key in one)
    return one is not other


class ParallelizedShards(Shards):
    """The shards of a tensor group (one rank: nothing is divided here)."""

    def __init__(self, graph: LayerGraph, plan: Plan, world: World) -> None:
        device = plan.device_of(world.rank)
        super().__init__(
            world, plan.ranks_of(device) if device >= 0 else (world.rank,), graph.tied_names
        )
        self._graph = graph
        self._divisions: dict[str, Division] = {}
        self._changes = Changes(())
        if plan.tensor_groups:
            check_ties(graph, plan)
            self._parallelize = function_of(graph)
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
        if self.group is None or self._mesh is None:
            return
        done, own = set[int](), set[int]()
        for stage, program in programs.items():
            check_stage(stage, program, len(self.ranks))
            own |= {id(module.__dict__) for _, module in program.module.own}
            for _, tensor in named_tensors(program.module):
                if id(tensor) not in done:  # stages of a rank share the user's parameters
                    done.add(id(tensor))
                    copy_values(tensor, self.ranks[0], self.group, self.world)
        modules = dict(self._graph.program.named_modules())
        tensors = {name: dict(own_tensors(module)) for name, module in modules.items()}
        self._changes = Changes(modules.values())
        made = self._parallelize(self._graph.model, self._mesh)
        if made is not None and made is not self._graph.model:
            raise BadInput(
                f"{called(self._parallelize)} returns a {type(made).__name__}, but it must change "
                f"the model in place; let it return the model that it was given, or nothing"
            )
        if list(modules.values()) != [m for _, m in self._graph.program.named_modules()]:
            raise BadInput(
                f"{called(self._parallelize)} replaces modules, but layers were captured with "
                f"them; let it change parameters and forwards of the modules that are there"
            )
        self._changes.find(own)
        for name, module in modules.items():
            self._take_tensors(name, module, tensors[name], keeps=id(module.__dict__) in own)

    def _take_tensors(
        self, path: str, module: nn.Module, before: Mapping[str, torch.Tensor], *, keeps: bool
    ) -> None:
        """Put the user's own tensors back into a module, with shards as values if it ``keeps``."""
        for place, key, new in places_in(module):
            old, name = before.get(key), f"{path}.{key}".removeprefix(".")
            if old is None or new is old:
                continue
            if keeps:
                self._take(name, old, new)
            place[key] = old

    def _take(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        where = f"{called(self._parallelize)} gives '{name}'"
        if not isinstance(new, DTensor) or new.device_mesh != self._mesh:
            raise BadInput(
                f"{where} another tensor that is no DTensor of the mesh that it was given; use "
                f"distribute_tensor(tensor, mesh, placements)"
            )
        (placement,) = new.placements
        if placement.is_partial():
            raise BadInput(f"{where} the placement {placement}; use Shard or Replicate")
        first = self.tied.get(name, name)
        found = Division(placement, new.shape, new.stride())
        if self._divisions.setdefault(first, found) != found:
            raise BadInput(
                f"{where} the placement {placement}, and '{first}', which is the same parameter, "
                f"{self._divisions[first].placement}; divide both alike"
            )
        old.grad = None
        old.data = new.to_local().detach().clone()
        if not placement.is_replicate():
            dim: int = getattr(placement, "dim", 0) % len(new.shape)
            self.dims[first], self.sizes[first] = dim, new.shape[dim]

    def left_whole(self) -> AbstractContextManager[None]:
        """Within, modules are as the user made them, without what the function has changed."""
        return self._changes.undone()

    def as_dtensor(self, name: str, shard: torch.Tensor) -> DTensor:
        """A shard of this rank as a part of the whole."""
        found = self._divisions[self.tied.get(name, name)]
        return DTensor.from_local(
            shard,
            self._mesh,
            (found.placement,),
            run_check=False,
            shape=found.shape,
            stride=found.stride,
        )

    def gathered(self, key: str, name: str, shard: torch.Tensor) -> torch.Tensor:
        """The whole of a shard; that of packed weights by torch, without a limit of time."""
        if is_strided(self._division_of(name)):
            return self.as_dtensor(name, shard).full_tensor().contiguous()
        return super().gathered(key, name, shard)

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that belongs to the parameter ``name``, or all of it."""
        placement, dim = self._division_of(name), self.dim_of(name)
        if placement is None or not is_strided(placement) or dim is None or tensor.dim() <= dim:
            return super().own_part(name, tensor)
        assert self._mesh is not None
        placed = distribute_tensor(tensor, self._mesh, (placement,), src_data_rank=None)
        return placed.to_local().contiguous()

    def _division_of(self, name: str) -> Placement | None:
        found = self._divisions.get(self.tied.get(name, name))
        return found and found.placement

    def leave(self) -> None:
        """Leave the group, so that after a failure its other ranks do not wait for this one."""
        self._changes.undo()
        # Its connections are closed when nothing refers to it any more, and the mesh does.
        forget_groups(self._mesh)
        super().leave()

    def divides(self, stage: int) -> bool:
        """Whether this rank has shards of a stage: of all, or of none."""
        return self.is_divided

    def places_of(self, program: StageProgram) -> list[tuple[Place, str]]:
        """Where the tensors of a stage are that the function has made DTensors, by name."""
        module, whole = program.module, program.module.graph.program
        named = (*module.named_parameters(), *module.named_buffers())
        own = {self.tied.get(name, name) for name, _ in named} & self._divisions.keys()
        every = (n for n, _ in (*whole.named_parameters(), *whole.named_buffers()))
        return [(whole.places(name), name) for name in every if self.tied.get(name, name) in own]

    def call_of(self, program: StageProgram) -> "ParallelizedCall":
        """How a stage of this rank's group, or a part of it, is called."""
        return ParallelizedCall(self, program)

    def attempt(
        self,
        program: StageProgram,
        leaves: Sequence[torch.Tensor],
        lengths: LengthsOf,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Compare a stage on one sample with itself left whole; all ranks of the group call this.

        The run of the stage left whole is also the first, in which calls are compared with the
        record: the function's hooks are no part of that. Numbers of a stage that draws, as for
        dropout, are compared in the first step only.
        """
        device, inputs = self.world.device, sample_of(program, leaves, lengths, self.world.device)
        hooks, drawn = hooks_of(program), set[bool]()

        def run(call: ProgramCall) -> list[torch.Tensor]:
            program.module.tell(RunContext(trial=True))
            state, around = random_state(device), precision()
            with replayed(program.module, device, state), around, torch.enable_grad():
                found = call.run(*inputs)
                drawn.add(not same_state(state, random_state(device)))
            return [each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]

        with self.left_whole(), self._gathered_in(program):
            program.module.check_next_run()
            expected = run(ProgramCall(program.module))
        try:
            found = run(self.call_of(program))
        except (NotImplementedError, RuntimeError, TypeError, ValueError, BadInput) as cause:
            why, line = str(cause).partition("\n")[0], line_of(cause.__traceback__)
            at = f" at {line}" if line else ""
            raise self._refusal(program, f"does not run on its shards{at} ({why})") from cause
        if added := hooks_of(program) - hooks:
            raise self._refusal(
                program,
                f"gets a hook on the gradient of '{min(added)}', which would sum again what other "
                f"micro-batches have summed (as replicated_with_grad_allreduce of transformers)",
            )
        gaps = map(gap_of, found, expected)
        most = max(gaps, default=0.0)
        if True not in drawn and not most <= tolerance_of(program, found):
            raise self._refusal(
                program, f"gives other numbers on its shards (by {most:.1e}) than left whole"
            )

    @contextmanager
    def _gathered_in(self, program: StageProgram) -> Iterator[None]:
        """Within, the tensors of a stage are whole."""
        named = {name: held[key] for (held, key), name in self.places_of(program)}
        shards = {name: t.data for name, t in named.items() if self.dim_of(name) is not None}
        try:
            for name, shard in shards.items():
                named[name].data = self.gathered(name, name, shard)
            yield
        finally:
            for name, shard in shards.items():
                named[name].data = shard

    def _refusal(self, program: StageProgram, why: str) -> BadInput:
        divided = {name.rpartition(".")[0] for _, name in self.places_of(program)}
        around = divided | {name.rpartition(".")[0] for name in divided}
        modules = dict(program.module.graph.program.named_modules())
        own = [n for n in modules if n in around and not is_torchs(modules[n])]
        reads = next((n for n in own if numbers_read(modules[n])), "")
        remedy = "change what tensor_parallel divides"
        if reads:
            numbers = numbers_read(modules[reads]).items()
            listed = ", ".join(f"self.{key} = {value}" for key, value in numbers)
            remedy = (
                f"its forward reads {listed}: divide what counts heads or widths by the size of "
                f"the mesh, in a function tensor_parallel=parallelize(model, mesh)"
            )
        layers = f"the stage of layers {program.layers.start} to {program.layers.stop - 1}"
        where = reads or next(iter(own), "")
        return BadInput(f"{layers} {why}; in '{where}' {remedy}, or plan without tensor groups")


class ParallelizedCall(ProgramCall):
    """Calls a stage of which this rank holds shards; all results are plain and whole.

    Weights that are DTensors get their gradients in the first half of a backward.
    """

    def __init__(self, shards: ParallelizedShards, program: StageProgram) -> None:
        places = shards.places_of(program)
        held = {id(place) for (place, _), _ in places}
        own = program.module.own_modules()
        super().__init__(program.module, {id(m) for m in own if id(own_parameters(m)) in held})
        self._shards = shards
        self._places, self._names = [place for place, _ in places], [name for _, name in places]

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage on plain tensors."""
        self._module.unchecked = False  # `attempt` has compared its calls, without hooks
        with self.in_backward():
            found = super().run(leaves, inputs, deferred)
        return pytree.tree_map_only(DTensor, DTensor.full_tensor, found)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within, modules hold DTensors: checkpoints run forwards again in the backward."""
        shards = zip(self._places, self._names, strict=True)
        parts = [self._shards.as_dtensor(name, held[key]) for (held, key), name in shards]
        with exchanged(self._places, parts):
            yield


@contextmanager
def exchanged(places: Sequence[Place], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, these places hold other tensors."""
    own = [held[key] for held, key in places]
    try:
        for (held, key), value in zip(places, values, strict=True):
            held[key] = value
        yield
    finally:
        for (held, key), value in zip(places, own, strict=True):
            held[key] = value


def places_in(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """The places of a module's own tensors, with what they hold now."""
    both = (own_parameters(module), own_buffers(module))
    return [(held, key, t) for held in both for key, t in held.items() if t is not None]


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, tensor) for _, key, tensor in places_in(module))


def called(function: Callable[..., Any]) -> str:
    """A function for messages."""
    return f"tensor_parallel={getattr(function, '__name__', type(function).__name__)}"


def sample_of(
    program: StageProgram, leaves: Sequence[torch.Tensor], lengths: LengthsOf, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One sample of a batch for a stage, with numbers drawn alike for what it receives."""
    drawn = torch.Generator().manual_seed(0)
    received: list[torch.Tensor] = []
    for spec in program.received:
        found = torch.zeros(spec.at(lengths).shape_for(1), dtype=spec.dtype)
        if spec.dtype.is_floating_point:
            found.normal_(generator=drawn)
        received.append(found.to(device).requires_grad_(spec.requires_grad))
    return [leaves[index][:1].to(device) for index in program.batch_inputs], received


def hooks_of(program: StageProgram) -> set[str]:
    """The parameters of a stage with hooks on the accumulation of their gradients."""
    return {name for name, p in program.module.named_parameters() if gradient_hooks(p)[1]}


def gap_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference relative to the largest of the expected numbers."""
    a, b = one.detach().double(), other.detach().double()
    if a.shape != b.shape or not b.numel():
        return 0.0 if a.shape == b.shape else float("inf")
    gap, largest = float((a - b).abs().max()), float(b.abs().max())
    return gap / largest if largest else gap


def tolerance_of(program: StageProgram, found: Sequence[torch.Tensor]) -> float:
    """The gap that sums in another order make; parts of many models run in float32."""
    own = (*program.module.parameters(), *found)
    types = {torch.float32, *(tensor.dtype for tensor in own)}
    return max(torch.finfo(t).eps ** 0.5 for t in types if t.is_floating_point)


def is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def numbers_read(module: nn.Module) -> dict[str, int]:
    """The whole numbers above 1 that a module has as attributes and its forward reads."""
    code = getattr(type(module).forward, "__code__", None)
    names = names_in(code) if code is not None else set[str]()
    own = {n: v for n, v in vars(module).items() if type(v) is int and v > 1}
    return {name: value for name, value in own.items() if name in names}


def names_in(code: CodeType) -> set[str]:
    """The names that code reads, that of functions within it, too."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


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
