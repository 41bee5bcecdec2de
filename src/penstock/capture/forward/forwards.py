"""Forwards and hooks that the user's modules have while a stage runs; then they are as before."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import nn

from penstock.capture.forward.partial_forward import StageTask
from penstock.capture.record.model_state import Place, put
from penstock.torch_internals import BACKWARD_HOOKS, COMPILED_CALL

_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()


class ReplacedForward:
    """The ``forward`` that a module of the user has while a stage runs.

    ``mutes``: its hooks are muted, since none of its calls is the stage's. ``sends``: a part of its
    results is sent.
    """

    __slots__ = ("bound", "forward", "had", "mutes", "place", "sends")

    def __init__(self, module: nn.Module, *, mutes: bool, sends: bool) -> None:
        self.place: dict[str, Any] = module.__dict__
        self.bound = type(module).forward.__get__(module)
        self.had: Any = None
        self.mutes, self.sends = mutes, sends
        self.forward: Any = None

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward."""
        return (self.had or self.bound)(*args, **kwargs)


class Forwards:
    """All that is replaced in the user's modules while a stage runs."""

    def __init__(self, task: StageTask) -> None:
        self._program = task.program
        self._replaced: dict[str, ReplacedForward] = {}
        self._containers = list(roles_between(task))

    def add(
        self,
        path: str,
        make: Callable[[ReplacedForward], Callable[..., Any]],
        *,
        mutes: bool,
        sends: bool,
    ) -> None:
        """Replace the forward of a module by that which ``make`` returns."""
        module = self._program.module(path)
        found = ReplacedForward(module, mutes=mutes, sends=sends)
        found.forward = wraps(module.forward)(make(found))
        self._replaced[path] = found

    def replace(self) -> tuple[list[tuple[Place, Any]], str]:
        """Put the forwards into the modules, and mute hooks of other stages' units.

        Returns the muted, and the path of a module whose hooks cannot be muted; empty if there is
        none.
        """
        muted: list[tuple[Place, Any]] = []
        refused = ""

        def mute(place: dict[str, Any], key: str, instead: Any) -> None:
            muted.append(((place, key), place[key]))
            place[key] = instead

        hooks, pre_hooks = BACKWARD_HOOKS
        for place, kind, path in self._containers:
            if not (place[hooks] or place[pre_hooks]) or kind == "own":
                continue
            if kind == "both":
                refused = path
            for key in BACKWARD_HOOKS:
                mute(place, key, _NO_HOOKS)
        for path, own in self._replaced.items():
            place = own.place
            own.had = place.get("forward")
            place["forward"] = own.forward
            hooked = place[hooks] or place[pre_hooks]
            compiled = place.get(COMPILED_CALL)
            if own.mutes and (hooked or compiled):
                for key in BACKWARD_HOOKS:
                    mute(place, key, _NO_HOOKS)
                if compiled:
                    mute(place, COMPILED_CALL, None)
            elif hooked and own.sends:
                refused = path
        return muted, refused

    def restore(self, muted: Sequence[tuple[Place, Any]]) -> None:
        """Give the modules what they had before."""
        for own in self._replaced.values():
            if own.had is None:
                own.place.pop("forward", None)
            else:
                own.place["forward"], own.had = own.had, None
        for place, value in muted:
            put(place, value)


def roles_between(task: StageTask) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Modules between units: whether their calls are the stage's, another's, or of both."""
    part, record = task.part, task.record
    for path in record.between:
        below = f"{path}." if path else ""
        inside = {unit for unit in record.counts if unit.startswith(below)}
        calls = record.hooks.on_modules.get(path, [])
        if calls:
            here = [part.first <= first and last <= part.last for first, last in calls]
        else:
            here = [unit in part.paths for unit in inside]
        kind = "both"
        if part.first == 0 and part.last >= len(record.events):
            kind = "own"
        elif here and len(set(here)) == 1:
            kind = "own" if here[0] else "other"
        yield task.program.module(path).__dict__, kind, path
