"""One run of the user's program on the example: each call with what it read, made and wrote.

Units are modules whose calls other stages leave out as a whole. Everything outside of units runs
on every stage. The record has one event for each call of a unit, and for each call of a torch
function between units:

    address of a unit call      (path, n)                    the n-th call of this module
    address of a torch call     (anchor, function, line, n)  the n-th call there since the unit call
                                                             ``anchor``
    value                       a number; its address is that of its maker, and the slot in there

Nothing is replaced: the user's Python runs as it is.
"""

import contextlib
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.record.absent import (
    DRAWN,
    SHAPE_ONLY,
    VALUES,
    Absent,
    NeedsValues,
    UnknownSize,
    absent_like,
    call_name,
    check_none_lost,
    deciding_tensors,
    fresh_results,
    functions_through,
    memory_of,
    scripts_seen,
    version_of,
    writes_first,
)
from penstock.capture.record.model_and_loss import LOSS, UserProgram
from penstock.capture.record.model_state import (
    OF_EVERY_MODULE,
    PLAIN,
    Place,
    StatePlace,
    exchanged,
    place_of,
    value_at,
)
from penstock.capture.record.outside_state import containers_in
from penstock.capture.record.stand_ins import made_up, standing_in
from penstock.capture.record.torch_calls import BATCH_NORM_OPERATORS
from penstock.capture.record.units import is_torchs
from penstock.capture.record.user_lines import Line, line_in_words, line_of_user, line_with_source
from penstock.errors import CaptureFailed
from penstock.torch_internals import (
    BACKWARD_HOOKS,
    BackwardHookFunction,
    NoFunctionCalls,
    checkpoint_here,
    forward_hooks,
    own_buffers,
    own_parameters,
    pytree,
    write_count,
)

Address: TypeAlias = tuple[Any, ...]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass(slots=True)
class Value:
    """A tensor between calls: event ``maker`` made it as its result number ``slot``.

    ``slot`` is ``("w", j)`` for the j-th tensor that was written to. A value that is not
    ``crossable`` cannot be sent from one stage to another. One that is not ``of_batch`` is computed
    from parameters and sizes alone.
    """

    maker: int
    slot: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    bytes: int
    crossable: bool = True
    of_batch: bool = True


@dataclass(frozen=True, slots=True)
class TensorReference:
    """Placeholder for a tensor in recorded arguments: a value, a parameter's name, or None."""

    value: int | str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Made:
    """A leaf of a unit's result: a constant, an argument (by path), or a tensor that it made."""

    kind: str
    what: Any
    dtype: torch.dtype | None = None
    grad: bool = False


@dataclass(slots=True)
class RecordedCall:
    """A call. ``reads`` and ``makes`` are values, ``leaves`` the batch's leaves that it read.

    ``params`` and ``buffers`` are names of what a call between units read. ``reads_values``: its
    result is no tensor but depends on values; ``answer`` is that result. ``depends``: on
    parameters, and so on stages; what does not is found from the batch alone, by every stage.
    ``random``: it draws.
    ``result`` is the structure of a unit's result. ``stranger`` says which tensor it read that is
    trained, but none of the program's.
    """

    address: Address
    func: Any = None
    line: Line | None = None
    reads: list[int] = field(default_factory=list[int])
    leaves: set[int] = field(default_factory=set[int])
    params: list[str] = field(default_factory=list[str])
    buffers: list[str] = field(default_factory=list[str])
    makes: list[int] = field(default_factory=list[int])
    args: Any = None
    reads_values: bool = False
    answer: Any = None
    random: bool = False
    depends: bool = False
    is_unit: bool = False
    written: bool = False
    result: tuple[list[Made], Any] | None = None
    stranger: str = ""


@dataclass(slots=True)
class BlockCall:
    """The call of a module that holds several units: events ``first`` to ``last``.

    A stage that none of it belongs to leaves it out as a whole, if it is ``closed``: what others
    use of it is what it returned.
    """

    path: str
    first: int
    last: int
    template: list[Made]
    spec: Any
    anchor: Address | None
    closed: bool = True


class _ByTensor:
    """Facts by tensor object, without keeping the tensor."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}

    def get(self, tensor: torch.Tensor) -> Any:
        found = self._facts.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def set(self, tensor: torch.Tensor, fact: Any) -> None:
        self._facts[id(tensor)] = (weakref.ref(tensor), fact)


class _Memory:
    """Tensors by the memory that they share, and the version of each memory."""

    def __init__(self) -> None:
        self._tensors: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._versions: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> int | None:
        """Note a tensor; return its memory's key (None: it has none, under vmap)."""
        key = memory_of(tensor)
        if key is None:
            return None
        known = [ref for ref in self._tensors.get(key, ()) if ref() is not None]
        if not known:
            self._versions[key] = version_of(tensor)
        if all(ref() is not tensor for ref in known):
            known.append(weakref.ref(tensor))
        self._tensors[key] = known
        return key

    def note_moved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a write has given other memory: that of an absent one."""
        key = self.note(tensor)
        if key is not None:
            self._versions[key] = -1

    def take_write(self, tensor: torch.Tensor) -> int | None:
        """The key of the tensor's memory if it was written to since the last look."""
        key = memory_of(tensor)
        if key is None or self._versions.get(key) in (None, version_of(tensor)):
            return None
        self._versions[key] = version_of(tensor)
        return key

    def sharing(self, key: int) -> list[torch.Tensor]:
        """The living tensors with this memory."""
        found = (ref() for ref in self._tensors.get(key, ()))
        return [tensor for tensor in found if tensor is not None]


