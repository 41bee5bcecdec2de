"""One stage: the user's own forward on his own modules; calls of other stages are left out.

    unit of this stage       runs as it is
    unit of another stage    returns what was received for its address, or absent tensors
    call between units       runs; it is absent if it reads something absent
    all that is sent is made  the forward of this stage ends there

Only while a stage runs, the units that it must see have another ``forward``; afterwards the model
is as the user made it.
"""

import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.forward.kept_state import KeptState, changed_by, copied
from penstock.capture.forward.whole_blocks import numbers_in, units_in, whole_blocks
from penstock.capture.loss.loss_parts import LossAction, measured, target_count, weighed
from penstock.capture.loss.loss_path import LossPath, OtherPath, PathGuard
from penstock.capture.record.absent import (
    Absent,
    NeedsValues,
    NoHandle,
    absent_like,
    call_name,
    functions_through,
    scripts_seen,
    writes_first,
)
from penstock.capture.record.calls import (
    Address,
    BlockCall,
    Made,
    RecordedCall,
    tensors_in,
)
from penstock.capture.record.example import Recorded
from penstock.capture.record.model_and_loss import IN_ONE_PROCESS, UserProgram
from penstock.capture.record.model_state import Place, place_of, put, value_at
from penstock.capture.record.outside_state import (
    GeneratorsState,
    RandomState,
    generators_state,
    random_state,
    restore_generators,
    restore_random_state,
    seed_generators,
)
from penstock.capture.record.sizes import BatchSize
from penstock.capture.record.user_lines import line_of, line_of_user, line_with_source
from penstock.device import device_in_use
from penstock.errors import BadInput
from penstock.torch_internals import (
    BACKWARD_HOOKS,
    COMPILED_CALL,
    NoFunctionCalls,
    forward_hooks,
    has_global_hooks,
    modes_on,
    own_buffers,
    put_on,
    pytree,
    taken_off,
)

Costs: TypeAlias = Literal["", "measured", "estimated"]
"""Kind of the costs for which a stage runs; empty if it does not run for these."""

Purpose: TypeAlias = Literal["training", "probing", "checking", "measured", "estimated"]
"""Purpose of a stage's run; see `ProgramStage`."""

KEEP_TOGETHER = "keep these layers in one stage"
REMEDY = (
    f"a stage needs the calls that the example batch made; capture again with such a batch, or "
    f"{KEEP_TOGETHER}"
)


class StageEnd(BaseException):
    """Everything that this stage sends has been made."""


class PathChanged(BaseException):
    """Control flow differs from the example; no `Exception`, so that user code lets it pass."""


@dataclass(frozen=True)
class ProgramPart:
    """Part of a record that is a stage's: events ``first`` to ``last``, and the calls of ``units``.

    ``received`` and ``sent`` are values, each with the address of its maker and its slot there;
    ``held`` are names of parameters and buffers. ``answers``, by address, are those of the example
    to questions whose tensors may be missing. ``to_end``: forward continues when all that is
    sent is made.
    """

    first: int
    last: int
    units: frozenset[tuple[str, int]] = frozenset()
    held: frozenset[str] = frozenset()
    received: Mapping[int, tuple[Address, Any]] = field(
        default_factory=dict[int, tuple[Address, Any]]
    )
    sent: Mapping[int, tuple[Address, Any]] = field(default_factory=dict[int, tuple[Address, Any]])
    answers: Mapping[Address, Any] = field(default_factory=dict[Address, Any])
    to_end: bool = False

    @cached_property
    def paths(self) -> frozenset[str]:
        """The paths of its units."""
        return frozenset(path for path, _ in self.units)

    def makes(self, number: int, event: RecordedCall) -> bool:
        """Return whether the stage makes a call: its own, or an earlier one that needs no stage."""
        return number < self.last and (number >= self.first or not event.depends)


@dataclass(slots=True)
class RunContext:
    """Identity of a run of a stage.

    ``name`` is unique to this micro-batch in the run, ``micro_batch`` among those that are kept
    at the same time. ``keep``: it will run again (``replay``), with the state that this run
    began with. ``returns``: its backward will run, with the state that this run leaves. ``trial``:
    what it changes of the model's state is put back.
    """

    name: tuple[int, ...] = ()
    micro_batch: int = 0
    keep: bool = False
    replay: bool = False
    returns: bool = False
    trial: bool = False


