"""A stand-in for GPUs: this process's torch, built for the CPU, behaves as if it had CUDA devices.

    import stand_in_gpu
    stand_in_gpu.install(devices=4)      # once in a process, before the code under test

A storage is marked as memory of a GPU. A tensor on it says ``cuda:N``, as do its views, whatever
class it has, and all of it is computed on the CPU: so a run gives the CPU's numbers, to every
digit. Whatever a real device refuses or waits for follows from the marks:

- Operators refuse tensors of two devices, but for CPU scalars and CPU indices, and generators of
  another device. ``numpy`` and Gloo's messages refuse a GPU's memory, NCCL's groups a CPU's.
- `waits` lists what makes the host wait for a GPU: numbers read, data-dependent shapes, copies to
  the host and pageable copies to a GPU, Gloo's collectives of a GPU's memory, and what
  synchronises by name. ``torch.cuda.set_sync_debug_mode("error")`` refuses all of them.
- The first operation on an NCCL communicator waits for the other ranks of it, and stops with a
  `Stuck` that says for whom. As in torch, a group made with ``device_id`` has its communicator
  from the start and uses it for messages, and any other makes one for each pair of ranks at their
  first message. Two ranks with one GPU are refused.
- Memory is counted, by the storages that are alive, in blocks of 512 bytes. More than there is
  raises ``torch.OutOfMemoryError``.
- Each GPU has its own random numbers. Events, streams, pinned memory and autocast can be used.

What it does not carry: work that runs behind the host (an event has happened when it is recorded;
a receive blocks the host where NCCL would block the stream, so a wrong order of operations on one
communicator is not seen), CUDA's arithmetic and its lists of casts under autocast, saving and
pickling tensors with their device, graphs, ``torch.compile``, C++ that asks a tensor for its device
(`torch.Stream`, sparse and quantised tensors), and kernels of one's own.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch.distributed import distributed_c10d as c10d
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten

BLOCK_BYTES = 512
HOST = -1
"""The number of the CPU where others are those of GPUs."""


class MixedDevices(RuntimeError):
    """An operator got tensors of two devices."""


class Stuck(RuntimeError):
    """The other ranks of a communicator do not come to their first operation on it."""


# What is here.


@dataclass
class Gpu:
    """A device and its state. ``held_bytes`` are those of other processes."""

    name: str
    uuid: str
    memory_bytes: int
    held_bytes: int
    generator: torch.Generator
    allocated_bytes: int = 0
    peak_bytes: int = 0


@dataclass
class State:
    """The GPUs that this process sees, and what has happened on them."""

    gpus: list[Gpu] = field(default_factory=list)
    current: int = 0
    waits: list["HostWait"] = field(default_factory=list)
    sync_debug: int = 0
    first_use_s: float = 60.0
    in_gloo: bool = False
    pinned: dict[int, int] = field(default_factory=dict)


HERE = State()


@dataclass(frozen=True)
class HostWait:
    """Why the host waited, and where: calls outside torch, ``file:line function``, innermost first.

    A call of a model has its file, and one of penstock its place in the package.
    """

    why: str
    calls: tuple[str, ...]

    def within(self, function: str) -> bool:
        """Whether a function of penstock of this name was running."""
        own = (call for call in self.calls if call.startswith("penstock/"))
        return any(call.rpartition(" ")[2] == function for call in own)

    def __str__(self) -> str:
        return f"{self.why}: {self.calls[0]}"


def waits() -> list[HostWait]:
    """What the host has waited for since `clear_waits`."""
    return list(HERE.waits)


def clear_waits() -> None:
    """Forget what the host has waited for."""
    HERE.waits.clear()


def note_wait(why: str) -> None:
    if HERE.in_gloo:
        return
    if HERE.sync_debug:
        text = f"called a synchronizing CUDA operation: {why}"
        if HERE.sync_debug > 1:
            raise RuntimeError(text)
        print(text, file=sys.stderr)
    calls: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and "/site-packages/torch/" not in path and path[0] != "<":
            for root in ("/site-packages/", "/src/", "/tests/"):
                path = path.rpartition(root)[2]
            calls.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    HERE.waits.append(HostWait(why, tuple(calls)))


# Whose memory a storage is. Its Python object lives as long as it does, and keeps the mark.


class Claim:
    """A GPU's memory in use, counted until the storage that has this mark is freed."""

    __slots__ = ("bytes", "gpu")

    def __init__(self, gpu: int, size: int) -> None:
        self.gpu, self.bytes = gpu, 0
        self.take(size)

    def take(self, size: int) -> None:
        blocks = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        gpu = HERE.gpus[self.gpu]
        free = gpu.memory_bytes - gpu.held_bytes - gpu.allocated_bytes
        if blocks - self.bytes > free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU {self.gpu} has a total "
                f"capacity of {gpu.memory_bytes} bytes of which {free} bytes is free."
            )
        gpu.allocated_bytes += blocks - self.bytes
        gpu.peak_bytes = max(gpu.peak_bytes, gpu.allocated_bytes)
        self.bytes = blocks

    def __del__(self) -> None:
        HERE.gpus[self.gpu].allocated_bytes -= self.bytes


