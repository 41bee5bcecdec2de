"""Absent tensors: those that are not on this rank. Shape and type are known, values are not.

A stage runs the user's own forward. What other stages make is absent there. An absent tensor is a
tensor subclass, so torch hands over only calls that read one; calls between tensors that are here
run as if nothing were absent.

    here    + here        computed as always
    absent  + here        absent; the shape follows from a tensor without values (meta device)
    absent.item()         raises `NeedsValues`: the program requests a value that is elsewhere
    zeros_like(absent)    here: only the shape is read

That is so within a run of the user's program. What his loop does with a weight that this rank has
released is checked first (`penstock.capture.record.elsewhere`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.capture.tensor_parts import give_scales, is_quantised, plain_parts
from penstock.device import DEVICE_NAMES, is_gpu
from penstock.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    NoFunctionCalls,
    as_parameter,
    as_subclass,
    pytree,
    storage_id,
    tensors_in,
    without_modes,
    write_count,
)

META = torch.device("meta")


class NeedsValues(BaseException):
    """Code between units requests values, or sizes that depend on values, of another stage.

    No `Exception`, so that a handler in the user's code does not swallow it.
    """


class UnknownSize(NeedsValues):
    """A unit is given a tensor whose size depends on values."""


RUNS: list[object] = []
"""The runs of users' programs that are in progress; none in the user's loop."""


class Absent(torch.Tensor):
    """A tensor that is elsewhere.

    ``plain`` is the tensor on the meta device behind it. ``needs_grad`` says whether the tensor
    requires a gradient where it is. If ``is_unknown``, its shape depends on values, and whoever
    reads the shape gets `NeedsValues`.
    """

    home = torch.device("cpu")
    """The device that absent tensors of this process claim to be on: that of its stages."""

    became: torch.Tensor | None = None
    """The tensor that a call in place has made of it, where that was received (``h.relu_()``)."""

    any_became = False
    """True if any absent tensor has become another in the run that is in progress."""

    plain: torch.Tensor
    needs_grad: bool
    is_unknown = False
    whence: Any = None
    """The `Whence` of a weight of another rank, and of what the loop computes from one."""

    @staticmethod
    def of(plain: torch.Tensor, needs_grad: bool = False, is_unknown: bool = False) -> "Absent":
        """An absent tensor with the shape and type of ``plain``, which is on the meta device."""
        made: Any = as_subclass(Absent, plain)
        made.plain, made.needs_grad = plain, needs_grad
        if is_unknown:
            made.is_unknown = True
        return made

    @staticmethod
    def claim(device: torch.device) -> None:
        """Give absent tensors the device of the rest, from now on; tensors on meta are nowhere."""
        if device != Absent.home and device.type != "meta":  # each write slows look-ups in a class
            Absent.home = device

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.is_unknown:
            raise NeedsValues("the size of a tensor of another stage")
        with NoFunctionCalls():
            return self.plain.shape

    dtype = property(lambda self: self.plain.dtype)  # pyright: ignore
    device = property(lambda self: Absent.home)  # pyright: ignore
    is_meta = property(lambda self: False)  # pyright: ignore
    is_cuda = property(lambda self: is_gpu(Absent.home))  # pyright: ignore
    is_cpu = property(lambda self: Absent.home.type == "cpu")  # pyright: ignore
    ndim = property(lambda self: len(self.plain.shape))  # pyright: ignore
    grad_fn = property(lambda self: None)  # pyright: ignore
    is_leaf = property(lambda self: not self.needs_grad)  # pyright: ignore
    grad = property(lambda self: None, lambda self, value: None)  # pyright: ignore

    @property
    def data(self) -> "Absent":  # pyright: ignore
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore
        """Set nothing; but modes that watch calls see it, as they do of other tensors."""
        setter: Any = torch.Tensor.data.__set__  # pyright: ignore
        torch.overrides.handle_torch_function(setter, (self, value), self, value)

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.needs_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.needs_grad = value

    def size(self, dim: int | None = None) -> Any:  # pyright: ignore
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.plain.shape)

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.is_unknown:
            raise NeedsValues("the size of a tensor of another stage")
        return iter(torch.Tensor.unbind(self, 0))

    def is_floating_point(self) -> bool:
        """Return whether the elements are floating-point numbers."""
        return self.plain.dtype.is_floating_point

    def requires_grad_(self, requires_grad: bool = True) -> "Absent":  # pyright: ignore
        """Note whether it requires a gradient."""
        self.needs_grad = requires_grad
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.whence is not None and not RUNS:
            raise self.whence.refusal("saving it needs the values of")
        raise NeedsValues("a tensor of another stage was to be saved, and its values")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":  # pyright: ignore
        made = memo[id(self)] = Absent.of(self.plain, self.needs_grad, self.is_unknown)
        if isinstance(self, nn.Parameter):
            as_parameter(made)
        if self.whence is not None:
            made.whence = self.whence
        return made

    def __repr__(self) -> str:  # pyright: ignore
        shape = "of unknown shape" if self.is_unknown else tuple(self.plain.shape)
        where = f", from {self.whence}" if self.whence is not None else ""
        return f"Absent({shape}, {self.plain.dtype}{where})"

    def __format__(self, _: str) -> str:
        return "?"  # a line of a log, which the stage that has the value writes, too

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not RUNS:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if type(leaf) is Absent and leaf.whence is not None:
                    return leaf.whence.call(func, args, kwargs or {})
        if Absent.any_became:
            now, named = pytree.tree_map(_as_it_became, (args, kwargs or {}))
            if not any(type(leaf) is Absent for leaf in pytree.tree_leaves((now, named))):
                return func(*now, **named)
            return absent_call(func, now, named)
        return absent_call(func, args, kwargs or {})


def _as_it_became(value: Any) -> Any:
    return value.became if type(value) is Absent and value.became is not None else value


class NoHandle:
    """The handle of a hook that was not registered."""

    def remove(self) -> None:
        """Do nothing."""


def absent_like(
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    needs_grad: bool = False,
    *,
    is_unknown: bool = False,
    is_parameter: bool = False,
) -> Absent:
    """A new absent tensor; as a parameter it is an instance of `torch.nn.Parameter`."""
    with NoFunctionCalls(), without_modes():
        made = Absent.of(torch.empty(shape, dtype=dtype, device=META), needs_grad, is_unknown)
    return as_parameter(made) if is_parameter else made


def release(parameter: torch.Tensor, whence: object = None, *, may_be_read: bool = False) -> int:
    """Make a parameter of the user's model absent and free its memory; returns the bytes freed.

    The object stays the same: ``requires_grad_``, ``p.data = x`` and ``p.grad = None`` go on
    working, and have no effect on this rank. Memory that ``may_be_read`` by other tensors is freed
    with the last of them.
    """
    if type(parameter) is Absent:
        return 0
    needs_grad = parameter.requires_grad
    absent: Any = parameter
    with NoFunctionCalls():
        like = parameter.shape, parameter.stride()
        plain = torch.empty_strided(*like, dtype=parameter.dtype, device=META)
        parameter.grad = None
        # Weights share some scales, which must not be freed with one of them.
        give_scales(parameter, parameter, lambda _, scale: torch.empty_like(scale, device=META))
        parts = plain_parts("", parameter).values()
        freed = sum(free(part, may_be_read=may_be_read) for part in parts)
        if is_quantised(parameter):
            absent.released = type(parameter)
    into_absent(parameter, plain, needs_grad)
    as_parameter(parameter)
    absent.whence = whence
    return freed


def free(tensor: torch.Tensor, *, may_be_read: bool) -> int:
    """Free a tensor's memory, if it is its own; return the bytes."""
    storage, own = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if tensor.is_meta or storage.nbytes() != own:
        return 0
    if storage.resizable() and not may_be_read:
        storage.resize_(0)
    else:  # also that of a file, or of NumPy
        tensor.data = tensor.new_empty(0)
    return own