def wrapped_forwards(
    program: UserProgram, wrappers: Mapping[str, Callable[[Any], Any]]
) -> Iterator[tuple[Place, Any]]:
    """Other forwards of modules by path, with their places; hooks and all around them stay."""
    for path, wrap in wrappers.items():
        module = program.module(path)
        yield (module.__dict__, "forward"), wraps(module.forward)(wrap(module.forward))


def without_hooks(program: UserProgram, paths: Collection[str]) -> Iterator[tuple[Place, Any]]:
    """No hooks on the backward of modules, with their places: they take tensors with values."""
    for path in paths:
        for key in BACKWARD_HOOKS:
            yield (program.module(path).__dict__, key), OrderedDict[int, Any]()


_FIXED = OF_EVERY_MODULE - {"training"}

RANDOM_NAMES = frozenset(
    [
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
        *("feature_alpha_dropout", "native_dropout", "rrelu", "gumbel_softmax", "bernoulli"),
        *("multinomial", "normal", "poisson", "rand_like", "randn_like", "randint_like"),
        *("rrelu_", "dropout_", "alpha_dropout_", *DRAWN),
    ]
)
"""Calls that draw; on absent tensors no generator shows it."""


def draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers, as far as its name and arguments show."""
    if name == "scaled_dot_product_attention":
        return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)
    if name not in RANDOM_NAMES:
        return False
    if "dropout" in name:
        return bool(kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True)))
    return True


_NO_CALLS = {".shape", ".dtype", ".device", ".is_leaf", ".ndim"}
_NO_CALLS |= {".grad", ".grad=", ".requires_grad", ".requires_grad="}
"""Properties that are read, or set, without a trace in the record."""


class ProgramRecording(TorchFunctionMode):
    """Record of what ``program`` does while it is active; ``units`` are paths of modules.

    ``blocks`` are modules that hold several units. ``originals`` are the user's own parameters by
    name. Units in ``valued`` run on made-up values, since they read values inside; a unit that
    turns out to do so is added; with None all units run as they are. Units in ``varying`` have
    more calls in other batches, so what follows one of their calls is found by the unit.
    """

    has_tensor_hooks = False
    """True if hooks are registered on tensors, in units or between them."""
    has_gradients = False
    """True if torch.autograd.grad is called, in units or between them."""
    has_scripts = False
    """True if functions of torch.jit.script are called."""
    model_end = 0
    """The events before this one are the model's; the others are those of the loss."""
    has_unknown = False
    """True if a call between units makes a tensor whose size is not known without values."""
    on_function: Callable[[Any, Callable[..., Any], tuple[Any, ...]], None] | None = None
    """Callback before each call of an autograd function, with its class, call and arguments."""
    is_temporary = False
    """True if the program changes its own state between units, and may take that back later."""
    answered: Mapping[Address, Callable[[Any], Any]] = {}
    """Functions that make the answer to a question out of the right one, by its address."""

    def __init__(
        self,
        program: UserProgram,
        units: Sequence[str],
        blocks: Sequence[str],
        originals: Mapping[str, torch.Tensor],
        valued: set[str] | None,
        varying: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.program, self.units, self.block_paths = program, units, blocks
        self.valued, self.varying = valued, frozenset(varying)
        self.events: list[RecordedCall] = []
        self.values: list[Value] = []
        self.blocks: list[BlockCall] = []
        self.regions: list[tuple[int, int]] = []
        """Ranges of events within which nothing can be cut: checkpoints, own functions."""
        self.opened: dict[str, str] = {}
        """Units that must be opened, with the reason."""
        self.buffer_writes: dict[str, list[int]] = {}
        self.overwritten: dict[int, int] = {}
        """Values that an event wrote over."""
        self.nested: set[str] = set()
        """Units that call modules of other units."""
        self.hook_events: set[int] = set()
        """Events of torch's own hooks on backwards, which other stages mute."""
        self.hooked: dict[str, list[tuple[int, int]]] = {}
        """Modules between units with hooks on their backward: the events of their calls."""
        self.counts: Counter[str] = Counter()
        self.tensor_hooks: dict[Address, int] = {}
        """Values on which code between units registers hooks, by the address of that call."""
        self.norms: list[str] = []
        """Places at which samples are normalised over the batch."""
        self.frequencies: list[str] = []
        """Places at which gradients of a table are divided by how often the batch has an index."""
        self.current, self.batch = _ByTensor(), _ByTensor()
        self.hidden, self._memory = _ByTensor(), _Memory()
        """The units within which tensors were made that are not their results."""
        self.carried = _ByTensor()
        """The places of what an earlier run has left in the model's state."""
        self.carried_reads: dict[StatePlace, dict[Address, Line]] = defaultdict(dict)
        """The calls that read something carried with their lines, by place."""
        self.apart = _ByTensor()
        """True if a tensor is independent of the batch: made of parameters and sizes alone."""
        self._originals = originals
        self._inside: str | None = None
        self._implicit: list[int] = []
        self._hooked_inside: list[int] = []
        self._implicit_params: set[str] = set()
        self._implicit_leaves: set[int] = set()
        self._draws_inside = False
        self._anchor: Address | None = None
        self._seen: dict[Address, int] = {}
        self._active = False
        self.checkpoints: dict[int, tuple[Any, int, int]] = {}
        """The user's checkpoints, by identity, each with its first event and the one after."""
        self.reentrant: set[int] = set()
        """The first events of the user's reentrant checkpoints."""
        self._function_depth = 0
        self._know_tensors()

    def _know_tensors(self) -> None:
        program = self.program
        named = [*program.named_parameters(), *self._originals.items()]
        self.param_names: dict[int, str] = {}
        for name, parameter in named:
            self.param_names.setdefault(id(parameter), name)
        self._buffers = dict(program.named_buffers())
        self._buffer_names = {id(buffer): name for name, buffer in self._buffers.items()}
        self._param_memory = {
            memory_of(parameter): name for name, parameter in program.named_parameters()
        }
        self.parameter_writes: dict[str, list[int]] = {}
        self._buffer_memory = {memory_of(buffer): n for n, buffer in program.named_buffers()}
        self._owner: dict[str, str] = {}
        for path in self.units:
            for parameter in program.module(path).parameters():
                first = self.param_names[id(parameter)]
                self._owner.setdefault(first, path)
        inside = tuple(f"{path}." for path in self.units)
        self.between = [
            path
            for path, _ in program.named_modules()
            if path not in self.units and not path.startswith(inside)
        ]
        """Modules that are no unit nor in one."""
        self.has_hooks = {
            path
            for path, module in program.named_modules()
            if any(module.__dict__[key] for key in BACKWARD_HOOKS)
        }
        """Modules with hooks on their backward."""
        self._skeleton = [program.module(path) for path in self.between]

    # Running.

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record the calls of the program that runs meanwhile."""
        # A cut inside of a module with hooks on its backward would break them.
        own = [path for path in self.between if path in self.has_hooks]
        wrappers = {path: partial(self._around_hooked, path) for path in own}
        wrappers |= {path: partial(self._around_unit, path) for path in self.units}
        blocks = [path for path in self.block_paths if path not in own]
        wrappers |= {path: partial(self._around_block, path) for path in blocks}
        # A run whose calls are compared is a training run, with all its hooks.
        muted = without_hooks(self.program, self.has_hooks if self.valued is not None else ())
        replaced = chain(muted, wrapped_forwards(self.program, wrappers))
        with exchanged(replaced), functions_through(self._function):
            self._active, self._at_start = True, self._skeleton_state()
            try:
                with fresh_results(), scripts_seen(self._note_script), self:
                    yield
            finally:
                self._active = False
                self._finish()

    def end_model(self) -> None:
        """Note that the model has returned, and the loss function has not begun."""
        self.model_end = len(self.events)

    def _note_script(self) -> None:
        self.has_scripts = True

    def _around_hooked(self, path: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            first = len(self.events)
            result = plain(*args, **kwargs)
            call = first, len(self.events)
            self.regions.append(call)
            for tensor in tensors_in(result):
                value = self.current.get(tensor)
                if value is not None:  # gradients must pass the hooks around what is seen here
                    self.values[value].crossable = False
            self.hooked.setdefault(path, []).append(call)
            return result

        return forward

    def _function(self, kind: Any, call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call of an autograd function; those of the user's own between units are events."""
        if self.on_function is not None:
            self.on_function(kind, call, args)
        if kind is CheckpointFunction and self._active:
            self.reentrant.add(len(self.events))
        if self._inside is not None or not self._active:
            return _with_grad(call(*args, **kwargs), (args, kwargs))
        return self._own_function(kind, call, args, kwargs)

    def _own_function(
        self, kind: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An own autograd function: no cut inside of it; only results of checkpoints can be sent.

        Gradients do not pass through what it calls, but through itself.
        """
        line, first = line_of_user(3), len(self.events)
        address = self._next_address(self._anchor, kind.__name__, line)
        reads = RecordedCall(address, kind, line)
        given = tensors_in((args, kwargs))
        reads.args = self._references((args, kwargs))
        self._read(reads, given)
        self._function_depth += 1
        try:
            result = _with_grad(call(*args, **kwargs), (args, kwargs))
        finally:
            self._function_depth -= 1
        inner = [v for event in self.events[first:] for v in event.makes]
        reads.reads += inner
        reads.params += [name for event in self.events[first:] for name in event.params]
        number = len(self.events)
        self.events.append(reads)
        if kind is BackwardHookFunction:
            self.hook_events |= set(range(first, number + 1))
        for slot, tensor in enumerate(tensors_in(result)):
            if all(tensor is not one for one in given):
                self.make(reads, number, slot, tensor, crossable=kind is CheckpointFunction)
        self.regions.append((first, number + 1))
        return result

    # What is known of tensors.

    def _read(self, event: RecordedCall, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            value, leaf = self.current.get(tensor), self.batch.get(tensor)
            if leaf is not None:
                event.leaves.add(leaf)
            if value is not None:
                event.reads.append(value)
            name = self.param_names.get(id(tensor))
            if name is not None and not event.is_unit:
                event.params.append(name)
                owner = self._owner.get(name)
                if owner is not None and any(True for _ in self.program.module(owner).children()):
                    self.opened.setdefault(
                        owner, f"its parameters are read at {line_in_words(event.line)}"
                    )
            if id(tensor) in self._buffer_names:
                event.buffers.append(self._buffer_names[id(tensor)])
            if value is None and name is None:
                self._read_unseen(event, tensor)
            self._note_carried(tensor, event.address)

    def _note_carried(self, tensor: torch.Tensor, address: Address) -> None:
        place = self.carried.get(tensor)
        if place is not None and address not in self.carried_reads[place]:
            self.carried_reads[place][address] = line_of_user()

    def state_at(self, place: StatePlace) -> list[torch.Tensor]:
        """The tensors in a piece of the program's state."""
        return tensors_in(value_at(place_of(self.program, place)))

    def shapes_at(self, place: StatePlace) -> list[tuple[int, ...]]:
        """The shapes of these tensors."""
        return [self._reference(tensor).shape for tensor in self.state_at(place)]

    def _read_unseen(self, event: RecordedCall, tensor: torch.Tensor) -> None:
        unit = self.hidden.get(tensor)
        if unit is not None:
            where = line_in_words(event.line)
            self.opened[unit] = f"something other than its result is read at {where}"
        elif tensor.requires_grad and tensor.is_leaf:
            event.stranger = f"{held_here(tensor)} at {line_with_source(event.line)}"

    def make(
        self,
        event: RecordedCall,
        number: int,
        slot: Any,
        tensor: torch.Tensor,
        *,
        crossable: bool = True,
    ) -> None:
        """Let ``tensor`` be a value that event ``number`` made."""
        known = type(tensor) is not Absent or not tensor.is_unknown
        shape = tuple(tensor.shape) if known else (-1,)
        size = tensor.numel() * tensor.element_size() if known else 0
        value = Value(number, slot, shape, tensor.dtype, tensor.requires_grad, size)
        value.of_batch = not self.apart.get(tensor)
        value.crossable = crossable and known and not self._function_depth
        self.has_unknown = self.has_unknown or not known
        self.values.append(value)
        self.current.set(tensor, len(self.values) - 1)
        event.makes.append(len(self.values) - 1)
        self._memory.note(tensor)

    def _writes(
        self, event: RecordedCall, number: int, tensors: Sequence[torch.Tensor], made: set[int]
    ) -> set[int]:
        """Make new values of all tensors whose memory was written to; returns the memories."""
        done: set[int] = set()
        for tensor in tensors:
            key = self._memory.take_write(tensor)
            if key is None:
                continue
            done.add(key)
            for j, other in enumerate(self._memory.sharing(key)):
                if id(other) in self._buffer_names and not event.is_unit:
                    self.buffer_writes.setdefault(self._buffer_names[id(other)], []).append(number)
                before = self.current.get(other)
                if before is not None:
                    self.overwritten[before] = number
                if id(other) in made:
                    continue
                if before is not None:
                    event.reads.append(before)
                self.make(event, number, ("w", j), other, crossable=False)
        return done

    # Calls of torch functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = call_name(func)
        if name in _NO_CALLS:
            return func(*args, **kwargs)
        if func in BATCH_NORM_OPERATORS and (args[5:6] or (kwargs.get("training"),))[0]:
            self.norms.append(self._inside or line_in_words(line_of_user()))
        if kwargs.get("scale_grad_by_freq"):
            self.frequencies.append(self._inside or line_in_words(line_of_user()))
        if name == "embedding_bag" and self.batch.get(kwargs.get("offsets")) is not None:
            raise CaptureFailed(
                f"an EmbeddingBag at {line_with_source(line_of_user())} is given offsets of the "
                f"batch, which count from its first sample, and micro-batches begin elsewhere; "
                f"give it the same number of ids for each sample (samples, ids), padded to "
                f"padding_idx"
            )
        if func is torch.autograd.grad:
            self.has_gradients = True
        if name in ("register_hook", "backward"):
            self._note_hook(name, args[0])
            return func(*args, **kwargs)
        if self._inside is not None:
            return self._call_inside(func, name, args, kwargs)
        line = line_of_user()
        self._record_sizes(name, args, kwargs, line)
        place = (self._anchor, name, line)
        before: Any = torch.get_rng_state() if name not in ("size", "dim") else None
        out = kwargs.get("out")
        wrote = writes_first(name) or out is not None or name == ".data="
        written: Any = args[0] if wrote and args and out is None else out
        memory = memory_of(written) if isinstance(written, torch.Tensor) else None
        result = func(*args, **kwargs)
        if memory is not None and memory_of(written) != memory:
            self._memory.note_moved(written)
        made, given = tensors_in(result), tensors_in((args, kwargs))
        reads_values = name in VALUES
        if not made and not reads_values and not wrote:
            return result
        check_none_lost(given)
        event = RecordedCall(self._next_address(*place), func, line)
        event.random = draws(name, args, kwargs) or not torch.equal(before, torch.get_rng_state())
        event.reads_values, event.answer = reads_values, result if reads_values else None
        if reads_values and not any(self._is_computed(tensor) for tensor in given):
            return result
        self._record_call(event, name, args, kwargs, given, made, wrote)
        for names, writes in (
            (self._buffer_memory, self.buffer_writes),
            (self._param_memory, self.parameter_writes),
        ):
            if memory in names:  # a write may make a tensor absent, in other memory
                own = names[memory_of(written)] = names[memory]
                writes.setdefault(own, []).append(len(self.events) - 1)
        answer = self.answered.get(event.address)
        return result if answer is None else answer(result)

    def _next_address(self, anchor: Address | None, name: str, line: Line) -> Address:
        """The address of a call: it is the next of this function at this line."""
        place = (anchor, name, line)
        n = self._seen.get(place, 0)
        self._seen[place] = n + 1
        return (*place, n)

    def _note_hook(self, name: str, tensor: torch.Tensor) -> None:
        """A hook on a tensor: it sees the whole gradient where the tensor is made."""
        line = line_of_user(3)
        if name == "backward":
            raise CaptureFailed(
                f"forward calls backward() at {line_with_source(line)}, whose gradients would end "
                f"where its stage begins; use torch.autograd.grad, or add the term to the loss"
            )
        self.has_tensor_hooks = True
        value = self.current.get(tensor)
        if value is None:
            return
        if self._inside is not None:
            self._hooked_inside.append(value)
            return
        self.tensor_hooks[self._next_address(self._anchor, name, line)] = value

    def _record_sizes(self, name: str, args: Any, kwargs: Any, line: Line) -> None:
        """Record values that decide about the size of a result: every stage requests them.

        These are bounds of slices; and masks and repeats, if they are of the batch alone. Results
        of masks that stages make have no known size.
        """
        for is_bound, tensor in deciding_tensors(name, args, kwargs):
            if self._is_computed(tensor):
                kind = _BOUND if is_bound else MASK
                event = RecordedCall((self._anchor, kind, line, len(self.events)), None, line)
                event.reads_values, event.answer = True, int(tensor) if is_bound else None
                self._read(event, [tensor])
                self.events.append(event)

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        return self.current.get(tensor) is not None or id(tensor) in self.param_names

    def _record_call(
        self,
        event: RecordedCall,
        name: str,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        wrote: bool,
    ) -> None:
        for tensor in given:
            self._memory.note(tensor)
        self._note_apart(made, name, args, given)
        event.args = self._references((args, kwargs))
        skipped = _only_shape(name, args, given)
        self._read(event, [tensor for tensor in given if tensor is not skipped])
        number = len(self.events)
        self.events.append(event)
        if event.func is torch.autograd.grad:  # no cut between what it is of and the call
            inputs = tensors_in(kwargs.get("inputs", args[1] if len(args) > 1 else ()))
            values = [self.current.get(tensor) for tensor in inputs]
            makers = [-1 if value is None else self.values[value].maker for value in values]
            self.regions.append((min(makers, default=-1) + 1, number + 1))
        self._note_checkpoint(number)
        written = self._writes(event, number, given, {id(tensor) for tensor in made})
        for slot, tensor in enumerate(made):
            known = self.current.get(tensor)
            wrote = wrote or memory_of(tensor) in written
            if any(tensor is one for one in given) and not wrote and known is not None:
                event.makes.append(known)  # returned as it came
                continue
            shared = memory_of(tensor) in written and any(
                other is not tensor for other in self._memory.sharing(memory_of(tensor) or 0)
            )
            self.make(event, number, slot, tensor, crossable=not shared)

    def _references(self, given: Any) -> Any:
        """Arguments with references in place of tensors; packed sequences become plain tuples."""

        def plain(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return tuple(map(self._reference, value))
            return self._reference(value)

        return pytree.tree_map(plain, given, is_leaf=lambda v: isinstance(v, PackedSequence))

    def _reference(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found: Any = self.current.get(value)
        if found is None:
            found = self.param_names.get(id(value))
        known = type(value) is not Absent or not value.is_unknown
        return TensorReference(found, tuple(value.shape) if known else (-1,), value.dtype)

    def _note_apart(self, result: Any, name: str, args: Any, given: Sequence[torch.Tensor]) -> None:
        """Note whether what a call returns, or writes to, is apart from the batch."""
        skipped = _only_shape(name, args, given)
        apart = all(tensor is skipped or self._is_apart(tensor) for tensor in given)
        for tensor in tensors_in(result):
            self.apart.set(tensor, apart)
        if given and not apart and writes_first(name):
            self.apart.set(given[0], False)

    def _is_apart(self, tensor: torch.Tensor) -> bool:
        known = self.apart.get(tensor)
        return known if known is not None else id(tensor) in self.param_names

    def _call_inside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A call within a unit: only what links the unit to others is noted."""
        result = func(*args, **kwargs)
        if not self._draws_inside and draws(name, args, kwargs):
            self._draws_inside = True
        self._note_checkpoint(len(self.events))
        unit, given = self._inside, tensors_in((args, kwargs))
        if isinstance(result, torch.Tensor | list | tuple):
            for tensor in tensors_in(result):
                if self.hidden.get(tensor) is None and self.current.get(tensor) is None:
                    self.hidden.set(tensor, unit)
            check_none_lost(given)
            self._note_apart(result, name, args, given)
        for tensor in given:
            if unit is not None:
                self._note_carried(tensor, (unit, self.counts[unit] - 1))
            leaf = self.batch.get(tensor)
            if leaf is not None:
                self._implicit_leaves.add(leaf)
            parameter, value = self.param_names.get(id(tensor)), self.current.get(tensor)
            if parameter is not None:
                if self._owner.get(parameter) != unit:
                    self._implicit_params.add(parameter)
            elif value is not None:
                self._implicit.append(value)
            else:
                other = self.hidden.get(tensor)
                if other is not None and other != unit:
                    self.opened[other] = f"{unit} reads something other than its result"
        return result

    def _note_checkpoint(self, number: int) -> None:
        found = checkpoint_here()
        if found is not None:
            _, first, _ = self.checkpoints.get(id(found), (found, number, number))
            self.checkpoints[id(found)] = (found, first, number + 1)

    # Calls of units.

    def _around_unit(self, path: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside is None and self._active:
                return self._unit(path, plain, args, kwargs)
            if self._inside is not None and self._inside != path:
                self.nested.add(self._inside)
            return plain(*args, **kwargs)

        return forward

    def _surroundings(self, args: Any, kwargs: Any) -> list[Any]:
        """State that a unit must not change: of arguments, and of modules between units."""
        found = containers_in((args, kwargs))
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

    def _unit(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        self.is_temporary = self.is_temporary or self._skeleton_state() != self._at_start
        n = self.counts[path]
        self.counts[path] = n + 1
        event = RecordedCall((path, n), line=line_of_user(3), depends=True, is_unit=True)
        event.args = self._references((args, kwargs))
        given = tensors_in((args, kwargs))
        check_none_lost(given)
        for tensor in given:
            self._memory.note(tensor)
        self._read(event, given)
        state, before = self._surroundings(args, kwargs), torch.get_rng_state()
        versions = [version_of(tensor) for tensor in given]
        self._inside, self._draws_inside = path, False
        self._implicit, self._implicit_params, self._implicit_leaves = [], set(), set()
        self._hooked_inside = []
        try:
            result = self._run_unit(path, plain, args, kwargs)
            if not is_torchs(self.program.module(path)):
                result = self._as_its_own(result, given)
        finally:
            self._inside = None
        number = len(self.events)
        self._anchor = self.anchor_of(event.address)
        event.random = self._draws_inside or not torch.equal(before, torch.get_rng_state())
        if self._surroundings(args, kwargs) != state:
            self.opened[path] = "it changes something outside of itself"
        self._note_implicit(event, number)
        for tensor, version in zip(given, versions, strict=True):
            if version_of(tensor) != version:
                event.written = True
                value = self.current.get(tensor)
                if value is None or not self.events[self.values[value].maker].depends:
                    self.opened[path] = "it writes to a tensor that other stages have, too"
        self.events.append(event)
        self._note_checkpoint(number)
        self._note_result(event, number, path, args, kwargs, given, result)
        return result

    def _as_its_own(self, result: Any, given: Sequence[torch.Tensor]) -> Any:
        """A unit's result, in which what it was given is another tensor with the same values.

        It may return its argument as it is in some steps only, as an expert that rests does, and
        what a stage sends must be what comes out of it.
        """

        same = {id(tensor) for tensor in given if tensor.requires_grad}

        def apart(leaf: Any) -> Any:
            return leaf.view_as(leaf) if id(leaf) in same else leaf

        if same.isdisjoint(map(id, pytree.tree_leaves(result))):
            return result
        with torch.enable_grad():
            return pytree.tree_map(apart, result)

    def _note_implicit(self, event: RecordedCall, number: int) -> None:
        for value in self._hooked_inside:
            self.regions.append((self.values[value].maker, number + 1))
        known = set(event.reads)
        event.params += sorted(self._implicit_params)
        event.leaves |= self._implicit_leaves
        event.reads += [
            value
            for value in dict.fromkeys(self._implicit)
            if value not in known and self.values[value].maker < number
        ]

    def _note_result(
        self,
        event: RecordedCall,
        number: int,
        path: str,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        result: Any,
    ) -> None:
        leaves, spec = pytree.tree_flatten(result)
        places = _places_of(args, kwargs)
        made = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._writes(event, number, given, made - set(places))
        kept: list[Made] = []
        slot = 0
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                kept.append(Made("constant", leaf))
                continue
            if id(leaf) in places and not event.written:
                kept.append(Made("given", places[id(leaf)]))
                if self.current.get(leaf) is not None:
                    event.makes.append(self.current.get(leaf))
            else:
                kept.append(Made("made", slot, leaf.dtype, leaf.requires_grad))
                # Gradients must pass the module's hooks, which are around what is seen here.
                self.make(event, number, slot, leaf, crossable=path not in self.has_hooks)
            slot += 1
        event.result = (kept, spec)

    def _run_unit(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit as it is, or on made-up values if it reads values inside."""
        if self.valued is None:
            return plain(*args, **kwargs)
        if path in self.valued:
            return self._on_values(path, plain, args, kwargs)
        module = self.program.module(path)
        given = (*tensors_in((args, kwargs)), *module.parameters())
        if not any(type(tensor) is Absent for tensor in given):
            return plain(*args, **kwargs)
        held = [(part.__dict__, own_buffers(part)) for part in module.modules()]
        before = [(places, dict(places), buffers, dict(buffers)) for places, buffers in held]
        try:
            result = plain(*args, **kwargs)
            check_none_lost(tensors_in(result))
            if not any(type(t) is Absent and t.is_unknown for t in tensors_in(result)):
                return result
        except (NeedsValues, Exception):
            pass
        for attributes, kept, buffers, kept_buffers in before:
            attributes.clear()
            attributes.update(kept)
            buffers.update(kept_buffers)
        self.valued.add(path)
        return self._on_values(path, plain, args, kwargs)

    def _on_values(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit on values that are made up, but for those that are here."""
        home = Absent.home
        made: dict[int, torch.Tensor] = {}

        def here(value: Any) -> Any:
            if type(value) is not Absent:
                return value
            if value.is_unknown:
                raise UnknownSize(f"a tensor of unknown size in '{path}'")
            if id(value) not in made:
                made[id(value)] = _drawn(value, home)
                self.apart.set(made[id(value)], self._is_apart(value))
            return made[id(value)]

        def parameter(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not Absent:
                return tensor
            name = self.param_names.get(id(tensor), "")
            own = self._originals.get(name)
            if own is None or own.is_meta or type(own) is Absent:
                with NoFunctionCalls():
                    found = made_up(tensor.plain, home)
            else:
                found = own.detach().clone()
            self.apart.set(found, True)
            return found

        with torch.random.fork_rng(devices=[]), standing_in([self.program.module(path)], parameter):
            given, named = pytree.tree_map(here, (args, kwargs))
            versions = {id(tensor): write_count(tensor) for tensor in made.values()}
            result = plain(*given, **named)
        back = {id(value): key for key, value in made.items()}
        originals = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        for key, value in made.items():
            if write_count(value) != versions[id(value)]:
                originals[key].plain.zero_()  # pyright: ignore

        def away(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in back:
                return originals[back[id(value)]]
            found = absent_like(tuple(value.shape), value.dtype, value.requires_grad)
            self.apart.set(found, self.apart.get(value))
            return found

        return pytree.tree_map(away, result)

    # Calls of blocks.

    def _around_block(self, path: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None or not self._active:
                return plain(*args, **kwargs)
            return self._block(path, plain, args, kwargs)

        return forward

    def anchor_of(self, address: Address) -> Address:
        """The first part of the addresses of calls that follow this call of a unit."""
        return (address[0], -1) if address[0] in self.varying else address

    def keep_together(self, path: str) -> None:
        """Let there be no cut from the first to the last call of a unit."""
        calls = [n for n, e in enumerate(self.events) if e.is_unit and e.address[0] == path]
        if len(calls) > 1:
            self.regions.append((calls[0], calls[-1] + 1))

    def _block(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        first = len(self.events)
        before = {id(t): self.current.get(t) for t in tensors_in((args, kwargs))}
        result = plain(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        places = _places_of(args, kwargs)
        call = BlockCall(path, first, len(self.events), [], spec, self._anchor)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                call.template.append(Made("constant", leaf))
                continue
            value = self.current.get(leaf)
            if id(leaf) in places and before.get(id(leaf)) == value:
                call.template.append(Made("given", places[id(leaf)]))
            else:
                call.closed = call.closed and value is not None
                call.template.append(Made("made", value, leaf.dtype, leaf.requires_grad))
        self.blocks.append(call)
        return result

    # What was recorded.

    @property
    def by_address(self) -> dict[Address, RecordedCall]:
        """The calls by their addresses."""
        return {event.address: event for event in self.events}

    def _note_assigned(self) -> None:
        """A buffer for which forward has put another tensor is written by what made that."""
        in_loss = LOSS in self.program.root_names
        for name, before in self._buffers.items():
            place, key = self.program.places(name)
            now = place.get(key)
            value = None if now is None or now is before else self.current.get(now)
            if value is not None:
                number = self.values[value].maker
                if in_loss and name.startswith(f"{LOSS}."):
                    number = max(number, self.model_end)
                self.buffer_writes.setdefault(name, []).append(number)

    @cached_property
    def local_buffers(self) -> dict[str, list[int]]:
        """The buffers that belong to one stage, with the calls of that stage which write them.

        They are written from the batch or activations, or by a loss function, which only the last
        stages run. What the model writes of neither, all stages write.
        """
        return {name: own for name, own in self.buffer_writes.items() if self._is_local(own)}

    def _is_local(self, writes: Sequence[int]) -> bool:
        behind = (self.events[number] for number in self.behind(writes))
        return max(writes) >= self.model_end or any(e.depends or e.leaves for e in behind)

    def makers_at(self, place: StatePlace) -> list[int]:
        """The calls, or those of units, that have made the tensors in a piece of state."""
        found: list[int] = []
        for tensor in self.state_at(place):
            value, unit = self.current.get(tensor), self.hidden.get(tensor)
            if value is not None:
                found.append(self.values[value].maker)
            elif unit is not None:
                found += [n for n, event in enumerate(self.events) if event.address[0] == unit]
        return found

    def keep_carried(self, makers: Sequence[int], reads: Iterable[Address]) -> bool:
        """Forbid cuts from these calls that made a piece of state to those that read it next time.

        Return whether it is made of the batch or activations, so that it matters.
        """
        if not makers or not self._is_local(makers):
            return False
        every = [n for n, event in enumerate(self.events) if event.address in reads]
        every += makers
        self.regions.append((min(every), max(every) + 1))
        return True

    def _keep_with_writes(self) -> None:
        """Forbid cuts among calls that read a tensor which is written to, or what it is made of.

        As where forward itself moves an average of weights: the stage that does it needs them all.
        """
        for name, writes in self.parameter_writes.items():
            names = {name}.union(*(self.events[number].params for number in self.behind(writes)))
            self._keep_users(names, {self._owner.get(own) for own in names}, writes)
        for name, writes in self.local_buffers.items():
            units = {unit for unit in self.units if name.startswith(f"{unit}.")}
            self._keep_users({name}, units, writes)

    def _keep_users(
        self, names: set[str], units: Collection[str | None], writes: list[int]
    ) -> None:
        """Forbid cuts among these writes and the calls that read these tensors."""
        users = [
            number
            for number, event in enumerate(self.events)
            if names.intersection((*event.params, *event.buffers))
            or (event.is_unit and event.address[0] in units)
        ]
        every = [*users, *writes]
        self.regions.append((min(every), max(every) + 1))

    def behind(self, events: Iterable[int]) -> frozenset[int]:
        """These events, and those that make what they read."""
        todo, found = list(events), set[int]()
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += [self.values[value].maker for value in self.events[number].reads]
        return frozenset(found)

    def _finish(self) -> None:
        """Find what depends on parameters, and which blocks are closed."""
        self.regions += [(first, last) for _, first, last in self.checkpoints.values()]
        self.dependent: set[int] = set()
        self.decided: set[int] = set()
        """Values whose sizes activations decide about, and what is made of these."""
        by_activations = False
        for number, event in enumerate(self.events):
            of_stages = any(value in self.dependent for value in event.reads)
            if of_stages and event.func is None and event.address[1] == MASK:
                event.reads_values, of_stages, by_activations = False, False, True
                event.reads = []
                continue
            event.depends = event.is_unit or bool(event.params) or of_stages
            own = {value for value in event.makes if self.values[value].maker == number}
            if by_activations or any(value in self.decided for value in event.reads):
                self.decided |= own
            by_activations = False
            if event.depends:
                self.dependent |= own
        self._note_assigned()
        self._keep_with_writes()
        # Where hooks are called, something may be collected for code outside of the block.
        modules = list(self.program.named_modules())
        called = [path for path, module in modules if forward_hooks(module)]
        for block in self.blocks:
            if any(path.startswith(f"{block.path}.") for path in called):
                block.closed = False
            results = {made.what for made in block.template if made.kind == "made"}
            inside = range(block.first, block.last)
            if any(e.random and not e.depends for e in self.events[block.first : block.last]):
                block.closed = False
            for number, event in enumerate(self.events):
                if number not in inside and any(
                    self.values[value].maker in inside and value not in results
                    for value in event.reads
                ):
                    block.closed = False


_BOUND, MASK = "bound of a slice", "mask or repeats"


def held_here(tensor: torch.Tensor) -> str:
    """A tensor in words: which attribute of which module whose code runs, if of any."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            for name, own in own_parameters(owner).items():
                if own is tensor:
                    return f"'{name}' of a {type(owner).__name__}"
        frame = frame.f_back
    return f"a tensor of shape {tuple(tensor.shape)}"


def _only_shape(name: str, args: Any, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The argument of which a call reads only the shape, if there is one."""
    place = SHAPE_ONLY.get(name)
    found = args[place] if place is not None and place < len(args) else None
    if not isinstance(found, torch.Tensor) or sum(tensor is found for tensor in given) > 1:
        return None  # in x.view_as(x) the values are read too
    return found


def _places_of(args: Any, kwargs: Any) -> dict[int, Any]:
    """The path of each tensor in the arguments, by its identity."""
    found = pytree.tree_flatten_with_path((args, kwargs))[0]
    return {id(leaf): path for path, leaf in found if isinstance(leaf, torch.Tensor)}


def _with_grad(result: Any, given: Any) -> Any:
    """The result of an own autograd function; absent ones need a gradient if an input does."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(given)):
        for tensor in tensors_in(result):
            if type(tensor) is Absent and tensor.is_floating_point():
                tensor.needs_grad = True
    return result


def _drawn(like: Absent, device: torch.device) -> torch.Tensor:
    """A tensor with made-up values; one that needs a gradient is no leaf, so it can be written."""
    with NoFunctionCalls():
        value = made_up(like.plain, device)
    return value.requires_grad_().clone() if like.needs_grad else value
