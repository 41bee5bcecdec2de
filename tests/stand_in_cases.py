"""What the tests of the stand-in GPUs run in processes of their own."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import stand_in_gpu
import torch
import torch.distributed as dist
from torch import nn

GPU = torch.device("cuda", 0)


def said(call: Callable[[], Any]) -> str:
    """The error of a call; empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def waited(call: Callable[[], Any]) -> list[str]:
    """What the host waits for in a call."""
    stand_in_gpu.clear_waits()
    call()
    return [wait.why for wait in stand_in_gpu.waits()]


def devices() -> dict[str, str]:
    """Where tensors say they are, by what they come from."""
    stand_in_gpu.install(2)
    x = torch.randn(3, 4, device=GPU)
    layer = nn.Linear(4, 2).to(GPU)
    y = layer(x)
    y.square().sum().backward()
    other = x.to("cuda:1")
    parameter = nn.Parameter(torch.ones(2))
    parameter.data = parameter.data.to(GPU)
    found = {
        "factory": x,
        "view": x[1:].T,
        "result": y,
        "parameter": layer.weight,
        "gradient": layer.weight.grad,
        "data": parameter,
        "of values": torch.tensor([1.0, 2.0], device="cuda:1"),
        "like": torch.zeros_like(other),
        "like, on the host": torch.zeros_like(x, device="cpu"),
        "back": y.cpu(),
        "cast and back": y.to("cpu", torch.float64),
        "moved": other,
        "one hot": nn.functional.one_hot(torch.tensor([1, 2], device=GPU), 4),
        "clone": __import__("copy").deepcopy(layer.weight),
        "meta": torch.empty(3, device="meta"),
    }
    maximum = x.clone().requires_grad_()
    maximum.max(1)[0].sum().backward()
    found["gradient of a maximum"] = maximum.grad
    leaf = torch.ones(2, requires_grad=True)
    leaf.to(GPU).sum().backward()
    found["gradient over a move"] = leaf.grad
    assert y.to(GPU) is y and x.is_cuda and not x.cpu().is_cuda
    return {name: str(tensor.device) for name, tensor in found.items()}


def refusals() -> dict[str, str]:
    """What is refused, by what it is."""
    stand_in_gpu.install(2, memory_bytes=1 << 20, held_bytes=1 << 10)
    x, host = torch.ones(3, device=GPU), torch.ones(3)
    return {
        "mixed": said(lambda: x + host),
        "written": said(lambda: host.sum().add_(x[0])),
        "two": said(lambda: x + x.to("cuda:1")),
        "numpy": said(lambda: x.numpy()),
        "memory": said(lambda: torch.empty(1 << 20, device=GPU)),
        "ordinal": said(lambda: torch.empty(1, device="cuda:2")),
        "generator": said(lambda: torch.rand(1, device=GPU, generator=torch.Generator())),
        "scalar": said(lambda: x * torch.tensor(2.0)),
        "index": said(lambda: x[torch.tensor([0, 2])]),
        "copy": said(lambda: host.copy_(x)),
    }


def host_waits() -> dict[str, list[str]]:
    """What makes the host wait, by what is done."""
    stand_in_gpu.install(1)
    x, host = torch.ones(3, device=GPU), torch.ones(3)
    pinned = host.pin_memory()
    found = {
        "float": waited(lambda: float(x.sum())),
        "if": waited(lambda: bool(x.sum() > 1)),
        "to the host": waited(lambda: x.cpu()),
        "to the host, pinned": waited(lambda: pinned.copy_(x, non_blocking=True)),
        "to the GPU": waited(lambda: host.to(GPU)),
        "to the GPU, pinned": waited(lambda: pinned.to(GPU, non_blocking=True)),
        "values": waited(lambda: torch.tensor([1.0], device=GPU)),
        "a number written": waited(lambda: x.__setitem__(1, 3.0)),
        "a mask": waited(lambda: x[x > 1]),
        "synchronised": waited(lambda: torch.cuda.synchronize()),
        "event": waited(lambda: torch.cuda.Event().record()),
        "product": waited(lambda: (x * 2 + x.mean()).sum()),
    }
    torch.cuda.set_sync_debug_mode("error")
    found["refused"] = [said(lambda: float(x.sum()))]
    return found


def memory() -> list[int]:
    """Allocated bytes with a tensor, with two, at the peak, and after; each of 1 MiB."""
    stand_in_gpu.install(1)
    count, found = torch.cuda.memory_allocated, list[int]()
    first = torch.zeros(1 << 18, device=GPU)
    found.append(count())
    second = first + 1
    found.append(count())
    view = second[3:]
    del second, first
    found.append(count())
    del view
    return [*found, torch.cuda.max_memory_allocated(), count()]


def random_numbers() -> dict[str, bool]:
    """Whether the generators of CPU and GPU are apart, and begin again from their states."""
    stand_in_gpu.install(1)
    torch.manual_seed(7)
    host, state = torch.rand(3), torch.cuda.get_rng_state()
    gpu = torch.rand(3, device=GPU)
    torch.cuda.set_rng_state(state)
    again = torch.rand(3, device=GPU)
    own = torch.rand(3, device=GPU, generator=torch.Generator(GPU).manual_seed(7))
    equal = lambda a, b: torch.equal(a.cpu(), b.cpu())  # noqa: E731
    return {
        "same seed": equal(host, gpu),
        "again": equal(gpu, again),
        "own": equal(own, gpu),
        "next of the host": equal(torch.rand(3), host),
    }


def messages(kind: str) -> str:
    """What rank 0 is told when ranks exchange a tensor in a way that NCCL would not carry."""
    stand_in_gpu.install(2, first_use_s=3.0 if kind == "crossed" else 60.0)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0 if kind == "one GPU" else rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    here = torch.device("cuda", torch.cuda.current_device())
    by_nccl = dist.new_group(backend="nccl")
    other = dist.new_group(backend="nccl")
    x = torch.full((3,), float(rank), device=here)

    def exchange() -> None:
        if kind == "crossed":
            # Each rank makes another communicator first.
            for group in (by_nccl, other) if rank == 0 else (other, by_nccl):
                dist.all_reduce(x, group=group)
        elif kind == "by Gloo":
            dist.send(x, 1 - rank) if rank == 0 else dist.recv(x, 1 - rank)
        elif kind == "of the host":
            dist.all_reduce(x.cpu(), group=by_nccl)
        elif rank == 0:
            dist.send(x + 5, 1, group=by_nccl)
        else:
            dist.recv(x, 0, group=by_nccl)
            assert x.tolist() == [5.0] * 3 and x.device == here

    try:
        return said(exchange) or dist.get_backend(by_nccl)
    finally:
        if kind in ("right", "one GPU"):
            dist.destroy_process_group()