def give_back(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a parameter a value that was released, or on meta; it is an ordinary one again."""
    absent: Any = parameter
    needs_grad = parameter.requires_grad
    if type(parameter) is Absent:
        del absent.plain, absent.needs_grad
        absent.__dict__.pop("whence", None)
        absent.__class__ = nn.Parameter
    if parameter.is_meta:  # it has never had values here
        torch.utils.swap_tensors(parameter, nn.Parameter(value, needs_grad))
    else:
        parameter.data = value
        parameter.requires_grad_(needs_grad)


def check_none_lost(tensors: Iterable[torch.Tensor]) -> None:
    """Raise `RuntimeError` if a tensor without values is no absent one.

    Code that is not Python's, as of ``torch.jit.script``, takes absent tensors for those on meta.
    """
    with NoFunctionCalls():
        found = [tensor for tensor in tensors if type(tensor) is not Absent and tensor.is_meta]
    if any(memory_of(tensor) is not None for tensor in found):
        raise RuntimeError("code that is not Python's was given a tensor without values")


def version_of(tensor: torch.Tensor) -> int:
    """A number that every write to the tensor's memory changes."""
    with NoFunctionCalls():
        return write_count(tensor.plain if type(tensor) is Absent else tensor)


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return an identity of the memory; None for tensors without any of their own."""
    plain = tensor.plain if type(tensor) is Absent else tensor
    try:
        with NoFunctionCalls():
            return storage_id(plain)
    except (NotImplementedError, RuntimeError):
        return None


def into_absent(tensor: torch.Tensor, plain: torch.Tensor, needs_grad: bool) -> None:
    """Make an existing tensor object absent."""
    made: Any = tensor
    made.__class__ = Absent
    made.plain, made.needs_grad = plain, needs_grad


@contextlib.contextmanager
def scripts_seen(note: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Make calls of ``torch.jit.script`` functions calls of torch functions, like others.

    They are C++, which would take absent tensors for some with values. ``note`` is called at each.
    """
    kind: Any = torch.jit.ScriptFunction
    plain = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        note()
        given = tensors_in((args, kwargs))
        if torch.overrides.has_torch_function(given):
            return torch.overrides.handle_torch_function(self, given, *args, **kwargs)
        return plain(self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = plain


@contextlib.contextmanager
def functions_through(see: Callable[..., Any]) -> Iterator[None]:
    """Replace each call of an autograd function by ``see(class, call, args, kwargs)``.

    Replaced is the method that ``apply`` calls: users may hold ``MyFunction.apply`` itself.
    """
    lowest: Any = torch.autograd.Function.__mro__[1]
    outer = lowest.__dict__.get("apply")

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        call = outer.__get__(None, kind) if outer else super(lowest, kind).apply
        return see(kind, call, args, kwargs)

    lowest.apply = classmethod(apply)
    try:
        yield
    finally:
        if outer:
            lowest.apply = outer
        else:
            del lowest.apply


SHAPE_ONLY = {
    **dict.fromkeys(("expand_as", "view_as", "reshape_as", "type_as", "to"), 1),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), 0),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), 0),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), 0),
}
"""Calls that read only shape and type of one argument, with its position."""

