"""The layer graph of a recorded program: each stage runs the user's own forward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from penstock.capture.batch.layout import BatchLayout
from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.batch.part import Leaf
from penstock.capture.contract import Batch, ParameterUse, TensorSpec
from penstock.capture.cut.cut import Cut, LayerCrossing
from penstock.capture.cut.needs import Needs, needs_of_outputs
from penstock.capture.forward.checked import call_in_words
from penstock.capture.forward.kept_state import KeptState, Place
from penstock.capture.forward.partial_forward import Costs
from penstock.capture.forward.probe import Probe, adds_up, probe
from penstock.capture.forward.stage_module import StageModule, StageProgram
from penstock.capture.forward.stage_parts import (
    leaves_of_part,
    leaves_of_sizes,
    leaves_read_by,
    program_part,
)
from penstock.capture.loss.loss_parts import LossParts
from penstock.capture.loss.loss_path import OtherPath
from penstock.capture.loss.step_values import AnyLeaf, StepValues
from penstock.capture.record.absent import Absent, release
from penstock.capture.record.example import Recorded
from penstock.capture.record.model_and_loss import UserProgram, WholeModule
from penstock.capture.record.model_outputs import StructuredOutputs, flatten_outputs
from penstock.capture.record.model_state import StatePlace, place_of_state
from penstock.capture.record.sizes import BatchSize
from penstock.errors import BadInput, shortened
from penstock.text import counted, html_table
from penstock.torch_internals import Norm, own_buffers

Record: TypeAlias = Callable[..., Recorded]
"""Function that records a program on the leaves of an example, as `record_program` does."""

SplitTable: TypeAlias = Mapping[str, Literal["colwise", "rowwise"]]
"""Names of linear layers, with ``*`` for any one part of a name, and how each is divided."""

Parallelize: TypeAlias = Callable[[nn.Module, Any], object]
"""Function that divides a model in place over a one-dimensional `DeviceMesh`, as in torchtitan."""


@dataclass(frozen=True)
class LayerGraph:
    """A recorded program as a chain of layers, which is cut into stages.

    ``wants`` says what stages return: the loss, the loss and the model's outputs, or only these.
    ``alone``: all stages run in this process, so what a stage does not hold must be hidden from it.
    ``costs`` are those that its stages run for (see `StageTask`). ``others`` are the graphs of
    further kinds of batches, on the same modules and with the same layers. ``compiles`` and
    ``tensor_parallel`` are those of `capture_model`, for who runs the stages. ``whole_loss``: the
    last layer is a loss that is computed once, on all samples of a step, because of this call.
    ``in_evaluation`` is the graph of evaluation mode, if that makes other calls; of one whose model
    has no loss there only outputs are wanted.
    ``one_slice``: a batch cannot be cut into slices, because of this call, and that is not built.
    ``record`` records the program on other leaves as it was recorded.
    """

    program: UserProgram
    recorded: Recorded
    cut: Cut
    state: KeptState
    wants: str = "loss"
    alone: bool = True
    costs: Costs = ""
    others: tuple["LayerGraph", ...] = ()
    compiles: bool = False
    tensor_parallel: SplitTable | Parallelize | None = None
    whole_loss: str = ""
    in_evaluation: "LayerGraph | None" = None
    one_slice: str = ""
    record: Record | None = None

    @classmethod
    def of(cls, program: UserProgram, recorded: Recorded, *, kinds: int = 1) -> "LayerGraph":
        """Return the graph of a recorded program, for this number of ``kinds`` of batches."""
        state = KeptState(program, recorded.changes)
        why = recorded.parts.mixing
        if recorded.whole_from is not None and kinds == 1:
            uniform = replace(recorded, parts=LossParts())
            cut = Cut(uniform, program)
            if cut.has_whole_loss:
                return cls(program, uniform, cut, state, whole_loss=why)
        if recorded.refusal is not None and not recorded.taken:
            raise recorded.refusal
        parts = LossParts() if recorded.taken else recorded.parts
        recorded = replace(recorded, whole_from=None, parts=parts)
        return cls(program, recorded, Cut(recorded, program), state, one_slice=recorded.taken)

    def __repr__(self) -> str:
        """The layers with the tensors that they send, in at most ten lines."""
        lines = [
            shortened(f"{number:>5}  {name} -> {sent}".removesuffix(" -> "), 100)
            for number, name, sent in self.layer_rows()
        ]
        if len(lines) > 9:
            lines[4:-4] = [f"       ... {len(lines) - 8} more"]
        return "\n".join((self.title, *lines))

    def _repr_html_(self) -> str:
        return html_table(("layer", "name", "sends"), self.layer_rows(), self.title)

    @property
    def title(self) -> str:
        """The model, with the number of its layers."""
        layers, batch = counted(len(self.layer_names), "layer"), counted(self.batch_size, "sample")
        return f"LayerGraph of {self.name}: {layers}, for {batch}"

    def layer_rows(self) -> Iterator[tuple[int, str, str]]:
        """The number of each layer, its name, and the tensors that it sends."""
        sent = {number: list[str]() for number in range(-1, len(self.layer_names))}
        for spec, maker, _ in self.crossings:
            sent[maker].append(f"{spec.shape} {str(spec.dtype).removeprefix('torch.')}")
        for number, name in enumerate(self.layer_names):
            yield number, name, ", ".join(sent[number])

    @property
    def kinds(self) -> tuple["LayerGraph", ...]:
        """The graph of each kind of batch, this first."""
        return (self, *self.others)

    # The model.

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.program.model).__name__

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.program.model

    @property
    def layout(self) -> BatchLayout:
        """The tensors of a batch, and where their samples are."""
        return self.program.call.layout

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Paths of the modules at which the layers begin."""
        return self.cut.names

    @property
    def mixing(self) -> str:
        """Reason why micro-batches cannot give the result of the whole batch; empty if they can."""
        norms = self.recorded.record.norms
        if norms:
            modules = dict(self.program.named_modules())
            where = next((path for path in norms if path in modules), norms[0])
            kind = type(modules[where]).__name__ if where in modules else "batch normalisation"
            return f"it mixes samples ({kind} '{where}')"
        for where in self.recorded.record.frequencies:
            return f"'{where}' divides gradients by frequencies in the batch (scale_grad_by_freq)"
        if self.recorded.parts.mixing:
            return f"it mixes samples ({self.recorded.parts.mixing})"
        recorded = self.recorded
        changed = [*recorded.changes, *(place for unit, place in recorded.unit_changes if not unit)]
        buffers = [place.name for place in changed if place.kind == "buffer"]
        for name in (*buffers, *recorded.counts):
            return f"its forward updates buffer '{name}'"
        for name in sorted(self.written_parameters):
            return f"its forward writes to parameter '{name}'"
        return ""

    def own_module(self) -> WholeModule:
        """The user's model with its loss."""
        return WholeModule(self.program)

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        return self.layout.batch_size

    @property
    def parameter_uses(self) -> tuple[ParameterUse, ...]:
        """Every parameter and buffer, with the layers that read it."""
        return self.cut.parameter_uses

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Additional names of tied parameters, each with the parameter's first name."""
        return self.program.tensors.tied

    def set_training(self, training: bool) -> None:
        """Put the whole model into evaluation mode, or back into the modes that it had before.

        The mode is the model's, not a stage's: stages of a rank share modules.
        """
        if training:
            for module, mode in self.state.modes:
                module.training = mode
            self.state.modes = []
        elif not self.state.modes:
            named = self.program.named_modules()
            self.state.modes = [(module, module.training) for _, module in named]
            for module, _ in self.state.modes:
                module.training = False

    @contextmanager
    def untouched_state(self) -> Iterator[None]:
        """Restore on exit what forward changes besides buffers; stages may run meanwhile."""
        put_back = self.state_snapshot()
        try:
            yield
        finally:
            put_back()

    def state_snapshot(self, *further: Place) -> Callable[[], None]:
        """A function that puts what forward changes, on this rank, back to what it is now."""
        units = (place_of_state(self.program, place) for _, place in self.recorded.unit_changes)
        return self.state.snapshot([*units, *further])

    @property
    def changed_attributes(self) -> list[tuple[str, StatePlace]]:
        """The attributes that forward changes, each with the unit that does it, or empty."""
        recorded = self.recorded
        every = [*(("", place) for place in recorded.changes), *recorded.unit_changes]
        return [(unit, place) for unit, place in every if place.kind == "attribute"]

    def kept_state(self) -> Callable[[], None]:
        """Keep what forward changes, buffers too; returns what puts it back after a step."""
        if not self.recorded.parts.path:
            return lambda: None
        return self.state_snapshot(*self._statistics)

    @cached_property
    def _statistics(self) -> list[Place]:
        """The buffers of batch norms."""
        norms = (module for _, module in self.program.named_modules() if isinstance(module, Norm))
        return [(buffers, key) for buffers in map(own_buffers, norms) for key in buffers]

    def start_training(self) -> None:
        """Put a model that was captured in evaluation mode into training mode, once.

        `from_pretrained` gives such models. Later the mode is the user's to set.
        """
        if not self.state.modes:
            self.state.starts_training = False
            for root in self.program.root_names:
                self.program.module(root).train()

    @property
    def written_parameters(self) -> frozenset[str]:
        """The parameters that forward itself writes to between modules."""
        return frozenset[str]().union(*(k.recorded.record.parameter_writes for k in self.kinds))

    @property
    def calls(self) -> list[str]:
        """The calls of the example of each kind, as words without paths of this host."""
        every = [event for kind in self.kinds for event in kind.recorded.record.events]
        return [call_in_words(event.address) for event in every]

    # What crosses.

    @property
    def crossings(self) -> tuple[tuple[TensorSpec, int, tuple[int, ...]], ...]:
        """Tensors read by later layers, in order of execution."""
        return tuple((self.spec(c.value), c.maker, c.readers) for c in self._crossings)

    @cached_property
    def _trained(self) -> frozenset[int]:
        return frozenset(crossing.value for crossing in self.cut.crossings)

    def spec(self, value: int) -> TensorSpec:
        """A value as a tensor that is sent."""
        if self.wants == "loss" or value in self._trained:
            return self.cut.spec(value)
        return self.cut.spec(value, requires_grad=False)

    @cached_property
    def _outputs(self) -> list[int]:
        """The values that the model returns."""
        return [value for value in self.recorded.output_values if value is not None]

    @cached_property
    def _needs(self) -> Needs:
        if self.wants == "outputs":
            return needs_of_outputs(self.cut, self._outputs)
        return Needs(frozenset(range(self.cut.end)), frozenset(range(len(self.layout.leaves))))

    @cached_property
    def _crossings(self) -> tuple[LayerCrossing, ...]:
        if self.wants == "loss":
            return self.cut.crossings
        dependent = [v for v in self._outputs if v in self.recorded.record.dependent]
        found = self.cut.crossings_for(self._needs.events, dependent)
        for crossing in found:
            if not self.cut.can_cross(crossing.value):
                raise BadInput(
                    "the model's outputs need a tensor of an earlier layer whose size is no "
                    "multiple of the samples, so it cannot be sent; compute them in one module"
                )
        return found

    # Batches.

    def batch_leaves(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, checked against the example (BadInput if unlike)."""
        return self.as_one_step([self.layout.flatten(batch)])[0]

    @property
    def _needs_step(self) -> bool:
        return self.loss_mode == "step" and self.wants != "outputs"

    @cached_property
    def loss_mode(self) -> str:
        """Weighting of slices; a cross entropy before the last layer counts part by part."""
        mode = self.recorded.parts.mode
        last = len(self.layer_names) - 1
        if mode == "targets" and any(
            self.cut.layer_of[number] < last for number in self.recorded.parts.actions
        ):
            return "step"
        return mode

    @property
    def summed_leaves(self) -> frozenset[int]:
        """The leaves that values of a whole step are computed from."""
        return self.step_values.read if self._needs_step else frozenset()

    def as_one_step(self, batches: Sequence[Sequence[AnyLeaf]]) -> list[list[AnyLeaf]]:
        """The leaves of batches of one step, or of parts, with the step's values if needed."""
        own = [list(leaves[: len(self.layout.leaves)]) for leaves in batches]
        return self.step_values.beside(own) if self._needs_step else own

    def as_own_steps(self, leaves: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch in which each micro-batch is a step of its own."""
        if not self._needs_step:
            return list(leaves)
        return self.step_values.of_each_part(leaves[: len(self.layout.leaves)], cut)

    def follows_path(self, batch: Batch) -> bool:
        """Return whether the batch shows no reason for its loss to leave the recorded path."""
        leaves = dict(enumerate(self.layout.flatten(batch)))
        size = BatchSize(leaves[0].shape[0], self.lengths_of(leaves))
        device = self.recorded.device
        own = {i: leaf if leaf.is_meta else leaf.to(device) for i, leaf in leaves.items()}
        try:
            self._path_probe(own, size)
        except (OtherPath, BadInput):
            return False
        return True

    @cached_property
    def _path_probe(self) -> Probe:
        path = self.recorded.parts.path
        return probe(self.program, self.recorded, self.state, self.cut.end, {}, path)

    @cached_property
    def step_values(self) -> StepValues:
        """The values of a step that slices need."""
        recorded = self.recorded
        record, actions = recorded.record, recorded.parts.actions
        acting = {number for number, own in actions.items() if any(a.kind != "rows" for a in own)}
        return StepValues(
            probe(self.program, recorded, self.state, self.cut.end, actions, {}),
            leaves_read_by(record, acting),
            self.lengths_of,
            recorded.device,
            adds=all(adds_up(record, n, action) for n, own in actions.items() for action in own),
            shared=self.layout.shared,
        )

    @property
    def leaves_read(self) -> frozenset[int]:
        """The leaves of a batch that layers may read."""
        return self._needs.leaves

    def known_leaves(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The leaves of a batch that are read, by index (BadInput if unlike the example)."""
        return self.program.call.leaves(batch, self.leaves_read)

    @property
    def largest_lengths(self) -> LengthsOf:
        """The largest declared value of each length, or that of the example batch."""
        layout = self.layout
        pairs = zip(layout.example_lengths, layout.lengths, strict=True)
        return tuple(size if length.max is None else length.max for size, length in pairs)

    def lengths_of(self, leaves: Mapping[int, Leaf]) -> LengthsOf:
        """The lengths of a batch."""
        return self.layout.lengths_of(leaves)

    # Outputs.

    @cached_property
    def outputs(self) -> StructuredOutputs:
        """Outputs of the model, with their structure."""
        found = self.recorded.outputs
        if found.problem:
            return found
        for number, value in enumerate(self.recorded.output_values):
            if value is None or not self.cut.has_rows(value):
                return StructuredOutputs(
                    problem=f"the size of output {number} of the model is not a multiple of the "
                    f"samples, as where each is compared with all; return tensors with the samples "
                    f"along one dimension"
                )
        specs = tuple(
            self.cut.spec(value, f"output {i}")
            for i, value in enumerate(self.recorded.output_values)
            if value is not None
        )
        return replace(found, specs=specs)

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The layer whose stage returns each output; empty if none are wanted."""
        if self.wants == "loss":
            return ()
        return (len(self.layer_names) - 1,) * len(self.recorded.output_values)

    def outputs_in(self, output: Any, loss: torch.Tensor | None) -> list[torch.Tensor]:
        """The tensors of what the model returned, in the order of `outputs`."""
        own = loss if self.program.loss is None else None
        if self.wants == "outputs" and self.program.loss is None:
            own = loss_of(output)
        _, found = flatten_outputs(output, own)
        if len(found) != len(self.recorded.output_values):
            raise BadInput(
                f"{self.name} returned {len(found)} tensors, and "
                f"{len(self.recorded.output_values)} on the example; return the same each time"
            )
        if any(type(tensor) is Absent for tensor in found):
            raise BadInput(
                f"an output of {self.name} depends on a tensor that the batch lacks, or that is on "
                f"another stage; give the whole batch"
            )
        return found

    def part_at(self, path: str) -> int:
        """The number of the output at ``path``, as in ``"losses.words"``; it must be exact."""
        specs: Any = self.outputs.specs  # in place of the tensors, so that each is found again
        found: Any = self.outputs.rebuild(specs)
        for name in path.split("."):
            inner: Any = found
            found = inner.get(name) if isinstance(inner, Mapping) else getattr(inner, name, None)
        number = next((i for i, spec in enumerate(self.outputs.specs) if spec is found), None)
        if number is None:
            raise BadInput(
                f"'{path}' names no tensor in what {self.name} returns beside its loss; name one "
                f"by its keys or attributes, as in 'losses.words'"
            )
        if self.recorded.output_counting[number] not in ("loss", "rows"):
            raise BadInput(
                f"'{path}' is no part of the loss of {self.name} and no mean over samples, so it "
                f"cannot be put together from slices of a batch; return its mean as a part of the "
                f"loss, or give a function that returns (mean, weight)"
            )
        return number

    def for_costs(self, costs: Costs) -> "LayerGraph":
        """A copy with the loss of each micro-batch alone, and with state of its own."""
        recorded = replace(self.recorded, parts=LossParts())
        state = KeptState(self.program, recorded.changes)
        return replace(self, recorded=recorded, state=state, costs=costs)

    def with_outputs(self) -> "LayerGraph":
        """A copy whose last stage also returns the model's outputs (BadInput if it has none)."""
        return self._wanting("both")

    def without_loss(self) -> "LayerGraph":
        """A copy that returns only the model's outputs (BadInput if it has none)."""
        return self._wanting("outputs")

    def _wanting(self, wants: str) -> "LayerGraph":
        if self.outputs.problem:
            raise BadInput(self.outputs.problem)
        others, own = tuple(other._wanting(wants) for other in self.others), self.in_evaluation
        own = own if own is None or own.wants == "outputs" else own._wanting(wants)
        found = replace(self, wants=wants, others=others, in_evaluation=own)
        _ = found._crossings
        return found

    # Stages.

    def stage(self, layers: range) -> StageProgram:
        """The layers ``layers`` as one module, which runs on the user's own modules."""
        count = len(self.layer_names)
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise BadInput(
                f"a stage of layers {layers}, but layers must be a non-empty part of "
                f"range(0, {count}); change the plan's cuts"
            )
        is_last = layers.stop == count
        has_loss = is_last and self.wants != "outputs"
        part = program_part(self.recorded, self.cut, self._crossings, self._needs, layers)
        returned = self._outputs if is_last and self.wants != "loss" else ()
        read = leaves_of_part(self.recorded, self._needs, part, returned, with_loss=has_loss)
        received = tuple(self.spec(value) for value in part.received)
        places = self.layout.length_places
        sized = frozenset(leaves_of_sizes(read, received, self.leaves_read, places))
        inputs = tuple(sorted(read | sized))
        if self.whole_loss and has_loss and len(layers) > 1:  # its loss runs apart
            for part_of_it in (self.stage(layers[:-1]), self.stage(layers[-1:])):
                sized |= part_of_it.sized - set(inputs)
                inputs = tuple(sorted({*inputs, *part_of_it.batch_inputs}))
        events = self.recorded.record.events
        acts = any(part.makes(n, events[n]) for n in self.recorded.parts.actions)
        if self._needs_step and (has_loss or acts):
            inputs = (*inputs, len(self.layout.leaves))
        outputs = tuple(range(len(self.output_layers))) if is_last else ()
        sent = tuple(self.spec(value) for value in part.sent)
        module = StageModule(
            self,
            part,
            inputs,
            received,
            foreign=self.cut.units_elsewhere(layers),
            is_last=is_last,
            has_loss=has_loss,
            outputs=outputs,
        )
        return StageProgram(layers, module, inputs, received, sent, has_loss, outputs, sized)

    def hold_only(
        self,
        programs: Sequence[StageProgram],
        whence: Callable[[str], object] = lambda name: None,
    ) -> int:
        """Free the parameters that none of these stages holds; return the bytes freed.

        The user's `Parameter` objects stay; they are absent from now on. ``whence`` gives the
        `Whence` of each by its first name.
        """
        modules = [program.module for program in programs]
        held = {name for module in modules for name in module.stage.held.names}
        freed = 0
        for name, parameter in self.program.named_parameters():
            if name not in held:
                freed += release(parameter, whence(self.tied_names.get(name, name)))
        for module in modules:
            module.stage.hold(alone=False)
        return freed


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned that was called without a loss function."""
    if isinstance(output, Mapping):
        found: Any = output.get("loss")  # pyright: ignore
    else:
        found = getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) else None