UNDECIDED = "undecided"
"""The mark of what C++ made for itself: it names the device of tensors, which are the CPU's here.

The first operator that has it with a GPU's tensor shows what it is.
"""

device_of_cpp = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def storage_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def mark_of(tensor: torch.Tensor) -> Claim | str | None:
    return getattr(storage_of(tensor), "stand_in_mark", None)


def number_of(tensor: torch.Tensor) -> int:
    """The GPU whose memory a tensor is in; `HOST` for any other."""
    mark = mark_of(tensor)
    return mark.gpu if isinstance(mark, Claim) else HOST


def put(tensor: torch.Tensor, gpu: int) -> torch.Tensor:
    """Mark a tensor's storage as a GPU's, or the CPU's."""
    storage = storage_of(tensor)
    if storage is not None and gpu != HOST:
        mark = getattr(storage, "stand_in_mark", None)
        if isinstance(mark, Claim):
            mark.take(storage.nbytes())
        else:
            storage.stand_in_mark = Claim(gpu, storage.nbytes())
    return tensor


def numbered(device: Any) -> int:
    """The number of the GPU that a device is, as users write it; `HOST` for others."""
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return HOST
    number = HERE.current if device.index is None else device.index
    if number >= len(HERE.gpus):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return number


def is_plain(*values: Any) -> bool:
    """Whether torch itself runs a call now: no mode and no class of tensors has its own way."""
    return not (
        torch._C._is_torch_function_mode_enabled()
        or has_torch_function([v for v in values if isinstance(v, torch.Tensor)])
    )


def device(self: torch.Tensor) -> torch.device:
    """``Tensor.device``."""
    local = getattr(self, "_local_tensor", None)  # of a DTensor
    if isinstance(local, torch.Tensor):
        return local.device
    found = device_of_cpp(self)
    if found.type != "cpu":
        return found
    number = number_of(self)
    return found if number == HOST else torch.device("cuda", number)


# Moves.


class Move(torch.autograd.Function):
    """A copy in another memory; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, to: int) -> torch.Tensor:
        ctx.source = number_of(tensor)
        with torch._C._DisableTorchDispatch():
            return put(tensor.detach().clone(), to)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return moved(gradients[0], ctx.source, False), None


def moved(tensor: torch.Tensor, to: int, non_blocking: bool) -> torch.Tensor:
    if number_of(tensor) == to:
        return tensor
    note_copy(tensor, to, non_blocking)
    copy = Move.apply(tensor, to)
    assert isinstance(copy, torch.Tensor)
    if to == HOST and non_blocking:
        pin(copy)  # as torch does, so that the copy need not wait
    return copy


def note_copy(source: torch.Tensor, to: int, non_blocking: bool, target: Any = None) -> None:
    """Note a wait for a copy between a GPU and the host, unless it needs none."""
    own = number_of(source)
    if own == HOST and to != HOST and not (non_blocking and source.is_pinned()):
        note_wait("pageable copy to a GPU" if not source.is_pinned() else "copy to a GPU")
    in_background = non_blocking and (target is None or target.is_pinned())
    if own != HOST and to == HOST and not in_background:
        note_wait("copy to the host")


def pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = storage_of(tensor)
    storage.stand_in_pinned = True
    return tensor


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """``Tensor.is_pinned``."""
    storage = storage_of(self)
    if getattr(storage, "stand_in_pinned", False):
        return True
    start = storage.data_ptr() if storage is not None else 0
    return any(at <= start < at + size for at, size in HERE.pinned.items())


def parsed_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``Tensor.to`` by name, in whichever of its three forms."""
    found, rest = dict(kwargs), list(args)
    other = rest.pop(0) if rest and isinstance(rest[0], torch.Tensor) else found.pop("other", None)
    if other is not None:
        found["device"], found["dtype"] = other.device, other.dtype
    else:
        if rest and not isinstance(rest[0], torch.dtype):
            found["device"] = rest.pop(0)
        if rest and isinstance(rest[0], torch.dtype | None):
            found["dtype"] = rest.pop(0)
    return found | dict(zip(("non_blocking", "copy"), rest, strict=False))


