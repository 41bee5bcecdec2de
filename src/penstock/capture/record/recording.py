"""One run of the user's program on the example: it is recorded while it runs as it is."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from penstock.capture.record.absent import fresh_results, functions_through, scripts_seen
from penstock.capture.record.calls import ProgramRecord, RecordedCall
from penstock.capture.record.function_calls import FunctionCalls
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.model_state import exchanged
from penstock.capture.record.module_calls import ModuleCalls
from penstock.capture.record.regions import find_dependent, keep_with_writes, open_blocks
from penstock.capture.record.tensor_facts import TensorFacts
from penstock.capture.record.unit_runs import UnitRuns
from penstock.capture.record.units import modules_between


class Recording:
    """Recording of what ``program`` does while it is active; the result is ``record``.

    ``units`` are paths of modules, ``blocks`` modules that hold several of them. See `UnitRuns` for
    ``originals`` and ``valued``, `ProgramRecord` for ``varying``.
    """

    def __init__(
        self,
        program: UserProgram,
        units: Sequence[str],
        blocks: Collection[str],
        originals: Mapping[str, torch.Tensor],
        valued: set[str] | None,
        varying: Collection[str] = (),
    ) -> None:
        between = tuple(modules_between(program, units))
        self.record = ProgramRecord(program, units, frozenset(varying), between)
        self.tensors = TensorFacts(self.record, originals)
        runs = UnitRuns(program, self.tensors, originals, valued)
        self._modules, self._blocks = ModuleCalls(self.record, self.tensors, runs), blocks
        self.functions = FunctionCalls(self.record, self.tensors, self._modules)

    def add_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Let the leaves of the batch be values, each made by an event of its own."""
        tensors, shared = self.tensors, self.record.program.call.layout.shared
        for number, leaf in enumerate(leaves):
            self.record.events.append(RecordedCall(("", number), leaves={number}))
            tensors.make(0, leaf)
            tensors.batch[leaf] = number
            if number in shared:
                tensors.apart[leaf] = True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record the calls of the program that runs meanwhile."""
        record, modules, functions = self.record, self._modules, self.functions
        with exchanged(modules.replaced(self._blocks)), functions_through(functions.own_function):
            modules.begin()
            try:
                seen = scripts_seen(partial(setattr, record, "has_scripts", True))
                with fresh_results(), seen, functions:
                    yield
            finally:
                modules.is_active = False
                record.regions += [(first, last) for _, first, last in record.checkpoints.values()]
                find_dependent(record)
                self.tensors.note_assigned()
                keep_with_writes(record, self.tensors.owner)
                open_blocks(record)

    def end_model(self) -> None:
        """Note that the model has returned, and the loss function has not begun."""
        self.record.model_end = len(self.record.events)
