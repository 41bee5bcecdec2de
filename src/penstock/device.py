"""The device of a rank: a GPU of its own, or the CPU. The one place that names CUDA.

Work on a GPU runs behind the host, which only launches it. So what is timed waits for the device
(`wait_for`), or leaves marks on its stream (`timing_mark`), which wait for nothing.
"""

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

import torch

from penstock.errors import BadInput
from penstock.machine import FreeMemory, free_host_memory, usable_memory_bytes
from penstock.text import size_text
from penstock.torch_internals import GPU_SLEEP

GPU = "cuda"

DeviceName: TypeAlias = Literal["cpu", "cuda"]
"""Kind of device on which layers run, as users name it."""

DEVICE_NAMES: tuple[DeviceName, ...] = ("cpu", "cuda")

Mark: TypeAlias = torch.cuda.Event
"""A moment of a GPU's stream."""

STAGED_BYTES = 32 << 20
"""Bytes of each of the two host buffers through which a tensor is read from a GPU."""

LEAST_PAUSE_S, MOST_PAUSE_S = 50e-6, 1e-3
"""Seconds between two polls of a mark: they double from the first to the second."""


def is_gpu(device: torch.device) -> bool:
    """Return whether a device computes behind the host, with memory of its own."""
    return device.type == GPU


def check_gpu_is_here(wanted: str) -> None:
    """Raise `BadInput` if this process sees no GPU; the message names what requires one."""
    if not torch.cuda.is_available():
        raise BadInput(
            f"{wanted}: torch {torch.__version__} finds no CUDA device here; leave it out, or plan "
            f"for a GPU with 'penstock profile --estimate KIND'"
        )


def seen_gpus() -> list[torch.device]:
    """The GPUs that this process is shown."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device(GPU, number) for number in range(seen)]


def own_device(wanted: torch.device | str | None) -> torch.device:
    """The device of this rank, which becomes the current one.

    A GPU without a number is that of the rank's place among those of its host; ranks beyond the
    last GPU share. With ``None`` it is a GPU if the host has one for each of its ranks, and else
    the CPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    seen = len(seen_gpus())
    if wanted is None:
        # A process that sees one GPU of several has it to itself.
        enough = seen >= local_ranks or (seen == 1 and "CUDA_VISIBLE_DEVICES" in os.environ)
        wanted = GPU if seen and enough else "cpu"
    device = torch.device(wanted)
    if not is_gpu(device):
        return device
    check_gpu_is_here(f"device '{wanted}' on host {socket.gethostname()}")
    number = device.index if device.index is not None else local_rank % seen
    if number >= seen:
        raise BadInput(
            f"device '{wanted}' is not on host {socket.gethostname()}, which shows {seen} to this "
            f"process; give a number below {seen}, or '{GPU}' for each rank's own"
        )
    torch.cuda.set_device(number)
    return torch.device(GPU, number)


def device_in_use() -> torch.device:
    """The current GPU, if any has been used; else the CPU."""
    return torch.device(GPU if torch.cuda.is_initialized() else "cpu")


def device_kind(device: torch.device) -> str:
    """The name of a GPU's model; ``cpu`` for every CPU."""
    return torch.cuda.get_device_properties(device).name if is_gpu(device) else "cpu"


def identity_of(device: torch.device) -> str:
    """A key, equal for two ranks of a host if and only if they compute on the same device."""
    if not is_gpu(device):
        return "cpu"
    # Numbers count what a process is shown, and differ between processes.
    return str(torch.cuda.get_device_properties(device).uuid)


def wait_for(device: torch.device) -> None:
    """Wait until all work that was launched on a GPU has ended."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def timing_mark(device: torch.device, again: Mark | None = None) -> Mark:
    """Mark the present end of a GPU's stream, ``again`` with a mark that was made before.

    ``elapsed_time`` of one mark and a later one are the milliseconds between, once both happened.
    """
    mark = again or torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


def wait_checking(mark: Mark, check: Callable[[], None]) -> None:
    """Wait until ``mark`` has happened; meanwhile call ``check``, which may raise to end this."""
    pause_s = LEAST_PAUSE_S
    while not mark.query():
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_PAUSE_S)


class CopyStream:
    """A stream of a GPU that copies to and from pinned memory while the current stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        """Copy what comes next only after all that the current stream has been given by now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        """Copy behind the host; both tensors must live until the mark, the end of the copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            # The host sleeps while it waits for such a mark.
            mark = torch.cuda.Event(blocking=True)
            mark.record(self._stream)
        return mark

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to copy into, whose memory the current stream does not use any more."""
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the current stream use ``tensors`` of `empty` after the copies launched so far."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)


def pinned_memory(memory: torch.Tensor, device: torch.device) -> bool:
    """Let a GPU copy to and from host memory without the host, until `unpinned`.

    False if the driver refuses; then the host waits for each copy.
    """
    runtime: Any = torch.cuda.cudart()
    done = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    if not done:
        # The next launch would raise the driver's error.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
    return done


def unpinned(memory: torch.Tensor) -> None:
    """Undo `pinned_memory`, once no copy is under way."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host on a device, behind the host: it is copied to pinned memory first.

    Rows that are one in memory, as of what all samples share, stay so.
    """
    if tensor.device != device and tensor.dim() and tensor.shape[0] > 1 and not tensor.stride(0):
        return copied_to(device, tensor[:1]).expand_as(tensor)
    if is_gpu(device) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pieces_on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in order, in host memory; each piece is valid until the next.

    A GPU copies them into a small pinned buffer, one half while the other is read.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if not is_gpu(tensor.device):
        yield flat
        return
    pieces = flat.split(STAGED_BYTES)
    room = torch.empty((2, min(STAGED_BYTES, flat.nbytes)), dtype=torch.uint8, pin_memory=True)
    stream = CopyStream(tensor.device)
    stream.follow()
    marks = [stream.copy(room[0][: len(piece)], piece) for piece in pieces[:1]]
    for number, piece in enumerate(pieces):
        for following in pieces[number + 1 : number + 2]:
            marks.append(stream.copy(room[(number + 1) % 2][: len(following)], following))
        marks[number].synchronize()
        yield room[number % 2][: len(piece)]


FASTEST_CLOCK_HZ = 2.5e9
"""Cycles per second that no GPU's clock exceeds: a sleep of that many lasts at least a second."""


