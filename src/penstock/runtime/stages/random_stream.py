"""The random numbers of a rank's stages (dropout), separate from those of the user's script.

All ranks must iterate the same batches. So a script that shuffles with the global generator needs
that generator in the same state on all ranks. But dropout must differ between replicas, or all
would drop the same units. So stages draw from their own stream, seeded by seed and rank.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from penstock.runtime.stages.replay import random_state, restore_random_state

__all__ = ["RandomState", "RandomStream"]

RandomState: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""The states of the generators of the CPU and of the device, if it is a GPU."""


class RandomStream:
    """One rank's stream: the state of the generators of the CPU and of ``device``."""

    def __init__(self, device: torch.device, seed: int, rank: int) -> None:
        self._device = device
        digest = hashlib.sha256(f"{seed}:rank {rank}".encode()).digest()
        number = int.from_bytes(digest[:8], "little") >> 1
        own = None
        if device.type == "cuda":
            own = torch.Generator(device).manual_seed(number).get_state()
        self.state: RandomState = torch.Generator().manual_seed(number).get_state(), own

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Within, the global generators continue this stream; they are restored afterwards."""
        before = random_state(self._device)
        restore_random_state(self._device, *self.state)
        try:
            yield
        finally:
            self.state = random_state(self._device)
            restore_random_state(self._device, *before)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within, the same as `drawn`; afterwards this stream is restored too."""
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
