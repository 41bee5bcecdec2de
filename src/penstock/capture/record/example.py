"""Record the user's program on the example batch, and on parts of it.

    run   batch                          why
    1     the example                    the record
    2     the example, on the same copy  results that count calls; state that changes each time
    3, 4  fewer (or more) samples        sizes as formulas of samples
    5 ..  other lengths, for each        sizes as formulas of lengths

All runs are on copies whose parameters are absent, so they take neither the model's memory nor its
time. Units are opened, and the runs repeated, until what others use of a unit is what it returned.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from penstock.capture.loss.loss_parts import (
    Counting,
    LossParts,
    MustOpen,
    NotFromSlices,
    counting_of,
    loss_parts,
)
from penstock.capture.loss.mixing import mixing_call, start_of_whole_loss
from penstock.capture.record.absent import Absent
from penstock.capture.record.calls import Address, BlockCall, ProgramRecord, RecordedCall
from penstock.capture.record.example_runs import Again, Attempt, ExampleRuns, NotThere
from penstock.capture.record.failures import (
    LengthRefused,
    check_model,
    only_whole,
)
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.model_outputs import StructuredOutputs, flatten_outputs
from penstock.capture.record.model_state import (
    PLAIN,
    StatePlace,
    changed_places,
    hook_counts,
    module_tree,
    plain_state,
    same_value,
)
from penstock.capture.record.other_batches import (
    example_at_lengths,
    other_lengths,
    other_row_counts,
)
from penstock.capture.record.outside_state import (
    Globals,
    changed_name,
    contents_in,
    generators_state,
    kept_random_state,
    same_generators,
)
from penstock.capture.record.regions import keep_carried, keep_unit_together
from penstock.capture.record.sizes import BatchSize, ValueSizes, shapes_of
from penstock.capture.record.tensor_facts import shape_of, state_at
from penstock.capture.record.units import (
    Granularity,
    is_torchs,
)
from penstock.capture.record.user_lines import Line, line_with_source
from penstock.errors import BadInput, CaptureFailed, PenstockError
from penstock.torch_internals import Norm, eagerly, own_buffers, pytree

INSTANCES = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_OTHER_ANSWERS = 1.25, 1e-4, 1e4
"""Factors of the numbers that a loss takes from its own values, to see what it does.

Thresholds are passed by the large factors, where they do not make it fail.
"""
_MOST_ATTEMPTS = 200
"""Limit of attempts. Each opens or closes a unit, so only models that never settle reach it."""


@dataclass
class CarriedState:
    """Tensors that a forward leaves for the next: the calls that read them then, with their lines.

    ``made_by`` are the calls behind them, which read the batch if it is ``of_batch``. ``has_rows``:
    some of the rows are those of samples.
    """

    reads: Mapping[Address, Line]
    made_by: frozenset[int]
    of_batch: bool
    has_rows: bool = False


@dataclass
class Recorded:
    """A recorded program; ``loss`` is the value of the loss.

    ``terms`` are the values of the loss's terms, if it is a list. A loss function that mixes
    samples does so from event ``whole_from`` on; ``refusal`` says why slices cannot give it.
    ``changes`` is the state that forward changes between units, ``changes_again`` what it changes
    in every run; ``unit_changes`` are the same of units, each with its unit. ``counters`` are the
    attributes that are a number, another one after every run. ``outputs`` is what
    the model returned, ``output_values`` the values of the tensors in it (None: none was recorded).
    ``counts`` are the buffers that hold something of the samples after forward, but for those of
    batch norms, whose kernel writes unseen; each with the line that writes it, or its module.
    ``carried`` are tensors in the model's state that the next forward reads. ``moved`` are names of
    those that values of the whole step have to do with, and the line that takes these.
    """

    record: ProgramRecord
    sizes: ValueSizes
    size: BatchSize
    loss: int
    parts: LossParts
    changes: tuple[StatePlace, ...] = ()
    changes_again: tuple[StatePlace, ...] = ()
    unit_changes: tuple[tuple[str, StatePlace], ...] = ()
    counters: tuple[StatePlace, ...] = ()
    draws_python: bool = False
    outputs: StructuredOutputs = field(default_factory=StructuredOutputs)
    output_values: tuple[int | None, ...] = ()
    output_counting: tuple[Counting, ...] = ()
    terms: tuple[int, ...] = ()
    calls: tuple[dict[str, int], ...] = ()
    counts: dict[str, str] = field(default_factory=dict[str, str])
    carried: dict[StatePlace, CarriedState] = field(default_factory=dict[StatePlace, CarriedState])
    moved: dict[str, str] = field(default_factory=dict[str, str])
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_steady: bool = True
    """True if other numbers of samples make the same calls that depend on parameters."""
    is_steady_in_lengths: bool = True
    """The same of other lengths."""
    whole_from: int | None = None
    refusal: BadInput | None = None
    evaluates_alike: bool = True
    """True if evaluation mode makes the same calls, of which the same is returned."""
    taken: str = ""

    def has_calls_of(self, size: BatchSize) -> bool:
        """Return whether such a batch makes the recorded calls that depend on parameters."""
        same = self.is_steady_in_lengths or size.lengths == self.size.lengths
        return self.is_steady and same


def modules_above(path: str) -> Iterator[str]:
    """The modules that hold one, the innermost first, without the root."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


