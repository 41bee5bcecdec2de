"""What the rest relies on of a GPU, one thing a test; `benchmarks/gpu.py` runs them first.

They need no configuration of pytest.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import gpu_device
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from penstock import device as devices
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.clock import clock_for
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]

ON_GPU = gpu_device.DEVICE == "cuda"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
MEGABYTES = 64
on_gpu_alone = pytest.mark.skipif(not ON_GPU, reason="the CPU has no such thing")


def filled() -> torch.Tensor:
    """A tensor of `MEGABYTES`."""
    return torch.ones(MEGABYTES << 20, dtype=torch.uint8, device=DEVICE)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that nothing has started as a rank."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield


# The device.


def test_the_own_device_is_the_one_that_is_asked_for(alone: None) -> None:
    assert devices.own_device(gpu_device.DEVICE) == DEVICE


def test_without_a_wish_it_is_a_gpu_where_there_is_one(alone: None) -> None:
    assert devices.own_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_gpu_that_is_not_here_is_refused(alone: None) -> None:
    with pytest.raises(BadInput, match=r"cuda:4096|finds no CUDA device"):
        devices.own_device("cuda:4096")


def test_a_device_has_one_identity() -> None:
    found = devices.identity_of(DEVICE)
    assert found and found == devices.identity_of(DEVICE)


def test_a_device_has_the_name_of_its_model() -> None:
    name = torch.cuda.get_device_name(DEVICE) if ON_GPU else "cpu"
    assert devices.kind_of(DEVICE) == name


# Memory.


def test_free_memory_is_less_than_all() -> None:
    free = devices.free_memory(DEVICE)
    assert 0 < free.bytes <= devices.memory_bytes_of(DEVICE)


@on_gpu_alone
def test_memory_that_torch_keeps_is_free_for_it() -> None:
    kept = filled()
    before = devices.free_memory(DEVICE).bytes
    del kept  # torch keeps it, and does not give it back to the driver
    gained = devices.free_memory(DEVICE).bytes - before
    assert gained >= (MEGABYTES << 20) * 0.9


@on_gpu_alone
def test_allocated_bytes_count_a_tensor() -> None:
    before = devices.allocated_bytes(DEVICE)
    kept = filled()
    assert devices.allocated_bytes(DEVICE) - before == kept.nbytes


def test_the_peak_counts_what_is_free_again() -> None:
    devices.begin_peak(DEVICE)
    before = devices.peak_bytes(DEVICE)
    filled()
    assert devices.peak_bytes(DEVICE) - before == (MEGABYTES << 20 if ON_GPU else 0)
    devices.begin_peak(DEVICE)
    assert devices.peak_bytes(DEVICE) == devices.allocated_bytes(DEVICE)


@on_gpu_alone
def test_more_memory_than_there_is_is_an_error_of_its_own() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device=DEVICE)


# Time.


@on_gpu_alone
def test_a_mark_does_not_wait() -> None:
    busy = torch.ones(8192, 8192, device=DEVICE)
    devices.wait_for(DEVICE)
    for _ in range(20):
        busy = busy @ busy * 0
    mark = devices.timing_mark(DEVICE)
    assert not mark.query()
    devices.wait_for(DEVICE)
    assert mark.query()


@on_gpu_alone
def test_two_marks_say_how_long_the_device_worked() -> None:
    torch.cuda._sleep(1)
    first = devices.timing_mark(DEVICE)
    torch.cuda._sleep(100_000_000)
    second = devices.timing_mark(DEVICE)
    devices.wait_for(DEVICE)
    assert 20 < first.elapsed_time(second) < 500  # at 0.2 to 5 GHz


def test_the_clock_has_the_seconds_of_the_device() -> None:
    clock = clock_for(DEVICE)
    clock.restart()
    start = clock.now()
    product = torch.ones(512, 512, device=DEVICE) @ torch.ones(512, 512, device=DEVICE)
    clock.add("F", 0, 0, start, clock.now())
    (record,) = clock.records
    assert product[0, 0] == 512 and record.kind == "F"
    assert 0 < record.end_s - record.start_s < 60
    assert clock.busy_s == pytest.approx(record.end_s - record.start_s, abs=1e-3)


# Random numbers.


def test_a_random_state_is_put_back() -> None:
    before = devices.generator_state(DEVICE), torch.get_rng_state()
    first = torch.rand(8, device=DEVICE)
    devices.put_generator_state(DEVICE, before[0])
    torch.set_rng_state(before[1])
    assert torch.equal(torch.rand(8, device=DEVICE), first)


def test_each_seed_gives_a_random_state_of_its_own() -> None:
    one, same, other = (devices.seeded_generator_state(DEVICE, seed) for seed in (3, 3, 4))
    if one is None or same is None or other is None:
        assert one is same is other and not ON_GPU
    else:
        assert torch.equal(one, same) and not torch.equal(one, other)


# Precision.


def test_float32_is_float32() -> None:
    torch.manual_seed(0)
    a = torch.randn(256, 256, device=DEVICE)
    with devices.without_tf32():
        found = a @ a
    exact = a.double() @ a.double()
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6


def test_the_precision_of_products_is_put_back() -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    with devices.without_tf32():
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cudnn.conv.fp32_precision == before


# A pipeline.


def small(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> tuple[nn.Module, Any]:
    """A small net, and a batch."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), norm(16), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(16, 16), torch.randn(16, 16))


