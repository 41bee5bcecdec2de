"""Finds the functions that a job file names, and checks that they can be called as they will be."""

import importlib
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from penstock.errors import BadInput

__all__ = ["function_at"]

CALLS: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "data": ("split", "seed", "start_step", "batch_size"),
    "loss": ("output", "target"),
    "metrics": ("output", "target"),
    "callbacks": ("pipe", "event"),
}
"""The keys of a job file that name functions, each with the arguments that these are given."""


def function_at(place: str, key: str) -> Any:
    """The function at ``module:function``; a loss may be a list of weighted functions.

    Raises:
        BadInput: the place is malformed, the import fails, the module has no such function, or it
            cannot be called with the arguments of ``key``.
    """
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise BadInput(
            f'{key} is \'{place}\'; write it as "module:function", for example "my_model:build"'
        )
    if module_name.startswith("."):
        raise BadInput(
            f"{key} is '{place}', but a job file belongs to no package, so '.' means nothing; "
            f"write the module's whole name"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(
            f"{key} is '{place}', but importing '{module_name}' failed: {error}; put the module "
            f"beside the job file or install it"
        ) from error
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise BadInput(
            f"{key} is '{place}', but importing '{module_name}' ended with {kind}: {error}; a "
            f"module of a job only defines, it runs nothing while it is imported"
        ) from error
    if not hasattr(module, name):
        near = get_close_matches(name, dir(module), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"define it in {module.__file__}"
        raise BadInput(f"{key} is '{place}', but '{module_name}' has no function '{name}'; {hint}")
    function = getattr(module, name)
    kind = key.partition(".")[0]
    if kind == "loss" and isinstance(function, list):
        return function
    if kind in CALLS:
        check_call(function, f"{key} is '{place}'", kind)
    return function


def check_call(function: Any, what: str, kind: str) -> None:
    """Raise `BadInput` if ``function`` cannot be called as the functions of ``kind`` are."""
    called = f"{kind}({', '.join(CALLS[kind])})"
    if not callable(function):
        raise BadInput(
            f"{what}, which is no function but a {type(function).__name__}; write a function "
            f"{called} that makes use of it, and name that"
        )
    if inspect.isclass(function) and kind in ("loss", "metrics"):
        raise BadInput(
            f"{what}, which is a class; name a function {called}, or an object of the class that "
            f"a module holds"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C++ without one
        return
    told = {"needs": None} if kind == "data" and "needs" in signature.parameters else {}
    try:
        signature.bind(*CALLS[kind], **told)
    except TypeError as problem:
        own = ", ".join(signature.parameters)
        raise BadInput(
            f"{what}, which takes ({own}), but is called as {called}: {problem}; write a function "
            f"with these arguments around it, and name that"
        ) from None