_recording = threading.Lock()


def record_program(
    program: UserProgram,
    leaves: Sequence[torch.Tensor],
    *,
    granularity: Granularity = "module",
    autocast: torch.dtype | None = None,
    training: bool = True,
    with_loss: bool = True,
) -> Recorded:
    """Record a program on an example with these leaves; in evaluation mode without ``training``.

    Without its loss, the first output of the model takes the place of it.
    """
    check_model(program)
    fresh = partial(Attempt, granularity, training, with_loss)
    attempt = fresh()
    device = device_of_model(program)
    jointly = False
    with _undisturbed(program, device):
        for _ in range(_MOST_ATTEMPTS):
            recorder = _Recorder(ExampleRuns(program, leaves, device, attempt, autocast))
            try:
                found = recorder.record(jointly=jointly)
                found.evaluates_alike = not training or recorder.evaluates_alike(found)
                return found
            except Again:
                continue
            except LengthRefused:
                if jointly or len(program.call.layout.lengths) < 2:
                    raise
                jointly, attempt = True, fresh()
    raise CaptureFailed(
        f"{type(program.model).__name__} takes another path in each of {_MOST_ATTEMPTS} runs on "
        f"the example batch; see that forward does the same for the same batch"
    )


def device_of_model(program: UserProgram) -> torch.device:
    """The device of the model's tensors; the CPU for models without values."""
    for _, tensor in (*program.named_parameters(), *program.named_buffers()):
        if not tensor.is_meta and type(tensor) is not Absent:
            return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def _undisturbed(program: UserProgram, device: torch.device) -> Iterator[None]:
    """Restore generators, globals, and the device that absent tensors claim to be on."""
    if not _recording.acquire(blocking=False):
        raise CaptureFailed(
            f"{type(program.model).__name__} cannot be captured while another thread captures a "
            f"model; capture one after the other"
        )
    with contextlib.ExitStack() as closing:
        closing.callback(_recording.release)
        closing.callback(setattr, Absent, "home", Absent.home)
        closing.callback(Globals(program.model, program.loss).restore)
        Absent.home = device
        with kept_random_state(device), eagerly():
            yield


