"""Repeats the dropout of a step in the user's own module: the same masks on the same samples.

    the step           stage 0 on rows 0..3    call 0, call 1
                       stage 1 on rows 0..3    call 2
                       stage 0 on rows 4..7    call 0, call 1      ...
    the module         call 0 on rows 0..7  =  call 0 on rows 0..3, call 0 on rows 4..7

`DropoutStates` records the state of the random generators before each call of dropout while the
pipeline takes the step. `SameDropout` then cuts each call in the module into the slices that the
step computed, and runs each slice from its recorded state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.capture.torch_calls import TorchCalls
from penstock.runtime.stages.replay import random_state, restore_random_state
from penstock.runtime.verify.without_dropout import RECURRENT, drops

__all__ = [
    "DropoutCall",
    "DropoutStates",
    "Masks",
    "OtherMasks",
    "SameDropout",
    "Slices",
    "masks_of",
]


class OtherMasks(Exception):
    """The module's calls of dropout differ from those of the step, so masks cannot be equal."""


@dataclass(frozen=True)
class DropoutCall:
    """A call of dropout on some rows: the generators' states before it and its tensor's shape."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    shape: tuple[int, ...]


Masks = tuple[Mapping[tuple[int, int], DropoutCall], ...]
"""For each call of dropout in the model, in order: its slices, by start and stop of their rows."""

Slices = dict[tuple[int, int, int], list[DropoutCall]]
"""The calls of a rank, in order, by stage and by start and stop of their rows."""


class Forwarding(Protocol):
    """A stage's runner; ``forwarding`` is the micro-batch whose forward is running, or -1."""

    forwarding: int


class DropoutStates(TorchCalls):
    """While active, records the calls of dropout in the forwards of a rank's stages.

    ``rows[stage][m]`` are the rows of the batch that the rank computes of micro-batch ``m``.
    """

    def __init__(
        self,
        runners: Mapping[int, Forwarding],
        rows: Mapping[int, Sequence[range]],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.found: Slices = {}
        self._runners, self._rows, self._device = runners, rows, device

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call if it is an active dropout, and run it."""
        if drops(func, args, kwargs):
            for stage, runner in self._runners.items():
                if runner.forwarding >= 0:
                    rows = self._rows[stage][runner.forwarding]
                    if rows:
                        calls = self.found.setdefault((stage, rows.start, rows.stop), [])
                        shape = tuple(args[0].shape) if args else ()
                        calls.append(DropoutCall(*random_state(self._device), shape))
        return func(*args, **kwargs)


def masks_of(ranks: Sequence[Slices]) -> Masks:
    """Merge the records of all ranks, call by call in the order of the stages.

    Raises:
        OtherMasks: slices of one stage have different numbers of calls.
    """
    of_stages: dict[int, dict[tuple[int, int], list[DropoutCall]]] = {}
    for found in ranks:
        for (stage, lo, hi), calls in found.items():
            of_stages.setdefault(stage, {})[lo, hi] = calls
    masks: list[Mapping[tuple[int, int], DropoutCall]] = []
    for _, slices in sorted(of_stages.items()):
        if len({len(calls) for calls in slices.values()}) > 1:
            raise OtherMasks
        count = len(next(iter(slices.values())))
        masks += [{rows: calls[k] for rows, calls in slices.items()} for k in range(count)]
    return tuple(masks)


class SameDropout(TorchCalls):
    """While active, dropout on some rows of a batch draws the masks of the step.

    `begin` sets the rows of the next forward, `end` marks its end. The generators' states are
    restored after each call.
    """

    def __init__(self, masks: Masks, device: torch.device) -> None:
        super().__init__()
        self._masks, self._device = masks, device
        self._rows, self._calls = range(0), 0

    def begin(self, rows: range) -> None:
        """Begin a forward of ``rows``."""
        self._rows, self._calls = rows, 0

    def end(self) -> None:
        """End the forward (raises OtherMasks if the step has called dropout more often)."""
        if self._calls != len(self._masks):
            raise OtherMasks

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run dropout slice by slice, and call everything else unchanged.

        Raises:
            OtherMasks: the step has no such call.
        """
        if not drops(func, args, kwargs):
            return func(*args, **kwargs)
        if func in RECURRENT or not args or self._calls >= len(self._masks):
            raise OtherMasks
        slices = self._slices(tuple(args[0].shape))
        self._calls += 1
        before = random_state(self._device)
        try:
            return torch.cat([self._run(func, args, kwargs, *part) for part in slices])
        finally:
            restore_random_state(self._device, *before)

    def _slices(self, shape: tuple[int, ...]) -> list[tuple[range, DropoutCall]]:
        """The slices of the next call, whose tensor has ``shape``, along its first dimension."""
        inside = [
            (lo, hi, drawn)
            for (lo, hi), drawn in sorted(self._masks[self._calls].items(), key=lambda x: x[0])
            if self._rows.start <= lo and hi <= self._rows.stop
        ]
        found: list[tuple[range, DropoutCall]] = []
        start = 0
        for lo, hi, drawn in inside:
            alike = drawn.shape[1:] == shape[1:] and len(self._rows) * drawn.shape[0] == (
                (hi - lo) * shape[0]
            )
            if not alike:
                raise OtherMasks
            found.append((range(start, start + drawn.shape[0]), drawn))
            start = found[-1][0].stop
        if start != shape[0]:
            raise OtherMasks
        return found

    def _run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        named: Mapping[str, Any],
        rows: range,
        drawn: DropoutCall,
    ) -> torch.Tensor:
        whole = args[0]

        def part(value: Any) -> Any:
            has_rows = isinstance(value, torch.Tensor) and value.dim() == whole.dim()
            if not has_rows or value.shape[0] != whole.shape[0]:
                return value
            return value[rows.start : rows.stop]

        restore_random_state(self._device, drawn.cpu, drawn.device)
        return func(*map(part, args), **{name: part(value) for name, value in named.items()})