def tensor_methods() -> dict[str, Any]:
    """The methods of tensors that depend on a device, by name."""
    old = torch.Tensor

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_plain(self, *args, *kwargs.values()) or device_of_cpp(self).type != "cpu":
            return old_to(self, *args, **kwargs)
        wanted = parsed_to(args, kwargs)
        where, dtype = wanted.pop("device", None), wanted.pop("dtype", None) or self.dtype
        number = number_of(self) if where is None else numbered(where)
        if where is not None and torch.device(where).type not in ("cpu", "cuda"):
            return old_to(self, *args, **kwargs)
        if number == number_of(self):
            return old_to(self, dtype, **wanted)
        return old_to(moved(self, number, wanted.get("non_blocking", False)), dtype)

    def reading(name: str) -> Callable[..., Any]:
        own = getattr(old, name)

        @wraps(own)
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_plain(self) and number_of(self) != HOST:
                if name in ("numpy", "__array__") and not kwargs.get("force"):
                    raise TypeError(
                        f"can't convert {self.device} device type tensor to numpy. Use "
                        f"Tensor.cpu() to copy the tensor to host memory first."
                    )
                note_wait(name)
            return own(self, *args, **kwargs)

        return read

    def set_item(self: torch.Tensor, index: Any, value: Any) -> None:
        # C++ makes a tensor of a number on the device of its target.
        if isinstance(value, int | float | complex) and is_plain(self) and number_of(self) != HOST:
            self[index].fill_(value) if not has_mask(index) else old_set(self, index, value)
        else:
            old_set(self, index, value)

    old_to, old_set = old.to, old.__setitem__
    return {
        "to": wraps(old_to)(to),
        "cpu": lambda self, **kwargs: self.to("cpu", **kwargs),
        "cuda": lambda self, device=None, **kwargs: self.to(
            "cuda" if device is None else torch.device(device), **kwargs
        ),
        "__setitem__": wraps(old_set)(set_item),
        "is_pinned": is_pinned,
        "pin_memory": lambda self, device=None: self if self.is_pinned() else pin(self.clone()),
        "record_stream": lambda self, stream: None,
        "get_device": lambda self: number_of(self),
        "device": property(device),
        "is_cuda": property(lambda self: self.device.type == "cuda"),
        "is_cpu": property(lambda self: self.device.type == "cpu"),
        "new_tensor": made_of_values(old.new_tensor),
        **{name: reading(name) for name in ("numpy", "__array__", "tolist")},
    }


def has_mask(index: Any) -> bool:
    return any(isinstance(part, torch.Tensor | list) for part in tree_leaves(index))


