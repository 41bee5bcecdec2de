"""Runs only one of several layers with the same operators and shapes, since they cost the same."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from penstock.measure.layer_runs import LayerRun
from penstock.measure.same_work import work_of
from penstock.measure.saved_tensors import SavedStorages, storage_address

__all__ = ["EqualLayers"]

Cost = TypeVar("Cost")


@dataclass(frozen=True)
class _Known(Generic[Cost]):
    """The cost of a layer, and what it did to its inputs (by index) and outputs.

    ``source`` is the index of the input that an output shares its storage with, or -1.
    """

    cost: Cost
    outputs: Sequence[torch.Tensor]
    source: Sequence[int]
    saved_inputs: Sequence[int]
    saved_outputs: Sequence[int]


class EqualLayers(Generic[Cost]):
    """Caches the costs of layers on tensors without values, by the work that the layers do.

    ``storages`` are those that the layers have saved so far.
    """

    def __init__(self, storages: SavedStorages) -> None:
        self._storages = storages
        self._known: dict[Hashable, _Known[Cost]] = {}

    def run(
        self, run: LayerRun, visit: Callable[[], tuple[tuple[torch.Tensor, ...], Cost]]
    ) -> tuple[tuple[torch.Tensor, ...], Cost]:
        """Outputs and cost of a layer: from ``visit``, or derived from an equal layer."""
        key = self._key(run)
        inputs = (*run.leaves, *run.received)
        if key is None:
            return visit()
        if key not in self._known:
            outputs, cost = visit()
            addresses = [storage_address(tensor) for tensor in inputs]
            self._known[key] = _Known(
                cost,
                outputs,
                [_position(storage_address(tensor), addresses) for tensor in outputs],
                self._saved(inputs),
                self._saved(outputs),
            )
            return outputs, cost
        known = self._known[key]
        outputs = tuple(
            inputs[source] if source >= 0 else _like(tensor)
            for tensor, source in zip(known.outputs, known.source, strict=True)
        )
        self._storages.ignore(inputs[k] for k in known.saved_inputs)
        self._storages.ignore(outputs[k] for k in known.saved_outputs)
        return outputs, known.cost

    def _saved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [k for k, tensor in enumerate(tensors) if self._storages.knows(tensor)]

    def _key(self, run: LayerRun) -> Hashable | None:
        """All that the cost of a layer depends on; None for layers that are not captured graphs."""
        work = work_of(run)
        return work and (work, tuple(map(self._storages.knows, (*run.leaves, *run.received))))


def _position(address: int, addresses: Sequence[int]) -> int:
    return addresses.index(address) if address in addresses else -1


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).requires_grad_(tensor.requires_grad)
