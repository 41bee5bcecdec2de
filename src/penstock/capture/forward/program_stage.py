"""One stage: the user's own forward on his own modules; calls of other stages are left out.

    unit of this stage       runs as it is
    unit of another stage    returns what was received for its address, or absent tensors
    call between units       runs; it is absent if it reads something absent
    all that is sent is made  the forward of this stage ends there

Only while a stage runs, the units that it must see have another ``forward``; afterwards the model
is as the user made it.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from itertools import chain, count
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.forward.kept_state import KeptState, RunState
from penstock.capture.forward.partial_forward import StageRun, StageTask
from penstock.capture.forward.unit_calls import UnitCall, unit_calls
from penstock.capture.forward.watched import find_watched, whole_loss
from penstock.capture.forward.whole_blocks import blocks_as_wholes, events_in
from penstock.capture.loss.loss_parts import measured, target_count, weighed
from penstock.capture.loss.loss_path import OtherPath, PathGuard
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
from penstock.capture.record.calls import Address, Made
from penstock.capture.record.model_state import Place
from penstock.capture.record.outside_state import (
    generators_state,
    random_state,
    restore_generators,
    restore_random_state,
    seed_generators,
)
from penstock.capture.record.sizes import BatchSize, ValueSizes
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
    tensors_in,
)

REMEDY = (
    "a stage needs the calls that the example batch made; capture again with such a batch, or "
    "keep these layers in one stage"
)

_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()


class HeldTensors:
    """Parameters and buffers of the model that are a stage's.

    ``alone``: parameters that the stage does not hold may be here, since other stages run in this
    process; they are absent while it runs. Where those have been released, nothing needs to be
    exchanged but what calls between units read.
    """

    def __init__(self, task: StageTask, *, alone: bool) -> None:
        program, record, part = task.program, task.record, task.part
        named = list(program.named_parameters())
        held = set(part.held)
        for path in part.paths:
            own = program.module(path).named_parameters(path, remove_duplicate=False)
            held |= {name for name, _ in own}
        here = {id(parameter) for name, parameter in named if name in held}
        self.names = frozenset(name for name, p in named if id(p) in here)
        """Names of the parameters that the stage holds."""
        read = {name for e in record.events if not e.is_unit for name in e.params}
        read_ids = {id(parameter) for name, parameter in named if name in read}
        self._exchanged: list[tuple[Place, Absent]] = []

        def hide(place: Place, *, is_parameter: bool = False) -> Absent:
            own = place[0][place[1]]
            shape, dtype = tuple(own.shape), own.dtype
            found = absent_like(shape, dtype, own.requires_grad, is_parameter=is_parameter)
            self._exchanged.append((place, found))
            return found

        self.absent: dict[str, torch.Tensor] = {}
        """Tensors in the places of other stages' parameters while this one runs, by name."""
        places: set[tuple[int, str]] = set()
        for name, parameter in named:
            if id(parameter) in here or type(parameter) is Absent:
                continue
            place, key = program.places(name)
            if (id(place), key) in places:
                continue  # a module that is reached by two names
            places.add((id(place), key))
            if alone or id(parameter) in read_ids:
                self.absent[name] = hide((place, key), is_parameter=True)
        # Hooks around a unit that is left out may write to its buffers: the old spectral norm's do.
        for path in record.counts.keys() - part.paths:
            module = program.module(path)
            if forward_hooks(module):
                for key, buffer in own_buffers(module).items():
                    if buffer is not None and type(buffer) is not Absent:
                        hide((own_buffers(module), key))
        self.buffers_elsewhere: set[str] = set()
        """Names of buffers that other stages write, from the batch or activations."""
        for name, numbers in record.local_buffers.items():
            if not any(part.first <= i < part.last for i in numbers):
                self.buffers_elsewhere.add(name)
                hide(program.places(name))

    def exchange(self, before: list[tuple[Place, Any]]) -> None:
        """Put the absent tensors in place, and what was there into ``before``."""
        for place, absent in self._exchanged:
            own = place[0][place[1]]
            absent.needs_grad = own.requires_grad
            before.append((place, own))
            place[0][place[1]] = absent