VALUES = frozenset(
    [
        *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
        *("numpy", "__array__", "equal", "allclose", "is_nonzero", "__contains__"),
    ]
)
"""Calls whose result is no tensor but depends on values."""

DRAWN = frozenset(
    [
        *("bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_", "kaiming_uniform_", "kaiming_normal_"),
    ]
)
"""Calls that fill their first argument with random numbers."""

_HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook", "retain_grad"])

_IN_PLACE = frozenset(
    [
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
        *("__iand__", "__ior__", "__ixor__", "__ipow__", "__imod__"),
    ]
)


MASKS = (torch.bool, torch.uint8)
"""The types of an index that select where they are true."""


def deciding_tensors(name: str, args: Any, kwargs: Any) -> Iterator[tuple[bool, torch.Tensor]]:
    """Tensors whose values decide about the size of a result; with True, bounds of slices."""
    if name in ("__getitem__", "__setitem__"):
        for entry in args[1] if isinstance(args[1], tuple) else (args[1],):
            if isinstance(entry, slice):
                bounds = entry.start, entry.stop, entry.step
                yield from ((True, bound) for bound in bounds if isinstance(bound, torch.Tensor))
            elif isinstance(entry, torch.Tensor) and entry.dtype in MASKS:
                yield False, entry
    elif name in ("masked_select", "repeat_interleave", "nonzero"):
        second = args[1] if len(args) > 1 else kwargs.get("mask", kwargs.get("repeats"))
        if isinstance(second, torch.Tensor):
            yield False, second


_BY_VALUES = frozenset(
    [
        *("__getitem__", "__setitem__", "masked_select", "repeat_interleave", "view", "reshape"),
        *("expand", "split", "repeat", "narrow", "tensor_split"),
    ]
)
"""Calls whose result has a shape that depends on the values of arguments that are tensors."""


