"""Explains errors of tracing in terms of the user's code.

Conditions on the number of samples that tracing could not prove but that always hold.

The code of a model that reshapes may ask whether ``16 * rows * min(64, 1024 * rows)`` equals
``1024 * rows``. It does for any number of rows, but PyTorch cannot simplify it and gives up.
"""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import CaptureFailed

__all__ = [
    "REMEDY",
    "GoesByValues",
    "LengthFixed",
    "capture_failed",
    "current_line",
    "data_dependent",
    "first_line",
    "fixes_samples",
    "frames_of",
    "guards_in",
    "hold_for_all_rows",
    "line_of",
    "running_modules",
]

_OURS = Path(__file__).parents[1]
_LIBRARIES = (Path(torch.__file__).parent, _OURS)
REMEDY = "write the model as penstock.Chain([...]), whose modules are not traced"
"""The alternative if tracing is not possible."""


class LengthFixed(CaptureFailed):
    """The model's code can be traced only for one length at a time."""


class GoesByValues(CaptureFailed):
    """Python code depends on values, at the line that the message names.

    ``within`` are the functions that ran there (`Callee`), innermost first; it is given if the
    traceback does not show them.
    """

    def __init__(self, message: str, within: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.within = tuple(within)


def capture_failed(
    error: BaseException, model_name: str, lengths: Mapping[str, str] | None = None
) -> CaptureFailed:
    """The `CaptureFailed` to raise for ``error``, which tracing a model raised.

    ``lengths`` are the names of the lengths, by the names that PyTorch gives them.
    """
    text = first_line(error)
    where = _user_line(error)
    at = f" at {where}" if where else ""
    for called, name in (lengths or {}).items():
        if f"{called} as dynamic but your code specialized it" in str(error):
            return LengthFixed(
                f"{model_name} cannot be captured for every '{name}': its code fixes it{at}; take "
                "the size from the input (x.shape[1], -1) instead of a number or a loop over it, "
                f"or have it captured once for each of some lengths: Length('{name}', "
                "buckets=(16, 32, 64))"
            )
    if fixes_samples(error):
        size = re.search(r"specialized it to be a constant \((\d+)\)", str(error))
        value = f" ({size.group(1)})" if size else ""
        return CaptureFailed(
            f"{model_name} cannot be captured: its code fixes the number of samples{value}{at}, "
            "but slices of a batch have other sizes; take the size from the input "
            "(x.shape[0], -1), "
            f"or {REMEDY}"
        )
    kept = re.search(r"following model attribute: model\.(.*?)\.?lifted_tensor", str(error))
    if kept is not None:
        return CaptureFailed(
            f"{model_name} cannot be captured: '{kept.group(1) or model_name}' changes a tensor "
            "through .data, or keeps one that forward made, which tracing cannot follow; make such "
            f"a tensor a buffer, change weights outside of forward, or {REMEDY}"
        )
    if guards := guards_in(error):
        return CaptureFailed(
            f"{model_name} cannot be captured{at}: what its code does holds only for numbers of "
            f"samples with {guards[0]}, as far as tracing can tell, but slices of a batch have "
            f"other sizes; take sizes from the input (x.shape[0], -1), or {REMEDY}"
        )
    if data_dependent(error):
        return CaptureFailed(
            f"{model_name} cannot be captured: its control flow depends on values{at}; "
            f"rewrite the line with tensor operations such as torch.where, or {REMEDY}"
        )
    if isinstance(error, TypeError) and "forward()" in text:
        return CaptureFailed(
            f"{model_name} does not accept the example batch: {text}; make the batch fit forward's "
            "arguments, and pass loss=... if its last entry is the target"
        )
    return CaptureFailed(
        f"{model_name} cannot be captured{at}: {type(error).__name__}: {text.rstrip('.')}; "
        f"check that the model runs on the example batch; if it does, {REMEDY}"
    )


def line_of(node: fx.Node) -> str:
    """``file:line `source` `` of the user's code that a traced operator comes from, or ""."""
    trace = str(node.meta.get("stack_trace") or "")
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n([^\n]*)', trace)
    for file, line, source in reversed(found):
        if not any(Path(file).is_relative_to(library) for library in _LIBRARIES):
            return f"{file}:{line} `{source.strip()}`"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _user_line(error: BaseException) -> str:
    """``file:line `source` `` of the innermost frame outside torch and Penstock, or ""."""
    for one in _chain(error):
        frames = list(traceback.extract_tb(one.__traceback__))
        frames += list(getattr(one, "real_stack", None) or [])
        if line := _innermost_line(frames):
            return line
    return ""


def current_line() -> str:
    """``file:line `source` `` of the user's code that is running, or ""."""
    return _innermost_line(traceback.extract_stack())


def _innermost_line(frames: Sequence[traceback.FrameSummary]) -> str:
    for frame in reversed(frames):
        path = Path(frame.filename)
        if any(path.is_relative_to(library) for library in _LIBRARIES):
            continue
        if not path.exists() or path.name == "contextlib.py":
            continue
        if _called_capture(frame.line or ""):
            break
        return f"{frame.filename}:{frame.lineno} `{frame.line}`"
    return ""


def _called_capture(line: str) -> bool:
    """Whether a frame is the caller of capture instead of code of the model."""
    return "capture_model(" in line or "Pipeline(" in line


def running_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods called ``frame``, innermost first."""
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            yield found
        frame = frame.f_back


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames that raised ``error``, innermost first, then those of its causes."""
    for one in _chain(error):
        yield from reversed([frame for frame, _ in traceback.walk_tb(one.__traceback__)])


def fixes_samples(error: BaseException) -> bool:
    """Whether tracing failed because the code fixes the number of samples."""
    text = str(error)
    return "specialized" in text or ("Constraints violated" in text and "constant" in text)


def data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because Python code needs the values of tensors."""
    names = {type(one).__name__ for one in _chain(error)}
    if names & {"GuardOnDataDependentSymNode", "DataDependentOutputException"}:
        return True
    return "data-dependent" in str(error).lower()


MOST_ROWS = 256
"""Conditions are tried for numbers of samples up to this one."""

_SAMPLES = re.compile(r"L\['leaves'\]\[\d+\]\.size\(\)\[0\]")
_GUARD = re.compile(r"satisfy the generated guard (.*[^.\s])")


def guards_in(error: BaseException) -> list[str]:
    """The conditions that ``error`` reports, with ``rows`` for the samples of any tensor."""
    return [_SAMPLES.sub("rows", guard) for guard in _GUARD.findall(str(error))]


def hold_for_all_rows(error: BaseException) -> bool:
    """Whether all conditions that ``error`` reports hold for any number of samples.

    They are tried, not proven: size formulas that hold for all numbers up to `MOST_ROWS` are taken
    as true.
    """
    guards = guards_in(error)
    complaints = re.findall(r"^\s+- ", str(error), re.MULTILINE)
    if not guards or len(complaints) != len(guards):
        return False
    names = {"__builtins__": {}, "min": min, "max": max}
    try:
        return all(
            eval(guard, names, {"rows": rows})
            for guard, rows in product(guards, range(1, MOST_ROWS + 1))
        )
    except (NameError, SyntaxError, TypeError, ZeroDivisionError):
        return False
