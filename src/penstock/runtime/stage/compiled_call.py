"""Stages whose parts are compiled by ``torch.compile``, forward and backward.

    block of this stage                        compiled as one function
    block that is cut, or watched inside       its units are compiled one by one
    code between them, loss                    Python
    unit of one kernel (a linear layer)        as it is

A stage has the same number of rows in every full micro-batch. Its parts are compiled once for these
shapes before the first step: otherwise ranks would time out while others compile. Later nothing is
compiled any more: inputs of other shapes (the last batch of an epoch) run without compilation. So
do micro-batches with a backward in two halves, since a compiled backward computes all gradients at
once.

The user's modules are as he made them: compiled forwards are in them only while a stage runs.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.forward.call import ProgramCall, StageCall, entering, forwards_put
from penstock.capture.forward.deferred_weights import DeferredGradients
from penstock.capture.forward.partial_forward import RunContext
from penstock.capture.forward.stage_module import StageModule, StageProgram
from penstock.capture.record.absent import Absent
from penstock.capture.record.units import is_torchs
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.processes.world import World
from penstock.runtime.stage.random_stream import on_trial
from penstock.torch_internals import COMPILED_CALL, checkpoint_here, compiler, tensors_in

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
"""Compiler options with which dropout draws the same numbers as without compilation."""

COMPILERS = ("g++", "c++", "clang++")

VARIANTS = 1024
"""Most compilations of code for modules that differ in more than tensors (torch: 8).

Modules of one class share compiled code; a number such as that of the layer makes them differ.
"""


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


PLAIN_RUNS = 8
"""Forwards, none of them compiled, after which a run reports why."""


class CompiledCall(StageCall):
    """A stage that runs compiled on the shapes that it was compiled for, and directly on others.

    The first stage warns once if none of its first `PLAIN_RUNS` is of these shapes. A forward that
    will be recomputed also runs the compiled functions for training, and what it
    saves for the backward is dropped. So both forwards give the same bits.
    """

    records = True

    def __init__(self, program: StageProgram) -> None:
        self.program = program
        self._module = program.module
        self._plain = self._beside = ProgramCall(self._module)
        self._compiled: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        self._shapes: list[torch.Size] = []
        self._runs_left = PLAIN_RUNS if program.layers.start == 0 else 0
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
            self._runs_left -= not known
            if not (known or self._runs_left):
                shapes = ", ".join(str(tuple(shape)) for shape in self._shapes)
                warnings.warn(
                    f"compile=True has compiled for tensors of {shapes}, and no "
                    f"batch had these shapes, so all run uncompiled; pad batches to one length, "
                    f"that of the example, in the loader's collate function",
                    stacklevel=2,
                )
            return self._plain.run(leaves, inputs, deferred)
        self._runs_left = 0
        if self._module.unchecked:
            self._check(leaves, inputs)
        # Whatever is different now (a mode, a number that the user has set) runs uncompiled.
        with torch.compiler.set_stance("eager_on_recompile"), forwards_put(self._compiled):
            if torch.is_grad_enabled():
                return self._beside.run(leaves, inputs)
            recorded = [tensor.detach() for tensor in inputs]
            for i in self._grad_inputs:
                recorded[i] = entering(recorded[i])
            with torch.enable_grad():
                outputs = self._beside.run(leaves, recorded)
        return tuple(output.detach() for output in outputs)

    def _check(self, leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Compare the stage's calls with those of the example, in a run that leaves nothing behind.

        It is uncompiled. As a micro-batch of the step it would save the statistics of batch
        normalisation for its backward, and compiled micro-batches write to them before that.
        """
        with on_trial(self._module, (*leaves, *inputs)[0].device):
            self._plain.run(leaves, [tensor.detach() for tensor in inputs])
        self._module.unchecked = False

    @property
    def in_evaluation(self) -> StageCall:
        return self._plain

    def others(self) -> list[nn.Parameter]:
        return self._plain.others()

    def set_context(self, context: RunContext) -> None:
        self._plain.set_context(context)

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
        batch. Gradients, buffers, the model's own state and random numbers are left unchanged.
        """
        own = [leaf[:1].expand(rows, *leaf.shape[1:]).contiguous() for leaf in leaves]
        inputs = [spec.zeros(rows, lengths, device) for spec in self.program.received]
        for i in self._grad_inputs:
            inputs[i].requires_grad_()
        self._shapes = [tensor.shape for tensor in (*own, *inputs)]
        trained = [p for p in self._module.parameters() if p.requires_grad]
        wanted = [*trained, *(inputs[i] for i in self._grad_inputs)]
        with on_trial(self._module, device), within, compiling():
            self._choose(own, inputs)
            with forwards_put(self._compiled):
                outputs = self._module.run(own, inputs)
            ends = outputs[: 1 if self.program.is_last else len(self.program.sent)]
            roots = [output for output in ends if output.requires_grad]
        if roots and wanted:
            seeds = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)

    def _choose(self, leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Find out in a run as it is which parts can be compiled, and prepare their forwards."""
        candidates = {id(part): part for part in compiled_modules(self._module)}
        refused: set[int] = set()
        watching = [(part.__dict__, watched(part, refused)) for part in candidates.values()]
        with forwards_put(watching):
            self._module.run(leaves, inputs)
        inside: set[int] = set()
        for key, part in candidates.items():
            own = part.__dict__  # in which the user may have put another forward, or compiled it
            if "forward" in own or own.get(COMPILED_CALL) is not None:
                continue
            if key in refused or key in inside:
                continue
            forward = torch.compile(forward_of(part), dynamic=False, options=OPTIONS)
            self._compiled.append((own, forward))
            inside |= {id(child) for child in part.modules()}
        self._beside = ProgramCall(self._module, inside)


