"""Calls of modules in the record: of units, of blocks that hold several, of those with hooks."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch

from penstock.capture.record.absent import check_none_lost, version_of
from penstock.capture.record.calls import (
    Address,
    BlockCall,
    Made,
    ProgramRecord,
    RecordedCall,
)
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.model_state import OF_EVERY_MODULE, PLAIN, Place
from penstock.capture.record.outside_state import containers_in, holds_tensors
from penstock.capture.record.tensor_facts import TensorFacts
from penstock.capture.record.torch_calls import draws
from penstock.capture.record.unit_runs import UnitRuns
from penstock.capture.record.units import is_torchs
from penstock.capture.record.user_lines import line_of_user
from penstock.torch_internals import BACKWARD_HOOKS, pytree, tensors_in

_FIXED = OF_EVERY_MODULE - {"training"}


class ModuleCalls:
    """Recording of calls of modules; ``inside`` is the call of the unit that runs, if one does."""

    def __init__(self, record: ProgramRecord, tensors: TensorFacts, runs: UnitRuns) -> None:
        self._record, self._tensors, self._runs = record, tensors, runs
        self.inside: RecordedCall | None = None
        self.anchor: Address | None = None
        """The call of a unit that ended last."""
        self.is_active = False
        program = record.program
        self._skeleton = [program.module(path) for path in record.between]
        self._hooked = {
            path
            for path, module in program.named_modules()
            if any(module.__dict__[key] for key in BACKWARD_HOOKS)
        }
        """Modules with hooks on their backward."""
        self._at_start: list[Any] = []

    def begin(self) -> None:
        """Record from now on."""
        self.is_active, self._at_start = True, self._skeleton_state()

    def replaced(self, blocks: Collection[str]) -> Iterator[tuple[Place, Any]]:
        """The attributes of modules that are others during a recording, with their places."""
        program = self._record.program
        if self._runs.valued is not None:
            # A run whose calls are compared is a training run, with all its hooks.
            yield from without_hooks(program, self._hooked)
        # A cut inside of a module with hooks on its backward would break them.
        own = [path for path in self._record.between if path in self._hooked]
        around = dict.fromkeys(own, self._hooked_call)
        around |= dict.fromkeys(self._record.units, self._unit_or_inner)
        around |= {path: self._block for path in blocks if path not in own}
        for path, call in around.items():
            module = program.module(path)
            yield (module.__dict__, "forward"), wrapped(module.forward, partial(call, path))

    @property
    def is_between(self) -> bool:
        """Return whether what runs is recorded, outside of units."""
        return self.is_active and self.inside is None

    def _hooked_call(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        record, first = self._record, len(self._record.events)
        result = plain(*args, **kwargs)
        call = first, len(record.events)
        record.regions.append(call)
        for tensor in tensors_in(result):
            value = self._tensors.current.get(tensor)
            if value is not None:  # gradients must pass the hooks around what is seen here
                record.values[value].crossable = False
        record.hooks.on_modules.setdefault(path, []).append(call)
        return result

    # Units.

    def _unit_or_inner(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        if self.is_between:
            return self._unit(path, plain, args, kwargs)
        if self.inside is not None and self.inside.address[0] != path:
            self._record.has_nested = True
        return plain(*args, **kwargs)

    def _unit(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        record, tensors = self._record, self._tensors
        record.is_temporary = record.is_temporary or self._skeleton_state() != self._at_start
        n = record.counts[path]
        record.counts[path] = n + 1
        event = RecordedCall((path, n), line=line_of_user(3), depends=True, is_unit=True)
        event.args = tensors.references((args, kwargs))
        given = tensors_in((args, kwargs))
        check_none_lost(given)
        for tensor in given:
            tensors.memory.note(tensor)
        tensors.read(event, given)
        state, before = self._surroundings(args, kwargs), torch.get_rng_state()
        versions = [version_of(tensor) for tensor in given]
        self.inside = event
        try:
            result = self._runs.run(path, plain, args, kwargs)
            if not is_torchs(record.program.module(path)):
                result = as_its_own(result, given)
        finally:
            self.inside = None
        self.anchor = record.anchor_of(event.address)
        event.random = event.random or not torch.equal(before, torch.get_rng_state())
        if self._surroundings(args, kwargs) != state:
            record.opened[path] = "it changes something outside of itself"
        event.params.sort()
        written = False
        for tensor, version in zip(given, versions, strict=True):
            if version_of(tensor) != version:
                written = True
                value = tensors.current.get(tensor)
                if value is None or not record.events[record.values[value].maker].depends:
                    record.opened[path] = "it writes to a tensor that other stages have, too"
        record.note_checkpoint()
        record.events.append(event)
        paths, made = paths_by_id(args, kwargs), tensors_in(result)
        tensors.note_writes(given, {id(tensor) for tensor in made} - set(paths))
        for slot, tensor in enumerate(made):
            if written or id(tensor) not in paths:
                # Gradients must pass the module's hooks, which are around what is seen here.
                tensors.make(slot, tensor, crossable=path not in self._hooked)
            elif tensor in tensors.current:
                event.makes.append(tensors.current[tensor])
        event.result = self._leaves(result, paths, lambda tensor: not written)
        if any(map(is_new_object, event.result[0])):
            record.opened[path] = "it returns an object with tensors"
        return result

    def _leaves(
        self, result: Any, paths: Mapping[int, Any], is_as_given: Callable[[torch.Tensor], bool]
    ) -> tuple[list[Made], Any]:
        """The leaves of the result of a unit or a block, and the structure around them."""
        leaves, spec = pytree.tree_flatten(result)
        found: list[Made] = []
        for leaf in leaves:
            path = paths.get(id(leaf))
            if not isinstance(leaf, torch.Tensor):
                # An argument handed on, or else the same each time.
                found.append(Made("constant", leaf) if path is None else Made("handed on", path))
            elif path is not None and is_as_given(leaf):
                found.append(Made("given", path))
            else:
                value = self._tensors.current.get(leaf)
                found.append(Made("made", value, leaf.dtype, leaf.requires_grad))
        return found, spec

    def note_inside(
        self, event: RecordedCall, name: str, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Note of a torch call within a unit's only what links the unit to others."""
        tensors, unit = self._tensors, event.address[0]
        event.random = event.random or draws(name, args, kwargs)
        self._record.note_checkpoint()
        given = tensors_in((args, kwargs))
        if isinstance(result, torch.Tensor | list | tuple):
            for tensor in tensors_in(result):
                if tensors.current.get(tensor) is None:
                    tensors.hidden.setdefault(tensor, unit)
            check_none_lost(given)
            tensors.note_apart(result, name, args, given)
        for tensor in given:
            tensors.note_carried(tensor, event.address)
            leaf = tensors.batch.get(tensor)
            if leaf is not None:
                event.leaves.add(leaf)
            parameter, value = tensors.names.get(id(tensor)), tensors.current.get(tensor)
            if parameter is not None:
                if tensors.owner.get(parameter) != unit and parameter not in event.params:
                    event.params.append(parameter)
            elif value is not None:
                if value not in event.reads:
                    event.reads.append(value)
            else:
                other = tensors.hidden.get(tensor)
                if other is not None and other != unit:
                    self._record.opened[other] = f"{unit} reads something other than its result"

    def _surroundings(self, args: Any, kwargs: Any) -> list[Any]:
        """State that a unit must not change: of arguments, and of modules between units."""
        found: list[Any] = [*containers_in((args, kwargs))]
        for module in self._skeleton:
            for key, value in module.__dict__.items():
                if key in _FIXED:
                    continue
                if isinstance(value, PLAIN):
                    found.append((key, repr(value) if isinstance(value, float) else value))
                elif isinstance(value, list | dict | torch.Tensor) and key[0] != "_":
                    is_tensor = isinstance(value, torch.Tensor)
                    found.append((key, id(value), version_of(value) if is_tensor else len(value)))
        return found

    def _skeleton_state(self) -> list[Any]:
        """Plain attributes of the modules between units, ``training`` among them."""
        kinds = (int, float, bool, str, type(None))
        return [
            (key, value)
            for module in self._skeleton
            for key, value in module.__dict__.items()
            if type(value) in kinds
        ]

    # Blocks.

    def _block(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        if not self.is_between:
            return plain(*args, **kwargs)
        events, current = self._record.events, self._tensors.current
        first = len(events)
        before = {id(t): current.get(t) for t in tensors_in((args, kwargs))}
        result = plain(*args, **kwargs)
        leaves, spec = self._leaves(
            result, paths_by_id(args, kwargs), lambda t: before.get(id(t)) == current.get(t)
        )
        unknown = any(made.kind == "made" and made.what is None for made in leaves)
        closed = not (unknown or any(map(is_new_object, leaves)))
        call = BlockCall(path, first, len(events), (leaves, spec), self.anchor, closed)
        self._record.blocks.append(call)
        return result


def wrapped(plain: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that passes its arguments to ``call(plain, args, kwargs)``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(plain, args, kwargs)

    return wraps(plain)(forward)


def without_hooks(program: UserProgram, paths: Collection[str]) -> Iterator[tuple[Place, Any]]:
    """No hooks on the backward of modules, with their places: they take tensors with values."""
    for path in paths:
        for key in BACKWARD_HOOKS:
            yield (program.module(path).__dict__, key), OrderedDict[int, Any]()


def as_its_own(result: Any, given: Sequence[torch.Tensor]) -> Any:
    """A unit's result, in which what it was given is another tensor with the same values.

    It may return its argument as it is in some steps only, as an expert that rests does, and what a
    stage sends must be what comes out of it.
    """
    same = {id(tensor) for tensor in given if tensor.requires_grad}

    def apart(leaf: Any) -> Any:
        return leaf.view_as(leaf) if id(leaf) in same else leaf

    if same.isdisjoint(map(id, pytree.tree_leaves(result))):
        return result
    with torch.enable_grad():
        return pytree.tree_map(apart, result)


def paths_by_id(args: Any, kwargs: Any) -> dict[int, Any]:
    """The path of each tensor or object in the arguments, by its identity."""
    found = pytree.tree_flatten_with_path((args, kwargs))[0]
    return {id(leaf): path for path, leaf in found if not isinstance(leaf, PLAIN)}


def is_new_object(made: Made) -> bool:
    """Return whether a leaf is an object with tensors that its call has made, as others lack it."""
    return made.kind == "constant" and holds_tensors(made.what)