_PACKING = ("_pack_padded_sequence", "_pad_packed_sequence")


def call_name(func: Any) -> str:
    """The name of a torch function; of a property, that of the attribute: ``.T``, ``.data=``."""
    name = getattr(func, "__name__", "") or getattr(func, "name", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return f".{attribute}{'=' if name == '__set__' else ''}"
    return name


def writes_first(name: str) -> bool:
    """Return whether a call of this name writes to its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_known: dict[Any, tuple[torch.Tensor | None, bool, bool]] = {}
"""Results by what decides about them: the tensor, whether it needs a gradient, and is a view.

Instead of the tensor it is None if the call returns its first argument.
"""
_MOST_KNOWN = 10_000
_remember = True


@contextlib.contextmanager
def fresh_results() -> Iterator[None]:
    """Give every result memory of its own, so that views and writes can be detected."""
    global _remember
    before, _remember = _remember, False
    try:
        yield
    finally:
        _remember = before


def absent_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that reads something absent: its result is absent.

    Where shapes decide, it is remembered by them: meta kernels written in Python are slow.
    """
    name = call_name(func)
    if name in _HOOKS:
        return NoHandle()  # its gradient arrives where it is
    if name in _PACKING and type(args[0]) is Absent and _is_here(args[1]):
        return _packed(func, name, *args)
    if name in VALUES or name[:1] == "." or "out" in kwargs:
        return _result(func, name, args, kwargs)
    if writes_first(name) or (name in _BY_VALUES and tensors_in((args[1:], kwargs))):
        return _result(func, name, args, kwargs)
    try:
        with_names = tuple((key, _key(value)) for key, value in kwargs.items())
        autocast = torch.is_autocast_enabled(Absent.home.type)
        key = (func, torch.is_grad_enabled(), autocast, _key(args), with_names)
        found = _known.get(key)
    except TypeError:
        return _result(func, name, args, kwargs)
    if found is not None and (_remember or not found[2]):
        plain, needs_grad, _ = found
        if plain is None:
            args[0].needs_grad = needs_grad
            return args[0]
        return Absent.of(plain if _remember else _copy_of(plain), needs_grad)
    result = _result(func, name, args, kwargs)
    is_known = type(result) is Absent and not any(result is argument for argument in args[1:])
    if is_known and not result.is_unknown:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        memory = memory_of(result)
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Absent)
        is_view = any(memory_of(leaf) == memory for leaf in tensors)
        plain = None if args and result is args[0] else result.plain
        _known[key] = plain, result.needs_grad, is_view
    return result


class _Here:
    """Mark of a tensor that is here in a key."""


def _key(value: Any) -> Any:
    """Return the part of an argument that decides about shapes (TypeError if it is unknown)."""
    kind = type(value)
    if kind is Absent:
        if value.is_unknown:
            raise TypeError
        plain = value.plain
        return plain.shape, plain.dtype, value.needs_grad, plain.stride()
    if isinstance(value, torch.Tensor):
        return _Here, value.shape, value.dtype, value.requires_grad, value.stride()
    if kind is tuple or kind is list:
        return (kind, *map(_key, value))
    return kind, value


class _SizeUnknown(Exception):
    """An argument's size depends on values."""