class _Recorder:
    """One attempt to record a program with given units."""

    def __init__(self, runs: ExampleRuns) -> None:
        self._runs, self._program = runs, runs.program
        self._written: dict[StatePlace, torch.Tensor | None] = {}

    def record(self, *, jointly: bool) -> Recorded:
        """The record; other lengths one by one, or all of them ``jointly``."""
        size, layout = self._runs.size, self._program.call.layout
        first, again = self._twice()
        records, batches = [first.record], [size]
        for rows in other_row_counts(size.samples):
            batches.append(BatchSize(len(rows), size.lengths))
            records.append(self._runs.once([leaf[rows] for leaf in self._runs.leaves], batches[-1]))
        by_samples = records[1:]
        for lengths, must_run in other_lengths(layout, size.lengths, jointly=jointly):
            other = BatchSize(size.samples, lengths)
            try:
                own = self._runs.once(
                    example_at_lengths(layout, self._runs.leaves, lengths), other, must_run=must_run
                )
            except NotThere:
                continue
            records.append(own)
            batches.append(other)
        self._check_results(records)
        self._find_varying([*records, again, *self._alone(first.record)])
        if self._runs.attempt.failure is not None:
            raise only_whole(self._program, self._runs.attempt.failure)
        first.sizes, first.size = ValueSizes(records, batches, self._shapes_at), self._runs.example
        first.is_steady = len(set(map(dependent_addresses, (first.record, *by_samples)))) == 1
        first.is_steady_in_lengths = len(set(map(dependent_addresses, records))) == 1
        first.counts = self._counts(first.record, by_samples)
        for place, state in first.carried.items():
            tensors = (state_at(r.program, place) for r in (first.record, *by_samples))
            shapes, *others = (list(map(shape_of, own)) for own in tensors)
            state.has_rows = any(other != shapes for other in others)
        first.calls = tuple(dict(record.counts) for record in records)
        if not self._runs.attempt.with_loss:
            return first
        try:
            given = first.record, by_samples, first.sizes, first.loss
            taken = self._taken_number(first.record)
            try:
                first.parts = loss_parts(*given, first.terms, taken, records[1:])
            except NotFromSlices as refusal:
                first.taken = refusal.why if taken is not None else ""
                first.parts, first.refusal = LossParts(mixing=refusal.why), refusal
            first.moved = moved_values(first)
            if first.moved:  # then a step has one micro-batch
                first.parts = LossParts(mixing=first.parts.mixing)
            first.parts.mixing = mixing_call(*given) or first.parts.mixing
            if first.parts.mixing and self._program.loss is not None and not first.terms:
                first.whole_from = start_of_whole_loss(*given)
            first.output_counting = tuple(
                counting_of(*given[:3], value, first.parts) for value in first.output_values
            )
        except MustOpen as unit:
            self._runs.open(unit.unit, "it makes a part of the loss")
        return first

    def _taken_number(self, record: ProgramRecord) -> RecordedCall | None:
        """The call that takes a number of activations on which the loss depends, if there is one.

        Other answers show it, as other numbers given to calls behind the loss, or another loss. It
        also depends on a number with which it fails whatever else that is, such as a size.
        """
        last = max((n for n, event in enumerate(record.events) if event.is_unit), default=-1)
        needed = [
            event
            for event in record.events[last + 1 :]
            if event.reads_values
            and event.depends
            and event.func
            and not isinstance(event.answer, bool)
        ]
        if not needed:
            return None
        values = Globals(self._program.model, self._program.loss)
        plain = self._outcome(values, {})

        def decide(some: Sequence[RecordedCall]) -> bool:
            found: list[list[str]] = []
            for factor in _OTHER_ANSWERS:
                # Each has a factor of its own, since a quotient of two must change.
                answers = {
                    e.address: partial(scaled_answer, factor + n) for n, e in enumerate(some)
                }
                outcome = self._outcome(values, answers)
                found += [outcome] if outcome is not None else []
            return not found or any(outcome != plain for outcome in found)

        if not decide(needed):
            return None
        return next((event for event in needed if decide([event])), needed[0])

    def _outcome(
        self, values: Globals, answers: Mapping[Address, Callable[[Any], Any]]
    ) -> list[str] | None:
        """The loss, and the numbers given to calls behind it, where questions have other answers.

        They are those of two runs of one copy: the second shows what the first has kept. None
        where the program fails.
        """
        values.restore()
        program = self._runs.copy()
        found: list[str] = []
        for _ in range(2):
            recording = self._runs.recording(program)
            recording.functions.answered = answers
            try:
                loss = self._runs.run(
                    recording, self._runs.leaves, self._runs.size, must_run=False
                ).loss
            except (NotThere, PenstockError):
                return None
            record, value = recording.record, recording.tensors.current.get(loss)
            behind = record.behind([] if value is None else [record.values[value].maker])
            found.append(f"{float(loss.detach()):.5g}")
            found += [call_and_numbers(record.events[number]) for number in sorted(behind)]
        return found

    def _close_where_values_skip(
        self, first: ProgramRecord, others: Sequence[ProgramRecord]
    ) -> None:
        """Close modules that call others only where activations say so, as experts with tokens."""
        asking = [n for n, event in enumerate(first.events) if event.reads_values and event.depends]
        callers: set[str] = set()
        for other in others if asking else ():
            for path, count in first.counts.items():
                if count and not other.counts[path]:
                    above = (p for p in modules_above(path) if self._calls_some(other, p))
                    callers.update(islice(above, 1))
        fresh: set[str] = set()
        for path in callers - self._runs.attempt.opened.keys():
            within = [
                number
                for number, event in enumerate(first.events)
                if event.is_unit and event.address[0].startswith(f"{path}.")
            ]
            if any(within[0] < number < within[-1] for number in asking):
                fresh.add(path)
        fresh.difference_update(self._runs.attempt.closed)
        if fresh:
            self._runs.attempt.closed |= dict.fromkeys(fresh, "activations decide what it calls")
            raise Again

    def _calls_some(self, record: ProgramRecord, path: str) -> bool:
        """Return whether a module has called some of its modules; no list of modules calls any."""
        module = self._program.module(path)
        called = any(n and unit.startswith(f"{path}.") for unit, n in record.counts.items())
        return called and not isinstance(module, nn.ModuleList | nn.ModuleDict)

    def _alone(self, record: ProgramRecord) -> Iterator[ProgramRecord]:
        """Two samples, each alone, where values of activations decide: they may skip calls."""
        if not any(event.reads_values and event.depends for event in record.events):
            return
        size = BatchSize(1, self._runs.size.lengths)
        for row in (0, self._runs.size.samples - 1):
            with contextlib.suppress(NotThere):  # norms do not take one sample
                leaves = [leaf[row : row + 1] for leaf in self._runs.leaves]
                yield self._runs.once(leaves, size, must_run=False)

    def _counts(self, record: ProgramRecord, others: Sequence[ProgramRecord]) -> dict[str, str]:
        """The buffers that hold something of the samples after forward (see `Recorded`).

        Without values, what they hold is of the samples if a call behind it reads the batch. With
        values it is, if other samples or another number of them leave other values.
        """
        found: dict[str, str] = {}
        for path, module in self._program.named_modules():
            if isinstance(module, INSTANCES) and module.track_running_stats:
                # Its kernel writes unseen, like that of batch norms, but replicas share nothing.
                found[f"{path}.running_mean"] = f"in {type(module).__name__}"
            flag = own_buffers(module).get("observer_enabled")
            if flag is not None and observes(path, module) and (flag.is_meta or bool(flag.any())):
                found[f"{path}.scale"] = f"in {type(module).__name__}"  # unseen if fused
        for place, value in self._written.items():
            module = self._program.module(place.path)
            name = place.name
            writes = record.buffer_writes.get(name, [])
            if is_torchs(module) and not writes and not observes(place.path, module):
                continue  # what torch's own modules keep is of their weights, as spectral norms do
            if value is None:
                differs = not writes or any(record.events[n].leaves for n in record.behind(writes))
            else:
                own = (buffer_at(other.program, place) for other in others)
                differs = any(one is None or not torch.equal(one, value) for one in own)
            if differs:
                line = line_with_source(record.events[writes[-1]].line) if writes else ""
                found[name] = line or f"in {type(module).__name__}"
        return found

    def _find_varying(self, records: Sequence[ProgramRecord]) -> None:
        """Calls of which other batches have more, or fewer: no cut among those of one unit."""
        first, *others = records
        self._close_where_values_skip(first, others)
        varying = {p for other in others for p, n in first.counts.items() if n != other.counts[p]}
        if not varying <= self._runs.attempt.varying:
            self._runs.attempt.varying |= varying
            raise Again
        for path in varying:
            keep_unit_together(first, path)
        made = [Counter(e.address[:-1] for e in r.events if not e.is_unit) for r in records]
        for value in first.values:
            place = first.events[value.maker].address[:-1]
            if any(own[place] != made[0][place] for own in made):
                value.crossable = False

    def _shapes_at(self, lengths: tuple[int, ...]) -> dict[Any, tuple[int, ...]]:
        """The shapes of all values at other lengths, by address and slot."""
        leaves = example_at_lengths(self._program.call.layout, self._runs.leaves, lengths)
        with _undisturbed(self._program, self._runs.device):
            try:
                found = self._runs.once(leaves, BatchSize(self._runs.size.samples, lengths))
            except Again:
                raise CaptureFailed(
                    f"{type(self._program.model).__name__} takes another path where its lengths "
                    f"are {list(lengths)}; capture it with such a batch"
                ) from None
        return shapes_of(found)

    def evaluates_alike(self, first: Recorded) -> bool:
        """Return whether a run in evaluation mode makes the recorded calls, and returns the same.

        It may open units, which is not for this record.
        """
        known = self._runs.attempt
        own = {**known.opened}, {**known.closed}, {*known.valued}, {*known.varying}
        self._runs.attempt = Attempt(known.granularity, False, True, *own, known.with_values)
        try:
            recording = self._runs.recording(self._runs.copy())
            loss, output, _ = self._runs.run(recording, self._runs.leaves, self._runs.size)
        except (PenstockError, Again):
            return False
        finally:
            self._runs.attempt = known
        record = recording.record
        events, others = ([e for e in r.events if e.depends] for r in (first.record, record))
        shapes = (
            [r.values[v].shape for e in r.events if e.depends for v in e.makes]
            for r in (first.record, record)
        )
        return (
            dependent_addresses(first.record) == dependent_addresses(record)
            and next(shapes) == next(shapes)
            and all(results_agree(a, b) for a, b in zip(events, others, strict=True) if a.is_unit)
            and flatten_outputs(output, loss)[0].structure == first.outputs.structure
        )

    def _twice(self) -> tuple[Recorded, ProgramRecord]:
        """The example run twice on a copy, with the state that this changes; and the second run."""
        program, leaves, size = self._runs.copy(), self._runs.leaves, self._runs.size
        tree, states, hooks = module_tree(program), [plain_state(program)], hook_counts(program)
        recording = self._runs.recording(program)
        record, current = recording.record, recording.tensors.current
        generators = generators_state()
        loss, output, terms = self._runs.run(recording, leaves, size)
        draws_python = not same_generators(generators, generators_state())
        if module_tree(program) != tree:
            self._runs.settle(changed_name(tree, module_tree(program)))
            raise Again
        states.append(plain_state(program))
        changed = changed_places(states[0], states[1])
        self._written = {p: buffer_at(program, p) for p in sorted(changed) if p.kind == "buffer"}
        values = Globals(program.model)
        between = {path: program.module(path) for path in record.between}
        before = contents_in(between), values.state()
        again = self._runs.recording(program)
        makers = {place: recording.tensors.makers_at(place) for place in changed}
        for place in changed:
            for tensor in state_at(program, place):
                again.tensors.carried[tensor] = place
        self._runs.run(again, leaves, size)
        states.append(plain_state(program))
        self._check_contents(before, (contents_in(between), values.state()))
        self._check_results([record, again.record])
        outputs, returned = flatten_outputs(output, loss)
        if not self._runs.attempt.with_loss:
            loss = next(iter(returned), torch.empty(()))
        found = current.get(loss)
        if found is None:
            unit = recording.tensors.hidden.get(loss)
            if unit is not None:
                self._runs.open(unit, "it makes the loss")
            raise BadInput(
                f"the loss of {type(program.model).__name__} is not computed by the model: no "
                f"recorded call made it; return a tensor that depends on the model's output"
            )
        if program.loss is not None:
            check_strangers(record, found)
        registers = hook_counts(program) != hooks
        recorded = self._with_state(record, states, found, registers_hooks=registers)
        recorded.draws_python = draws_python
        recorded.outputs = outputs
        for place, reads in again.tensors.carried_reads.items():
            if keep_carried(record, makers[place], reads):
                made_by = record.behind(makers[place])
                of_batch = any(record.events[number].leaves for number in made_by)
                recorded.carried[place] = CarriedState(reads, made_by, of_batch)
        recorded.output_values = tuple(map(current.get, returned))
        recorded.terms = tuple(current[term] for term in terms if term in current)
        return recorded, again.record

    def _check_contents(
        self, before: tuple[dict[str, Any], ...], after: tuple[dict[str, Any], ...]
    ) -> None:
        """Raise `CaptureFailed` if forward has changed what stages of a process share."""
        attribute = changed_name(before[0], after[0])
        name = f"{type(self._program.model).__name__}.{attribute}" if attribute else ""
        name = name or changed_name(before[1], after[1])
        if name:
            raise CaptureFailed(
                f"{name} cannot be captured: forward changes what is in it with every call, and "
                f"every stage of a process would; keep it in numbers, tensors or buffers of the "
                f"model (register_buffer), or use it in modules of one layer only"
            )

    def _with_state(
        self,
        record: ProgramRecord,
        states: Sequence[dict[StatePlace, Any]],
        loss: int,
        *,
        registers_hooks: bool,
    ) -> Recorded:
        def owner(place: StatePlace) -> str | None:
            if place.kind == "buffer" and place.name in record.local_buffers:
                return ""
            own = (u for u in record.units if place.path == u or place.path.startswith(f"{u}."))
            return next(own, None)

        again = changed_places(states[1], states[2])
        changed = changed_places(states[0], states[1]) | again
        if registers_hooks:
            # The first forward registers hooks and notes that. The first stage does so for all.
            once = changed - again
            changed -= {p for p in once if isinstance(states[1].get(p, self), PLAIN)}
        units = [(owner(place), place) for place in sorted(changed)]
        for unit in {unit for unit, place in units if unit and place.kind == "buffer"}:
            keep_unit_together(record, unit)
        empty = ValueSizes([record], [BatchSize(1)])
        return Recorded(
            record,
            empty,
            BatchSize(1),
            loss,
            LossParts(),
            changes=tuple(place for unit, place in units if unit is None),
            changes_again=tuple(sorted(p for p in again if not owner(p))),
            unit_changes=tuple(
                (unit, place)
                for unit, place in units
                # Statistics of norms are not read in training; other buffers are.
                if unit is not None and not isinstance(self._program.module(place.path), Norm)
            ),
            counters=tuple(place for place in sorted(again) if self._counts_calls(place, states)),
            device=self._runs.device,
        )

    def _counts_calls(self, place: StatePlace, states: Sequence[dict[StatePlace, Any]]) -> bool:
        """Return whether an attribute is a number that grows with calls, but not with samples."""
        before: Any = states[1].get(place)
        after: Any = states[2].get(place)
        numbers = type(before) in (int, float) and type(after) in (int, float)
        return numbers and bool((after - before) % self._runs.size.samples)

    def _check_results(self, records: Sequence[ProgramRecord]) -> None:
        """Open units whose results hold numbers that change; blocks are then not left out."""
        first = records[0]
        known = {event.address: event for event in first.events if event.is_unit}
        fresh: dict[str, str] = {}
        for other in records[1:]:
            for event in other.events:
                same = known.get(event.address)
                if event.is_unit and same is not None and not results_agree(same, event):
                    path = event.address[0]
                    if path not in self._runs.attempt.opened:
                        fresh[path] = "its result holds numbers that change"
        if fresh:
            self._runs.attempt.opened |= fresh
            raise Again
        for other in records[1:]:
            for path in {block.path for block in first.blocks}:
                own, those = ([b for b in r.blocks if b.path == path] for r in (first, other))
                if len(own) != len(those) or not all(map(results_agree, own, those)):
                    for block in own:
                        block.closed = False