@contextmanager
def compiling() -> Iterator[None]:
    """Set torch's compiler as stages need it."""
    settings = compiler().config.patch(
        recompile_limit=VARIANTS,
        accumulated_recompile_limit=VARIANTS,
        # Otherwise compiled code would leave out hooks that the user adds later.
        skip_nnmodule_hook_guards=False,
    )
    with settings, warnings.catch_warnings():
        # The compiler looks at the gradients of its inputs, which are results of other parts.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def compiled_modules(module: StageModule) -> list[nn.Module]:
    """Return the modules that may be compiled: the stage's blocks, then its units.

    Not those of one kernel, and not those that change Python state, which is different in every
    run, so that compiled code would be useless the next time.
    """
    graph = module.graph
    changing = [place.path for _, place in graph.recorded.unit_changes]
    changing += [place.path for place in graph.recorded.changes]

    def may_be(path: str) -> bool:
        part = graph.program.module(path)
        is_one_kernel = is_torchs(part) and next(part.children(), None) is None
        return not is_one_kernel and not any(f"{at}.".startswith(f"{path}.") for at in changing)

    paths = (*module.stage.own_blocks, *sorted(module.part.paths))
    return [graph.program.module(path) for path in paths if may_be(path)]


def forward_of(part: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class."""
    return type(part).forward.__get__(part)


def watched(part: nn.Module, refused: set[int]) -> Callable[..., Any]:
    """The forward of ``part``; adds it to ``refused`` if it cannot be compiled.

    That is so within a checkpoint (`torch.utils.checkpoint`): the backward runs that again, when no
    stage runs, and must find the same. And where it gets a tensor that is on another stage.
    """
    plain = forward_of(part)

    def forward(*args: Any, **kwargs: Any) -> Any:
        absent = any(type(tensor) is Absent for tensor in tensors_in((args, kwargs)))
        if absent or checkpoint_here() is not None:
            refused.add(id(part))
        return plain(*args, **kwargs)

    return forward


class StageCompiler:
    """Compiler of a rank's stages, which compiles them all before the first step.

    ``graphs`` is the number of graphs that torch has compiled for them; equal modules share one.
    """

    def __init__(self, device: torch.device) -> None:
        check_compiler(device)
        self.graphs = 0
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
        before = compiler().utils.counters["stats"]["unique_graphs"]
        for call in self._calls:
            program = call.program
            own = [leaves[i].to(world.device) for i in program.batch_inputs]
            rows = rows_of_rank(plan, world.rank, plan.stage_of_layer(program.layers.start))
            call.prepare(own, world.device, rows, precision(), lengths)
        self.graphs = compiler().utils.counters["stats"]["unique_graphs"] - before
        world.barrier()


def rows_of_rank(plan: Plan, rank: int, stage: int) -> int:
    """The rows of a full micro-batch that ``rank`` computes in ``stage``."""
    homes = (plan.holder(stage, direction) for direction in (0, 1))
    home = next(home for home in homes if rank in home.devices)
    return home.slices[home.devices.index(rank)]
