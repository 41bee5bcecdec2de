"""Calls that a captured graph keeps whole, as one operator instead of the operators inside.

    with recording_opaque_calls(table):              # around torch.export (capture/export.py)
        ...
        result = call_opaquely(table, function, args, kwargs, name="CTC")
    keep_opaque_calls(exported_module, table)        # nodes that call the original

While tracing, `call_opaquely` runs ``function`` once on the fake tensors, outside the trace, to
find out what it returns. It records one operator ``penstock::opaque``, whose inputs are the tensors
and the symbolic sizes among the arguments (also inside tuples, lists and dicts).
`keep_opaque_calls` turns each of these operators into a node ``run_opaque(call, tensors, sizes)``,
where ``call`` is an attribute that holds an `OpaqueCall`. A stage calls ``function`` itself with
real tensors, so its autograd works as usual. `active_table` gives the table to code that runs while
tracing and cannot get it otherwise.

Everything that ``function`` reads must be among its arguments, including parameters and buffers (as
tensors, for example in a dict for `torch.func.functional_call`); otherwise the graph would not know
which layer owns them. A call is refused, with the line of the user's code, if it reads another
traced tensor, writes to its arguments, returns a size, or cannot run on fake tensors. ``modules``
are those that ``function`` calls. While a stage calls it, they are in the training or evaluation
mode that they had at capture, or in evaluation mode.

``facts_of(node)`` is what capture must know about such a node: `heavy` if one of its operators is
work worth a layer, `random` if one draws random numbers, and which results have a gradient.

Keeps the backward of custom ``torch.autograd.Function``s in a captured graph.

Tracing records the operators of a Function's forward, and these say nothing about its backward. So
while a model is traced, each ``apply`` becomes one call that is kept whole (`capture.opaque`), and
a stage calls the original. Inside a registered operator or another Function nothing is recorded
anyway, so ``apply`` is left unchanged there.

``torch.utils.checkpoint`` with ``use_reentrant=True`` is such a Function too. Its content is traced
instead, because the plan decides about recomputation.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo._trace_wrapped_higher_order_op import ModIndex
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.capture_errors import REMEDY, current_line, first_line
from penstock.capture.operators import OPAQUE, OpaqueFacts, heavy_operator, random_operator
from penstock.capture.torch_calls import replaced
from penstock.capture.training_flags import kept_training_flags
from penstock.errors import CaptureFailed, PenstockError

__all__ = [
    "OpaqueCall",
    "OpaqueTable",
    "active_table",
    "call_opaquely",
    "keep_opaque_calls",
    "keeping_custom_functions",
    "recorded_call",
    "recording_opaque_calls",
    "refused",
    "refused_at",
    "run_opaque",
]


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor among the arguments of a call."""

    position: int


@dataclass(frozen=True)
class _SampleCount:
    """Stands for a size that depends on the number of samples."""

    position: int


@dataclass(frozen=True)
class _Device:
    """Stands for a device, which becomes the stage's device."""


