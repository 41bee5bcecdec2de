"""Counts exactly how many bytes a forward saves for its backward."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

__all__ = ["SavedStorages", "storage_address", "storage_bytes"]

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