def two_stages(model: nn.Module, batch: Any, schedule: str = "1f1b", **options: Any) -> Pipeline:
    """Two stages on one device."""
    stages = Stage(range(2), (0,), (4,)), Stage(range(2, 5), (1,), (4,))
    given: dict[str, Any] = {
        "optimizer": lambda p: AdamW(p, lr=1e-2),
        "verify": "first-step",
        "safety": Safety(transport="in-process"),
        "device": DEVICE,
        "loss": nn.MSELoss(),
    }
    return Pipeline(model, batch, plan=Plan(stages, 4, 4, schedule), **(given | options))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_step_is_that_of_the_module(norm: Callable[[int], nn.Module]) -> None:
    model, batch = small(norm)
    with two_stages(model, batch) as pipe:
        pipe.step(batch)
        assert pipe.verified is not None and pipe.verified.equal, pipe.verified
        buffers = dict(pipe._engine.held.named_buffers())
    assert {tensor.device for tensor in buffers.values()} <= {DEVICE}


def test_gradients_that_overflow_leave_the_weights_and_the_scale_falls() -> None:
    model, batch = small()
    huge = batch[0] * 1e3, batch[1] * 1e6
    with two_stages(model, huge, autocast=torch.float16, verify="off") as pipe:
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        metrics = pipe.step(huge)
        assert metrics.skipped
        assert all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())
        assert pipe.step(huge).loss_scale < metrics.loss_scale


def test_a_prediction_is_on_the_host() -> None:
    model, batch = small()
    with two_stages(model, batch, verify="off") as pipe:
        assert pipe.predict(batch).device.type == "cpu"


def test_the_model_is_given_back_on_the_device() -> None:
    model, batch = small()
    pipe = two_stages(model, batch, verify="off", optimizer=lambda p: SGD(p, lr=0.1))
    pipe.step(batch)
    pipe.close(gather=True)
    assert {p.device for p in model.parameters()} == {DEVICE}


def test_a_batch_of_the_device_is_trained_as_one_of_the_host() -> None:
    losses: list[float] = []
    for place in (torch.device("cpu"), DEVICE):
        model, batch = small()
        own = tuple(tensor.to(place) for tensor in batch)
        with two_stages(model, own, verify="off") as pipe:
            losses.append(pipe.step(own).loss)
    assert losses[0] == losses[1]


def test_the_tests_say_on_which_device_they_ran() -> None:
    assert os.environ.get("PENSTOCK_TEST_DEVICE", "cuda") == DEVICE.type
