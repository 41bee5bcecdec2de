"""The one place that names CUDA, on a stand-in for `torch.cuda`: this machine may have no GPU."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import device
from penstock.errors import BadInput
from penstock.measure.links import cluster_alone, this_member

GIGABYTE = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with two GPUs; returns those that were made current."""
    bound: list[int] = []
    properties = [
        SimpleNamespace(name="Stand-in", total_memory=80 * GIGABYTE, uuid=f"GPU-{number}")
        for number in range(2)
    ]
    for name, function in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("set_device", bound.append),
        ("get_device_properties", lambda device: properties[device.index]),
        ("mem_get_info", lambda device: (10 * GIGABYTE, 80 * GIGABYTE)),
        ("memory_reserved", lambda device: 5 * GIGABYTE),
        ("memory_allocated", lambda device: 2 * GIGABYTE),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return bound


@pytest.mark.parametrize(
    ("rank", "ranks", "asked", "shown", "expected"),
    [
        *[(rank, 2, asked, 2, f"cuda:{rank}") for rank in (0, 1) for asked in (None, "cuda")],
        # Ranks beyond the last GPU share if they are to have one, and else use the CPU.
        (2, 3, None, 2, "cpu"),
        (2, 3, "cuda", 2, "cuda:0"),
        # A rank that is shown one of several GPUs has it.
        (1, 2, None, 1, "cpu"),
        (1, 2, None, "1", "cuda:0"),
    ],
)
def test_the_device_of_a_rank(
    rank: int,
    ranks: int,
    asked: str | None,
    shown: int | str,
    expected: str,
    gpus: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``shown`` are how many GPUs, or those that the environment names."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if shown == 2 else 1)
    if isinstance(shown, str):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    found = device.own_device(asked)
    assert str(found) == expected
    assert gpus == ([] if expected == "cpu" else [found.index])


def test_a_gpu_that_is_not_here_is_refused_in_one_line(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"'cuda:2' is not on host .* shows 2 .* below 2"):
        device.own_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="finds no CUDA device here"):
        device.own_device("cuda")


def test_a_device_says_who_it_is_and_what_it_has(gpus: list[int]) -> None:
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert (device.device_kind(gpu), device.identity_of(gpu)) == ("Stand-in", "GPU-1")
    assert (device.device_kind(cpu), device.identity_of(cpu)) == ("cpu", "cpu")
    free = device.free_memory(gpu)
    assert (free.bytes, free.limit) == (13 * GIGABYTE, "free memory of cuda:1")


def test_the_cluster_of_one_gpu_is_that_gpu_with_what_no_other_process_holds(
    gpus: list[int],
) -> None:
    gpu = torch.device("cuda", 1)
    (alone,) = cluster_alone(gpu).devices
    assert (alone.kind, alone.memory_bytes) == ("Stand-in", 13 * GIGABYTE)
    assert this_member(gpu).cores == 0
    (on_cpu,) = cluster_alone(torch.device("cpu")).devices
    assert on_cpu.kind == "cpu" and this_member(torch.device("cpu")).cores > 0


