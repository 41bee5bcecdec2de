"""Stages whose parameters are sharded over ranks, and all-gathered for each pass.

Each rank keeps a share of the rows of every parameter, of its gradient and of the optimizer's state
(ZeRO stage 3: Rajbhandari et al., SC 2020, section 5.3; FSDP: Zhao et al., VLDB 2023). A block of
the model is gathered as one unit:

    messages    gather 0   gather 1            gather 2     ...
    forward                block 0, free       block 1, free    ...
    backward    gather 1   gather 0   block 1, reduce-scatter, free   block 0, ...

From a part's second pass on, the unit after the one that computes is prefetched. Passes of one part
are the same on every rank, so all ranks send in the same order.

Not torch's own `fully_shard`: its hooks around a module do not fire where a stage begins or ends
within that module's call, it replaces the user's parameters and classes, and it cannot be undone.

A parameter stays the user's object, with the rank's rows as its values. While its unit is gathered
it has all values, in memory that is given back in between. So the graph of a forward in flight
keeps no copy of them: it finds them in the same place when its backward has gathered them again.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.capture.forward.call import ProgramCall
from penstock.capture.forward.deferred_weights import DeferredGradients
from penstock.capture.forward.partial_forward import RunContext
from penstock.capture.forward.stage_module import StageModule, StageProgram
from penstock.capture.forward.whole_blocks import whole_blocks
from penstock.capture.layer_graph import LayerGraph
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import UNCOUNTED, make_groups, stages_of_parameters
from penstock.runtime.processes.world import World, await_work
from penstock.runtime.stage.shards import Shards, copy_values
from penstock.torch_internals import NoFunctionCalls, after_backward, tensors_in

# From torch 2.13 on these have other names.
gather_into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_into: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def divided_parameters(graph: LayerGraph, plan: Plan) -> dict[str, int]:
    """The parameters that stages of the plan divide, by their first names, with their rows.

    What code between modules reads, and scalars, stay whole on every rank.
    """
    divides = {number for number, s in enumerate(plan.stages) if s.sharding == "parameters"}
    tied, events = graph.tied_names, graph.recorded.record.events
    read = {tied.get(name, name) for e in events if not e.is_unit for name in e.params}
    shapes = {name: parameter.shape for name, parameter in graph.program.named_parameters()}
    found: dict[str, int] = {}
    for name, stages in stages_of_parameters(graph, plan).items():
        shape = shapes.get(name, torch.Size())
        if divides & set(stages) and shape and shape.numel() and name not in read:
            found[name] = shape[0]
    return found


@dataclass(slots=True)
class UnitMember:
    """A parameter of a unit: this rank's rows of it, and the memory of all while it is gathered.

    ``by_rank`` is that memory with a row for the share of each rank, the last ones padded.
    ``gradient`` is that of this rank's rows, kept here while the parameter is whole.
    """

    parameter: nn.Parameter
    rows: torch.Tensor
    whole: torch.Tensor
    by_rank: torch.Tensor
    gradient: torch.Tensor | None = None


class Unit:
    """Parameters of one element type that are gathered and freed together.

    ``name`` is that of the module whose parameters they are.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], shards: Shards) -> None:
        self.name, self._shards, self.is_whole = name, shards, False
        self._coming: tuple[Any, torch.Tensor] | None = None
        count = len(shards.ranks)
        most = [-(-len(p) // count) for p in parameters]
        self._widths = [rows * p[0].numel() for p, rows in zip(parameters, most, strict=True)]
        self._own = parameters[0].detach().new_zeros(sum(self._widths))
        self._memory = self._own.new_empty(count * len(self._own))
        self._bytes = self._memory.nbytes
        areas = self._memory.split([count * width for width in self._widths])
        self.members: list[UnitMember] = []
        parts = zip(parameters, most, self._own.split(self._widths), areas, strict=True)
        for parameter, rows, own, area in parts:
            held = parameter.detach()[shards.place * rows :][:rows]
            shape = -1, *parameter.shape[1:]
            own = own.view(shape)[: len(held)].copy_(held)
            whole = area.view(shape)[: len(parameter)]
            self.members.append(UnitMember(parameter, own, whole, area.view(count, -1)))
            parameter.grad, parameter.data = None, own
        self._memory.untyped_storage().resize_(0)

    def begin(self) -> None:
        """Start the all-gather of the values, which the next `gather` awaits."""
        if self.is_whole or self._coming is not None:
            return
        for member in self.members:  # the user's loop may have put it elsewhere, by p.data = x
            if member.parameter.data_ptr() != member.rows.data_ptr():
                member.rows.copy_(member.parameter.detach())
        self._memory.untyped_storage().resize_(self._bytes)
        found = self._memory if len(self.members) == 1 else torch.empty_like(self._memory)
        work = gather_into(found, self._own, group=self._shards.group, async_op=True)
        self._coming = work, found

    def gather(self) -> None:
        """Give the parameters all their values, and no gradients."""
        if self.is_whole:
            return
        self.begin()
        found = self._come()
        self.is_whole = True
        if found is not self._memory:
            pieces = found.view(len(self._shards.ranks), -1).split(self._widths, 1)
            for member, piece in zip(self.members, pieces, strict=True):
                member.by_rank.copy_(piece)
        for member in self.members:
            parameter = member.parameter
            member.gradient, parameter.grad = parameter.grad, None
            parameter.data = member.whole

    def _come(self) -> torch.Tensor:
        """Wait for the all-gather that has begun, and return its result."""
        assert self._coming is not None
        (work, found), self._coming = self._coming, None
        self._await(work, found, "parameters")
        return found

    def forget(self) -> None:
        """Do not await what has been begun: a rank has failed, or leaves a pass."""
        self._coming = None

    def reduce(self) -> None:
        """Add the sum of all ranks' gradients to that of this rank's rows, and free the values."""
        if not self.is_whole:
            self.free()
            return
        trained = [member for member in self.members if member.parameter.requires_grad]
        came = [m.parameter.grad is not None and m.parameter not in UNCOUNTED for m in trained]
        given = [padded(m.parameter.grad, m.by_rank) for m in trained]
        self.free()
        if not given:
            return
        widths = [each.shape[1] for each in given]
        joined = torch.cat(given, 1) if len(given) > 1 else given[0]
        given.clear()
        held = trained[0].parameter.grad
        assert held is not None  # a view of a bucket, maybe of a wider type
        joined = joined.to(held.dtype)
        found = joined.new_empty(sum(widths))
        group = self._shards.group
        work = reduce_into(found, joined.reshape(-1), group=group, async_op=True)
        self._await(work, found, "gradients")
        for member, piece, own in zip(trained, found.split(widths), came, strict=True):
            gradient = member.parameter.grad
            assert gradient is not None  # a view of a bucket
            # As `data`, other ranks' gradients do not count as one that has arrived here.
            held = gradient if own else gradient.data
            held.add_(piece[: gradient.numel()].view(gradient.shape))

    def free(self) -> None:
        """Leave the parameters this rank's rows, of values and gradients."""
        if not self.is_whole:
            if self._coming is not None:
                self._come()
                self._memory.untyped_storage().resize_(0)
            return
        self.is_whole = False
        for member in self.members:
            member.parameter.grad, member.parameter.data = None, member.rows
            member.parameter.grad, member.gradient = member.gradient, None
        self._memory.untyped_storage().resize_(0)

    def _await(self, work: Any, output: torch.Tensor, what: str) -> None:
        about = f"the {what} of '{self.name}'"
        await_work(work, self._shards.world, about, size_bytes=output.nbytes)


def padded(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient (``None`` is zero) in the shape of another tensor, with zeros at its end."""
    if gradient is not None and gradient.numel() == like.numel():
        return gradient.reshape(like.shape)
    found = like.new_zeros(like.shape)
    if gradient is not None:
        found.view(-1)[: gradient.numel()].copy_(gradient.reshape(-1))
    return found


class GatheredCall(ProgramCall):
    """Call of a stage, or a part of one, whose units are gathered when they are needed.

    ``hooked`` are units by the module around whose call they are gathered. The others that the part
    reads, ``around``, are gathered for a whole pass. With ``stays`` a replay leaves them gathered
    for the backward that follows it.

    ``earlier`` and ``later`` are the calls of the parts next to this one, if a stage's parts always
    run one after another, and again before their backwards.
    """

    gathers = True
    earlier: "GatheredCall | None" = None
    later: "GatheredCall | None" = None

    def __init__(
        self,
        shards: "ParameterShards",
        module: StageModule,
        hooked: Mapping[str, Sequence[Unit]],
        around: Sequence[Unit],
        *,
        stays: bool,
    ) -> None:
        super().__init__(module)
        self.hooked, self.around, self._stays = hooked, around, stays
        self.is_kept = False
        self._shards = shards
        self._order: list[str] = []
        """Names of modules of ``hooked`` in the order of their calls, as far as they are known."""
        self._reached = 0
        """The place in that order down to which a backward has come."""

    @property
    def units(self) -> list[Unit]:
        """All that the part reads."""
        return [*self.around, *(unit for own in self.hooked.values() for unit in own)]

    def set_context(self, context: RunContext) -> None:
        self.is_kept = self._stays and context.replay
        super().set_context(context)

    def others(self) -> list[nn.Parameter]:
        """None: no gradients are deferred."""
        return []

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the part. Units without a backward hook are gathered at the outputs' gradients."""
        stays = False
        for unit in self.around:
            unit.gather()
        self.begin_after("")
        self._shards.running = self
        try:
            made = super().run(leaves, inputs, deferred)
            # The part may end within the call of a module, which then never ends.
            left = [unit for unit in self.units if unit.is_whole]
            for root in (tensor.grad_fn for tensor in tensors_in(made)):
                if root is not None:
                    root.register_prehook(partial(self.before_backward, left))
                    stays = self.is_kept
        except BaseException:
            for unit in [*self.units, *(self.later.units if self.later else ())]:
                unit.forget()
            raise
        finally:
            self._shards.running = None
            for unit in () if stays else self.units:
                unit.free()
        return made

    def before_backward(self, units: Sequence[Unit], _: object = None) -> None:
        """Gather units; all that are left gathered are reduced when the backward ends."""
        if self._shards.in_backward is None:
            self._shards.in_backward = self
            self._reached = len(self._order) + 1
            after_backward(self._finish)
        for unit in units:
            unit.gather()
        names = {unit.name for unit in units}
        place = next((i for i, path in enumerate(self._order) if path in names), len(self._order))
        if place < self._reached:
            self._reached = place
            if place:
                self._begin(self._order[place - 1])
            elif self.earlier is not None:
                self.earlier.begin()

    def begin_after(self, path: str) -> None:
        """Prefetch the units that are needed after those of a module; the first after ``""``."""
        if path and path not in self._order:
            self._order.append(path)
        later = self._order[self._order.index(path) + 1 :] if path else self._order
        if later:
            self._begin(later[0])
        elif self.later is not None and not self.is_kept:
            self.later.begin()

    def begin(self) -> None:
        """Prefetch the units with which a forward of this part begins."""
        for unit in self.around:
            unit.begin()
        if self._order:
            self._begin(self._order[0])

    def _begin(self, path: str) -> None:
        for unit in self.hooked[path]:
            unit.begin()

    def _finish(self) -> None:
        self._shards.in_backward = None
        for unit in self.units:
            unit.reduce()


def gather_ahead(calls: Sequence[object]) -> None:
    """Link the calls of a stage's parts, always run in this order, to prefetch for each other."""
    for earlier, later in pairwise(calls):
        if isinstance(earlier, GatheredCall) and isinstance(later, GatheredCall):
            earlier.later, later.earlier = later, earlier


class ParameterShards(Shards):
    """The parameters of which this rank holds a share, in units, and the calls that gather them.

    ``running`` is the call whose forward runs, and ``in_backward`` that whose backward does.
    """

    def __init__(self, graph: LayerGraph, plan: Plan, world: World) -> None:
        own = [s.devices for s in plan.stages if s.sharding == "parameters"]
        here = next((devices for devices in own if world.rank in devices), (world.rank,))
        super().__init__(world, here, graph.tied_names)
        self.sizes = divided_parameters(graph, plan)
        self.dims = dict.fromkeys(self.sizes, 0)
        self.group = make_groups(world, own).get(self.ranks)
        self.running: GatheredCall | None = None
        self.in_backward: GatheredCall | None = None
        self._plan = plan
        self._units: dict[str, list[Unit]] = {}
        self._hooks = ExitStack()

    def divide(self, programs: Mapping[int, StageProgram]) -> None:
        """Give all ranks of a stage the values of its first, then keep this rank's rows."""
        if self.group is None:
            return
        members: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
        for stage in filter(self.divides, programs):
            for name, parameter in programs[stage].module.named_parameters():
                if self.tied.get(name, name) in self.dims:
                    copy_values(parameter, self.ranks[0], self.group, self.world)
                    key = module_of(name), parameter.dtype
                    members.setdefault(key, []).append(parameter)
        for (path, _), parameters in members.items():
            self._units.setdefault(path, []).append(Unit(path, parameters, self))
        program = next(iter(programs.values())).module.graph.program
        for path in self._units:
            module = program.module(path)
            before, after = partial(self._before, path), partial(self._after, path)
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ):
                self._hooks.callback(handle.remove)

    def leave(self) -> None:
        """Leave the group, and the user's modules without hooks."""
        self._hooks.close()
        super().leave()

    def divides(self, stage: int) -> bool:
        """Return whether the parameters of a stage are sharded."""
        return self._plan.stages[stage].sharding == "parameters"

    def call_of(self, program: StageProgram) -> GatheredCall:
        """Create the call of a stage of this rank, or of a part of it."""
        module = program.module
        stage = self._plan.stages[self._plan.stage_of_layer(program.layers.start)]
        held = {id(parameter) for parameter in module.parameters()}
        whole = self._called_once(module)
        hooked, around = dict[str, list[Unit]](), list[Unit]()
        for path, units in self._units.items():
            own = [unit for unit in units if any(id(m.parameter) in held for m in unit.members)]
            if own and path in whole:
                hooked[path] = own
            else:
                around += own
        return GatheredCall(self, module, hooked, around, stays=stage.by_block)

    def _called_once(self, module: StageModule) -> set[str]:
        """Modules whose single call is all the part's, and whose parameters none else reads."""
        record, part, tied = module.graph.recorded.record, module.part, self.tied.items()
        # A block all between two events, of which others use only the result.
        blocks = whole_blocks(
            record, lambda b: b.closed and part.first <= b.first and b.last <= part.last
        )
        found = {path for path, calls in blocks.items() if len(calls) == 1}
        found |= {path for path in part.paths if record.counts[path] == 1}
        return {
            path
            for path in found
            if all(a.startswith(f"{path}.") == b.startswith(f"{path}.") for a, b in tied)
        }

    # Around the calls of modules.

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self.running or self.in_backward
        units = call.hooked.get(path) if call is not None else None
        if not units:
            return
        with NoFunctionCalls():  # no calls of the user's program
            for unit in units:
                unit.gather()
            if self.running is not None:
                self.running.begin_after(path)
            # A checkpoint of the user's runs it again within the backward. The gradient of a leaf
            # may come before those of the parameters; that of another tensor comes after all that
            # was called later.
            if self.running is not None and torch.is_grad_enabled():
                for tensor in tensors_in((args, kwargs)):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(partial(self._after_backward, units))

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self.running
        units = call.hooked.get(path) if call is not None else None
        if call is None or not units:
            return
        with NoFunctionCalls():
            for tensor in tensors_in(output):
                # Called after the hooks of the tensor, with which the next module may be reduced.
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(partial(call.before_backward, units))
            if not call.is_kept:
                for unit in units:
                    unit.free()

    def _after_backward(self, units: Sequence[Unit], _: object) -> None:
        for unit in units if self.in_backward is not None else ():
            unit.reduce()


def module_of(name: str) -> str:
    """The module with which a parameter is gathered: the outermost of a list, or its own.

    >>> module_of("model.layers.3.attention.query.weight"), module_of("model.norm.weight")
    ('model.layers.3', 'model.norm')
    """
    parts = name.split(".")[:-1]
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
