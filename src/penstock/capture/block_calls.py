"""Avoids tracing equal blocks again and again: their calls are only noted.

    first call of a kind        run, between two marks
    second                      run, between two marks; must give the same graph as the first
    every further one           one operator, `penstock.block_again`, which `block_copies` replaces
                                by a copy of the second call's operators

Calls are of one kind if their blocks have equal structure, all attributes that the first call read
have equal values, and the arguments are equal except for the values of tensors.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from penstock.capture.block_structure import (
    Attribute,
    Block,
    State,
    find_blocks,
    identity,
    read_attributes,
    structure_of,
    values_of,
)

__all__ = ["BlockCalls", "Call", "Kind"]

_PLAIN = (
    int,
    float,
    complex,
    str,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
)


@dataclass(eq=False)
class Kind:
    """Calls that do the same, two of which are traced.

    ``reads`` are the attributes that the first call read, ``values`` their values. ``returned`` is
    the result of the first call, later that of the second.
    """

    arguments: Hashable
    returned: "Returned"
    reads: frozenset[Attribute]
    values: Hashable
    traced: list["Call"]


@dataclass(eq=False)
class Call:
    """One call of a block; ``number`` identifies its marks and its placeholder in the graph."""

    number: int
    block: Block
    kind: Kind | None = None
    copied: bool = False


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: distinct tensors, their shapes, and everything else."""

    tensors: Sequence[torch.Tensor]
    description: tuple[list[Hashable], Hashable, list[Hashable]]

    def have_changed(self) -> bool:
        """Whether the call changed their shapes or whether they require a gradient."""
        return [_described(tensor) for tensor in self.tensors] != self.description[0]