class FakeStream:
    """A stream that notes what it is told."""

    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams of the stand-in are told, in order."""
    said: list[str] = []
    inside = [FakeStream(said, "compute")]

    class Event:
        def __init__(self, **_: bool) -> None: ...

        def record(self, stream: FakeStream) -> None:
            said.append(f"mark on {stream.name}")

        def synchronize(self) -> None:
            said.append("the host waits")

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        inside.append(stream)
        yield
        inside.pop()

    real = torch.Tensor.copy_

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        said.append(f"copy on {inside[-1].name}{'' if non_blocking else ', waiting'}")
        return real(target, source)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(said, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: inside[0])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return said


def test_a_copy_follows_what_was_computed_and_the_host_does_not_wait(said: list[str]) -> None:
    stream = device.CopyStream(torch.device("cpu"))
    stream.follow()
    target = torch.zeros(3)
    stream.copy(target, torch.ones(3))
    assert said == ["copies waits for compute", "copy on copies", "mark on copies"]
    assert target.tolist() == [1, 1, 1]


def test_what_was_copied_in_is_the_computing_streams_afterwards(said: list[str]) -> None:
    stream = device.CopyStream(torch.device("cpu"))
    tensor = stream.empty((2,), torch.float64)
    users: list[str] = []
    handed: Any = SimpleNamespace(record_stream=lambda user: users.append(user.name))
    stream.hand_over([handed])
    assert (tensor.shape, tensor.dtype, users) == ((2,), torch.float64, ["compute"])
    assert said == ["compute waits for copies"]


def test_a_ring_that_the_driver_does_not_pin_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver keeps its error for the next launch, which is none of the user's."""
    memory, asked = torch.zeros(8, dtype=torch.uint8), list[Any]()
    answers = [0, 801]

    def register(*arguments: int) -> int:
        asked.append(arguments)
        return answers[len(asked) - 1]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=asked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    cpu, real, launched = torch.device("cpu"), torch.zeros, list[int]()

    def fails(*arguments: Any, **options: Any) -> torch.Tensor:
        launched.append(len(asked))
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "zeros", fails)
    assert device.pinned_memory(memory, cpu)
    assert not device.pinned_memory(memory, cpu)
    monkeypatch.setattr(torch, "zeros", real)
    device.unpinned(memory)
    assert launched == [2]
    assert asked == [(memory.data_ptr(), 8, 0)] * 2 + [memory.data_ptr()]


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 9])
def test_a_tensor_is_read_in_pieces_through_a_small_buffer(
    rows: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two pieces are in host memory, and one is read only when its copy is over."""
    monkeypatch.setattr(device, "STAGED_BYTES", 16)
    monkeypatch.setattr(device, "is_gpu", lambda device: True)
    real, rooms = torch.empty, list[int]()

    def empty(shape: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        rooms.append(torch.Size(shape).numel() if pin_memory else -1)
        return real(shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    tensor = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2).t()
    found = b""
    for piece in device.pieces_on_host(tensor):
        assert said[-1] == "the host waits"
        found += bytes(piece.tolist())
    assert found == tensor.contiguous().numpy().tobytes()
    assert sum(rooms) <= 32 and "waiting" not in " ".join(said)


def test_a_gpu_without_room_is_named_with_host_rank_bytes_and_remedy(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    gpu = torch.device("cuda", 1)
    device.check_free_memory(gpu, 13 * GIGABYTE, "the plan")
    device.check_free_memory(torch.device("cpu"), 1e30, "the plan")
    told = (
        r"^rank 3 on host \S+: the plan takes 15.0 GB of cuda:1, which has 14.0 GB of 85.9 GB "
        r"free; end other processes on it \('nvidia-smi' lists them\), or give another GPU in "
        r"CUDA_VISIBLE_DEVICES$"
    )
    with pytest.raises(BadInput, match=told):
        device.check_free_memory(gpu, 15e9, "the plan")


def test_memory_is_that_of_tensors_of_torch_and_of_all_processes(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 6 * GIGABYTE)
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert device.reserved_peak_bytes(gpu) == 6 * GIGABYTE
    assert device.bytes_of_all_processes(gpu) == 70 * GIGABYTE
    assert device.reserved_peak_bytes(cpu) == device.bytes_of_all_processes(cpu) == 0


@pytest.mark.parametrize("own", ["tf32", "ieee"])
def test_without_tf32_models_may_switch_cudnn_off_and_all_is_put_back(own: str) -> None:
    """As the CTC loss of transformers does; the user's precisions may differ among themselves."""
    cudnn: Any = torch.backends.cudnn
    first = cudnn.allow_tf32, cudnn.rnn.fp32_precision
    cudnn.conv.fp32_precision = own
    try:
        with device.without_tf32():
            assert cudnn.conv.fp32_precision == cudnn.rnn.fp32_precision == "ieee"
            with cudnn.flags(enabled=False):
                pass
            assert not cudnn.allow_tf32
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == (own, first[1])
    finally:
        cudnn.allow_tf32 = first[0]
    assert (cudnn.allow_tf32, cudnn.rnn.fp32_precision) == first


def test_freed_memory_of_the_host_goes_back_also_from_below_what_is_in_use() -> None:
    pieces = [bytearray(100_000) for _ in range(600)]
    above = bytearray(100_000)
    full = resident_bytes()
    del pieces
    device.release_unused(torch.device("cpu"))
    assert full - resident_bytes() > 50_000_000
    assert len(above) == 100_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
