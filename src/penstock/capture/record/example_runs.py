"""Runs of the user's program on an example, which open and close units until they fit it."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from penstock.capture.record.absent import Absent, NeedsValues, UnknownSize
from penstock.capture.record.calls import ProgramRecord
from penstock.capture.record.failures import does_not_run, first_line_of_error, innermost_module
from penstock.capture.record.model_and_loss import Returned, UserProgram
from penstock.capture.record.recording import Recording
from penstock.capture.record.sizes import BatchSize
from penstock.capture.record.units import Granularity, blocks_around, units_of
from penstock.capture.record.user_lines import line_of
from penstock.device import without_nested_tensors
from penstock.errors import CaptureFailed, PenstockError


@dataclass
class Attempt:
    """Findings about the units so far.

    ``opened`` and ``closed`` have reasons; ``varying`` are called more often in other batches.
    """

    granularity: Granularity
    training: bool = True
    with_loss: bool = True
    opened: dict[str, str] = field(default_factory=dict[str, str])
    closed: dict[str, str] = field(default_factory=dict[str, str])
    valued: set[str] = field(default_factory=set[str])
    varying: set[str] = field(default_factory=set[str])
    with_values: bool = False
    settled: bool = False
    failure: Exception | None = None
    """Failure of the program outside of modules, with tensors without values."""

    def give_values(self) -> None:
        """Run with the values of the model and the batch; no unit needs made-up ones then."""
        self.with_values = True
        self.valued.clear()


class Again(Exception):
    """The units have changed: record again."""


class NotThere(Exception):
    """The program failed on an optional probe batch."""


class ExampleRuns:
    """Runs on copies of a program, with the units that an attempt has found so far.

    ``leaves`` are those of the example, of at least two samples: with one it would be ambiguous
    which sizes are the samples.
    """

    def __init__(
        self,
        program: UserProgram,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        attempt: Attempt,
        autocast: torch.dtype | None,
    ) -> None:
        self.program, self.device = program, device
        self.attempt, self._autocast = attempt, autocast
        self._originals: Mapping[str, torch.Tensor] = dict(program.named_parameters())
        layout = program.call.layout
        lengths = layout.lengths_of(dict(enumerate(leaves))) if layout.lengths else ()
        self.example = BatchSize(leaves[0].shape[0], lengths)
        self.leaves = [torch.cat([t, t]) for t in leaves] if leaves[0].shape[0] == 1 else leaves
        self.size = BatchSize(self.leaves[0].shape[0], lengths)

    def copy(self) -> UserProgram:
        """A copy of the program without values, in the mode of the attempt."""
        copied = self.program.without_values(keeps_parameters=self.attempt.with_values)
        for root in copied.root_names if not self.attempt.training else ():
            copied.module(root).eval()
        if self.attempt.training and not copied.model.training:
            copied.model.train()
        return copied

    def recording(self, program: UserProgram) -> Recording:
        """A recording of a copy, with the units of the attempt."""
        attempt = self.attempt
        units = units_of(program, attempt.granularity, attempt.opened, attempt.closed)
        blocks = blocks_around(program, units, attempt.opened)
        return Recording(program, units, blocks, self._originals, attempt.valued, attempt.varying)

    def once(
        self, leaves: Sequence[torch.Tensor], size: BatchSize, *, must_run: bool = True
    ) -> ProgramRecord:
        """The record of a run on a copy of the program."""
        recording = self.recording(self.copy())
        self.run(recording, leaves, size, must_run=must_run)
        return recording.record

    def run(
        self,
        recording: Recording,
        leaves: Sequence[torch.Tensor],
        size: BatchSize,
        *,
        must_run: bool = True,
    ) -> Returned:
        """Run a recorded copy; raises `Again` if the units have changed.

        If it need not run and fails, `NotThere`.
        """
        record, program = recording.record, recording.record.program
        torch.manual_seed(0)
        precision: Any = contextlib.nullcontext()
        if self._autocast is not None:
            precision = torch.autocast(self.device.type, self._autocast)
        own = [
            Absent.of(leaf.detach()) if leaf.is_meta else leaf.to(self.device).clone()
            for leaf in leaves
        ]
        recording.add_leaves(own)
        try:
            with (
                program.without_caches(),
                without_nested_tensors(),
                torch.set_grad_enabled(self.attempt.training),
                precision,
                recording.active(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # the user's own runs give these too
                given, with_loss = dict(enumerate(own)), self.attempt.with_loss
                result = program.run(given, with_loss=with_loss, on_output=recording.end_model)
        except PenstockError:
            raise
        except (NeedsValues, Exception) as error:
            if not must_run:
                raise NotThere from error
            self._on_failure(error, program, size)
        if recording.tensors.has_unknown and not self.attempt.with_values and not self._is_on_meta:
            self.attempt.give_values()
            raise Again
        opened = self.attempt.opened
        fresh = {path: why for path, why in record.opened.items() if path not in opened}
        if fresh:
            opened |= fresh
            for path in fresh:
                self.attempt.closed.pop(path, None)
            raise Again
        return result

    def open(self, path: str, why: str) -> NoReturn:
        """Open a unit, and record again."""
        if path in self.attempt.opened:
            raise CaptureFailed(
                f"'{path}' of {type(self.program.model).__name__} cannot be left out as a whole "
                f"({why}), and not be opened either; move that out of it"
            )
        self.attempt.opened[path] = why
        self.attempt.closed.pop(path, None)
        raise Again

    def _on_failure(
        self, error: NeedsValues | Exception, program: UserProgram, size: BatchSize
    ) -> NoReturn:
        """The program needs values, or failed, maybe since it was given tensors without values.

        Then the module in which it did is closed, so that its stage runs it on whole tensors, or
        the model is given values. What fails outside of modules would fail in every stage but one.
        """
        attempt = self.attempt
        path = innermost_module(error.__traceback__, program)
        no_values = not attempt.with_values and not self._is_on_meta
        # No module can be closed around a size that was made before it.
        can_close = not isinstance(error, UnknownSize if no_values else Exception)
        if can_close and path is not None and path not in {*attempt.closed, *attempt.opened}:
            attempt.closed[path] = first_line_of_error(error)
            raise Again from error
        if no_values:
            attempt.give_values()
            attempt.failure = error if isinstance(error, Exception) else None
            raise Again from error
        if isinstance(error, Exception):
            raise does_not_run(program, error, size, self.example) from error
        where = line_of(error.__traceback__) or "an unknown line"
        raise CaptureFailed(
            f"{type(program.model).__name__} needs {error} at {where}, and the model has no "
            f"values; build it on the CPU, or write the line with tensor operations such as "
            f"torch.where"
        ) from error

    def settle(self, changed: str) -> None:
        """Let the user's model do what it does once: some replace modules in their first forward.

        Buffers are put back.
        """
        program = self.program
        name = type(program.model).__name__
        if self._is_on_meta:
            raise CaptureFailed(
                f"{name} replaces modules of its own in forward, which takes values; build it on "
                f"the CPU and run it once before"
            )
        if self.attempt.settled:
            raise CaptureFailed(
                f"forward of {name} replaces its modules ({changed or 'some'}) with every call, "
                f"and stages need the same modules each time; build them in __init__"
            )
        self.attempt.settled = True
        buffers = {name: buffer.clone() for name, buffer in program.named_buffers()}
        own = {i: leaf.to(self.device).clone() for i, leaf in enumerate(self.leaves)}
        with torch.no_grad(), program.without_caches():
            program.run(own)
            for name, buffer in program.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])

    @property
    def _is_on_meta(self) -> bool:
        """Return whether the model has no values."""
        return any(t.is_meta or type(t) is Absent for t in self._originals.values())
