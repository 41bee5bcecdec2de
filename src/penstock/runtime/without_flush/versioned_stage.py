"""A stage that updates its weights while micro-batches are in flight."""

from collections.abc import Callable, Sequence

import torch

from penstock.runtime.metrics import clip_factor
from penstock.runtime.stages.runner import ModuleRunner, Tensors
from penstock.runtime.without_flush.weight_versions import WeightVersions

__all__ = ["VersionedStage", "clip_gradients"]


class VersionedStage:
    """A stage's runner with the weights that its schedule prescribes.

    Micro-batches come in order, so what the runner knows by a number that comes again is counted
    here. ``update`` sums gradients, changes the weights and zeroes the gradients; it is called by
    `settle` after every ``per_update`` backwards, when their gradients are on their way upstream.
    """

    def __init__(
        self,
        runner: ModuleRunner,
        versions: WeightVersions,
        per_update: int,
        update: Callable[[], object],
    ) -> None:
        self.runner = runner
        self.versions = versions
        self._per_update = per_update
        self._update = update
        self._forwarded = 0
        self._ended = 0
        self._settled = 0

    def restart(self) -> None:
        """Nothing is in flight: count from 0 again."""
        self.versions.restart()
        self._forwarded = self._ended = self._settled = 0

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Run the stage with the weights of this forward."""
        number = self._forwarded
        self._forwarded += 1
        with self.versions.forward(number):
            return self.runner.forward(micro_batch, received)

    def recompute(self, micro_batch: int) -> Tensors:
        """Run the forward again, with the weights of the backward."""
        with self.versions.recompute(self._ended):
            return self.runner.recompute(micro_batch)

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the backward with its weights."""
        number = self._ended
        self._ended += 1
        with self.versions.backward(number):
            return self.runner.backward(micro_batch, gradients)

    def backward_input(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Not to be had: orders without a flush have whole backwards."""
        raise NotImplementedError

    def backward_weight(self, micro_batch: int) -> Tensors:
        """Not to be had: orders without a flush have whole backwards."""
        raise NotImplementedError

    def settle(self) -> bool:
        """Update the weights, if enough backwards have ended since the last time."""
        if self._ended - self._settled < self._per_update:
            return False
        self._settled = self._ended
        self.versions.update(self._update)
        return True


def clip_gradients(gradients: Sequence[torch.Tensor], limit: float | None) -> float:
    """Scale ``gradients`` to a norm of at most ``limit``, if there is one; what the norm was."""
    if not gradients:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(g).double() for g in gradients])
    norm = float(torch.linalg.vector_norm(norms))
    factor = clip_factor(norm, limit)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
