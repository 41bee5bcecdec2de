"""Reasons why a program cannot be recorded: one line with the user's line and what to change."""

import traceback
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.sizes import BatchSize
from penstock.capture.record.user_lines import line_of
from penstock.errors import CaptureFailed
from penstock.torch_internals import has_global_hooks


class LengthRefused(CaptureFailed):
    """The program does not run where one of its lengths is another."""


def does_not_run(
    program: UserProgram, error: BaseException, size: BatchSize, example: BatchSize
) -> CaptureFailed:
    """The error to raise where a batch of ``size`` failed; the user's has the size ``example``."""
    name, layout = type(program.model).__name__, program.call.layout
    text, where = first_line_of_error(error), line_of(error.__traceback__)
    what = f"{type(error).__name__}{f' at {where}' if where else ''}: {text.rstrip('.')}"
    if size.samples != example.samples:
        several = any(leaf.rows > 1 for leaf in layout.leaves)
        alone = next((leaf.name for leaf in layout.leaves if leaf.rows == 1), "")
        assumed = f"; {alone} has {example.samples} rows, so {example.samples} samples were assumed"
        remedy = "take sizes from the input (x.shape[0], -1)"
        if isinstance(error, IndexError):
            remedy += ", and index samples by numbers of the batch in the loop, not in forward"
        return CaptureFailed(
            f"{name} does not run on {size.samples} samples, and micro-batches have other numbers "
            f"of samples than the example batch ({example.samples}): {what}; {remedy}"
            f"{assumed if several and alone else ''}"
        )
    changed = [i for i, length in enumerate(size.lengths) if length != example.lengths[i]]
    if changed:
        i = changed[0]
        length = layout.lengths[i].name
        return LengthRefused(
            f"{name} does not run where '{length}' is {size.lengths[i]} instead of "
            f"{example.lengths[i]}: {what}; take the size from the input (x.shape[1], -1), or "
            f"leave '{length}' out of dynamic and pad all batches to one length"
        )
    if isinstance(error, TypeError) and "forward()" in text:
        return CaptureFailed(
            f"{name} does not accept the example batch: {text}; make the batch fit forward's "
            f"arguments, and pass loss=... if its last entry is the target"
        )
    if "'TensorReference' object" in text:
        return only_whole(program, error)
    return CaptureFailed(
        f"{name} does not run on the example batch: {what}; see that it runs on the batch by itself"
    )


def only_whole(program: UserProgram, error: BaseException) -> CaptureFailed:
    """The error to raise where code between modules runs on tensors with values only."""
    where = line_of(error.__traceback__)
    return CaptureFailed(
        f"{type(program.model).__name__} cannot be cut into stages: {type(error).__name__}"
        f"{f' at {where}' if where else ''}, where a tensor is of another stage: "
        f"{first_line_of_error(error).rstrip('.')}; move the line into a module of its own, "
        f"which is run whole"
    )


def check_model(program: UserProgram) -> None:
    """Raise `CaptureFailed` for what no stage could run in parts."""
    name = type(program.model).__name__
    for own, tensor in (*program.named_parameters(), *program.named_buffers()):
        if is_lazy(tensor):
            raise CaptureFailed(
                f"'{own}' of {name} has no shape before its lazy module has run; run the model on "
                f"a batch first"
            )
    for path, module in program.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"'{path}' of {name}" if path else "the model"
            raise CaptureFailed(
                f"{where} is a torch.jit.ScriptModule, whose code and tensors are not Python's; "
                f"pass the module that it was made of"
            )
    if has_global_hooks():
        raise CaptureFailed(
            f"{name} cannot be captured: there are backward hooks for all modules "
            f"(register_module_full_backward_hook, FlopCounterMode), which would also run where a "
            f"stage leaves modules out; register them on the modules that need them"
        )


def first_line_of_error(error: BaseException) -> str:
    """The first line of an error's message, cut to 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def innermost_module(trace: Any, program: UserProgram) -> str | None:
    """The innermost module of the user, not the outermost, whose forward was running."""
    paths = {id(module): path for path, module in program.named_modules()}
    found: str | None = None
    for frame, _ in traceback.walk_tb(trace):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and frame.f_code.co_name == "forward":
            path = paths.get(id(module))
            if path is not None and path not in program.root_names:
                found = path
    return found
