"""The stand-in GPUs refuse, wait for and count what real ones do; see `stand_in_gpu`."""

from typing import Any

import pytest
import stand_in_cases as cases

from penstock.runtime.processes.launch import launch_workers


def alone(function: Any) -> Any:
    (found,) = launch_workers(function, (), workers=1, threads=1)
    return found


def test_tensors_say_where_they_are() -> None:
    found = alone(cases.devices)
    elsewhere = {
        "of values": "cuda:1",
        "like": "cuda:1",
        "moved": "cuda:1",
        "like, on the host": "cpu",
        "back": "cpu",
        "cast and back": "cpu",
        "gradient over a move": "cpu",
        "meta": "meta",
    }
    assert found == {name: elsewhere.get(name, "cuda:0") for name in found}


def test_what_a_gpu_refuses() -> None:
    found = alone(cases.refusals)
    assert [name for name, text in found.items() if not text] == ["scalar", "index", "copy"]
    assert "at least two devices, cuda:0 and cpu" in found["mixed"]
    assert "two devices" in found["written"] and "cuda:1" in found["two"]
    assert "to numpy. Use Tensor.cpu()" in found["numpy"]
    assert found["memory"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "invalid device ordinal" in found["ordinal"]
    assert "'cuda' device type for generator" in found["generator"]


def test_what_the_host_waits_for() -> None:
    found = alone(cases.host_waits)
    (refused,) = found.pop("refused")
    assert refused == "RuntimeError: called a synchronizing CUDA operation: item"
    assert found == {
        "float": ["item"],
        "if": ["item"],
        "to the host": ["copy to the host"],
        "to the host, pinned": [],
        "to the GPU": ["pageable copy to a GPU"],
        "to the GPU, pinned": [],
        "values": ["pageable copy to a GPU"],
        "a number written": [],
        "a mask": ["nonzero"],
        "synchronised": ["synchronize"],
        "event": [],
        "product": [],
    }


def test_memory_is_that_of_live_tensors() -> None:
    assert alone(cases.memory) == [1 << 20, 2 << 20, 1 << 20, 2 << 20, 0]


def test_each_gpu_draws_its_own_numbers() -> None:
    found = alone(cases.random_numbers)
    assert found == {"same seed": True, "again": True, "own": True, "next of the host": False}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("right", "nccl"),
        ("crossed", "Stuck: rank 0 makes the communicator of ranks (0, 1) in c10d::allreduce_"),
        ("by Gloo", "RuntimeError: [gloo/transport/tcp/pair.cc] writev: Bad address"),
        ("of the host", "RuntimeError: No backend type associated with device type cpu"),
        ("one GPU", "RuntimeError: Duplicate GPU detected : rank 1 and rank 0"),
    ],
)
def test_groups_carry_what_their_backend_would(kind: str, told: str) -> None:
    first, _ = launch_workers(cases.messages, (kind,), workers=2, threads=1)
    assert first.startswith(told)