class OpaqueCall(nn.Module):
    """A recorded call: ``function``, its arguments with slots for tensors, and its results.

    ``results`` are the fake tensors that it returned while tracing, in order. ``structure`` says
    how these and constants form its result. It is a module without tensors, so stages can hold it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        slots: Sequence[Any],
        spec: pytree.TreeSpec,
        name: str,
        modules: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.function = function
        self.slots = tuple(slots)
        self.spec = spec
        self.name = name
        # The mode at capture: a stage may run while the user's model is in evaluation mode.
        self.flags = {part: part.training for module in modules for part in module.modules()}
        self.results: tuple[torch.Tensor, ...] = ()
        self.structure: tuple[tuple[Any, ...], pytree.TreeSpec] = ((), spec)
        self.facts = OpaqueFacts()
        self.line = current_line()

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Call the original; returns its tensors.

        Raises:
            CaptureFailed: its result has another structure than while it was traced.
        """
        args, kwargs = self.arguments(tensors, sizes)
        with _flags(self.flags if self.training else dict.fromkeys(self.flags, False)):
            found, spec = pytree.tree_flatten(self.function(*args, **kwargs))
        wanted, wanted_spec = self.structure
        alike = spec == wanted_spec and all(
            isinstance(value, torch.Tensor) == isinstance(slot, _Tensor)
            for value, slot in zip(found, wanted, strict=True)
        )
        if not alike:
            raise CaptureFailed(
                f"{self.name} returned something else than when the model was captured; it must "
                f"return the same structure of tensors in every call, or {REMEDY}"
            )
        return [value for value in found if isinstance(value, torch.Tensor)]

    def arguments(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the original, with ``tensors`` and ``sizes`` in their slots."""

        def fill(slot: Any) -> Any:
            match slot:
                case _Tensor(position):
                    return tensors[position]
                case _SampleCount(position):
                    return sizes[position]
                case _Device():
                    return tensors[0].device if tensors else torch.device("cpu")
                case _:
                    return slot

        args, kwargs = pytree.tree_unflatten([fill(slot) for slot in self.slots], self.spec)
        return args, kwargs

    @property
    def description(self) -> tuple[Any, ...]:
        """Equal for calls of one function whose arguments differ only in tensors and sizes."""
        owner = getattr(self.function, "__self__", None)
        function = id(self.function) if owner is None else (id(owner), self.name)
        known = (_Tensor, _SampleCount, _Device, bool, int, float, str, type(None), torch.dtype)
        slots = [(type(slot), slot if isinstance(slot, known) else id(slot)) for slot in self.slots]
        return function, slots, self.spec, self.structure[1], self.facts

    def __deepcopy__(self, memo: dict[int, Any]) -> "OpaqueCall":
        """Itself: it has no tensors, and what the user's code holds may not be copyable."""
        return self


@contextlib.contextmanager
def _flags(flags: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Within, modules are in the training or evaluation mode that ``flags`` give."""
    with kept_training_flags(flags):
        for part, flag in flags.items():
            part.training = flag
        yield


@dataclass
class OpaqueTable:
    """The calls of one trace; the operator's first argument is an index into ``calls``.

    ``differentiated_at`` is the last line that computed gradients inside forward.
    """

    calls: list[OpaqueCall] = field(default_factory=list[OpaqueCall])
    differentiated_at: str = ""


_TABLE: ContextVar[OpaqueTable | None] = ContextVar("opaque calls", default=None)

_LIBRARY = torch.library.Library("penstock", "DEF")
_LIBRARY.define("opaque(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
_OPERATOR = torch.ops.penstock.opaque.default


@torch.library.register_fake("penstock::opaque", lib=_LIBRARY)
def _fake(call: int, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
    table = active_table()
    assert table is not None, "the operator exists only while tracing"
    return [
        torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
        for result in table.calls[call].results
    ]


def _differentiated(ctx: Any, *gradients: Any) -> Any:
    raise refused("torch.autograd.grad", "goes through a call that is kept whole")


torch.library.register_autograd("penstock::opaque", _differentiated, lib=_LIBRARY)


@contextlib.contextmanager
def recording_opaque_calls(table: OpaqueTable) -> Iterator[None]:
    """Within, ``table`` is the table of the trace."""
    token = _TABLE.set(table)
    try:
        yield
    finally:
        _TABLE.reset(token)


def active_table() -> OpaqueTable | None:
    """The table of the running trace, if any."""
    return _TABLE.get()


def call_opaquely(
    table: OpaqueTable,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str,
    modules: Sequence[nn.Module] = (),
    known: OpaqueFacts | None = None,
) -> Any:
    """The result of ``function(*args, **kwargs)``, recorded as one operator.

    ``name`` is used in error messages. ``known`` are facts about the call that hold even if running
    on fake tensors does not show them; that run shows which results have a gradient.

    Raises:
        CaptureFailed: the call cannot be kept whole; names the user's line.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []
    slots: list[Any] = []
    for leaf in leaves:
        match leaf:
            case torch.Tensor():
                slots.append(_Tensor(len(tensors)))
                tensors.append(leaf)
            case torch.SymInt():
                slots.append(_SampleCount(len(sizes)))
                sizes.append(leaf)
            case torch.SymFloat() | torch.SymBool():
                raise refused(name, f"gets {leaf}, which is computed from the number of samples")
            case torch.device():
                slots.append(_Device())
            case _:
                slots.append(leaf)
    call = OpaqueCall(function, slots, spec, name, modules)
    _learn_results(call, tensors, sizes)
    if known is not None:
        call.facts = replace(
            known,
            heavy=known.heavy or call.facts.heavy,
            random=known.random or call.facts.random,
            with_gradient=call.facts.with_gradient,
        )
    table.calls.append(call)
    made = _OPERATOR(len(table.calls) - 1, tensors, sizes)
    values, result_spec = call.structure
    filled = [made[v.position] if isinstance(v, _Tensor) else v for v in values]
    return pytree.tree_unflatten(filled, result_spec)


def refused(name: str, why: str) -> CaptureFailed:
    """The error to raise if the user's code calls ``name``, which cannot be captured."""
    return refused_at(current_line(), name, why)


def refused_at(at: str, name: str, why: str) -> CaptureFailed:
    """The same error for a given line."""
    return CaptureFailed(
        f"{name}{f' at {at}' if at else ''} cannot be kept in a captured model: it {why}; {REMEDY}"
    )


def _learn_results(call: OpaqueCall, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> None:
    """Run the original on fake tensors, outside the trace, and record what it did."""
    mode = detect_fake_mode(list(tensors))
    assert mode is not None, "tracing runs under a fake tensor mode"
    versions = [tensor._version for tensor in tensors]
    with _outside_of_trace(mode):
        fakes = [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in tensors]
        watch = _OperatorNotes(fakes)
        args, kwargs = call.arguments(fakes, sizes)
        try:
            with watch:
                result = call.function(*args, **kwargs)
        except PenstockError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
            raise refused(call.name, f"does not run on tensors without values ({what})") from error
    if [tensor._version for tensor in tensors] != versions:
        raise refused(call.name, "writes to one of its arguments")
    if watch.reads_others:
        raise refused(call.name, "reads a tensor of the model that is not among its arguments")
    found, spec = pytree.tree_flatten(result)
    results: list[torch.Tensor] = []
    slots: list[Any] = []
    for value in found:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise refused(call.name, f"returns {value}, which depends on the number of samples")
        if isinstance(value, torch.Tensor):
            slots.append(_Tensor(len(results)))
            results.append(value)
        else:
            slots.append(value)
    call.results = tuple(results)
    call.structure = (tuple(slots), spec)
    call.facts = OpaqueFacts(watch.heavy, watch.random, tuple(r.requires_grad for r in results))


@contextlib.contextmanager
def _outside_of_trace(mode: FakeTensorMode) -> Iterator[None]:
    """Within, nothing is recorded; real tensors that code holds count as constants."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with (
            disable_proxy_modes_tracing(),
            torch._C.DisableTorchFunction(),
            torch.random.fork_rng(devices=[]),
            mode,
        ):
            yield
    finally:
        mode.allow_non_fake_inputs = before


class _OperatorNotes(TorchDispatchMode):
    """Notes what the operators of a call do, and whether they read other traced tensors.

    Tensors are identified by their storage, because views of them are made on the way.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.heavy = self.random = self.reads_others = False
        self._known = {_storage(tensor): tensor for tensor in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.heavy |= heavy_operator(func)
        self.random |= random_operator(func)
        for value in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(value, FakeTensor) and _storage(value) not in self._known:
                self.reads_others = True
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._known[_storage(value)] = value
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.compiler.disable
def run_opaque(
    call: OpaqueCall, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """What a stage does for a recorded call; returns the tensors that the original returns."""
    return call(tensors, sizes)


def keep_opaque_calls(module: fx.GraphModule, table: OpaqueTable) -> None:
    """Replace recorded operators in ``module`` and in the regions inside it by `run_opaque`.

    Raises:
        CaptureFailed: a call in a region must be in the stage of an argument made outside it.
    """
    for part in [*module.modules()]:
        if isinstance(part, fx.GraphModule):
            found = [node for node in part.graph.nodes if node.target is _OPERATOR]
            for node in found:
                if part is not module:
                    _check_in_region(node, table)
                _keep(part, node, table)
            if found:
                part.recompile()


def _check_in_region(node: fx.Node, table: OpaqueTable) -> None:
    call = table.calls[int(node.args[0])]  # pyright: ignore[reportArgumentType]
    given = any(source.op == "placeholder" for source in node.all_input_nodes)
    if call.facts.beside_arguments and given:
        why = "is called in another region (torch.autocast, no_grad) than its tensor is made in"
        raise refused_at(call.line, call.name, why)


def recorded_call(node: fx.Node, table: OpaqueTable) -> OpaqueCall | None:
    """The call that a node of a graph records, before `keep_opaque_calls`."""
    if node.target is not _OPERATOR:
        return None
    index = node.args[0]
    assert isinstance(index, int)
    return table.calls[index]


def _keep(owner: fx.GraphModule, node: fx.Node, table: OpaqueTable) -> None:
    index, *inputs = node.args
    assert isinstance(index, int)
    call = table.calls[index]
    name = f"_opaque_{index}"
    owner.add_module(name, call)
    with owner.graph.inserting_before(node):
        held = owner.graph.get_attr(name)
    node.target = run_opaque
    node.args = (held, *inputs)
    node.meta[OPAQUE] = call.facts
    for user in node.users:
        if user.target is operator.getitem:
            user.meta[OPAQUE] = replace(call.facts, group="", beside_arguments=False)


FUNCTIONS: Any = torch.autograd.function
# Every Function's `apply` ends here, even if code holds `apply` under another name.
LOWEST: Any = FUNCTIONS._SingleLevelFunction


@contextlib.contextmanager
def keeping_custom_functions(table: OpaqueTable) -> Iterator[None]:
    """Record each ``apply`` of a Function in ``table`` while a model is traced."""
    under_transforms = FUNCTIONS.custom_function_call

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            below: Any = super(LOWEST, cls)
            return below.apply(*args, **kwargs)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        return call_opaquely(table, cls.apply, args, kwargs, name=f"{cls.__name__}.apply")

    def transformed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # torch looks up indices in a mapped function by a Function, which is recorded as such.
        if get_proxy_mode() is None or cls is ModIndex:
            return under_transforms(cls, *args, **kwargs)
        raise refused(f"{cls.__name__}.apply", "is called within a transform of torch.func")

    with (
        replaced(LOWEST, "apply", classmethod(apply)),
        replaced(FUNCTIONS, "custom_function_call", transformed),
    ):
        yield


def _checkpointed(run: Any, preserve_random_state: bool, *args: Any) -> Any:
    """The result of a checkpointed call; without gradient if no argument has one, as in torch."""
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return run(*args)
    with torch.no_grad():
        return run(*args)