def check_strangers(record: ProgramRecord, loss: int) -> None:
    """Raise `BadInput` if the loss function has a gradient for what is not in model or loss."""
    own = record.values[loss]
    behind = record.behind([own.maker] if own.grad else (), lambda value: value.grad)
    for event in (record.events[n] for n in sorted(behind) if n >= record.model_end):
        if event.stranger:
            raise BadInput(
                f"the loss function reads {event.stranger}, which requires a gradient and is no "
                f"part of the model; pass the module itself, loss=module (of several, one that "
                f"holds them), or call requires_grad_(False) on it if it is not trained"
            )


def scaled_answer(factor: float, answer: Any) -> Any:
    """A number, or all in a list or array, times ``factor``; whole numbers become at least 1."""
    if isinstance(answer, list):
        return [scaled_answer(factor, own) for own in answer]
    return max(1, round(answer * factor)) if isinstance(answer, int) else answer * factor


def call_and_numbers(event: RecordedCall) -> str:
    """A call, and the plain numbers that it was given."""
    leaves = pytree.tree_leaves(event.args)
    return repr((event.address, [own for own in leaves if isinstance(own, int | float)]))


def buffer_at(program: UserProgram, place: StatePlace) -> torch.Tensor | None:
    """A copy of a buffer; None if it has no values."""
    buffer = own_buffers(program.module(place.path)).get(place.key)
    return None if buffer is None or type(buffer) is Absent else buffer.detach().clone()


