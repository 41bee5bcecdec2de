"""Stages whose forwards and backwards are compiled by ``torch.compile``.

A stage has the same number of rows in every full micro-batch. It is compiled once for these shapes
before the first step: otherwise ranks would time out while others compile. Inputs of other shapes
(the last batch of an epoch) run without compilation. So do micro-batches with a backward in two
halves, since a compiled backward computes all gradients at once.
"""

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.deferred_weights import DeferredGradients
from penstock.capture.layer_graph import StageProgram
from penstock.capture.lengths import LengthsOf
from penstock.capture.stage.stage_tensors import RunContext
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.iteration import places_of
from penstock.runtime.processes.world import World
from penstock.runtime.stages.call import (
    function_of,
    holder_of,
    is_plain,
    stage_call,
    with_tensors_as_arguments,
)
from penstock.runtime.stages.random_stream import forward_state, replayed

__all__ = ["CompiledCall", "StageCompiler"]

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
"""With this, dropout draws the same numbers as without compilation."""

COMPILERS = ("g++", "c++", "clang++")

Run = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]


def check_compiler(device: torch.device) -> None:
    """Raise `BadInput` if torch has no C++ compiler to compile for the CPU."""
    if device.type != "cpu":
        return
    named = os.environ.get("CXX")
    wanted = (named,) if named else COMPILERS
    if not any(shutil.which(name) for name in wanted):
        raise BadInput(
            f"compile = true needs a C++ compiler, and none of {', '.join(wanted)} is in PATH; "
            f"install one, name it in the environment variable CXX, or leave compile out"
        )


class CompiledCall:
    """A stage that runs compiled on the shapes that it was compiled for, and directly on others.

    A forward that will be recomputed also runs the compiled function for training, and what it
    saves for the backward is dropped. So both forwards give the same bits.
    """

    def __init__(self, program: StageProgram) -> None:
        self.program = program
        self._plain = stage_call(program.module)
        self._compiled = compiled(program.module)
        self._shapes: list[torch.Size] = []
        self._grad_inputs = [i for i, spec in enumerate(program.received) if spec.requires_grad]

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage, without compilation if gradients are deferred or shapes are different."""
        known = [tensor.shape for tensor in (*leaves, *inputs)] == self._shapes
        if deferred is not None or not known:
            return self._plain.run(leaves, inputs, deferred)
        if torch.is_grad_enabled():
            return self._compiled(leaves, inputs)
        recorded = [tensor.detach() for tensor in inputs]
        for i in self._grad_inputs:
            recorded[i].requires_grad_()
        with torch.enable_grad():
            outputs = self._compiled(leaves, recorded)
        return tuple(output.detach() for output in outputs)

    def others(self) -> list[nn.Parameter]:
        """The same as without compilation."""
        return self._plain.others()

    def tell(self, context: RunContext) -> None:
        """Say which run the next one is."""
        self._plain.tell(context)

    def prepare(
        self,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        rows: int,
        within: AbstractContextManager[object],
        lengths: LengthsOf = (),
    ) -> None:
        """Compile forward and backward for ``rows`` rows by running both once.

        ``leaves`` are the leaves of the batch that the stage reads, ``lengths`` the lengths of the
        batch. Gradients, buffers and random numbers are left unchanged.
        """
        module = self.program.module
        own = [leaf[:1].expand(rows, *leaf.shape[1:]).contiguous() for leaf in leaves]
        inputs = [
            torch.zeros(spec.at(lengths).shape_for(rows), dtype=spec.dtype, device=device)
            for spec in self.program.received
        ]
        for i in self._grad_inputs:
            inputs[i].requires_grad_()
        self._shapes = [tensor.shape for tensor in (*own, *inputs)]
        trained = [p for p in module.parameters() if p.requires_grad]
        wanted = [*trained, *(inputs[i] for i in self._grad_inputs)]
        with replayed(module, forward_state(device)), torch.enable_grad(), within:
            outputs = self._compiled(own, inputs)
            ends = outputs[: 1 if self.program.is_last else len(self.program.sent)]
            roots = [output for output in ends if output.requires_grad]
        if roots and wanted:
            seeds = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)


class StageCompiler:
    """Creates the compiled stages of a rank, and compiles them all before the first step.

    Raises:
        BadInput: there is no C++ compiler.
    """

    def __init__(self, device: torch.device) -> None:
        check_compiler(device)
        self._calls: list[CompiledCall] = []

    def call_of(self, program: StageProgram) -> CompiledCall:
        """The compiled call of a stage or a part of one."""
        call = CompiledCall(program)
        self._calls.append(call)
        return call

    def prepare(
        self,
        plan: Plan,
        world: World,
        leaves: Sequence[torch.Tensor],
        precision: Callable[[], AbstractContextManager[object]],
        lengths: LengthsOf = (),
    ) -> None:
        """Compile for the rows of a full micro-batch on this rank, and wait for all ranks."""
        rows = {
            place.stage: rows_of(plan, world.rank, place.stage)
            for place in places_of(plan, world.rank)
        }
        for call in self._calls:
            program = call.program
            own = [leaves[i].to(world.device) for i in program.batch_inputs]
            computed = rows[plan.stage_of_layer(program.layers.start)]
            call.prepare(own, world.device, computed, precision(), lengths)
        world.barrier()


def rows_of(plan: Plan, rank: int, stage: int) -> int:
    """The rows of a full micro-batch that ``rank`` computes in ``stage``."""
    homes = (plan.holder(stage, direction) for direction in (0, 1))
    home = next(home for home in homes if rank in home.devices)
    return home.slices[home.devices.index(rank)]


def compiled(module: nn.Module) -> Run:
    """``module`` as a compiled function of leaves and received tensors."""
    if isinstance(module, fx.GraphModule) and is_plain(module):
        graph, names = with_tensors_as_arguments(module)
        held = [holder_of(module, name) for name in names.values()]
        function = torch.compile(function_of(graph), dynamic=False, options=OPTIONS)
        return lambda leaves, inputs: function(
            *[holder[name] for holder, name in held], *leaves, *inputs
        )
    if isinstance(module, fx.GraphModule):
        whole = torch.compile(module, dynamic=False, options=OPTIONS)
        return lambda leaves, inputs: whole(*leaves, *inputs)
    # The loss of a chain is observed while it runs (`penstock.capture.loss_weight`). So its modules
    # are compiled one by one, except the one that computes the loss.
    twin = copy.copy(module)
    plain = loss_module(module)
    twin._modules = {
        name: child if child is None or name == plain else one(child)
        for name, child in module._modules.items()
    }
    return lambda leaves, inputs: twin(*leaves, *inputs)


def one(child: nn.Module) -> Any:
    """Compile one module of a chain."""
    return torch.compile(child, dynamic=False, options=OPTIONS)


def loss_module(stage: nn.Module) -> str:
    """The name of the module that computes the loss in a chain's stage; empty if there is none."""
    if not getattr(stage, "_is_last", True):
        return ""
    return "loss" if getattr(stage, "_has_loss", False) else next(reversed(stage._modules), "")
