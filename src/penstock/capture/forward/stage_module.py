"""A stage as the runtime sees it: a module with the user's own tensors that are this stage's."""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from penstock.capture.batch.layout import BatchLayout
from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.batch.part import Leaf
from penstock.capture.contract import TensorSpec
from penstock.capture.forward.checked import checked
from penstock.capture.forward.kept_state import KeptState
from penstock.capture.forward.partial_forward import (
    Costs,
    ProgramPart,
    Purpose,
    RunContext,
    StageRun,
    StageTask,
)
from penstock.capture.forward.program_stage import ProgramStage
from penstock.capture.loss.loss_parts import LossAction
from penstock.capture.loss.loss_path import OtherPath
from penstock.capture.loss.step_values import StepValues
from penstock.capture.record.absent import Absent, absent_like
from penstock.capture.record.example import Recorded
from penstock.capture.record.model_and_loss import IN_ONE_PROCESS, UserProgram
from penstock.capture.record.model_outputs import StructuredOutputs
from penstock.capture.record.sizes import BatchSize
from penstock.capture.tensor_parts import become, is_quantised
from penstock.errors import BadInput
from penstock.torch_internals import without_modes


class StageGraph(Protocol):
    """Contract between a stage and its graph, which is a `LayerGraph`."""

    @property
    def program(self) -> UserProgram: ...
    @property
    def recorded(self) -> Recorded: ...
    @property
    def state(self) -> KeptState: ...
    @property
    def layout(self) -> BatchLayout: ...
    @cached_property
    def outputs(self) -> StructuredOutputs: ...
    @cached_property
    def step_values(self) -> StepValues: ...
    @cached_property
    def loss_mode(self) -> str: ...
    @property
    def wants(self) -> str: ...
    @property
    def alone(self) -> bool: ...
    @property
    def costs(self) -> Costs: ...
    def spec(self, value: int) -> TensorSpec: ...
    def outputs_in(self, output: Any, loss: torch.Tensor | None) -> list[torch.Tensor]: ...
    def lengths_of(self, leaves: Mapping[int, Leaf]) -> LengthsOf: ...
    def start_training(self) -> None: ...


