"""The one place that names CUDA, on a stand-in for `torch.cuda`: this machine may have no GPU."""

from types import SimpleNamespace

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


def started_as(monkeypatch: pytest.MonkeyPatch, local_rank: int, local_ranks: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))


def test_each_rank_has_its_own_gpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (None, "cuda"):
        found: list[str] = []
        for local_rank in range(2):
            started_as(monkeypatch, local_rank, 2)
            found.append(str(device.own_device(asked)))
        assert found == ["cuda:0", "cuda:1"]
    assert gpus == [0, 1, 0, 1]


def test_ranks_beyond_the_last_gpu_share_if_asked_and_else_use_the_cpu(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_as(monkeypatch, 2, 3)
    assert device.own_device(None) == torch.device("cpu")
    assert device.own_device("cuda") == torch.device("cuda", 0)


def test_a_rank_that_is_shown_one_gpu_of_several_has_it(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_as(monkeypatch, 1, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.own_device(None) == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert device.own_device(None) == torch.device("cuda", 0)


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
    assert (device.kind_of(gpu), device.identity_of(gpu)) == ("Stand-in", "GPU-1")
    assert (device.kind_of(cpu), device.identity_of(cpu)) == ("cpu", "cpu")
    free = device.free_memory(gpu)
    assert (free.bytes, free.limit) == (13 * GIGABYTE, "free memory of cuda:1")


def test_the_cluster_of_one_gpu_is_that_gpu(gpus: list[int]) -> None:
    gpu = torch.device("cuda", 1)
    (alone,) = cluster_alone(gpu).devices
    assert (alone.kind, alone.memory_bytes) == ("Stand-in", 80 * GIGABYTE)
    assert this_member(gpu).cores == 0
    (on_cpu,) = cluster_alone(torch.device("cpu")).devices
    assert on_cpu.kind == "cpu" and this_member(torch.device("cpu")).cores > 0