@dataclass(frozen=True)
class Returned:
    """The result of a call: ``sources`` say where each leaf comes from, ``made`` are its tensors.

    A source is ``("argument", number)``, ``("made", number)`` or ``("constant", value)``.
    """

    spec: TreeSpec
    sources: tuple[tuple[str, Any], ...]
    made: tuple[torch.Tensor, ...]

    @property
    def description(self) -> Hashable:
        """Equal for results that differ only in the values of tensors."""
        constants = tuple(
            (source, _plain(value) if source == "constant" else value)
            for source, value in self.sources
        )
        return self.spec, constants, tuple(_described(tensor) for tensor in self.made)

    def rebuild(self, arguments: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:
        """The same result with other tensors."""
        leaves = {"argument": arguments.__getitem__, "made": made.__getitem__}
        return tree_unflatten(
            [leaves[source](v) if source in leaves else v for source, v in self.sources], self.spec
        )


class BlockCalls:
    """The calls of blocks in one trace of ``root``; blocks of the classes ``apart`` just run."""

    def __init__(self, root: nn.Module, apart: frozenset[type]) -> None:
        self.calls: list[Call] = []
        self._apart = set(apart)
        self._blocks = find_blocks(root)
        self._kinds: dict[Hashable, list[Kind]] = {}
        self._reading: list[tuple[Block, set[Attribute]]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While active, calls of blocks are handled here."""
        original = nn.Module._call_impl  # While tracing, torch keeps a reference to __call__.
        modes = _modes()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            block = self._blocks.get(identity(module))
            run = functools.partial(original, module, *args, **kwargs)
            if block is None or _modes() != modes or get_proxy_mode() is None:
                return run()
            return self._call(block, run, (args, kwargs))

        nn.Module._call_impl = call  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            nn.Module._call_impl = original
            _results.clear()

    def _call(self, block: Block, run: Callable[[], Any], given: Any) -> Any:
        structure, arguments = structure_of(block), _arguments(given)
        if structure is None or arguments is None or type(block.module) in self._apart:
            return run()
        kinds = self._kinds.setdefault(structure, [])
        for kind in kinds:
            if kind.arguments == arguments.description and (
                values_of(block, kind.reads) == kind.values
            ):
                if len(kind.traced) == 1:
                    return self._second(kind, block, run, arguments)
                return self._copied(kind, block, arguments)
        return self._first(kinds, block, run, arguments)

    def _first(
        self, kinds: list[Kind], block: Block, run: Callable[[], Any], arguments: Arguments
    ) -> Any:
        call, before = self._new_call(block), State(block)
        with read_attributes(block) as reads:
            self._reading.append((block, reads))
            try:
                result, returned = _marked(call, run, arguments)
            finally:
                self._reading.pop()
        if returned is None or before.has_changed():
            self._apart.add(type(block.module))
        else:
            values = values_of(block, reads)
            call.kind = Kind(arguments.description, returned, frozenset(reads), values, [call])
            kinds.append(call.kind)
        return result

    def _second(
        self, kind: Kind, block: Block, run: Callable[[], Any], arguments: Arguments
    ) -> Any:
        call = self._new_call(block, kind)
        result, returned = _marked(call, run, arguments)
        if returned is None or returned.description != kind.returned.description:
            self._apart.add(type(block.module))
        else:
            kind.returned = returned
            kind.traced.append(call)
        return result

    def _copied(self, kind: Kind, block: Block, arguments: Arguments) -> Any:
        """The result of a call of ``kind``, without running it."""
        call = self._new_call(block, kind)
        call.copied = True
        _results[call.number] = kind.returned.made
        made = again(list(arguments.tensors), call.number)
        for tensor, like in zip(made, kind.returned.made, strict=True):
            tensor.requires_grad = like.requires_grad
        for around, reads in self._reading:
            # What this call would have read, the blocks around it would have read as well.
            for path, part in around.parts.items():
                reads |= {(path, name) for own, name in kind.reads if block.parts[own] is part}
        return kind.returned.rebuild(arguments.tensors, made)

    def _new_call(self, block: Block, kind: Kind | None = None) -> Call:
        self.calls.append(Call(len(self.calls), block, kind))
        return self.calls[-1]


def _marked(
    call: Call, run: Callable[[], Any], arguments: Arguments
) -> tuple[Any, Returned | None]:
    """The result of ``run``, whose operators are put between two marks.

    The second value is None if no other call can be like this one.
    """
    begins(list(arguments.tensors), call.number)
    result = run()
    returned = _returned(result, arguments)
    if returned is None or arguments.have_changed():
        return result, None
    ends(list(returned.made), call.number)
    return result, returned


def _modes() -> Hashable:
    """The modes around a call; regions without gradients or with autocast are separate graphs."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), tuple(autocast)


def _plain(value: Any) -> Hashable:
    if isinstance(value, torch.SymInt):
        # Two symbols may turn out equal later in the trace; `block_spans` compares them again.
        return torch.SymInt, value.node.hint
    return type(value), value


def _described(tensor: torch.Tensor) -> Hashable:
    sizes = tuple(_plain(size) for size in (*tensor.shape, *tensor.stride()))
    plain = (tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))
    return (sizes, tensor.dim(), *plain)


def _arguments(given: Any) -> Arguments | None:
    """The arguments; None if they contain anything but tensors and constants."""
    leaves, spec = tree_flatten(given)
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    described: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            described.append(numbers[id(leaf)])
        elif isinstance(leaf, (*_PLAIN, torch.SymInt)):
            described.append(_plain(leaf))
        else:
            return None
    if not tensors:
        return None
    kinds = [_described(tensor) for tensor in tensors]
    return Arguments(tensors, (kinds, spec, described))


def _returned(result: Any, arguments: Arguments) -> Returned | None:
    """The result of a call; None if it contains anything but tensors and constants."""
    leaves, spec = tree_flatten(result)
    given = {id(tensor): index for index, tensor in enumerate(arguments.tensors)}
    made: dict[int, torch.Tensor] = {}
    sources: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in given:
            sources.append(("argument", given[id(leaf)]))
        elif isinstance(leaf, torch.Tensor):
            made.setdefault(id(leaf), leaf)
            sources.append(("made", list(made).index(id(leaf))))
        elif isinstance(leaf, (*_PLAIN, torch.SymInt)):
            sources.append(("constant", leaf))
        else:
            return None
    return Returned(spec, tuple(sources), tuple(made.values())) if made else None


_results: dict[int, tuple[torch.Tensor, ...]] = {}
"""For each copied call of the running trace, tensors like the ones that it returns."""

_library = torch.library.Library("penstock", "FRAGMENT")
_library.define("block_begins(Tensor[] inputs, int call) -> ()")
_library.define("block_ends(Tensor[] results, int call) -> ()")
_library.define("block_again(Tensor[] inputs, int call) -> Tensor[]")

begins = torch.ops.penstock.block_begins.default
ends = torch.ops.penstock.block_ends.default
again = torch.ops.penstock.block_again.default


def _mark(tensors: Sequence[torch.Tensor], call: int) -> None:
    """Marks compute nothing."""


def _like_before(inputs: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    """Tensors of the shapes that another call of the kind returned."""
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for t in _results[call]
    ]


def _define(operator: torch._ops.OpOverload, compute: Callable[..., Any]) -> None:
    def without_gradient(tensors: Sequence[torch.Tensor], call: int) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(tensors, call)

    name = operator._schema.name
    _library.impl(name, compute, "CompositeExplicitAutograd")
    _library.impl(name, without_gradient, "Autograd")
    torch.library.register_fake(name, compute, lib=_library)
    has_side_effect(operator)  # Otherwise tracing drops it, since nothing reads it.


_define(begins, _mark)
_define(ends, _mark)
_define(again, _like_before)