def hold(device: torch.device, seconds: float) -> None:
    """Keep a GPU busy for at least ``seconds``, so that what is launched meanwhile queues up."""
    with torch.cuda.device(device):
        getattr(torch.cuda, GPU_SLEEP)(int(seconds * FASTEST_CLOCK_HZ))


def flush_cache(device: torch.device) -> None:
    """Leave nothing in a GPU's L2 cache of what was computed before."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    torch.empty(size, dtype=torch.uint8, device=device).zero_()


def memory_bytes_of(device: torch.device) -> float:
    """The memory that a device has, free or not."""
    if is_gpu(device):
        return float(torch.cuda.get_device_properties(device).total_memory)
    return usable_memory_bytes()


def free_memory(device: torch.device) -> FreeMemory:
    """The free memory of a device under the tightest limit; infinite if none is reported."""
    if not is_gpu(device):
        return free_host_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved but does not use is free for this process.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(float(free + kept), f"free memory of {device}")


def release_unused(device: torch.device) -> None:
    """Give memory that is kept for later tensors to other processes: of a GPU, and of the host.

    The C library keeps what was freed below something that is still in use.
    """
    if is_gpu(device):
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc only
    if trim is not None:
        trim(0)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` in glibc's malloc.h."""

KEPT_BYTES = 256 << 20
"""Free memory at the end of the heap that is kept."""

MAPPED_BYTES = 32 << 20
"""Larger blocks are mapped one by one and returned when freed (the largest value of glibc)."""


def keep_freed_memory(device: torch.device) -> None:
    """Make the C library keep freed memory on a CPU, unless the environment sets what it does.

    Otherwise each tensor of a layer may be made of pages that the kernel has to clear first. Does
    nothing with other libraries than glibc.
    """
    if device.type != "cpu":
        return
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in chosen):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)


def check_free_memory(device: torch.device, wanted_bytes: float, what: str) -> None:
    """Raise `BadInput` if a GPU has less free memory than ``what`` takes; nothing on the CPU."""
    if not is_gpu(device):
        return
    free, whole = free_memory(device).bytes, memory_bytes_of(device)
    if wanted_bytes > free:
        raise BadInput(
            f"rank {os.environ.get('RANK', '0')} on host {socket.gethostname()}: {what} takes "
            f"{size_text(wanted_bytes)} of {device}, which has {size_text(free)} of "
            f"{size_text(whole)} free; end other processes on it ('nvidia-smi' lists them), or "
            f"give another GPU in CUDA_VISIBLE_DEVICES"
        )


def allocated_bytes(device: torch.device) -> int:
    """The bytes of a GPU's tensors now; 0 on the CPU, where torch does not count."""
    return torch.cuda.memory_allocated(device) if is_gpu(device) else 0


def begin_peak(device: torch.device) -> None:
    """Count `peak_bytes` and `reserved_peak_bytes` from now on."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of a GPU's tensors since `begin_peak`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if is_gpu(device) else 0


def reserved_peak_bytes(device: torch.device) -> int:
    """The most bytes that torch took of a GPU since `begin_peak`, used or not; 0 on the CPU."""
    return torch.cuda.max_memory_reserved(device) if is_gpu(device) else 0


def bytes_of_all_processes(device: torch.device) -> int:
    """Bytes that all processes hold of a GPU now, by its driver: contexts, libraries, tensors."""
    if not is_gpu(device):
        return 0
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free


def generator_state(device: torch.device) -> torch.Tensor | None:
    """The state of a GPU's generator; ``None`` on the CPU, which has torch's own."""
    return torch.cuda.get_rng_state(device) if is_gpu(device) else None


def put_generator_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Put a GPU's generator into a state; ``None`` leaves it."""
    if state is not None:
        torch.cuda.set_rng_state(state, device)


def seeded_generator_state(device: torch.device, seed: int) -> torch.Tensor | None:
    """The state of a GPU's generator after seeding; ``None`` on the CPU."""
    return torch.Generator(device).manual_seed(seed).get_state() if is_gpu(device) else None


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TF32 in the block, so that a GPU computes float32 as float32.

    Convolutions round to TF32 by default, ten bits of mantissa, and a whole batch is computed by
    other algorithms than a micro-batch: on an H100 a first layer's gradient differed by 0.8 %.
    """
    cudnn: Any = torch.backends.cudnn
    backends: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        flag = cudnn.allow_tf32
    except RuntimeError:  # the user's settings differ, and then torch does not say
        flag = True
    try:
        # The older flag agrees with the rest, or what reads it raises, such as `cudnn.flags`.
        cudnn.allow_tf32 = False
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        cudnn.allow_tf32 = flag
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextmanager
def without_nested_tensors() -> Iterator[None]:
    """Disable the fast path of torch's encoder layers, whose tensors no stage can send."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
