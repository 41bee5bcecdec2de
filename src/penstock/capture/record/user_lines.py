"""Lines of the user's code: parts of the addresses of calls, and of messages."""

import linecache
import os
import sys
import traceback
from types import CodeType
from typing import Any, TypeAlias

import torch

Line: TypeAlias = tuple[str, int]

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_SKIPPED = (
    os.path.dirname(torch.__file__),
    *(os.path.join(_OURS, part, "") for part in ("capture", "measure", "rehearse", "runtime")),
    os.path.join(_OURS, "torch_internals.py"),
    "<frozen",
)
_START = os.path.join(_OURS, "capture", "record", "model_and_loss.py")
"""File whose frames call the user's program: what is further out is no part of it."""

_is_users: dict[CodeType, bool] = {}


def line_of_user(depth: int = 2) -> Line:
    """The file and line of the user's code (or a library's) that is running.

    Where only torch's own modules are, as in a Sequential, it is ("torch", 0).
    """
    frame: Any = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        own = _is_users.get(code)
        if own is None:
            own = _is_users[code] = not code.co_filename.startswith(_SKIPPED)
        if own:
            return code.co_filename, frame.f_lineno
        if code.co_filename == _START:
            break
        frame = frame.f_back
    return "torch", 0


def line_of(trace: Any) -> str:
    """The innermost line of the user's code in a traceback; empty if there is none."""
    own = ""
    for frame, number in traceback.walk_tb(trace):
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, *_SKIPPED)):
            own = line_with_source((name, number))
    return own


def line_in_words(line: Line | None) -> str:
    """``model.py:12``."""
    return f"{os.path.basename(line[0])}:{line[1]}" if line and line[1] else "a line of torch"


def line_with_source(line: Line | None) -> str:
    """``/home/me/model.py:12 `return a * b` ``, for messages that say what to change."""
    source = linecache.getline(*line).strip() if line is not None else ""
    return f"{line[0]}:{line[1]} `{source}`" if line and source else line_in_words(line)