@dataclass(slots=True)
class StageRun:
    """Inputs of one run of a stage.

    ``seed`` makes equal what all stages draw between units in one micro-batch. ``own_seed`` is for
    what this stage alone draws then, and comes from the rank's own generator. ``whole`` are the
    values of the whole step by address, and ``share`` is the micro-batch's part of its samples.
    """

    size: BatchSize
    received: Mapping[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    context: RunContext = field(default_factory=RunContext)
    seed: int = 0
    own_seed: int = 0
    whole: Mapping[Address, Sequence[Any]] = field(default_factory=dict[Address, Sequence[Any]])
    share: float = 1.0


_NO_RUN = StageRun(BatchSize(0))


class _Watch(TorchFunctionMode):
    """Mode between units where calls matter by address: received, sent, or parts of the loss."""

    def __init__(self, stage: "ProgramStage") -> None:
        super().__init__()
        self._stage = stage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stage, name = self._stage, call_name(func)
        if stage.inside or (name not in stage.watched_names and not stage.guard.is_on):
            return func(*args, **kwargs)
        return stage.watched_call(func, name, args, kwargs)


class _WithoutHooks(TorchFunctionMode):
    """Mode that ignores hooks on tensors without gradients, instead of an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call_name(func) in ("register_hook", "retain_grad") and not args[0].requires_grad:
            return NoHandle()
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Call:
    """Role of this stage in one call of a unit, or of a block that is left out."""

    own: bool
    anchor: Address | None
    template: Sequence[Made]
    spec: Any
    sent: Mapping[Any, int] | None = None
    received: frozenset[int] | None = None
    watch: bool = False
    draws: bool = False
    first: int = 0
    """The number of its (first) event."""

    @property
    def is_single(self) -> bool:
        """Return whether the result is one tensor that the unit made."""
        return len(self.template) == 1 and self.spec.is_leaf() and self.template[0].kind == "made"


class _Way:
    """The ``forward`` that a module of the user has while a stage runs."""

    __slots__ = ("bound", "forward", "had", "mutes", "place", "sends")

    def __init__(self, module: nn.Module, *, mutes: bool) -> None:
        self.place: dict[str, Any] = module.__dict__
        self.bound = type(module).forward.__get__(module)
        self.had: Any = None
        self.mutes = mutes
        self.sends = ""
        self.forward: Any = None

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward."""
        return (self.had or self.bound)(*args, **kwargs)


_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()


class ProgramStage:
    """Runner of ``part`` of a recorded program on the user's own modules.

    ``actions`` say what is different about calls of the loss, by number of event, and ``path``
    which calls there must be. With ``probes`` nothing is known of activations: the run finds the
    values of a whole step, for which all parameters are absent. ``alone``: parameters that this
    stage does not hold may be here, since other stages run in this process; they are absent while
    it runs.

    With ``costs`` it runs to find these: from `on_begin` on it makes all calls of its range, and no
    others; it does not end when all is made that is sent, but where the next stage begins. If they
    are "estimated", activations have no values, so requests for them get the example's answers.
    """

    on_begin: Callable[[], None] | None = None
    """Callback before the stage's own first call, unless that is the first of all."""

    def __init__(
        self,
        program: UserProgram,
        recorded: Recorded,
        part: ProgramPart,
        actions: Mapping[int, Sequence[LossAction]],
        state: KeptState,
        *,
        path: LossPath | None = None,
        alone: bool = True,
        purpose: Purpose = "training",
    ) -> None:
        self.program, self.recorded, self.part = program, recorded, part
        self.probes, self._checks = purpose == "probing", purpose == "checking"
        self.costs: Costs = purpose if purpose in ("measured", "estimated") else ""
        self.inside = False
        self.counts_targets = False
        self.counted: Any = None
        self.found: dict[Address, list[Any]] = {}
        record = self.record = recorded.record
        self._sizes, self._state = recorded.sizes, state
        events = record.events
        self._actions = {events[i].address: list(own) for i, own in actions.items()}
        self._streams = any(event.random and not event.depends for event in events)
        self.draws_alike = self._streams or recorded.draws_python
        own = dict(path or {})
        if not self.probes:
            own = {
                anchor: segment.within(events, part.first)
                for anchor, segment in own.items()
                if segment.first < part.last and part.first < segment.last
            }
        self.guard = PathGuard(own)
        self._find_watched(actions, [call for each in own.values() for call, _ in each.calls])
        self._mode, self._modes_before = _Watch(self), 0
        self._running: dict[str, int] | None = None
        self._wanted = len(part.sent)
        self._ends_early = not part.to_end
        self._kept_before: dict[Any, list[Any]] = {}
        self._left_after: dict[Any, list[Any]] = {}
        self.state_key = part.first, part.last
        self._make_ways()
        self._containers = list(self._modules_between())
        self.hold(alone=alone)
        self._own_state = [
            place_of(program, place)
            for unit, place in recorded.unit_changes
            if (unit in part.paths if unit else place.name not in self.buffers_elsewhere)
        ]
        self.has_state = bool(state.places or self._own_state)
        self._reset(StageRun(BatchSize(1)))

    # What this stage must see.

    def _find_watched(
        self, actions: Mapping[int, Sequence[LossAction]], compared: Iterable[Address]
    ) -> None:
        events, part = self.record.events, self.part
        self._received_slots: dict[Address, dict[Any, int]] = {}
        self._sent_slots: dict[Address, dict[Any, int]] = {}
        self._unit_received: dict[Address, dict[Any, int]] = {}
        self._unit_sent: dict[Address, dict[Any, int]] = {}
        for calls, units, source in (
            (self._sent_slots, self._unit_sent, part.sent),
            (self._received_slots, self._unit_received, part.received),
        ):
            for value, (address, slot) in source.items():
                table = units if len(address) == 2 else calls
                table.setdefault(address, {})[slot] = value
        acted = {events[i].address for i in actions if self.probes or part.makes(i, events[i])}
        self._answers = part.answers
        if self.probes or self.costs == "estimated":
            self._answers = {e.address: e.answer for e in events if e.reads_values and e.depends}
        # A call between units that draws for activations is one stage's; it must not move the
        # generator from which all stages draw.
        self._random_calls: set[Address] = set()
        if self._streams:
            drawing = (e for e in events if e.random and e.depends and not e.is_unit)
            self._random_calls = {event.address for event in drawing}
        # What a stage receives has its hooks where it is made, and all gradients arrive there.
        hooks = self.record.hooks.on_tensors.items()
        self._hooked_elsewhere = {address for address, value in hooks if value in part.received}
        # Where the range begins and ends, if that is to be seen.
        ends = [part.first, part.last] if self.costs else []
        self._marks = {number for number in ends if 0 < number < len(events)}
        self._marked = {events[i].address: i for i in self._marks if not events[i].is_unit}
        addresses = {*self._received_slots, *self._sent_slots, *acted, *self._marked}
        addresses |= {*self._answers, *self._random_calls, *self._hooked_elsewhere}
        self._special = frozenset(addresses)
        addresses |= set(compared)
        # To watch a call takes as long as a layer. One of torch's functions that is the whole loss
        # is made here instead.
        self.loss: Callable[..., Any] | None = None
        if len(addresses) == 1 and addresses == acted and not self.probes:
            (only,) = addresses
            if self.record.by_address[only].func is self.program.loss:
                self.loss = partial(self._loss, only)
                addresses = set()
        self._watched = addresses

    def _make_ways(self) -> None:
        """Prepare the forwards of units, and of blocks that run or are left out as a whole."""
        record, part = self.record, self.part
        last = len(record.events)
        if self._ends_early and self._wanted:
            last = max(record.values[value].maker for value in part.sent)
            if self.costs:
                last = part.last  # its call is seen, and ends the stage
        left_out, own_blocks = self._find_whole()
        self.own_blocks = tuple(own_blocks)
        """Paths of blocks that are this stage's whole, and run as if they were units."""
        calls: dict[str, list[_Call]] = defaultdict(list)
        for number, event in enumerate(record.events):
            if event.is_unit:
                calls[event.address[0]].append(self._call_of(number))
        for path, blocks in (left_out | own_blocks).items():
            for unit in units_in(record, blocks):
                del calls[unit]
            calls[path] = [self._block_call(block, own=path in own_blocks) for block in blocks]
        self._ways: list[_Way] = []
        self._expected, self._may_vary = 0, False
        for path, own in calls.items():
            # Without watched places, what is own and sends nothing is left as it is.
            plain = all(
                c.own
                and not (c.sent or c.watch or (self._streams and c.draws))
                and c.first not in self._marks
                for c in own
            )
            if plain and not self._watched_anchors and not record.has_nested:
                continue
            way = _Way(self.program.module(path), mutes=not any(call.own for call in own))
            way.sends = path if any(call.sent for call in own) else ""
            once = len(own) == 1 and not own[0].draws and not record.has_nested
            make = self._called_once if once else self._called_often
            way.forward = wraps(self.program.module(path).forward)(make(path, own, way))
            self._ways.append(way)
            # Of its own, a stage may leave out what it sends nothing of, as an expert without rows.
            self._expected += sum(call.first <= last and not call.own for call in own)
            self._may_vary |= self._by_sample(path)

    def _find_whole(self) -> tuple[dict[str, list[BlockCall]], dict[str, list[BlockCall]]]:
        """The blocks that are left out, and those that run, as a whole: none is looked into."""
        left_out, own = dict[str, list[BlockCall]](), dict[str, list[BlockCall]]()
        if not self._checks:
            left_out = whole_blocks(self.record, self._can_be_left_out)
            if not self.probes:
                own = whole_blocks(self.record, self._can_run_whole)
        for blocks in (left_out | own).values():
            self._watched -= {self.record.events[n].address for n in numbers_in(blocks)}
        self.watched_names = {address[1] for address in self._watched}
        self._watched_anchors = {address[0] for address in self._watched}
        return left_out, own

    def _can_be_left_out(self, block: BlockCall) -> bool:
        part = self.part
        overlaps = block.last > part.first and block.first < part.last
        if not block.closed or (overlaps and not self.probes):
            return False
        inside = {self.record.events[number].address for number in numbers_in([block])}
        if inside & self._actions.keys() or not self._hides_only(block, part.received):
            return False
        return not any(
            place.path == block.path or place.path.startswith(f"{block.path}.")
            for place in self.recorded.changes
        )

    def _can_run_whole(self, block: BlockCall) -> bool:
        module: dict[str, Any] = self.program.module(block.path).__dict__
        if any(module.get(key) for key in (*BACKWARD_HOOKS, COMPILED_CALL)):
            return False  # what is sent is taken inside of the module's call
        if block.first < self.part.first or block.last > self.part.last:
            return False
        events = [self.record.events[number] for number in numbers_in([block])]
        if self._streams and any(event.random for event in events):
            return False
        units = [event.address for event in events if event.is_unit]
        if not self.part.units.issuperset(units) or any(self._by_sample(path) for path, _ in units):
            return False
        watched = {event.address for event in events} & self._watched
        results = {address for address, _ in self.part.sent.values()}
        return watched <= results and self._hides_only(block, self.part.sent)

    def _hides_only(self, block: BlockCall, crossing: Mapping[int, Any]) -> bool:
        """Return whether only the block's result crosses, and no later place is renumbered."""
        record, inside = self.record, numbers_in([block])
        results = {made.what for made in block.template if made.kind == "made"}
        if any(record.values[v].maker in inside and v not in results for v in crossing):
            return False
        # A call of the same line after the block has the next number there.
        addresses = {record.events[number].address for number in inside}
        places = {address[:3] for address in addresses}
        return all(address[:3] not in places for address in self._watched - addresses)

    def _modules_between(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Modules between units: whether their calls are this stage's, another's, or of both."""
        part, record = self.part, self.record
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
            yield self.program.module(path).__dict__, kind, path

    def _call_of(self, number: int) -> _Call:
        event = self.record.events[number]
        assert event.result is not None
        made, spec = event.result
        known = self.record.values
        values = {known[v].slot: v for v in event.makes if known[v].maker == number}
        template = [
            Made("made", values[m.what], m.dtype, m.grad) if m.kind == "made" else m for m in made
        ]
        received = self._unit_received.get(event.address)
        anchor = self.record.anchor_of(event.address)
        return _Call(
            event.address in self.part.units,
            anchor,
            template,
            spec,
            self._unit_sent.get(event.address),
            frozenset(received.values()) if received is not None else None,
            anchor in self._watched_anchors,
            event.random,
            number,
        )

    def _block_call(self, block: BlockCall, *, own: bool) -> _Call:
        part = self.part
        tensors = [made for made in block.template if made.kind in ("made", "given")]
        made = {made.what: slot for slot, made in enumerate(tensors) if made.kind == "made"}
        return _Call(
            own,
            block.anchor,
            block.template,
            block.spec,
            {slot: value for value, slot in made.items() if value in part.sent} if own else None,
            frozenset() if own else frozenset(value for value in made if value in part.received),
            block.anchor in self._watched_anchors,
            first=block.first,
        )

    def hold(self, *, alone: bool) -> None:
        """Decide which parameters that are not this stage's are exchanged while it runs.

        Where others' parameters have been released, nothing needs to be exchanged.
        """
        program, record, part = self.program, self.record, self.part
        named = list(program.named_parameters())
        held = set(part.held)
        for path in part.paths:
            own = program.module(path).named_parameters(path, remove_duplicate=False)
            held |= {name for name, _ in own}
        here = {id(parameter) for name, parameter in named if name in held}
        self.held = frozenset(name for name, p in named if id(p) in here)
        read = {name for e in record.events if not e.is_unit for name in e.params}
        read_ids = {id(parameter) for name, parameter in named if name in read}
        self._exchanged: list[tuple[Place, Absent]] = []
        self.stand_ins: dict[str, torch.Tensor] = {}
        """Placeholders for parameters of other stages while this one runs, by name."""
        places: set[tuple[int, str]] = set()
        for name, parameter in named:
            if id(parameter) in here or type(parameter) is Absent:
                continue
            place, key = program.places(name)
            if (id(place), key) in places:
                continue  # a module that is reached by two names
            places.add((id(place), key))
            if alone or id(parameter) in read_ids:
                stand_in = absent_like(
                    tuple(parameter.shape),
                    parameter.dtype,
                    parameter.requires_grad,
                    is_parameter=True,
                )
                self._exchanged.append(((place, key), stand_in))
                self.stand_ins[name] = stand_in
        # Hooks around a unit that is left out may write to its buffers: the old spectral norm's do.
        for path in record.counts.keys() - part.paths:
            module = program.module(path)
            if forward_hooks(module):
                for key, buffer in own_buffers(module).items():
                    if buffer is not None and type(buffer) is not Absent:
                        stand_in = absent_like(tuple(buffer.shape), buffer.dtype)
                        self._exchanged.append(((own_buffers(module), key), stand_in))
        # A buffer that is written from the batch or activations is of the stage that does it.
        self.buffers_elsewhere: set[str] = set()
        for name, numbers in record.local_buffers.items():
            if not any(part.first <= i < part.last for i in numbers):
                self.buffers_elsewhere.add(name)
                place = program.places(name)
                buffer = place[0][place[1]]
                self._exchanged.append((place, absent_like(tuple(buffer.shape), buffer.dtype)))

    def share_state(self, other: "ProgramStage") -> None:
        """Keep state for replays and backwards where another form of this stage finds it."""
        self._kept_before, self._left_after = other._kept_before, other._left_after

    @contextmanager
    def in_backward(self, name: Any) -> Iterator[None]:
        """Put back the state that a run has left under this name, if one has.

        The user's code also runs in a backward: autograd functions, hooks, checkpoints. It finds
        what its own forward has left, however many others have run since. What it changes stays.
        """
        left = self._left_after.pop(name, None)
        if left is None:
            with IN_ONE_PROCESS:
                yield
            return
        self._state.enter(self.state_key)
        now = self._state_now()
        self._put_state(left)
        try:
            with IN_ONE_PROCESS:
                yield
        finally:
            self._put_state(map(changed_by, left, self._state_now(), now))
            self._state.leave(self.state_key)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude calls of modules from this forward, within a run; they run on copies of state."""
        before = self._state_now()
        self.inside = True
        try:
            self._put_state(map(copied, before))
            yield
        finally:
            self.inside = False
            self._put_state(before)

    # Forwards of units while the stage runs.

    def _called_often(self, path: str, calls: Sequence[_Call], way: _Way) -> Callable[..., Any]:
        """The forward of a module that may be called several times."""
        by_sample = self._by_sample(path)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running is None or self.inside:
                return way.plain(*args, **kwargs)
            n = self._running.get(path, 0)
            self._running[path] = n + 1
            if self._watching:
                self._unwatch()
            if n >= len(calls):
                if not by_sample:
                    times = f"{n + 1} times, and {len(calls)} times on the example"
                    raise PathChanged(f"'{path}' is called {times}")
                n = len(calls) - 1
            call = calls[n]
            self._count += not call.own
            if call.first in self._marks:
                self._at_mark(call.first)
            if call.own:
                self.inside = True
                try:
                    if self._streams and call.draws:
                        result = self._in_stream((path, n), way.plain, args, kwargs)
                    else:
                        result = way.plain(*args, **kwargs)
                finally:
                    self.inside = False
                if call.sent:
                    self._collect(tensors_in(result), call.sent)
            else:
                result = self._left_out(call, args, kwargs)
            self._anchor = call.anchor
            if call.watch:
                self._watch()
            return result

        return forward

    def _called_once(self, path: str, calls: Sequence[_Call], way: _Way) -> Callable[..., Any]:
        """`_called_often` for a module with one call in a forward, and for what this stage does."""
        (call,) = calls
        own, after, sent, anchor, plain = call.own, call.watch, call.sent, call.anchor, way.plain
        mark = call.first if call.first in self._marks else None
        single = call.template[0] if call.is_single else None
        receives, left_out = bool(call.received), not call.own

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running is None or self.inside:
                return plain(*args, **kwargs)
            if self._watching:
                self._unwatch()
            self._count += left_out
            if mark is not None:
                self._at_mark(mark)
            if own:
                result = plain(*args, **kwargs)
                if sent:
                    self._collect(tensors_in(result), sent)
            elif single is None:
                result = self._left_out(call, args, kwargs)
            elif receives:
                result = self.received[single.what]
            else:
                result = self._absent(single)
            if after:
                self._anchor = anchor
                self._watch()
            return result

        return forward

    def _left_out(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """Return the result of another stage's unit: what was received, or absent tensors."""
        received = call.received
        if call.is_single:
            (made,) = call.template
            if received:
                return self.received[made.what]
            return self._absent(made)
        found: list[Any] = []
        for made in call.template:
            if made.kind == "constant":
                found.append(made.what)
            elif made.kind in ("given", "handed on"):
                found.append(pytree.key_get((args, kwargs), made.what))
            elif received and made.what in received:
                found.append(self.received[made.what])
            else:
                found.append(self._absent(made))
        return pytree.tree_unflatten(found, call.spec)

    def _at_mark(self, number: int) -> None:
        """The stage's own first call comes next, or the first after it."""
        if number == self.part.first:
            if self.on_begin is not None:
                self.on_begin()
        elif self._ends_early and len(self._sent) == self._wanted:
            raise StageEnd

    def _absent(self, made: Made) -> Absent:
        """An absent tensor for a value; its shape is found once for each size of batch."""
        known = self._shapes.get(made.what)
        if known is None:
            assert made.dtype is not None
            shape = self._sizes.shape(made.what, self._run.size)
            found = absent_like((0,) if shape is None else shape, made.dtype)
            known = self._shapes[made.what] = found.plain, shape is None
        return Absent.of(known[0], made.grad and torch.is_grad_enabled(), known[1])

    def _by_sample(self, path: str) -> bool:
        """Return whether the number of calls grows with the batch; all are of one stage."""
        counts = {counts.get(path, 0) for counts in self.recorded.calls}
        own = sum(unit == path for unit, _ in self.part.units)
        return len(counts) > 1 and own in (0, self.record.counts[path])

    # Calls between units.

    def watched_call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A call of a watched name between units."""
        place = (self._anchor, name, line_of_user(3))
        n = self._seen.get(place, 0)
        self._seen[place] = n + 1
        address = (*place, n)
        if self.guard.is_on:
            return self.guard.call(self._call, address, func, args, kwargs)
        return self._call(address, func, args, kwargs)

    def _call(self, address: Address, func: Any, args: Any, kwargs: Any) -> Any:
        if address not in self._special:
            return func(*args, **kwargs)
        name = address[1]
        if address in self._marked:
            self._at_mark(self._marked[address])
        if address in self._hooked_elsewhere:
            return NoHandle()
        if address in self._answers:  # of activations nothing is known: as in the example
            return self._answers[address]
        actions = self._actions.get(address)
        if actions is not None:
            result = self._acted(address, actions, func, args, kwargs)
        elif address in self._random_calls:
            # Of the line the number alone: files may have other paths on other hosts.
            key = name, address[0], address[2][1], address[3]
            result = self._in_stream(key, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        slots = self._received_slots.get(address)
        if slots is not None:
            result = filled(result, slots, self.received)
            if writes_first(name) and type(args[0]) is Absent:
                args[0].became, Absent.any_became = result, True
        slots = self._sent_slots.get(address)
        if slots is not None:
            self._collect(tensors_in(result), slots)
        return result

    def _function(self, kind: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of an autograd function; a reentrant checkpoint may be received, or sent."""
        if kind is not CheckpointFunction or not self._watching or self.inside:
            return call(*args, **kwargs)
        return self.watched_call(call, kind.__name__, args, kwargs)

    def _loss(self, address: Address, *args: Any) -> Any:
        return self._acted(address, self._actions[address], self.program.loss, args, {})

    def _acted(
        self, address: Address, actions: Sequence[LossAction], func: Any, args: Any, kwargs: Any
    ) -> Any:
        if self.probes:
            self.found[address] = measured(actions, func, args, kwargs)
            return func(*args, **kwargs)
        if has_absent((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if self.counts_targets:
            self.counted = target_count(args, kwargs)
            return func(*args, **kwargs)
        run = self._run
        whole = run.whole.get(address)
        if whole is None and self._state.any_path:
            return func(*args, **kwargs)
        if whole is None:
            raise OtherPath(f"{self._in_words(address)} is called, but not in the whole batch")
        return weighed(actions, whole, run.share, func, args, kwargs)

    def _in_stream(self, key: Any, plain: Any, args: Any, kwargs: Any) -> Any:
        """A call that draws, from a stream of its own."""
        device = device_in_use()
        state = random_state(device)
        parts = self._run.seed, self._run.own_seed, key
        torch.manual_seed(zlib.crc32(repr(parts).encode()))
        try:
            return plain(*args, **kwargs)
        finally:
            restore_random_state(device, state)

    def _watch(self) -> None:
        """Watch calls, below all modes entered since the run began: each takes off the topmost.

        Above those that were there before, as the record was made: they may make other calls.
        """
        self._watching = True
        if not self._state.any_path:
            self.guard.begin(self._anchor)
        put_on([self._mode, *taken_off(self._modes_before)])

    def _unwatch(self) -> None:
        self.guard.end()
        self._watching = False
        put_on(taken_off(self._modes_before)[1:])

    def _collect(self, tensors: Sequence[torch.Tensor], slots: Mapping[Any, int]) -> None:
        """Take what is sent; end the forward when all of it is made."""
        for slot, value in slots.items():
            tensor = tensors[slot]
            if type(tensor) is Absent:
                what = self._in_words(self.part.sent[value][0])
                raise PathChanged(f"{what} was made of tensors of another stage")
            wanted = self._sent_shapes.get(value)
            if wanted is None:
                wanted = self._sent_shapes[value] = self._sizes.shape(value, self._run.size)
            if tensor.shape != wanted:
                what = self._in_words(self.part.sent[value][0])
                raise PathChanged(
                    f"{what} has the shape {tuple(tensor.shape)}, and by the example {wanted}, "
                    f"which the next stage receives; values must not decide about it"
                )
            if value in self.record.overwritten:
                with NoFunctionCalls():  # no call of the user's program
                    tensor = tensor.clone()
            self._sent[value] = tensor
        if len(self._sent) == self._wanted and self._ends_early and not self.costs:
            raise StageEnd

    def _in_words(self, address: Address) -> str:
        if len(address) == 2:
            return f"the result of '{address[0]}'"
        return f"'{address[1]}' at {line_with_source(address[2])}"

    # A run.

    def _reset(self, run: StageRun) -> None:
        self._run = run
        self._sent: dict[int, torch.Tensor] = {}
        self._seen: dict[Address, int] = {}
        over = self.record.overwritten
        self.received: Mapping[int, torch.Tensor] = run.received
        if over and run.received:
            self.received = {
                value: tensor.clone() if value in over else tensor
                for value, tensor in run.received.items()
            }
        self._anchor: Address | None = None
        self._watching = self.inside = False
        self._count = 0
        self.found = {}

    _shapes_of: BatchSize | None = None

    def run(self, call: Callable[[], Any], run: StageRun) -> tuple[Mapping[int, torch.Tensor], Any]:
        """Run ``call``, the user's program on one micro-batch: what is sent, and its result.

        The result is None for a stage whose forward ends before.
        """
        if self._shapes_of is not run.size:
            self._shapes_of, self._shapes = run.size, dict[int, tuple[torch.Tensor, bool]]()
            self._sent_shapes = dict[int, tuple[int, ...] | None]()
            self._sizes.find(run.size.lengths)  # not within a run, which would be recorded, too
        self._reset(run)
        try:
            result = self._run_replaced(call)
        except (PathChanged, NeedsValues) as problem:
            what = "needs" if isinstance(problem, NeedsValues) else "took another path:"
            remedy = self._few() or f"; {REMEDY}"
            raise BadInput(f"forward {what} {problem}{at_line(problem)}{remedy}") from problem
        except Exception as problem:
            problem.add_note(f"{at_line(problem)}{self._few()}")
            raise
        finally:  # release what it was given
            self.received, self._run = {}, _NO_RUN
            if Absent.any_became:  # each write to a class makes what is looked up in it slower
                Absent.any_became = False
        if len(self._sent) < self._wanted:
            missing = next(v for v in self.part.sent if v not in self._sent)
            what = self._in_words(self.part.sent[missing][0])
            raise BadInput(f"forward took another path: {what} was not made; {REMEDY}")
        if self._count != self._expected and not self._may_vary and not self.probes:
            raise BadInput(
                f"forward took another path: {self._count} calls of other stages' modules were "
                f"seen, and {self._expected} on the example; {REMEDY}"
            )
        made, self._sent = self._sent, {}
        return made, result

    def _few(self) -> str:
        """Return a hint about a micro-batch of one sample; empty for others."""
        if self._run.size.samples != 1:
            return ""
        return (
            f" (micro-batch {self._run.context.micro_batch} has 1 sample: give batches with 2 or "
            f"more for each micro-batch, as with drop_last=True, and squeeze(-1) for squeeze())"
        )

    def _run_replaced(self, call: Callable[[], Any]) -> Any:
        run, result = self._run, None
        generator = self._seeded()
        if has_global_hooks():
            raise BadInput(
                "there are backward hooks for all modules now (also those of FlopCounterMode), "
                "which would run on what is elsewhere; use them on the model alone"
            )
        muted, refused = self._replace()
        swapped: list[tuple[Place, Any]] = []
        for place, stand_in in self._exchanged:
            own = place[0][place[1]]
            stand_in.needs_grad = own.requires_grad
            swapped.append((place, own))
            place[0][place[1]] = stand_in
        after: list[Any] | None = None
        if self.has_state:
            if not self.probes:
                self._state.enter(self.state_key)
            after = self._enter(run.context)
        self._running = {}
        with_grad = torch.is_grad_enabled()
        self._modes_before = modes_on()
        try:
            if refused:
                # What is sent is taken inside of the module's call, so hooks would be skipped.
                raise PathChanged(
                    f"'{refused}', of which a part is sent to another stage, got a backward hook "
                    f"after the model was captured"
                )
            with self._surroundings():
                try:
                    if None in self._watched_anchors:
                        self._watch()
                    result = call()
                    self.guard.end(result[0])
                finally:
                    self.guard.stop()
                    if self._watching:
                        self._unwatch()
        except StageEnd:
            pass
        finally:
            self._running = None
            if torch.is_grad_enabled() != with_grad:
                torch.set_grad_enabled(with_grad)
            if self.has_state:
                self._leave(run.context, after)
            for place, value in reversed(swapped):  # a module may be there under two names
                place[0][place[1]] = value
            self._restore(muted)
            if generator is not None:
                restore_random_state(device_in_use(), generator[0])
                if generator[1] is not None:
                    restore_generators(generator[1])
        return result

    def _surroundings(self) -> AbstractContextManager[object]:
        """Return the context that must be around a run of this program."""
        without_hooks = self.record.hooks.any_on_tensors and not torch.is_grad_enabled()
        sees_checkpoints = CheckpointFunction.__name__ in self.watched_names
        if not (self.record.has_scripts or without_hooks or sees_checkpoints):
            return nullcontext()
        found = ExitStack()
        if sees_checkpoints:
            found.enter_context(functions_through(self._function))
        if self.record.has_scripts:
            found.enter_context(scripts_seen())
        if without_hooks:  # it may run again with gradients
            found.enter_context(_WithoutHooks())
        return found

    def _seeded(self) -> tuple[RandomState, GeneratorsState | None] | None:
        """Seed what all stages draw equally between units; return the states to restore."""
        if not self.draws_alike:
            return None
        draws_python = self.recorded.draws_python
        if self._streams:
            self._run.own_seed = int(torch.empty((), dtype=torch.int64).random_())
        before = random_state(device_in_use()), generators_state() if draws_python else None
        if self._streams:
            torch.manual_seed(self._run.seed)
        if draws_python:
            seed_generators(self._run.seed)
        return before

    def _replace(self) -> tuple[list[tuple[Place, Any]], str]:
        """Put the stage's forwards into the modules; hooks of other stages' units are muted."""
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
        for way in self._ways:
            place = way.place
            way.had = place.get("forward")
            place["forward"] = way.forward
            hooked = place[hooks] or place[pre_hooks]
            compiled = place.get(COMPILED_CALL)
            if way.mutes and (hooked or compiled):
                for key in BACKWARD_HOOKS:
                    mute(place, key, _NO_HOOKS)
                if compiled:
                    mute(place, COMPILED_CALL, None)
            elif hooked and way.sends:
                refused = way.sends
        return muted, refused

    def _restore(self, muted: Sequence[tuple[Place, Any]]) -> None:
        for way in self._ways:
            if way.had is None:
                way.place.pop("forward", None)
            else:
                way.place["forward"], way.had = way.had, None
        for place, value in muted:
            put(place, value)

    def _enter(self, context: RunContext) -> list[Any] | None:
        """State before this run; of a replay that of the first run. Returns what to put back."""
        now = self._state_now()
        if self.probes:
            self._put_state(map(copied, now))
            return now
        if context.replay:
            self._put_state(map(copied, self._kept_before.pop(context.micro_batch)))
            return now
        if context.keep:
            self._kept_before[context.micro_batch] = [copied(value) for value in now]
        return now if context.trial else None

    def _leave(self, context: RunContext, after: list[Any] | None) -> None:
        if context.returns:
            self._left_after[context.micro_batch] = self._state_now()
        if after is not None:
            self._put_state(after)
        if not self.probes:
            self._state.leave(self.state_key)

    def _state_now(self) -> list[Any]:
        """The values of all places where the program keeps state."""
        return [value_at(place) for place in (*self._state.places, *self._own_state)]

    def _put_state(self, values: Iterable[Any]) -> None:
        """Put values into the places of `_state_now`."""
        for place, value in zip((*self._state.places, *self._own_state), values, strict=True):
            put(place, value)


def has_absent(values: Sequence[Any]) -> bool:
    """Return whether a tensor among the values, or in structures among them, is absent."""
    for value in values:
        if type(value) is Absent:
            return True
        if isinstance(value, (list, tuple, dict)) and has_absent(tensors_in(value)):
            return True
    return False


def filled(result: Any, slots: Mapping[Any, int], received: Mapping[int, torch.Tensor]) -> Any:
    """A call's result with received tensors in some of its slots."""
    if isinstance(result, torch.Tensor):
        return received[slots[0]] if 0 in slots else result
    leaves, spec = pytree.tree_flatten(result)
    found: list[Any] = []
    slot = 0
    for leaf in leaves:
        is_tensor = isinstance(leaf, torch.Tensor)
        found.append(received[slots[slot]] if is_tensor and slot in slots else leaf)
        slot += is_tensor
    return pytree.tree_unflatten(found, spec)


def at_line(problem: BaseException) -> str:
    """`` at `` the innermost line of the user's code in the traceback of a problem, if any."""
    found = line_of(problem.__traceback__)
    return f" at {found}" if found else ""