def _result(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name[:1] == ".":
        return _attribute(func, args)
    here = by_shape_only(func, name, args, kwargs)
    if here is not None:
        return here
    if name in VALUES:
        raise NeedsValues(f"{name.strip('_')}() of a tensor of another stage")
    if func is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    with without_modes():
        return _absent_result(func, name, args, kwargs)


def _absent_result(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "detach":
        with NoFunctionCalls():  # the same memory as another tensor object
            return Absent.of(args[0].plain.detach(), False, args[0].is_unknown)
    enabled = torch.is_grad_enabled()
    grad = enabled and (any(map(_needs_grad, args)) or any(map(_needs_grad, kwargs.values())))
    args, kwargs, again = _with_numbers(name, args, kwargs)
    if again is not None:
        return absent_call(again, args, kwargs)
    written: Any = args[0] if args and writes_first(name) else kwargs.get("out")
    if not isinstance(written, torch.Tensor):
        written = None
    if type(written) is Absent and _remember:
        written.plain = _copy_of(written.plain)
    try:
        result = _on_meta(func, args, kwargs)
    except (_SizeUnknown, RuntimeError, NotImplementedError) as error:
        is_other = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        if is_other and "meta" not in str(error).lower():
            raise
        if written is None or (type(written) is Absent and written.is_unknown):
            return _unknown(name, args, kwargs, grad)
        if type(written) is Absent:  # it stays as large as it is, and is seen to be written to
            written.plain = _copy_of(written.plain)
        result = None if name == "__setitem__" else getattr(written, "plain", written)
    if written is None:
        for value in args:
            if type(value) is Absent and value.plain is result:  # relu(x, inplace=True)
                value.needs_grad = value.needs_grad or grad
                return value
        return _out(result, grad)
    if type(written) is not Absent:
        with NoFunctionCalls():
            plain = torch.empty(written.shape, dtype=written.dtype, device=META)
        into_absent(written, plain, True)
    elif isinstance(result, torch.Tensor):
        written.plain = result  # a write may change the shape
    made: Any = written
    made.needs_grad = made.needs_grad or grad
    return written if isinstance(result, torch.Tensor) else result


def _gradients(outputs: Any, inputs: Any, *others: Any, **named: Any) -> tuple[Any, ...]:
    """Return what ``torch.autograd.grad`` does: a gradient for each input."""
    needs_grad = named.get("create_graph", others[2] if len(others) > 2 else False)
    every = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return tuple(absent_like(tensor.shape, tensor.dtype, needs_grad) for tensor in every)


def _copy_of(plain: torch.Tensor) -> torch.Tensor:
    """Memory of its own for a tensor that may be remembered."""
    with NoFunctionCalls():
        return torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=META)


def _attribute(func: Any, args: tuple[Any, ...]) -> Any:
    """A property that `Absent` does not answer itself: ``T``, ``mT``, ``real``."""
    owner: Absent = args[0]
    if len(args) > 1:
        return None  # a property that is set
    if owner.is_unknown:
        return absent_like((0,), owner.plain.dtype, owner.needs_grad, is_unknown=True)
    with NoFunctionCalls(), without_modes():
        found = func(owner.plain)
    return Absent.of(found, owner.needs_grad) if isinstance(found, torch.Tensor) else found


def by_shape_only(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that reads only the shape of what is absent; None for other calls."""
    place = SHAPE_ONLY.get(name)
    if place is None or place >= len(args):
        return None
    like = args[place]
    if type(like) is not Absent or like.is_unknown:
        return None
    if any(type(value) is Absent for i, value in enumerate(args) if i != place):
        return None
    with NoFunctionCalls():  # the right shape and type, without memory
        blank = torch.empty((), dtype=like.plain.dtype, device=Absent.home)
        blank = blank.expand(like.plain.shape)
    return func(*args[:place], blank, *args[place + 1 :], **kwargs)


def _with_numbers(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments with masks, sizes and repeats that are here turned into numbers.

    So ``x[mask]`` has its shape though ``x`` is absent. The last is another function to call.
    """
    if name in ("__getitem__", "__setitem__"):
        return _places_of_masks(args), kwargs, None
    if len(args) < 2:
        return args, kwargs, None
    second = args[1]
    if name == "masked_select" and type(second) is not Absent and not args[0].is_unknown:
        shape = torch.broadcast_shapes(args[0].shape, second.shape)
        whole = absent_call(torch.Tensor.expand, (args[0], shape), {})
        return (whole, second.expand(shape)), {}, torch.Tensor.__getitem__
    if name == "repeat_interleave" and _is_here(second):
        repeats = int(second) * args[0].shape[kwargs.get("dim", 0)] if not second.dim() else 0
        size = int(second.sum()) if second.dim() else repeats
        return args, {**kwargs, "output_size": size}, None
    if name in _BY_VALUES:
        return (args[0], *map(_numbers, args[1:])), kwargs, None
    return args, kwargs, None


def _packed(
    func: Callable[..., Any], name: str, given: Absent, sizes: torch.Tensor, *others: Any
) -> tuple[Absent, torch.Tensor]:
    """Sequences packed, or padded, by lengths that are here: one column of zeros gives the sizes.

    That is ``(batch, time, ...)``, or time first, from and to ``(all steps, ...)``.
    """
    packs = name == "_pack_padded_sequence"
    rows: tuple[int, ...] = (int(sizes.sum()),)
    if packs:  # the longest comes first
        rows = (len(sizes), int(sizes[0])) if others[0] else (int(sizes[0]), len(sizes))
    with NoFunctionCalls():
        found, sizes_out = func(torch.zeros(*rows, 1), sizes, *others)
    grad, dtype = torch.is_grad_enabled() and given.needs_grad, given.plain.dtype
    if given.is_unknown:
        return absent_like((0,), dtype, grad, is_unknown=True), sizes_out
    return absent_like((*found.shape[:-1], *given.plain.shape[len(rows) :]), dtype, grad), sizes_out


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not Absent


def _numbers(value: Any) -> Any:
    """Sizes that the user computed as tensors of the batch, as numbers."""
    if _is_here(value):
        return value.tolist()
    return type(value)(map(_numbers, value)) if type(value) in (tuple, list) else value


def _places_of_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index whose boolean masks are replaced by the places of what they select."""
    given = args[1] if isinstance(args[1], tuple) else (args[1],)
    found: list[Any] = []
    for entry in given:
        if _is_here(entry) and entry.dtype in MASKS:
            found += entry.nonzero(as_tuple=True)
        elif _is_here(entry) and not entry.dim():
            found.append(int(entry))
        else:
            found.append(entry)
    return (args[0], tuple(found), *args[2:])


def _needs_grad(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return any(map(_needs_grad, value)) if isinstance(value, tuple | list) else False


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call on tensors without values.

    Under autocast the type of a result depends on the device, and the meta device has no autocast:
    there fake tensors take part, which are said to be on the stage's own device.
    """
    if not torch.is_autocast_enabled(Absent.home.type):
        return func(*map(_in, args), **{key: _in(value) for key, value in kwargs.items()})
    with NoFunctionCalls(), FakeTensorMode(allow_non_fake_inputs=True):
        given, named = pytree.tree_map(_fake, (args, kwargs))
        found = func(*given, **named)
        return pytree.tree_map(_real_meta, found)


def _in(value: Any) -> Any:
    """An argument with meta tensors in place of tensors."""
    kind = type(value)
    if kind is Absent:
        if value.is_unknown:
            raise _SizeUnknown
        return value.plain
    if isinstance(value, FakeTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, torch.Tensor):
        with NoFunctionCalls():
            return value.detach().to(META)
    if kind is tuple or kind is list:
        return kind(map(_in, value))
    if kind is dict:
        return {key: _in(entry) for key, entry in value.items()}
    if kind is slice:
        return slice(_bound(value.start), _bound(value.stop), _bound(value.step))
    if kind is torch.device or (kind is str and value.partition(":")[0] in DEVICE_NAMES):
        return META
    return value


def _bound(value: Any) -> Any:
    """A bound of a slice as a number, though the user may give a tensor."""
    return int(value) if _is_here(value) else value


def _fake(value: Any) -> Any:
    """A tensor as a fake one on the stage's device."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is Absent and value.is_unknown:
        raise _SizeUnknown
    like = value.plain if type(value) is Absent else value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=Absent.home)


def _real_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, dtype = tuple(value.shape), value.stride(), value.dtype
    with without_modes():
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)


def _out(value: Any, grad: bool) -> Any:
    """A result with absent tensors in place of meta tensors."""
    if isinstance(value, torch.Tensor):
        if type(value) is Absent:
            return value
        return Absent.of(value, grad and (value.is_floating_point() or value.is_complex()))
    if type(value) in (tuple, list):
        return type(value)(_out(entry, grad) for entry in value)
    if isinstance(value, tuple) and any(isinstance(entry, torch.Tensor) for entry in value):
        kind: Any = type(value)
        return kind([_out(entry, grad) for entry in value])  # torch.return_types
    return value


def _unknown(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Any:
    """A result whose size depends on values: it may be handed on, but its shape not be read."""
    dtype = next((tensor.dtype for tensor in tensors_in(args)), torch.float32)

    def one() -> Absent:
        return absent_like((0,), dtype, grad, is_unknown=True)

    by_dims = name == "where" or kwargs.get("as_tuple", False)
    if name in ("nonzero", "where") and by_dims and len(args) == 1 and not args[0].is_unknown:
        dtype, grad = torch.int64, False
        return tuple(one() for _ in range(max(1, args[0].dim())))
    return one()
