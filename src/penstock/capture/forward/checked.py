"""A run of a stage in which every call is compared with the record.

The run is recorded in its turn. Calls that depend on parameters must be those of the record, in the
same order; what a batch alone decides (whether a mask is needed) may differ from batch to batch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from penstock.capture.forward.program_stage import PathChanged, ProgramStage
from penstock.capture.record.absent import Absent, NeedsValues
from penstock.capture.record.calls import Address, ProgramRecord, RecordedCall
from penstock.capture.record.outside_state import kept_random_state
from penstock.capture.record.recording import Recording
from penstock.capture.record.user_lines import line_in_words, line_of_user
from penstock.device import device_in_use
from penstock.errors import BadInput
from penstock.torch_internals import NoFunctionCalls, pytree, tensors_in


def checked(
    stage: ProgramStage,
    call: Callable[[], Any],
    leaves: Mapping[int, torch.Tensor],
) -> Callable[[], Any]:
    """``call``, a run of the user's program in ``stage``, which also compares its calls."""
    program, record = stage.task.program, stage.task.record

    def run() -> Any:
        again = Recording(program, record.units, (), stage.held.absent, None)
        functions: dict[Any, tuple[Any, ...]] = {}
        again.functions.on_function = partial(note_function, functions)
        again.add_leaves([leaves[index] for index in sorted(leaves)])
        again.record.events.append(RecordedCall(("", "received"), params=["received"]))
        for slot, tensor in enumerate(stage.now.received.values()):
            again.tensors.make(slot, tensor)
        try:
            with again.active():
                return call()
        finally:
            compare_calls(record, again.record)
            for kind, given in functions.items():
                with stage.aside():
                    check_gradients(kind, *given)

    return run


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, as a leaf."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def note_function(
    found: dict[Any, tuple[Any, ...]], kind: Any, call: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Keep copies of the arguments of each autograd function's first call, with its line."""
    absent = any(type(argument) is Absent for argument in args)
    if kind not in found and not absent and not kind.__module__.startswith("torch."):
        with NoFunctionCalls():
            own = pytree.tree_map_only(torch.Tensor, without_history, args)
            found[kind] = call, own, line_in_words(line_of_user())


def check_gradients(kind: Any, call: Callable[..., Any], given: tuple[Any, ...], line: str) -> None:
    """Raise `BadInput` if an autograd function gives gradients where none arrive.

    So routers inject a loss into the backward. A pipeline sums the gradients of micro-batches, and
    divides the sums by the terms of the step; what does not come from the loss would be divided,
    too.
    """
    try:
        with kept_random_state(device_in_use()), torch.enable_grad():
            made = [tensor for tensor in tensors_in(call(*given)) if tensor.requires_grad]
            read = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            zeros = [torch.zeros_like(tensor) for tensor in made]
            found = torch.autograd.grad(made, read, zeros, allow_unused=True) if made else ()
            injects = any(bool(gradient.any()) for gradient in found if gradient is not None)
    except (NeedsValues, Exception):  # it does not run by itself; the comparison sees more
        return
    if injects:
        raise BadInput(
            f"{kind.__name__} at {line} gives gradients in its backward that do not come from the "
            f"loss, and a pipeline would divide them by the samples of the step, too; return the "
            f"term from the model, and add it to the loss"
        )


def compare_calls(record: ProgramRecord, again: ProgramRecord) -> None:
    """Raise `PathChanged` if the calls of the record are not made in order, up to a stage's end.

    More calls of functions may be made, by hooks that the user has registered since.
    """
    wanted, place = dependent_calls(record), 0
    for event in dependent_calls(again):
        expected = wanted[place].address if place < len(wanted) else None
        if event.address == expected:
            place += 1
        elif event.is_unit:
            there = call_in_words(expected) if expected is not None else "nothing more"
            raise PathChanged(
                f"{call_in_words(event.address)} is called where the example called {there}"
            )


def dependent_calls(record: ProgramRecord) -> list[RecordedCall]:
    """The calls that depend on parameters."""
    return [
        event
        for number, event in enumerate(record.events)
        if event.depends
        and event.address[0] != ""
        and not event.reads_values
        and number not in record.hooks.events
    ]


def call_in_words(address: Address) -> str:
    """A call for messages."""
    if len(address) == 2:
        return f"'{address[0]}'"
    return f"'{address[1]}' at {line_in_words(address[2])}"
