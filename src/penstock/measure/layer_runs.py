"""Run a captured model layer by layer; each layer gets what the previous ones produced."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from penstock.capture.forward.call import ProgramCall, casts_kept, entering
from penstock.capture.forward.deferred_weights import DeferredGradients
from penstock.capture.forward.materialise import check_values
from penstock.capture.forward.partial_forward import Costs
from penstock.capture.forward.restored import kept_attributes, kept_buffers
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.outside_state import kept_random_state
from penstock.capture.record.stand_ins import with_values
from penstock.capture.record.torch_calls import backward_seen
from penstock.measure.clock import Stopwatch, work_s
from penstock.torch_internals import TorchDispatchMode, pytree, storage_id


@dataclass(frozen=True)
class RunSettings:
    """The device of layers, and the type of matrix products (None: that of the parameters)."""

    device: torch.device
    autocast: torch.dtype | None = None

    def precision(self) -> AbstractContextManager[object]:
        """The autocast context of a forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def casting_once(self) -> AbstractContextManager[object]:
        """A context around forwards between which no weight changes, as those of an iteration."""
        return casts_kept(self.device, self.autocast)


@dataclass(frozen=True)
class LayerRun:
    """One layer (or stage) with its inputs: those from the batch, then those received."""

    program: StageProgram
    leaves: tuple[torch.Tensor, ...]
    received: tuple[torch.Tensor, ...]
    settings: RunSettings

    def forward(
        self,
        begin: Callable[[], None] | None = None,
        deferred: DeferredGradients | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the layer; its outputs hold the autograd graph for a backward.

        A layer runs the user's forward, in which the calls of other layers are left out. ``begin``
        is called before the first call of this layer, unless it is the first layer. ``deferred`` is
        that of `ProgramCall`.
        """
        module = self.program.module
        module.stage.on_begin = begin
        try:
            with self.settings.precision():
                if deferred is not None:
                    return ProgramCall(module).run(self.leaves, self.received, deferred)
                return module.run(self.leaves, self.received)
        finally:
            module.stage.on_begin = None  # it would keep what ``begin`` knows of

    def differentiable(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs that gradients start from; of the last layer only the loss."""
        if self.program.is_last:
            outputs = outputs[len(self.program.sent) :][:1]
        return [output for output in outputs if output.requires_grad]

    @property
    def has_checkpoints(self) -> bool:
        """Return whether its backward re-runs calls of its forward, in checkpoints of the user."""
        return self.program.module.has_checkpoints()

    def peak_of_backward(self, outputs: Sequence[torch.Tensor]) -> int:
        """Run the backward; returns the most bytes that it takes at once beyond what is saved.

        Gradients of parameters, which have memory of their own, are dropped when they are added.
        """

        def drop(parameter: torch.Tensor) -> None:
            parameter.grad = None

        trained = [p for p in self.program.module.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(drop) for p in trained]
        roots = self.differentiable(outputs)
        with PeakBytes() as peak:
            backward_seen(roots, list(map(torch.ones_like, roots)))
        for hook in hooks:
            hook.remove()
        return peak.most

    @cached_property
    def stopwatch(self) -> Stopwatch:
        """The stopwatch for this layer alone."""
        return work_s(self.settings.device, ahead=True)


def programs_of(graph: LayerGraph) -> list[StageProgram]:
    """Every layer as a stage of its own."""
    programs = [graph.stage(range(i, i + 1)) for i in range(len(graph.layer_names))]
    for program in programs:
        check_values(program)
    return programs


def resized(leaves: Sequence[torch.Tensor], samples: int) -> list[torch.Tensor]:
    """A batch of ``samples`` samples: the first ones, repeated if there are too few."""
    return [leaf[torch.arange(samples) % leaf.shape[0]] for leaf in leaves]


def walk(
    programs: Sequence[StageProgram],
    leaves: Sequence[torch.Tensor],
    settings: RunSettings,
    visit: Callable[[int, LayerRun], tuple[torch.Tensor, ...]],
    *,
    lends: bool = False,
) -> None:
    """Call ``visit`` on each layer in turn; it returns the layer's outputs.

    Received tensors are detached, as between two stages. With ``lends`` a layer is on the device
    only while it is visited, on the meta device with made-up values for that time.
    """
    last_use = {
        spec.name: index for index, program in enumerate(programs) for spec in program.received
    }
    between: dict[str, torch.Tensor] = {}
    for index, program in enumerate(programs):
        received = tuple(
            entering(between[spec.name]) if spec.requires_grad else between[spec.name].detach()
            for spec in program.received
        )
        own = tuple(leaves[leaf] for leaf in program.batch_inputs)
        values = with_values([program.module], settings.device) if lends else nullcontext()
        with values, settings.casting_once():
            outputs = visit(index, LayerRun(program, own, received, settings))
        # Without their autograd graph, which holds the layer's parameters.
        sent = [output.detach() for output in outputs[: len(program.sent)]]
        between |= {spec.name: tensor for spec, tensor in zip(program.sent, sent, strict=True)}
        del outputs
        for name in [name for name in between if last_use.get(name, -1) <= index]:
            del between[name]


@contextmanager
def undisturbed(
    graph: LayerGraph, device: torch.device, costs: Costs = "measured"
) -> Iterator[LayerGraph]:
    """The graph to find costs with, in training mode; afterwards the model is as it was."""
    whole = graph.own_module()
    gradients = [(parameter, parameter.grad) for parameter in whole.parameters()]
    graph = graph.for_costs(costs)
    with kept_random_state(device), kept_attributes(whole), kept_buffers(whole.buffers()):
        try:
            if not graph.model.training:
                graph.model.train()
            yield graph
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


class MadeTensors(TorchDispatchMode):
    """A mode that keeps the tensors made while it is active in ``kept``, unless that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.kept is not None:
            self.kept += filter(torch.is_tensor, pytree.tree_leaves(result))
        return result


class PeakBytes(TorchDispatchMode):
    """A mode that finds the most bytes that tensors made while it is active take at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._living: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(t) for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in filter(torch.is_tensor, pytree.tree_leaves(result)):
            address = storage_id(tensor)
            if address not in given and address not in self._living:
                self._living[address] = storage_bytes(tensor)
                weakref.finalize(tensor.untyped_storage(), self._living.pop, address)
        self.most = max(self.most, sum(self._living.values()))
        return result


class SavedStorages:
    """Counter of the storages that forwards save; each counts for the first that saves it.

    Storages are counted, not tensors: a view keeps its whole storage alive, and two layers that
    save one tensor keep it once. Storages in ``ignored`` do not count: parameters, buffers, and the
    batch, which is in memory anyway.
    """

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        # Keeping the tensors prevents a storage's address from being reused while known.
        self._ignored = {storage_id(tensor): tensor for tensor in ignored}
        self._known = dict(self._ignored)
        self._crossing: set[int] = set()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these either, until `forget`."""
        self._known |= {storage_id(tensor): tensor for tensor in tensors}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of ``tensor`` would not be counted."""
        return storage_id(tensor) in self._known

    def forget(self, crossing: Iterable[torch.Tensor]) -> None:
        """Release what forwards saved, except storages of ``crossing``.

        Other forwards receive those and may save them too, so they are kept for good.
        """
        self._crossing |= {storage_id(tensor) for tensor in crossing} & self._known.keys()
        kept = {address: self._known[address] for address in self._crossing}
        self._known = kept | self._ignored

    def casts_of(self, run: LayerRun) -> list[torch.Tensor]:
        """The weights in the autocast type that a layer saves, however often it runs: each once.

        They are among those that are ignored from now on, until `forget`.
        """
        if run.settings.autocast is None:
            return []
        runs: list[dict[int, torch.Tensor]] = []
        for _ in range(2):
            saved: dict[int, torch.Tensor] = {}

            def note(tensor: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
                saved.setdefault(storage_id(tensor), tensor.detach())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                run.forward()
            runs.append(saved)
        made_once = runs[0].keys() & runs[1].keys() - self._known.keys()
        given = {storage_id(tensor) for tensor in (*run.leaves, *run.received)}
        casts = [runs[0][address] for address in made_once - given]
        self.ignore(casts)
        return casts

    def saved_by(
        self, run: LayerRun, begin: Callable[[], None]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The outputs of a layer, and a tensor of each storage that its forward is first to save.

        Nothing that is saved or made before this layer counts: masks and positions, which every
        stage makes of the batch, are there once, however many layers save them. ``begin`` is that
        of `LayerRun.forward`.
        """
        fresh: list[torch.Tensor] = []
        made = MadeTensors()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            # Detached, or the graph that saves a result would hold itself.
            tensor = tensor.detach()
            address = storage_id(tensor)
            if address not in self._known:
                self._known[address] = tensor
                fresh.append(tensor)
            return tensor

        def begun() -> None:
            while fresh:
                del self._known[storage_id(fresh.pop())]
            for tensor in run.received if run.has_checkpoints else ():  # these keep what they read
                note(tensor)
            self.ignore(made.kept or ())
            made.kept = None
            begin()

        with (
            made if run.program.layers.start else nullcontext(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            outputs = run.forward(begun)
        return outputs, fresh


def storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the storage behind a tensor."""
    return tensor.untyped_storage().nbytes()
