"""The random numbers of a rank's stages (dropout), separate from those of the user's script.

All ranks must iterate the same batches. So a script that shuffles with the global generator needs
that generator in the same state on all ranks. But dropout must differ between replicas, or all
would drop the same units. So stages draw from their own stream, seeded by seed and rank.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.capture.forward.partial_forward import RunContext
from penstock.capture.forward.stage_module import StageModule
from penstock.capture.record.outside_state import (
    RandomState,
    random_state,
    restore_random_state,
)
from penstock.device import seeded_generator_state
from penstock.torch_internals import own_buffers


class RandomStream:
    """One rank's stream: the state of the generators of the CPU and of ``device``."""

    def __init__(self, device: torch.device, seed: int, rank: int) -> None:
        self._device, self._seed = device, seed
        digest = hashlib.sha256(f"{seed}:rank {rank}".encode()).digest()
        number = int.from_bytes(digest[:8], "little") >> 1
        own = seeded_generator_state(device, number)
        self.state: RandomState = torch.Generator().manual_seed(number).get_state(), own

    def name(self, step: int, number: int = 0) -> tuple[int, ...]:
        """Unique name of a batch, of several of a step, among all others and those of other seeds.

        It is equal on all ranks: what stages draw equally follows from it.
        """
        return self._seed, step, number

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Continue this stream in the global generators; they are restored afterwards."""
        before = random_state(self._device)
        restore_random_state(self._device, self.state)
        try:
            yield
        finally:
            self.state = random_state(self._device)
            restore_random_state(self._device, before)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Do the same as `drawn`; afterwards restore this stream, too."""
        kept = self.state
        try:
            with self.drawn():
                yield
        finally:
            self.state = kept

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """The state by name, for a checkpoint."""
        cpu, own = self.state
        found = {f"{prefix}.stages": cpu}
        return found if own is None else {**found, f"{prefix}.stages.device": own}

    def restore(self, tensors: dict[str, torch.Tensor], prefix: str) -> None:
        """Restore what `tensors` returned; a missing state stays unchanged."""
        cpu = tensors.get(f"{prefix}.stages", self.state[0])
        own = tensors.get(f"{prefix}.stages.device", self.state[1])
        self.state = cpu, None if self.state[1] is None else own


@contextmanager
def on_trial(module: StageModule, device: torch.device) -> Iterator[RandomState]:
    """Run a stage with gradients, and without effect on buffers, state and random numbers."""
    context, before = module.context, random_state(device)
    module.set_context(RunContext(trial=True))
    with replayed(module, device, before), torch.enable_grad():
        yield before
    module.set_context(context)


@contextmanager
def replayed(module: nn.Module, device: torch.device, before: RandomState) -> Iterator[None]:
    """Replay dropout from the state ``before``; writes to buffers have no effect.

    The module gets copies of its buffers. Restoring the old values instead would not work: autograd
    may have saved a buffer for the backward, and rejects one that was written to in between.
    """
    after = random_state(device)
    restore_random_state(device, before)
    originals: list[tuple[nn.Module, str, torch.Tensor]] = []
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            originals.append((part, name, buffer))
            own_buffers(part)[name] = buffer.clone()
    try:
        yield
    finally:
        for part, name, buffer in originals:
            own_buffers(part)[name] = buffer
        restore_random_state(device, after)