@lru_cache(maxsize=256)
def weight_of_rows(rows: int, device: torch.device) -> torch.Tensor:
    """``rows`` as a float32 scalar tensor, one for all micro-batches of a size."""
    with without_modes():  # it is kept, and an estimate must not leave a tensor without value here
        return torch.full((), float(rows), dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def batch_size(samples: int, lengths: tuple[int, ...]) -> BatchSize:
    """The size of a batch; the same object for the same numbers."""
    return BatchSize(samples, lengths)


class StageModule(nn.Module):
    """A part of the user's model under its own names; running it runs the user's forward.

    Modules and tensors are the user's own objects. `StageProgram` says what it takes and returns.
    """

    def __init__(
        self,
        graph: StageGraph,
        part: ProgramPart,
        inputs: tuple[int, ...],
        received: tuple[TensorSpec, ...],
        *,
        foreign: Collection[str],
        is_last: bool,
        has_loss: bool,
        outputs: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.graph, self.part, self.inputs, self.specs = graph, part, inputs, received
        self.is_last, self.has_loss, self.outputs = is_last, has_loss, outputs
        self.mode = graph.loss_mode if graph.wants != "outputs" else "rows"
        record, program = graph.recorded.record, graph.program
        # A stage may end within the loss function.
        begins_loss = part.last > record.model_end and graph.wants != "outputs"
        self.runs_loss = has_loss or begins_loss
        self.unchecked = not graph.costs
        self.stage = self._stage(graph.costs or "training")
        self.context = RunContext()
        every = list(program.named_modules(each_once=False))
        others = {id(program.module(path)) for path in foreign}
        outside = {name for name, module in every if id(module) in others}
        below = tuple(f"{path}." for path in outside)
        self.own = [
            (name, module)
            for name, module in every
            if name not in outside and not name.startswith(below)
        ]
        self._step_leaf = count = len(graph.layout.leaves)
        self._missing = [index for index in range(count) if index not in inputs]
        self._written = [index for index in range(count) if index in record.overwritten]
        self._absent: tuple[BatchSize | None, dict[int, torch.Tensor]] = (None, {})

    @cached_property
    def _keeping(self) -> ProgramStage:
        """This stage, from which what the loss reads is taken."""
        found = self._stage("training", self.graph.state.again.within(self.part))
        found.state.share(self.stage.state)
        return found

    def _stage(self, purpose: Purpose, part: ProgramPart | None = None) -> ProgramStage:
        """This stage for a purpose; to check, it leaves no block out, so that each call is seen."""
        graph, counts = self.graph, self.is_last and self.mode == "targets"
        actions: Mapping[int, Sequence[LossAction]] = {}
        if counts or self.mode == "step":
            actions = graph.recorded.parts.actions
        path = graph.recorded.parts.path if graph.wants != "outputs" else {}
        task = StageTask(graph.program, graph.recorded, part or self.part, actions, path, purpose)
        return ProgramStage(task, graph.state, alone=graph.alone, counts_targets=counts)

    # A run.

    def set_context(self, context: RunContext) -> None:
        """Say which run the next one is."""
        self.__dict__["context"] = context  # not as a module sets attributes, which takes longer

    def in_backward(self, micro_batch: int) -> AbstractContextManager[None]:
        """Put the model's state back to what the forward of this micro-batch has left."""
        state = self.stage.state
        return state.in_backward(micro_batch) if state.is_any else IN_ONE_PROCESS

    def own_modules(self) -> list[nn.Module]:
        """All modules within this stage's units."""
        program = self.graph.program
        every = (program.module(path).modules() for path in self.part.paths)
        return list(dict.fromkeys(chain.from_iterable(every)))

    def has_checkpoints(self, *, reentrant: bool = False) -> bool:
        """Return whether the user's (``reentrant``) checkpoints run some of its calls again."""
        record, part = self.graph.recorded.record, self.part
        firsts = set(record.reentrant)
        if not reentrant:
            firsts |= {first for _, first, _ in record.checkpoints.values()}
        return any(part.first <= first < part.last for first in firsts)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage on leaves of the batch, then received tensors."""
        count = len(self.inputs)
        return self.run(tensors[:count], tensors[count:])

    def run(
        self, leaves: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return what is sent; then loss and weight, and outputs."""
        graph, stage, context = self.graph, self.stage, self.context
        if context.keep and graph.recorded.record.has_gradients and not torch.is_grad_enabled():
            return self._run_with_gradients(leaves, received)
        if graph.state.starts_training:
            graph.start_training()
        Absent.claim((leaves or received)[0].device)
        by_index = dict(zip(self.inputs, leaves, strict=True))
        size = self._size(by_index, received)
        step_row = by_index.pop(self._step_leaf, None)
        for index in self._written:
            if index in by_index:  # forward writes to it, and every stage of the rank reads it
                by_index[index] = by_index[index].clone()
        by_index |= self._absent_leaves(size)
        given = dict(zip(self.part.received, received, strict=True))
        run = StageRun(size, given, context)
        if stage.task.draws_alike:
            run.seed = zlib.crc32(repr(context.name).encode())
        if step_row is not None:
            total, run.whole = graph.step_values.of_row(step_row[0], size.lengths)
            run.share = size.samples / total
        program, runs_loss = graph.program, self.runs_loss

        def call() -> Any:
            return program.run(by_index, with_loss=runs_loss, instead=stage.loss)

        again = graph.state.again if self.has_loss and not context.replay else None
        if again is not None:
            stage = self._keeping
        if self.unchecked and not graph.state.modes and graph.recorded.has_calls_of(size):
            self.unchecked = False
            stage = self._stage("checking", stage.task.part)
            stage.state.share(self.stage.state)
            call = checked(stage, call, by_index)
        try:
            with program.without_caches() if program.configs else nullcontext():
                made, result = stage.run(call, run)
        except OtherPath as problem:
            if not graph.state.undoes:
                raise BadInput(f"the loss takes another path than recorded: {problem}") from None
            graph.state.other_path = graph.state.other_path or str(problem)
            return self._nothing(size, (leaves or received)[0].device)
        if again is not None:
            ends = {**given, **made}
            read = {i: t for i, t in zip(self.inputs, leaves, strict=True) if i < self._step_leaf}
            graph.state.ends[context.name] = read, {v: ends[v].detach() for v in again.ends}
        sent = [made[value] for value in self.part.sent]
        if not self.is_last:
            return tuple(sent)
        return (*sent, *self._ends(stage, result, run))

    def _nothing(self, size: BatchSize, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Zeros in the place of what a run returns that took another path: its step is undone."""
        graph, rows = self.graph, size.samples
        sent = [graph.spec(value) for value in self.part.sent]
        specs = [*sent, *(graph.outputs.specs[i] for i in self.outputs)]
        zeros = [spec.zeros(rows, size.lengths, device) for spec in specs]
        if self.has_loss:
            ends = torch.zeros((), device=device), weight_of_rows(rows, device)
            zeros[len(sent) : len(sent)] = ends
        return tuple(zeros)

    def _run_with_gradients(
        self, leaves: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """A run that will be repeated, of a forward that takes gradients within it."""
        given = [
            tensor.detach().requires_grad_(spec.requires_grad)
            for spec, tensor in zip(self.specs, received, strict=True)
        ]
        with torch.enable_grad():
            made = self.run(leaves, given)
        return tuple(tensor.detach() for tensor in made)

    def _ends(self, stage: ProgramStage, result: Any, run: StageRun) -> list[torch.Tensor]:
        """Loss and weight, and the model's outputs."""
        made, output, _ = result
        if type(made) is Absent:
            raise BadInput(
                "the loss reads what another stage makes, and did not on the example; capture with "
                "a batch on which it does, or add 0 times that to the loss"
            )
        found: list[torch.Tensor] = []
        if self.has_loss:
            counts = self.mode == "targets"
            rows = run.size.samples
            weight = stage.now.counted if counts else weight_of_rows(rows, made.device)
            found = [made / run.share if self.mode == "step" else made, weight]
        if self.outputs:
            tensors = self.graph.outputs_in(output, made)
            counting = self.graph.recorded.output_counting if self.mode == "step" else ()
            for index, how in enumerate(counting):
                if how == "loss":  # its parts are those of the whole step's
                    tensors[index] = tensors[index] / run.share
                elif how == "lost":
                    tensors[index] = torch.full_like(tensors[index], torch.nan)
            found += [tensors[index] for index in self.outputs]
        return found

    def _size(
        self, leaves: Mapping[int, torch.Tensor], received: Sequence[torch.Tensor]
    ) -> BatchSize:
        """Samples and lengths of this micro-batch."""
        lengths = self.graph.lengths_of(leaves)
        for leaf in leaves.values():
            return batch_size(leaf.shape[0], lengths)
        for spec, tensor in zip(self.specs, received, strict=True):
            if spec.batch_dim >= 0:
                each = spec.at(lengths).rows_per_sample
                return batch_size(tensor.shape[spec.batch_dim] // each, lengths)
        raise AssertionError("no input of the stage gives the number of samples")

    def _absent_leaves(self, size: BatchSize) -> Mapping[int, torch.Tensor]:
        """Absent tensors for the leaves that this stage does not read."""
        known, found = self._absent
        if known is size:
            return found
        layout = self.graph.layout
        found = {}
        for index in self._missing:
            spec = layout.leaves[index]
            shape = [size.samples, *((spec.rows,) if spec.rows > 1 else ()), *spec.shape[1:]]
            for dim, length in spec.varying:
                shape[dim] = size.lengths[length]
            found[index] = absent_like(tuple(shape), spec.dtype)
        self._absent = size, found
        return found

    # The module tree, as far as it is this stage's.

    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This stage's modules, under their names in the user's model."""
        yield prefix, self
        yield from each_once(self.own, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage holds."""
        held = self.stage.held.names
        named = ((n, p) for n, p in self.graph.program.named_parameters() if n in held)
        yield from each_once(named, prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of this stage's modules."""
        if not recurse:
            return
        names, elsewhere = {name for name, _ in self.own}, self.stage.held.buffers_elsewhere
        named = (
            (name, buffer)
            for name, buffer in self.graph.program.named_buffers()
            if name.rpartition(".")[0] in names or name in self.part.held  # one of a foreign unit
            if name not in elsewhere
            if type(buffer) is not Absent
        )
        yield from each_once(named, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """A module of the user's model."""
        return self.graph.program.module(target)

    @property
    def normalises(self) -> bool:
        """Return whether modules or functions of this stage normalise samples over the batch."""
        record, own = self.graph.recorded.record, self.part.paths
        return any(where in own or where not in record.counts for where in record.norms)

    def train(self, mode: bool = True) -> "StageModule":
        """Do nothing: the mode is the whole model's (`LayerGraph.set_training`)."""
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move or cast this stage's tensors; parameters stay the same objects."""
        with torch.no_grad():
            for _, parameter in self.named_parameters():
                quantised = is_quantised(parameter)  # its class moves what is beside the values
                old = parameter if quantised else parameter.data
                value = fn(old)
                if value is old:
                    continue
                if quantised:
                    become(parameter, value)
                else:
                    parameter.data = value
            for name, buffer in list(self.named_buffers(remove_duplicate=False)):
                place = self.graph.program.places(name)
                place[0][place[1]] = fn(buffer)
        return self


@dataclass(frozen=True)
class StageProgram:
    """The layers ``[lo, hi)`` as one module.

    ``module(*batch_leaves, *received)`` takes the leaves of the (sliced) batch with the indices
    ``batch_inputs``, then the tensors that ``received`` describes. It returns a tuple of the
    tensors that ``sent`` describes. The last stage also returns ``(loss, weight)``: the mean loss
    of its slice, and the number of terms of that mean as a 0-dim float tensor (rows, or valid
    targets if the loss ignores some), so that slices can be weighted exactly. Last come the model's
    outputs with the indices ``outputs``. Parameters and buffers keep their names in the user's
    model. Of the leaves ``sized`` only sizes and the device are read. The last tensors in ``sent``
    are not made here but passed on: those of ``received`` with the indices ``relayed``.
    """

    layers: range
    module: StageModule
    batch_inputs: tuple[int, ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    is_last: bool
    outputs: tuple[int, ...] = ()
    sized: frozenset[int] = frozenset()
    relayed: tuple[int, ...] = ()


def each_once(
    named: Iterable[tuple[str, Any]], prefix: str, remove_duplicate: bool
) -> Iterator[tuple[str, Any]]:
    """Names with a prefix; each tensor or module once if duplicates are to be removed."""
    seen: set[int] = set()
    for name, own in named:
        if remove_duplicate and id(own) in seen:
            continue
        seen.add(id(own))
        yield f"{prefix}.{name}" if prefix and name else prefix or name, own
