"""Runs a captured model layer by layer; each layer gets what the previous ones produced."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from penstock.capture.layer_graph import LayerGraph, StageProgram
from penstock.capture.stand_ins import is_on_meta, with_values
from penstock.capture.training_flags import kept_buffers
from penstock.measure.clock import Stopwatch, work_s

__all__ = [
    "LayerRun",
    "RunSettings",
    "SavedStorages",
    "programs_of",
    "resized",
    "storage_address",
    "storage_bytes",
    "undisturbed",
    "walk",
]


@dataclass(frozen=True)
class RunSettings:
    """Where layers run, and the type of their matrix products (None: that of the parameters).

    ``shares_cores``: more processes measure at once than there are cores.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    shares_cores: bool = False

    def precision(self) -> AbstractContextManager[object]:
        """The autocast context of a forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


@dataclass(frozen=True)
class LayerRun:
    """One layer (or stage) with its inputs: those from the batch, then those received."""

    program: StageProgram
    leaves: tuple[torch.Tensor, ...]
    received: tuple[torch.Tensor, ...]
    settings: RunSettings

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the layer; its outputs hold the autograd graph for a backward."""
        with self.settings.precision():
            return self.program.module(*self.leaves, *self.received)

    def differentiable(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs that gradients start from; of the last layer only the loss."""
        if self.program.is_last:
            outputs = outputs[len(self.program.sent) :][:1]
        return [output for output in outputs if output.requires_grad]

    @property
    def stopwatch(self) -> Stopwatch:
        """The stopwatch for this layer's device."""
        return work_s(self.settings.device, shares_cores=self.settings.shares_cores)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The inputs that need a gradient."""
        return [tensor for tensor in self.received if tensor.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters of the layer."""
        return [p for p in self.program.module.parameters() if p.requires_grad]


def programs_of(graph: LayerGraph, device: torch.device) -> list[StageProgram]:
    """Every layer as a stage of its own, on ``device``, in training mode."""
    programs = [graph.stage(range(i, i + 1)) for i in range(len(graph.layer_names))]
    for program in programs:
        if not is_on_meta(program.module):
            program.module.to(device)
        program.module.train()
    return programs


def resized(leaves: Sequence[torch.Tensor], samples: int) -> list[torch.Tensor]:
    """A batch of ``samples`` samples: the first ones, repeated if there are too few."""
    return [leaf[torch.arange(samples) % leaf.shape[0]] for leaf in leaves]


def walk(
    programs: Sequence[StageProgram],
    leaves: Sequence[torch.Tensor],
    settings: RunSettings,
    visit: Callable[[int, LayerRun], tuple[torch.Tensor, ...]],
) -> None:
    """Call ``visit`` on each layer in turn; it returns the layer's outputs.

    Received tensors are detached, as between two stages. A layer on the meta device gets made-up
    values while it is visited, so only one layer at a time has values.
    """
    last_use = {
        spec.name: index for index, program in enumerate(programs) for spec in program.received
    }
    between: dict[str, torch.Tensor] = {}
    for index, program in enumerate(programs):
        received = tuple(
            between[spec.name].detach().requires_grad_(spec.requires_grad)
            for spec in program.received
        )
        own = tuple(leaves[leaf] for leaf in program.batch_inputs)
        lent: AbstractContextManager[None] = nullcontext()
        if is_on_meta(program.module):
            lent = with_values([program.module], settings.device)
        with lent:
            outputs = visit(index, LayerRun(program, own, received, settings))
        # Without their autograd graph, which holds the layer's parameters.
        sent = [output.detach() for output in outputs[: len(program.sent)]]
        between |= {spec.name: tensor for spec, tensor in zip(program.sent, sent, strict=True)}
        del outputs
        for name in [name for name in between if last_use.get(name, -1) <= index]:
            del between[name]


@contextmanager
def undisturbed(programs: Sequence[StageProgram], device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and random state afterwards."""
    parameters = [p for program in programs for p in program.module.parameters()]
    buffers = [b for program in programs for b in program.module.buffers()]
    gradients = [p.grad for p in parameters]
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), kept_buffers(buffers):
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


Result = TypeVar("Result")


class SavedStorages:
    """Counts the storages that forwards save; each counts for the first forward that saves it.

    Storages are counted, not tensors: a view keeps its whole storage alive, and two layers that
    save one tensor keep it once. Storages in ``ignored`` do not count: parameters, buffers, and the
    batch, which is in memory anyway.
    """

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        # Keeping the tensors prevents a storage's address from being reused while known.
        self._ignored = {storage_address(tensor): tensor for tensor in ignored}
        self._known = dict(self._ignored)
        self._crossing: set[int] = set()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these either, until `forget`."""
        self._known |= {storage_address(tensor): tensor for tensor in tensors}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of ``tensor`` would not be counted."""
        return storage_address(tensor) in self._known

    def forget(self, crossing: Iterable[torch.Tensor]) -> None:
        """Release what forwards saved, except storages of ``crossing``.

        Other forwards receive those and may save them too, so they are kept for good.
        """
        self._crossing |= {storage_address(tensor) for tensor in crossing} & self._known.keys()
        kept = {address: self._known[address] for address in self._crossing}
        self._known = kept | self._ignored

    def bytes_saved_by(self, forward: Callable[[], Result]) -> tuple[Result, int]:
        """The result of ``forward``, and the bytes of the storages that it is first to save."""
        result, fresh = self.saved_by(forward)
        return result, sum(map(storage_bytes, fresh))

    def saved_by(self, forward: Callable[[], Result]) -> tuple[Result, list[torch.Tensor]]:
        """The result of ``forward``, and a tensor of each storage that it is first to save."""
        fresh: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            address = storage_address(tensor)
            if address not in self._known:
                self._known[address] = tensor
                fresh.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = forward()
        return result, fresh


def storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the storage behind a tensor."""
    return tensor.untyped_storage().nbytes()


def storage_address(tensor: torch.Tensor) -> int:
    """An identifier of the storage behind a tensor; all views share it, and fake tensors too."""
    return tensor.untyped_storage()._cdata
