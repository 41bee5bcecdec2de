"""The position of a data loader, so that a resumed run continues with the very next batch."""

import base64
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, RandomSampler

from penstock.errors import BadInput
from penstock.runtime.serialization import from_bytes, to_bytes


class StatefulLoader(Protocol):
    """A loader whose position can be saved: `ResumableLoader`, or torchdata's stateful loader."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at that position at the next iteration."""
        ...


class ResumableLoader:
    """A `DataLoader` that records its position, down to the batch.

        loader = ResumableLoader(DataLoader(data, 32, shuffle=True, generator=generator))
        for epoch in range(loader.epoch, 10):
            for batch in loader:
                pipe.step(batch)
                pipe.save("checkpoints", loader=loader)

    Each pass begins from the current state of the loader's ``generator``. A resumed pass begins
    from the saved state, and reads and drops the batches that were already used. Random numbers
    that the data set draws for them have no effect.

    Raises:
        BadInput: the loader shuffles with the global generator, which differs from rank to rank.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.sampler, RandomSampler) and loader.generator is None:
            raise BadInput(
                "the DataLoader shuffles without a generator of its own, so ranks could draw "
                "different batches; give it generator=torch.Generator().manual_seed(...)"
            )
        self.loader = loader
        self.epoch = 0
        self._taken = 0
        self._resumed = False
        self._start: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        generator, resumed = self.loader.generator, self._resumed
        if generator is not None and resumed and self._start is not None:
            generator.set_state(self._start)
        elif generator is not None:
            self._start = generator.get_state()
        if not resumed:
            self._taken = 0
        self._resumed = False
        with torch.random.fork_rng(devices=[]) if self._taken else nullcontext():
            batches = iter(self.loader)
            for _ in range(self._taken):
                next(batches, None)
        for batch in batches:
            self._taken += 1
            yield batch
        self.epoch, self._taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The number of complete passes, the batches used of this pass, and its random state."""
        generator = self.loader.generator
        start = self._start
        if not self._taken:
            start = generator.get_state() if generator is not None else None
        return {"epoch": self.epoch, "taken": self._taken, "generator": start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches that were already used."""
        self.epoch, self._taken = state_dict["epoch"], state_dict["taken"]
        self._start = state_dict["generator"]
        self._resumed = True


def loader_to_text(loader: StatefulLoader) -> str:
    """The state of a loader as text."""
    name = f"the state of the {type(loader).__name__}"
    data = bytes(to_bytes(loader.state_dict(), name))
    from_bytes(data, name)
    return base64.b64encode(data).decode("ascii")


def loader_from_text(loader: StatefulLoader, text: object, name: str) -> None:
    """Restore a loader from what `loader_to_text` made; ``name`` is the checkpoint's name."""
    if not isinstance(text, str):
        what = "no place in a loader" if text is None else "a place of an earlier version"
        raise BadInput(
            f"checkpoint '{name}' holds {what}; save it with loader=..., or load without"
        )
    name = f"the loader's place in checkpoint '{name}'"
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as cause:
        raise BadInput(f"{name} cannot be read ({cause}); it is damaged") from cause
    loader.load_state_dict(from_bytes(data, name))