def observes(path: str, module: nn.Module) -> bool:
    """Return whether a module of torch keeps the range of activations, as for quantisation."""
    of_weights = "weight_fake_quant" in path.split(".")
    return type(module).__module__.startswith("torch.ao.quantization.") and not of_weights


def moved_values(recorded: Recorded) -> dict[str, str]:
    """The state that values of the whole step are made of, or that they go into: its lines."""
    record, found = recorded.record, dict[str, str]()
    for number, actions in recorded.parts.actions.items():
        event = record.events[number]
        leaves = pytree.tree_leaves(event.args)
        results = {number for action in actions if action.kind == "result"}
        taken = [getattr(leaves[a.position], "value", None) for a in actions if a.position >= 0]
        makers = {record.values[value].maker for value in taken if isinstance(value, int)}
        read = {record.events[behind].address for behind in record.behind(results | makers)}
        for place, state in recorded.carried.items():
            if results & state.made_by or not read.isdisjoint(state.reads):
                found[place.name] = line_with_source(event.line)
    return found


def dependent_addresses(record: ProgramRecord) -> tuple[Address, ...]:
    """The addresses of the calls that depend on parameters."""
    return tuple(event.address for event in record.events if event.depends)


def results_agree(one: RecordedCall | BlockCall, other: RecordedCall | BlockCall) -> bool:
    """Return whether two results have the same constants, and tensors from the same places."""
    assert one.result is not None and other.result is not None
    (leaves, spec), (others, other_spec) = one.result, other.result
    return spec == other_spec and all(
        a.kind == b.kind and (a.kind != "constant" or same_value(a.what, b.what))
        for a, b in zip(leaves, others, strict=True)
    )