def made_of_values(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` and the like: values become a tensor of the CPU, which is then moved."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch._C._is_torch_function_mode_enabled():
            # C++ would give the mode its own function, and not this one.
            return handle_torch_function(made, args[:1], *args, **kwargs)
        where, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if where is None:
            where = first.device if first is not None else "cpu"
        needs = kwargs.pop("requires_grad", False)
        values = make(*args, **kwargs)
        if pinned:
            pin(values)
        values = values if torch.device(where).type == "meta" else values.to(where)
        return values.requires_grad_() if needs else values

    return made


# Operators.

ACROSS = {aten.copy_.default, aten.set_.source_Tensor, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
INDEXED |= {aten._index_put_impl_.default, aten._unsafe_index.Tensor}
INDEXED |= {aten._unsafe_index_put.default}
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
    "_linalg_check_errors",
}
"""Operators after which the host waits, for a number or for the shape of the result."""


default_dispatch = torch.Tensor.__torch_dispatch__


class OnGpus(python_dispatch.TorchDispatchMode):
    """While active, operators look at whose memory their tensors are in, and mark their results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            # A mode of users comes before that of fake tensors, and nothing is computed there.
            return func(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not default_dispatch for kind in types):
            return NotImplemented  # a class of tensors has its own way, and calls again
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        numbers = [number_of(tensor) for tensor in given]
        if func.namespace in ("c10d", "_c10d_functional"):
            communicate(func, args, kwargs, [*zip(given, numbers, strict=True)])
        gpu = max(numbers, default=HOST)
        asked = kwargs.get("device")
        by_user = "pin_memory" in kwargs  # C++ names no such option
        made_for_itself = asked is not None and not by_user and not given
        if asked is not None and (by_user or torch.device(asked).type == "cuda"):
            gpu = numbered(asked)
            if torch.device(asked).type == "cuda":
                kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is aten._to_copy.default and numbers[0] == HOST and gpu != HOST:
            note_copy(given[0], gpu, bool(kwargs.get("non_blocking")))
        pinned = kwargs.get("pin_memory", False)
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if gpu == HOST and not made_for_itself and not pinned:
            return func(*args, **kwargs)
        if func not in ACROSS and func.namespace not in ("c10d", "_c10d_functional"):
            check_devices(func, given, numbers, gpu)
        note_what_waits(func, args, kwargs, numbers)
        with drawing(func, gpu, kwargs):
            result = counted(*args) if func is aten.histc.default else func(*args, **kwargs)
        if func is aten.copy_.default or func.namespace == "c10d":
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                if made_for_itself and gpu == HOST:
                    storage_of(tensor).stand_in_mark = UNDECIDED
                elif pinned:
                    pin(tensor)
                elif device_of_cpp(tensor).type == "cpu":
                    put(tensor, gpu)
        return result


def counted(values: torch.Tensor, *bins: Any) -> torch.Tensor:
    """A histogram; the CPU has none of integers."""
    return aten.histc.default(values.double(), *bins).to(values.dtype)


def check_devices(func: Any, given: list[torch.Tensor], numbers: list[int], gpu: int) -> None:
    """Refuse tensors of two devices, and decide what C++ made for itself."""
    for place, (tensor, number) in enumerate(zip(given, numbers, strict=True)):
        if number == HOST and mark_of(tensor) == UNDECIDED:
            put(tensor, gpu)
            continue
        if number == gpu or device_of_cpp(tensor).type != "cpu":
            continue
        is_written = place == 0 and func._schema.is_mutable
        may_be_on_host = tensor.dim() == 0 and not is_written
        may_be_on_host |= func in INDEXED and place > 0
        if number == HOST and may_be_on_host:
            continue
        raise MixedDevices(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:{gpu} and {'cpu' if number == HOST else f'cuda:{number}'}! (when checking "
            f"argument {place} of {func})"
        )


def note_what_waits(func: Any, args: Any, kwargs: Any, numbers: list[int]) -> None:
    name = func._schema.name.partition("::")[2]
    if name in WAITING and max(numbers, default=HOST) != HOST:
        known = name == "repeat_interleave" and kwargs.get("output_size") is not None
        if not known:
            note_wait({"_local_scalar_dense": "item"}.get(name, name))
    elif func is aten.copy_.default:
        target, source = args[:2]
        in_background = bool((args[2:3] or (kwargs.get("non_blocking"),))[0])
        note_copy(source, number_of(target), in_background, target)
    elif func in INDEXED and numbers[0] != HOST:
        indices = [i for i in args[1] if isinstance(i, torch.Tensor)]
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            note_wait("nonzero")
        if any(number_of(i) == HOST for i in indices):
            note_wait("pageable copy to a GPU")


@contextmanager
def drawing(func: Any, gpu: int, kwargs: dict[str, Any]) -> Iterator[None]:
    """Within, random numbers for a GPU come from its own generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags or gpu == HOST:
        yield
        return
    given = kwargs.get("generator")
    if given is not None:
        if OWN_GENERATORS.get(given._cdata, HOST) != gpu:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        yield
        return
    before, own = torch.default_generator.get_state(), HERE.gpus[gpu].generator
    torch.default_generator.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


OWN_GENERATORS: dict[int, int] = {}
"""The GPU of each generator that has one. An operator is given a new Python object for it."""


class Generator(torch.Generator):
    """``torch.Generator`` of a CPU or a GPU."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls)
        if numbered(device) != HOST:
            OWN_GENERATORS[made._cdata] = numbered(device)
        return made

    def __del__(self) -> None:
        OWN_GENERATORS.pop(self._cdata, None)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        number = OWN_GENERATORS.get(self._cdata, HOST)
        return torch.device("cpu" if number == HOST else f"cuda:{number}")


# Groups of ranks.


@dataclass
class Communicators:
    """Those of an NCCL group, by the name of what was met for; ``ranks`` are global."""

    ranks: tuple[int, ...]
    has_own: bool
    takes_host_memory: bool
    met: set[str] = field(default_factory=set)


NCCL_GROUPS: dict[str, Communicators] = {}


def meet(name: str, ranks: tuple[int, ...], group: Communicators, what: str) -> None:
    """Wait until all ``ranks`` make the communicator called ``name``, at its first use."""
    if name in group.met:
        return
    store, own = c10d._get_default_store(), dist.get_rank()
    key, uuid = f"stand-in/{name}", HERE.gpus[HERE.current].uuid
    store.set(f"{key}/{own}", uuid)
    end_s = time.monotonic() + HERE.first_use_s
    for rank in ranks:
        while not store.check([f"{key}/{rank}"]):
            if time.monotonic() > end_s:
                raise Stuck(
                    f"rank {own} makes the communicator of ranks {ranks} in {what}, and rank "
                    f"{rank} does not come in {HERE.first_use_s:g} s"
                )
            time.sleep(0.002)
        if rank != own and store.get(f"{key}/{rank}").decode() == uuid:
            raise RuntimeError(
                f"Duplicate GPU detected : rank {rank} and rank {own} both on CUDA device {uuid}"
            )
    group.met.add(name)


def communicate(func: Any, args: Any, kwargs: Any, given: list[tuple[torch.Tensor, int]]) -> None:
    """Refuse what a backend cannot carry, and make communicators at their first use."""
    operation = func._schema.name
    name = group_name(args, kwargs)
    group = NCCL_GROUPS.get(name)
    is_message = operation.startswith(("c10d::send", "c10d::recv"))
    on_gpu = any(number != HOST for _, number in given)
    if group is None:
        if on_gpu and is_message:
            raise RuntimeError(
                f"[gloo/transport/tcp/pair.cc] writev: Bad address ({operation} of a GPU's memory)"
            )
        if on_gpu and operation != "_c10d_functional::wait_tensor":
            note_wait(f"Gloo's {operation.rpartition('::')[2]} of a GPU's memory")
        return
    if not on_gpu:
        if not group.takes_host_memory and "barrier" not in operation:
            raise RuntimeError(f"No backend type associated with device type cpu ({operation})")
        return
    ranks = group.ranks or tuple(range(dist.get_world_size()))
    if is_message and not group.has_own:
        peer = next(x for x in (*args, *kwargs.values()) if type(x) is int)
        ranks = tuple(sorted((dist.get_rank(), ranks[peer])))
        meet(f"{name}/{ranks}", ranks, group, operation)
    else:
        meet(name, ranks, group, operation)


def group_name(args: Any, kwargs: Any) -> str:
    """The name of the group among the arguments of an operator of torch.distributed."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            if "ProcessGroup" in str(value._type()):
                return dist.ProcessGroup.unbox(value).group_name
        elif isinstance(value, str) and value in NCCL_GROUPS:
            return value
    return ""


class NcclOptions:
    """``ProcessGroupNCCL.Options``, which have no effect here."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


class ProcessGroupNCCL:
    """Named where torch looks for NCCL."""

    Options = NcclOptions


def install_groups() -> None:
    """NCCL's groups are Gloo's, of which `communicate` knows what they were asked to be."""
    make = c10d._new_process_group_helper

    @wraps(make)
    def made(
        size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = str(backend)
        by_nccl = "nccl" in asked or asked == "undefined"
        if not by_nccl:
            return make(size, rank, ranks, backend, *args, **kwargs)
        own = kwargs.pop("device_id", None)
        kwargs.pop("backend_options", None)
        args = args[:2] + args[3:]  # the third are the backend's options
        group, store = make(size, rank, ranks, dist.Backend("gloo"), *args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            mixed = "gloo" in asked or asked == "undefined"
            found = Communicators(tuple(ranks), own is not None, mixed)
            NCCL_GROUPS[group.group_name] = found
        return group, store

    c10d._new_process_group_helper = made
    wait = dist.Work.wait

    @wraps(wait)
    def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Gloo may copy its result into place here, which is no copy between memories.
        HERE.in_gloo = True
        try:
            return wait(self, *args, **kwargs)
        finally:
            HERE.in_gloo = False

    dist.Work.wait = waited  # type: ignore[method-assign]
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    for module in (c10d, dist):
        module.is_nccl_available = lambda: True
        module.ProcessGroupNCCL = ProcessGroupNCCL
    new_group, get_backend = c10d.new_group, c10d.get_backend

    @wraps(new_group)
    def eager_group(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        name = getattr(group, "group_name", "")
        if name in NCCL_GROUPS and NCCL_GROUPS[name].has_own:
            found = NCCL_GROUPS[name]
            meet(name, found.ranks or tuple(range(dist.get_world_size())), found, "new_group")
        return group

    @wraps(get_backend)
    def backend_of(group: Any = None) -> str:
        group = group or c10d._get_default_group()
        found = NCCL_GROUPS.get(group.group_name)
        return get_backend(group) if found is None or found.takes_host_memory else "nccl"

    for module in (c10d, dist):
        module.new_group, module.get_backend = eager_group, backend_of


# torch.cuda.


class Event:
    """``torch.cuda.Event``: it has happened when it is recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timing, self.recorded_s = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        """Happen now."""
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds until ``other``."""
        if not (self.timing and other.timing and self.recorded_s and other.recorded_s):
            raise RuntimeError("both events must be made with timing, and recorded")
        return (other.recorded_s - self.recorded_s) * 1e3

    def synchronize(self) -> None:
        """Make the host wait."""
        note_wait("event")

    def query(self) -> bool:
        """Whether it has happened; nothing waits."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait."""


class Stream:
    """``torch.cuda.Stream``: what is launched on it is over at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", HERE.current if device is None else numbered(device))
        self.priority, self.cuda_stream = priority, id(self)
        self.device_index, self.device_type = self.device.index, 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        """Let this stream wait for another."""

    def wait_event(self, event: Event) -> None:
        """Let this stream wait for an event."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event at the end of this stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all is over."""
        return True

    def synchronize(self) -> None:
        """Make the host wait."""
        note_wait("stream")


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    yield


def own(device: Any = None) -> Gpu:
    return HERE.gpus[HERE.current if device is None else numbered(device)]


def set_device(device: Any) -> None:
    HERE.current = numbered(device)


def exchange_device(number: int) -> int:
    before = HERE.current
    if number >= 0:
        HERE.current = number
    return before


def properties_of(device: Any = None) -> SimpleNamespace:
    gpu = own(device)
    return SimpleNamespace(
        name=gpu.name,
        uuid=gpu.uuid,
        total_memory=gpu.memory_bytes,
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
    )


def begin_peak(device: Any = None) -> None:
    own(device).peak_bytes = own(device).allocated_bytes


def mem_get_info(device: Any = None) -> tuple[int, int]:
    gpu = own(device)
    return gpu.memory_bytes - gpu.held_bytes - gpu.allocated_bytes, gpu.memory_bytes


def seed_all(seed: int) -> None:
    for gpu in HERE.gpus:
        gpu.generator.manual_seed(seed)


def set_sync_debug_mode(mode: int | str) -> None:
    modes = {"default": 0, "warn": 1, "error": 2}
    HERE.sync_debug = modes[mode] if isinstance(mode, str) else mode


def register_pinned(pointer: int, size: int, flags: int) -> int:
    HERE.pinned[int(pointer)] = size
    return 0


def unregister_pinned(pointer: int) -> int:
    del HERE.pinned[int(pointer)]
    return 0


def cuda_functions() -> dict[str, Any]:
    """What `torch.cuda` has, by name."""
    streams: dict[int, Stream] = {}

    def current_stream(device: Any = None) -> Stream:
        number = HERE.current if device is None else numbered(device)
        return streams.setdefault(number, Stream(number))

    runtime = SimpleNamespace(
        cudaHostRegister=register_pinned, cudaHostUnregister=unregister_pinned
    )
    return {
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: len(HERE.gpus),
        "current_device": lambda: HERE.current,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_properties": properties_of,
        "get_device_name": lambda device=None: own(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: own(device).allocated_bytes,
        "memory_reserved": lambda device=None: own(device).allocated_bytes,
        "max_memory_allocated": lambda device=None: own(device).peak_bytes,
        "max_memory_reserved": lambda device=None: own(device).peak_bytes,
        "reset_peak_memory_stats": begin_peak,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: own().generator.manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: own(device).generator.get_state(),
        "set_rng_state": lambda state, device=None: own(device).generator.set_state(state),
        "get_rng_state_all": lambda: [gpu.generator.get_state() for gpu in HERE.gpus],
        "default_generators": tuple(gpu.generator for gpu in HERE.gpus),
        "Event": Event,
        "Stream": Stream,
        "stream": on_stream,
        "set_stream": lambda stream: None,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "synchronize": lambda device=None: note_wait("synchronize"),
        "_sleep": lambda cycles: None,
        "cudart": lambda: runtime,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: HERE.sync_debug,
    }


def install_autocast() -> None:
    """Autocast of a GPU is that of the CPU, which is where its operators run."""
    start = torch.autocast.__init__

    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = begin  # type: ignore[method-assign]

    def of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(kind: str = "cuda", *args: Any) -> Any:
            return function("cpu" if kind == "cuda" else kind, *args)

        return called

    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled"):
        setattr(torch, name, of_cpu(getattr(torch, name)))
    torch.set_autocast_dtype = of_cpu(torch.set_autocast_dtype)


def install_storages() -> None:
    """Copies of a storage keep its mark, and its bytes are counted again when it is resized."""
    kind: Any = torch.UntypedStorage
    clone, resize = kind.clone, kind.resize_

    def cloned(self: Any) -> Any:
        copy, mark = clone(self), getattr(self, "stand_in_mark", None)
        if isinstance(mark, Claim):
            copy.stand_in_mark = Claim(mark.gpu, copy.nbytes())
        return copy

    def resized(self: Any, size: int) -> Any:
        resize(self, size)
        if isinstance(mark := getattr(self, "stand_in_mark", None), Claim):
            mark.take(size)
        return self

    kind.clone, kind.resize_ = cloned, resized


def install_threads() -> None:
    """Operators on other threads, and on those that are started from now on."""
    run = threading.Thread.run

    def in_mode(self: threading.Thread) -> None:
        with OnGpus():
            run(self)

    threading.Thread.run = in_mode  # type: ignore[method-assign]
    OnGpus().__enter__()
    disabled = python_dispatch._disable_current_modes

    @contextmanager
    def without_others() -> Iterator[None]:
        with disabled(), OnGpus():
            yield

    # Modules may have imported it by its name. Without modes a GPU is still a GPU.
    for module in list(sys.modules.values()):
        if getattr(module, "_disable_current_modes", None) is disabled:
            module._disable_current_modes = without_others  # type: ignore[attr-defined]


def install(
    devices: int = 4,
    *,
    names: tuple[str, ...] = ("Stand-in",),
    memory_bytes: int = 80 << 30,
    held_bytes: int = 0,
    first_use_s: float = 60.0,
) -> None:
    """Give this process GPUs, for as long as it lives.

    It sees the ``devices`` of its host, or those in ``CUDA_VISIBLE_DEVICES``. GPU number n has the
    name ``names[n % len(names)]`` and ``memory_bytes``, of which ``held_bytes`` are taken by other
    processes. The first use of a communicator waits ``first_use_s`` for its other ranks.
    """
    if HERE.gpus:
        raise RuntimeError("the stand-in is installed already; start another process")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = range(devices) if shown is None else [int(n) for n in shown.split(",") if n]
    HERE.gpus = [
        Gpu(
            names[number % len(names)],
            f"GPU-{socket.gethostname()}-{number}",
            memory_bytes,
            held_bytes,
            torch.Generator(),
        )
        for number in numbers
    ]
    HERE.first_use_s = first_use_s
    for name, value in cuda_functions().items():
        setattr(torch.cuda, name, value)
    torch.Generator = Generator  # type: ignore[misc]
    for name, value in tensor_methods().items():
        setattr(torch.Tensor, name, value)
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, made_of_values(getattr(torch, name)))
    torch.utils._device._device_constructors.cache_clear()
    install_autocast()
    install_storages()
    install_groups()
    install_threads()