class ReplacedForward:
    """The ``forward`` that a module of the user has while a stage runs.

    ``make`` makes it of the user's.
    """

    __slots__ = ("bound", "forward", "had", "place")

    def __init__(
        self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.place: dict[str, Any] = module.__dict__
        self.bound = type(module).forward.__get__(module)
        self.had: Any = None
        self.forward = wraps(module.forward)(make(self.plain))

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward."""
        return (self.had or self.bound)(*args, **kwargs)


Role: TypeAlias = tuple[dict[str, Any], str, str]
"""The dict of a module, whether its calls are another stage's ("other") or of "both", its path."""


def mute(roles: Iterable[Role], before: list[tuple[Place, Any]]) -> None:
    """Take backward hooks, and compiled calls, off modules that are not the stage's.

    What was there is put into ``before``. Raises `PathChanged` where they cannot be muted: what is
    sent is taken inside of the module's call, so its hooks would be skipped.
    """
    hooks, pre_hooks = BACKWARD_HOOKS
    for place, kind, path in roles:
        hooked = place[hooks] or place[pre_hooks]
        if kind == "both" and hooked:
            raise PathChanged(
                f"'{path}', of which a part is sent to another stage, got a backward hook after "
                f"the model was captured"
            )
        if kind == "other" and (hooked or place.get(COMPILED_CALL)):
            for key in (*BACKWARD_HOOKS, COMPILED_CALL):
                if place.get(key):
                    before.append(((place, key), place[key]))
                    place[key] = None if key == COMPILED_CALL else _NO_HOOKS


def roles_between(task: StageTask) -> Iterator[Role]:
    """The modules between units of which not all calls are the stage's."""
    part, record = task.part, task.record
    whole = part.first == 0 and part.last >= len(record.events)
    for path in record.between:
        place = task.program.module(path).__dict__  # raises `BadInput` if the user has deleted it
        below = f"{path}." if path else ""
        inside = {unit for unit in record.counts if unit.startswith(below)}
        calls = record.hooks.on_modules.get(path, [])
        if calls:
            here = [part.first <= first and last <= part.last for first, last in calls]
        else:
            here = [unit in part.paths for unit in inside]
        if not (whole or (here and all(here))):
            yield place, "both" if any(here) or not here else "other", path


class StageEnd(BaseException):
    """Everything that this stage sends has been made."""


class PathChanged(BaseException):
    """Control flow differs from the example; no `Exception`, so that user code lets it pass."""


class _Watch(TorchFunctionMode):
    """Mode between units where calls matter by address: received, sent, or parts of the loss."""

    def __init__(self, stage: "ProgramStage", names: frozenset[Any]) -> None:
        super().__init__()
        self._stage, self._names = stage, names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stage, name = self._stage, call_name(func)
        if stage.now.inside or (name not in self._names and not stage.guard.is_on):
            return func(*args, **kwargs)
        return stage.watched_call(func, name, args, kwargs)


class _WithoutHooks(TorchFunctionMode):
    """Mode that ignores hooks on tensors without gradients, instead of an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call_name(func) in ("register_hook", "retain_grad") and not args[0].requires_grad:
            return NoHandle()
        return func(*args, **(kwargs or {}))


class _Progress:
    """Progress of a run of a stage.

    ``calls`` are those of each module so far, and None while the user's program does not run.
    ``inside`` a unit nothing is watched. ``others`` counts the calls of other stages' modules.
    ``counted`` and ``found`` are for the loss: targets, and values of a whole step by address.
    """

    __slots__ = (
        *("anchor", "calls", "counted", "found", "inside", "others", "received", "run", "seen"),
        *("sent", "watching"),
    )

    def __init__(self, run: StageRun, received: Mapping[int, torch.Tensor]) -> None:
        self.run, self.received = run, received
        self.sent: dict[int, torch.Tensor] = {}
        self.seen: dict[Address, int] = {}
        self.calls: dict[str, int] | None = None
        self.anchor: Address | None = None
        self.watching = self.inside = False
        self.others = 0
        self.counted: Any = None
        self.found: dict[Address, list[Any]] = {}


class _Shapes:
    """Shapes of values in a batch of one size; each is found once."""

    def __init__(self, sizes: ValueSizes, size: BatchSize) -> None:
        self.size, self.of = size, cache(partial(sizes.shape, size=size))
        self._made: dict[Any, tuple[torch.Tensor, bool]] = {}

    def absent(self, made: Made) -> Absent:
        """An absent tensor in the place of what another stage makes."""
        known = self._made.get(made.what)
        if known is None:
            assert made.dtype is not None
            shape = self.of(made.what)
            found = absent_like((0,) if shape is None else shape, made.dtype)
            known = self._made[made.what] = found.plain, shape is None
        return Absent.of(known[0], made.grad and torch.is_grad_enabled(), known[1])


class ProgramStage:
    """Runner of a part of a recorded program on the user's own modules.

    ``alone`` is that of `HeldTensors`. With ``counts_targets`` a run counts them, instead of
    weighing the calls of the loss.
    """

    on_begin: Callable[[], None] | None = None
    """Callback before the stage's own first call, unless that is the first of all; for costs."""

    def __init__(
        self, task: StageTask, kept: KeptState, *, alone: bool = True, counts_targets: bool = False
    ) -> None:
        self.task, self._kept, self._counts_targets = task, kept, counts_targets
        self._part, self._record = task.part, task.record
        self._probes, self._finds_costs = task.probes, bool(task.costs)
        self.guard = PathGuard(task.own_path)
        self._wanted = len(task.part.sent)
        self._ends_early = not task.part.to_end
        self._watched = find_watched(task)
        self.loss: Callable[..., Any] | None = None
        """Function in the place of the user's loss, if that is one of torch's."""
        if (address := whole_loss(task, self._watched)) is not None:
            self.loss = lambda *args: self._acted(address, task.program.loss, args, {})
            self._watched = self._watched.without(self._watched.addresses)
        left_out, own_blocks = blocks_as_wholes(task, self._watched)
        self.own_blocks = tuple(own_blocks)
        """Paths of blocks that are this stage's whole, and run as if they were units."""
        whole = events_in(chain(*left_out.values(), *own_blocks.values()))
        self._watched = self._watched.without(self._record.events[n].address for n in whole)
        self._mode, self._modes_before = _Watch(self, self._watched.names), 0
        self._roles = list(roles_between(task))
        self._replaced: list[ReplacedForward] = []
        self._expected, self._may_vary = 0, False
        self._add_forwards(unit_calls(task, self._watched, left_out, own_blocks))
        self.held = HeldTensors(task, alone=alone)
        self.state = RunState(task, kept, self.held.buffers_elsewhere)
        self._shapes = _Shapes(task.recorded.sizes, BatchSize(1))
        self.now = _NO_PROGRESS

    def _add_forwards(self, calls: Mapping[str, Sequence[UnitCall]]) -> None:
        """Prepare the forwards of units, and of blocks that run or are left out as a whole."""
        task, record, watched = self.task, self._record, self._watched
        last = len(record.events)
        if self._ends_early and self._wanted:
            last = max(record.values[value].maker for value in task.part.sent)
            if task.costs:
                last = task.part.last  # its call is seen, and ends the stage
        for path, own in calls.items():
            # Without watched places, what is own and sends nothing is left as it is.
            plain = all(
                c.own
                and not (c.sent or c.watch or (task.draws_in_all and c.draws))
                and c.first not in watched.marks
                for c in own
            )
            if plain and not watched.anchors and not record.has_nested:
                continue
            module = task.program.module(path)
            self._replaced.append(ReplacedForward(module, partial(self._called, path, own)))
            if not any(call.own for call in own):
                self._roles.append((module.__dict__, "other", path))
            elif any(call.sent for call in own):
                self._roles.append((module.__dict__, "both", path))
            # Of its own, a stage may leave out what it sends nothing of, as an expert without rows.
            self._expected += sum(call.first <= last and not call.own for call in own)
            self._may_vary |= task.by_sample(path)

    def hold(self, *, alone: bool) -> None:
        """Decide again which parameters are exchanged, since others' have been released."""
        self.held = HeldTensors(self.task, alone=alone)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude calls of modules from this forward, within a run; they run on copies of state."""
        self.now.inside = True
        try:
            with self.state.on_copies():
                yield
        finally:
            self.now.inside = False

    # Forwards of units while the stage runs.

    def _called(
        self, path: str, calls: Sequence[UnitCall], plain: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The forward of a module, with its calls in the example, and the user's forward."""
        task, marks, known = self.task, self._watched.marks, len(calls)
        by_sample = task.by_sample(path)
        draws = task.draws_in_all and any(call.draws for call in calls)

        def forward(*args: Any, **kwargs: Any) -> Any:
            now = self.now
            if now.calls is None or now.inside:
                return plain(*args, **kwargs)
            n = now.calls.get(path, 0)
            now.calls[path] = n + 1
            if now.watching:
                self._unwatch()
            if n >= known:
                if known > 1 and not by_sample:
                    times = f"{n + 1} times, and {known} times on the example"
                    raise PathChanged(f"'{path}' is called {times}")
                n = known - 1
            call = calls[n]
            now.others += not call.own
            if marks and call.first in marks:
                self._at_mark(call.first)
            if call.own:
                now.inside = True
                try:
                    if draws and call.draws:
                        result = in_stream(now.run, (path, n), plain, args, kwargs)
                    else:
                        result = plain(*args, **kwargs)
                finally:
                    now.inside = False
                if call.sent:
                    self._collect(tensors_in(result), call.sent)
            else:
                result = self._left_out(call, args, kwargs)
            if call.watch:
                now.anchor = call.anchor
                self._watch()
            return result

        return forward

    def _left_out(self, call: UnitCall, args: Any, kwargs: Any) -> Any:
        """Return the result of another stage's unit: what was received, or absent tensors."""
        received = self.now.received
        found: list[Any] = []
        for made in call.template:
            if made.kind == "made":
                is_here = made.what in received
                found.append(received[made.what] if is_here else self._shapes.absent(made))
            elif made.kind == "constant":
                found.append(made.what)
            else:
                found.append(pytree.key_get((args, kwargs), made.what))
        return found[0] if call.spec.is_leaf() else pytree.tree_unflatten(found, call.spec)

    def _at_mark(self, number: int) -> None:
        """The stage's own first call comes next, or the first after it."""
        if number == self._part.first:
            if self.on_begin is not None:
                self.on_begin()
        elif self._ends_early and len(self.now.sent) == self._wanted:
            raise StageEnd

    # Calls between units.

    def watched_call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A call of a watched name between units."""
        now = self.now
        place = (now.anchor, name, line_of_user(3))
        n = now.seen.get(place, 0)
        now.seen[place] = n + 1
        address = (*place, n)
        if self.guard.is_on:
            return self.guard.call(self._call, address, func, args, kwargs)
        return self._call(address, func, args, kwargs)

    def _call(self, address: Address, func: Any, args: Any, kwargs: Any) -> Any:
        watched, now = self._watched, self.now
        if address not in watched.special:
            return func(*args, **kwargs)
        name = address[1]
        if address in watched.marked:
            self._at_mark(watched.marked[address])
        if address in watched.hooked_elsewhere:
            return NoHandle()
        if address in watched.answers:  # of activations nothing is known: as in the example
            return watched.answers[address]
        if address in self.task.actions_of:
            result = self._acted(address, func, args, kwargs)
        elif address in watched.random:
            # Of the line the number alone: files may have other paths on other hosts.
            key = name, address[0], address[2][1], address[3]
            result = in_stream(now.run, key, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        slots = watched.received.get(address)
        if slots is not None:
            result = filled(result, slots, now.received)
            if writes_first(name) and type(args[0]) is Absent:
                args[0].became, Absent.any_became = result, True
        slots = watched.sent.get(address)
        if slots is not None:
            self._collect(tensors_in(result), slots)
        return result

    def _function(self, kind: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of an autograd function; a reentrant checkpoint may be received, or sent."""
        if kind is not CheckpointFunction or not self.now.watching or self.now.inside:
            return call(*args, **kwargs)
        return self.watched_call(call, kind.__name__, args, kwargs)

    def _acted(self, address: Address, func: Any, args: Any, kwargs: Any) -> Any:
        now, actions = self.now, self.task.actions_of[address]
        if self._probes:
            now.found[address] = measured(actions, func, args, kwargs)
            return func(*args, **kwargs)
        if has_absent((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if self._counts_targets:
            now.counted = target_count(args, kwargs)
            return func(*args, **kwargs)
        whole = now.run.whole.get(address)
        if whole is None and self._kept.any_path:
            return func(*args, **kwargs)
        if whole is None:
            raise OtherPath(f"{maker_in_words(address)} is called, but not in the whole batch")
        return weighed(actions, whole, now.run.share, func, args, kwargs)

    def _watch(self) -> None:
        """Watch calls, below all modes entered since the run began: each takes off the topmost.

        Above those that were there before, as the record was made: they may make other calls.
        """
        self.now.watching = True
        if not self._kept.any_path:
            self.guard.begin(self.now.anchor)
        put_on([self._mode, *taken_off(self._modes_before)])

    def _unwatch(self) -> None:
        self.guard.end()
        self.now.watching = False
        put_on(taken_off(self._modes_before)[1:])

    def _collect(self, tensors: Sequence[torch.Tensor], slots: Mapping[Any, int]) -> None:
        """Take what is sent; end the forward when all of it is made."""
        sent = self.now.sent
        for slot, value in slots.items():
            tensor = tensors[slot]
            if type(tensor) is Absent:
                what = maker_in_words(self._part.sent[value][0])
                raise PathChanged(f"{what} was made of tensors of another stage")
            wanted = self._shapes.of(value)
            if tensor.shape != wanted:
                what = maker_in_words(self._part.sent[value][0])
                raise PathChanged(
                    f"{what} has the shape {tuple(tensor.shape)}, and by the example {wanted}, "
                    f"which the next stage receives; values must not decide about it"
                )
            if value in self._record.overwritten:
                with NoFunctionCalls():  # no call of the user's program
                    tensor = tensor.clone()
            sent[value] = tensor
        if len(sent) == self._wanted and self._ends_early and not self._finds_costs:
            raise StageEnd

    # A run.

    def run(self, call: Callable[[], Any], run: StageRun) -> tuple[Mapping[int, torch.Tensor], Any]:
        """Run ``call``, the user's program on one micro-batch: what is sent, and its result.

        The result is None for a stage whose forward ends before.
        """
        if self._shapes.size is not run.size:
            sizes = self.task.recorded.sizes
            sizes.find(run.size.lengths)  # not within a run, which would be recorded, too
            self._shapes = _Shapes(sizes, run.size)
        over, received = self._record.overwritten, run.received
        if over and received:
            received = {
                v: tensor.clone() if v in over else tensor for v, tensor in received.items()
            }
        now = self.now = _Progress(run, received)
        try:
            result = self._run_replaced(call)
        except (PathChanged, NeedsValues) as problem:
            what = "needs" if isinstance(problem, NeedsValues) else "took another path:"
            remedy = few_samples(run) or f"; {REMEDY}"
            raise BadInput(f"forward {what} {problem}{at_line(problem)}{remedy}") from problem
        except Exception as problem:
            problem.add_note(f"{at_line(problem)}{few_samples(run)}")
            raise
        finally:  # release what it was given
            now.received, now.run = {}, _NO_RUN
            if Absent.any_became:  # each write to a class makes what is looked up in it slower
                Absent.any_became = False
        if len(now.sent) < self._wanted:
            missing = next(v for v in self._part.sent if v not in now.sent)
            what = maker_in_words(self._part.sent[missing][0])
            raise BadInput(f"forward took another path: {what} was not made; {REMEDY}")
        if now.others != self._expected and not self._may_vary and not self._probes:
            raise BadInput(
                f"forward took another path: {now.others} calls of other stages' modules were "
                f"seen, and {self._expected} on the example; {REMEDY}"
            )
        made, now.sent = now.sent, {}
        return made, result

    def _run_replaced(self, call: Callable[[], Any]) -> Any:
        now, result = self.now, None
        if has_global_hooks():
            raise BadInput(
                "there are backward hooks for all modules now (also those of FlopCounterMode), "
                "which would run on what is elsewhere; use them on the model alone"
            )
        keeps, after = self.state.is_any and not self._probes, None
        before: list[tuple[Place, Any]] = []
        with_grad = torch.is_grad_enabled()
        self._modes_before = modes_on()
        try:
            for own in self._replaced:
                own.had, own.place["forward"] = own.place.get("forward"), own.forward
            mute(self._roles, before)
            self.held.exchange(before)
            after = self.state.enter(now.run.context) if keeps else None
            now.calls = {}
            with self._surroundings():
                try:
                    if None in self._watched.anchors:
                        self._watch()
                    result = call()
                    self.guard.end(result[0])
                finally:
                    self.guard.stop()
                    if now.watching:
                        self._unwatch()
        except StageEnd:
            pass
        finally:
            entered, now.calls = now.calls is not None, None
            if torch.is_grad_enabled() != with_grad:
                torch.set_grad_enabled(with_grad)
            if entered and keeps:
                self.state.leave(now.run.context, after)
            for (place, key), value in reversed(before):  # a module may be there under two names
                place[key] = value
            for own in reversed(self._replaced):
                if own.had is None:
                    own.place.pop("forward", None)
                else:
                    own.place["forward"], own.had = own.had, None
        return result

    def _surroundings(self) -> AbstractContextManager[object]:
        """Return the context that must be around a run of this program."""
        record = self._record
        without_hooks = record.hooks.any_on_tensors and not torch.is_grad_enabled()
        sees_checkpoints = CheckpointFunction.__name__ in self._watched.names
        seen = record.has_scripts or without_hooks or sees_checkpoints
        if not (seen or self.task.draws_alike or self._probes):
            return nullcontext()
        found = ExitStack()
        if self._probes:  # a stage that runs later finds the state as it was
            found.enter_context(self.state.on_copies())
        if self.task.draws_alike:
            found.enter_context(seeded(self.task, self.now.run))
        if sees_checkpoints:
            found.enter_context(functions_through(self._function))
        if record.has_scripts:
            found.enter_context(scripts_seen())
        if without_hooks:  # it may run again with gradients
            found.enter_context(_WithoutHooks())
        return found


_NO_RUN = StageRun(BatchSize(0))
_NO_PROGRESS = _Progress(_NO_RUN, {})


@contextmanager
def seeded(task: StageTask, run: StageRun) -> Iterator[None]:
    """Seed what all stages draw equally between units; restore the generators at the end."""
    draws_python = task.recorded.draws_python
    if task.draws_in_all:
        run.own_seed = int(torch.empty((), dtype=torch.int64).random_())
    before, plain = random_state(device_in_use()), generators_state() if draws_python else None
    try:
        if task.draws_in_all:
            torch.manual_seed(run.seed)
        if draws_python:
            seed_generators(run.seed)
        yield
    finally:
        restore_random_state(device_in_use(), before)
        if plain is not None:
            restore_generators(plain)


def in_stream(run: StageRun, key: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call that draws, from a stream of its own."""
    device = device_in_use()
    state = random_state(device)
    torch.manual_seed(zlib.crc32(repr((run.seed, run.own_seed, key)).encode()))
    try:
        return call(*args, **kwargs)
    finally:
        restore_random_state(device, state)


def few_samples(run: StageRun) -> str:
    """Return a hint about a micro-batch of one sample; empty for others."""
    if run.size.samples != 1:
        return ""
    return (
        f" (micro-batch {run.context.micro_batch} has 1 sample: give batches with 2 or "
        f"more for each micro-batch, as with drop_last=True, and squeeze(-1) for squeeze())"
    )


def maker_in_words(address: Address) -> str:
    """The call that makes a value, for messages."""
    if len(address) == 2:
        return f"the result of '{address[0]}'"
    return f"'{address[1]}' at {line_with_source(address[2])}"


def has_absent(values: Sequence[Any]) -> bool:
    """Return whether a tensor among the values, or in structures among them, is absent."""
    return any(
        type(value) is Absent
        or (isinstance(value, (list, tuple, dict)) and has_absent(tensors_in(value)))
        for value in values
    )


def filled(result: Any, slots: Mapping[Any, int], received: Mapping[int, torch.Tensor]) -> Any:
    """A call's result with received tensors in some of its slots."""
    if isinstance(result, torch.Tensor):
        return received[slots[0]] if 0 in slots else result
    number = count()

    def put(tensor: torch.Tensor) -> torch.Tensor:
        slot = next(number)
        return received[slots[slot]] if slot in slots else tensor

    return pytree.tree_map_only(torch.Tensor, put, result)


def at_line(problem: BaseException) -> str:
    """`` at `` the innermost line of the user's code in the traceback of a problem, if any."""
    found = line_of(problem.__traceback__)
    return f" at {found}" if found else ""
