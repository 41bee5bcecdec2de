"""Calls of torch functions in the record, and of the user's own autograd functions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.record.absent import (
    VALUES,
    Absent,
    call_name,
    check_none_lost,
    deciding_tensors,
    memory_of,
    writes_first,
)
from penstock.capture.record.calls import (
    MASK,
    Address,
    ProgramRecord,
    RecordedCall,
)
from penstock.capture.record.module_calls import ModuleCalls
from penstock.capture.record.tensor_facts import TensorFacts, only_shape
from penstock.capture.record.torch_calls import BATCH_NORM_OPERATORS, draws
from penstock.capture.record.user_lines import Line, line_in_words, line_of_user, line_with_source
from penstock.errors import CaptureFailed
from penstock.torch_internals import BackwardHookFunction, tensors_in

_NO_CALLS = {".shape", ".dtype", ".device", ".is_leaf", ".ndim"}
_NO_CALLS |= {".grad", ".grad=", ".requires_grad", ".requires_grad="}
"""Properties that are read, or set, without a trace in the record."""

_BOUND = "bound of a slice"


class FunctionCalls(TorchFunctionMode):
    """Mode that records calls of functions outside of units, and what links units to others."""

    on_function: Callable[[Any, Callable[..., Any], tuple[Any, ...]], None] | None = None
    """Callback before each call of an autograd function, with its class, call and arguments."""
    answered: Mapping[Address, Callable[[Any], Any]] = {}
    """Functions that make the answer to a question out of the right one, by its address."""

    def __init__(self, record: ProgramRecord, tensors: TensorFacts, modules: ModuleCalls) -> None:
        super().__init__()
        self._record, self._tensors, self._modules = record, tensors, modules
        self._seen: Counter[Address] = Counter()

    def own_function(self, kind: Any, call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call of an autograd function; those of the user's own between units are events.

        There is no cut inside of it, and only results of checkpoints can be sent.
        """
        if self.on_function is not None:
            self.on_function(kind, call, args)
        record, tensors, first = self._record, self._tensors, len(self._record.events)
        if kind is CheckpointFunction and self._modules.is_active:
            record.reentrant.add(first)
        if not self._modules.is_between:
            return with_grad(call(*args, **kwargs), (args, kwargs))
        line = line_of_user(3)
        address = self._next_address(self._modules.anchor, kind.__name__, line)
        event = RecordedCall(address, kind, line)
        given = tensors_in((args, kwargs))
        event.args = tensors.references((args, kwargs))
        tensors.read(event, given)
        tensors.function_depth += 1
        try:
            result = with_grad(call(*args, **kwargs), (args, kwargs))
        finally:
            tensors.function_depth -= 1
        inner = record.events[first:]
        event.reads += [value for own in inner for value in own.makes]
        event.params += [name for own in inner for name in own.params]
        record.events.append(event)
        if kind is BackwardHookFunction:
            record.hooks.events |= set(range(first, len(record.events)))
        for slot, tensor in enumerate(tensors_in(result)):
            if all(tensor is not one for one in given):
                tensors.make(slot, tensor, crossable=kind is CheckpointFunction)
        record.regions.append((first, len(record.events)))
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call of ``func``."""
        kwargs = kwargs or {}
        name = call_name(func)
        if name in _NO_CALLS:
            return func(*args, **kwargs)
        self._note_kind(func, name, args, kwargs)
        inside = self._modules.inside
        if name in ("register_hook", "backward"):
            self._note_hook(name, args[0])
            return func(*args, **kwargs)
        if inside is not None:
            result = func(*args, **kwargs)
            self._modules.note_inside(inside, name, args, kwargs, result)
            return result
        return self._between_units(func, name, args, kwargs)

    def _note_kind(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        """Note calls that matter in units and between them, or refuse them."""
        inside, record = self._modules.inside, self._record
        if func in BATCH_NORM_OPERATORS and (args[5:6] or (kwargs.get("training"),))[0]:
            record.norms.append(inside.address[0] if inside else line_in_words(line_of_user()))
        if kwargs.get("scale_grad_by_freq"):
            where = inside.address[0] if inside else line_in_words(line_of_user())
            record.frequencies.append(where)
        offsets = kwargs.get("offsets")
        if name == "embedding_bag" and offsets in self._tensors.batch:
            raise CaptureFailed(
                f"an EmbeddingBag at {line_with_source(line_of_user())} is given offsets of the "
                f"batch, which count from its first sample, and micro-batches begin elsewhere; "
                f"give it the same number of ids for each sample (samples, ids), padded to "
                f"padding_idx"
            )
        if func is torch.autograd.grad:
            record.has_gradients = True

    def _note_hook(self, name: str, tensor: torch.Tensor) -> None:
        """A hook on a tensor: it sees the whole gradient where the tensor is made."""
        line, record = line_of_user(3), self._record
        if name == "backward":
            raise CaptureFailed(
                f"forward calls backward() at {line_with_source(line)}, whose gradients would end "
                f"where its stage begins; use torch.autograd.grad, or add the term to the loss"
            )
        record.hooks.any_on_tensors = True
        value = self._tensors.current.get(tensor)
        if value is None:
            return
        if self._modules.inside is not None:
            record.regions.append((record.values[value].maker, len(record.events) + 1))
        else:
            address = self._next_address(self._modules.anchor, name, line)
            record.hooks.on_tensors[address] = value

    def _next_address(self, anchor: Address | None, name: str, line: Line) -> Address:
        """The address of a call: it is the next of this function at this line."""
        place = (anchor, name, line)
        self._seen[place] += 1
        return (*place, self._seen[place] - 1)

    def _between_units(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors, anchor, line = self._tensors, self._modules.anchor, line_of_user()
        self._record_sizes(name, args, kwargs, line)
        before: Any = torch.get_rng_state() if name not in ("size", "dim") else None
        out = kwargs.get("out")
        wrote = writes_first(name) or out is not None or name == ".data="
        written: Any = args[0] if wrote and args and out is None else out
        memory = memory_of(written) if isinstance(written, torch.Tensor) else None
        result = func(*args, **kwargs)
        if memory is not None and memory_of(written) != memory:
            tensors.memory.note_moved(written)
        made, given = tensors_in(result), tensors_in((args, kwargs))
        reads_values = name in VALUES
        if not made and not reads_values and not wrote:
            return result
        check_none_lost(given)
        event = RecordedCall(self._next_address(anchor, name, line), func, line)
        event.random = draws(name, args, kwargs) or not torch.equal(before, torch.get_rng_state())
        event.reads_values, event.answer = reads_values, result if reads_values else None
        if reads_values and not any(map(tensors.is_computed, given)):
            return result
        for tensor in given:
            tensors.memory.note(tensor)
        tensors.note_apart(made, name, args, given)
        event.args = tensors.references((args, kwargs))
        skipped = only_shape(name, args, given)
        tensors.read(event, [tensor for tensor in given if tensor is not skipped])
        self._record.note_checkpoint()
        self._record.events.append(event)
        if func is torch.autograd.grad:
            self._keep_with(tensors_in(kwargs.get("inputs", args[1:2])))
        self._note_results(given, made, wrote=wrote)
        tensors.note_state_write(memory, written)
        answer = self.answered.get(event.address)
        return result if answer is None else answer(result)

    def _record_sizes(self, name: str, args: Any, kwargs: Any, line: Line) -> None:
        """Record values that decide about the size of a result: every stage requests them.

        These are bounds of slices; and masks and repeats, if they are of the batch alone. Results
        of masks that stages make have no known size.
        """
        for is_bound, tensor in deciding_tensors(name, args, kwargs):
            if self._tensors.is_computed(tensor):
                kind, number = _BOUND if is_bound else MASK, len(self._record.events)
                event = RecordedCall((self._modules.anchor, kind, line, number), None, line)
                event.reads_values, event.answer = True, int(tensor) if is_bound else None
                self._tensors.read(event, [tensor])
                self._record.events.append(event)

    def _keep_with(self, inputs: Sequence[torch.Tensor]) -> None:
        """Forbid cuts between what gradients are of, and the last call, which takes them."""
        values = [self._tensors.current.get(tensor) for tensor in inputs]
        makers = [-1 if value is None else self._record.values[value].maker for value in values]
        self._record.regions.append((min(makers, default=-1) + 1, len(self._record.events)))

    def _note_results(
        self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], *, wrote: bool
    ) -> None:
        tensors = self._tensors
        written = tensors.note_writes(given, {id(tensor) for tensor in made})
        for slot, tensor in enumerate(made):
            known, memory = tensors.current.get(tensor), memory_of(tensor)
            wrote = wrote or memory in written
            if any(tensor is one for one in given) and not wrote and known is not None:
                self._record.events[-1].makes.append(known)  # returned as it came
                continue
            shared = memory in written and any(
                other is not tensor for other in tensors.memory.sharing(memory or 0)
            )
            tensors.make(slot, tensor, crossable=not shared)


def with_grad(result: Any, given: Any) -> Any:
    """The result of an own autograd function; absent ones need a gradient if an input does."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(given)):
        for tensor in tensors_in(result):
            if type(tensor) is Absent and tensor.is_floating_point():
                tensor.needs_grad = True
    return result
