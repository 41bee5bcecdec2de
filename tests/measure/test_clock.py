"""The stopwatches say what work takes, on a GPU whose times are known."""

import pytest
import torch
from measure.known_gpu import KnownGpu

from penstock.measure import clock

GPU = torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> KnownGpu:
    known = KnownGpu()
    known.take_the_place(monkeypatch)
    return known


def test_small_kernels_take_what_the_gpu_takes_when_the_host_is_ahead(gpu: KnownGpu) -> None:
    def layer() -> None:
        gpu.kernel(1e-3)
        for _ in range(50):
            gpu.kernel(2e-6)

    seconds_of = clock.work_s(GPU, ahead=True)
    assert [seconds_of(layer) for _ in range(6)] == pytest.approx([1.1e-3] * 6)


def test_where_launches_take_longer_than_kernels_they_count(gpu: KnownGpu) -> None:
    def layer() -> None:
        for _ in range(100):
            gpu.kernel(2e-6)

    assert clock.work_s(GPU, ahead=True)(layer) == pytest.approx(100 * 10e-6)
    # Messages are launched far ahead, and their latency is that of the link.
    messages_s = clock.work_s(GPU, ahead=True, launches=False)
    assert messages_s(layer) == pytest.approx(100 * 2e-6)


def test_the_first_launches_do_not_make_later_ones_wait_long(gpu: KnownGpu) -> None:
    seconds_of = clock.work_s(GPU, ahead=True)
    assert seconds_of(lambda: gpu.kernel(1e-3, launch_s=2.0)) == pytest.approx(2.0, rel=1e-2)
    start_s = gpu.host_s
    times = [seconds_of(lambda: gpu.kernel(1e-3)) for _ in range(9)]
    assert times == pytest.approx([1e-3] * 9)
    assert gpu.host_s - start_s < 0.15


def test_work_that_waits_for_the_gpu_is_not_charged_for_holding_it(gpu: KnownGpu) -> None:
    def reads_a_number() -> None:
        gpu.kernel(1e-3)
        gpu.wait_for(GPU)
        gpu.kernel(1e-3)

    seconds_of = clock.work_s(GPU, ahead=True)
    for _ in range(4):
        assert seconds_of(reads_a_number) == pytest.approx(2.03e-3)


def test_what_a_layer_reads_comes_from_memory(gpu: KnownGpu) -> None:
    gpu.cold_s = 5e-4
    seconds_of = clock.work_s(GPU, ahead=True)
    assert [seconds_of(lambda: gpu.kernel(1e-3)) for _ in range(3)] == pytest.approx([1.5e-3] * 3)
    warm = clock.work_s(GPU)
    assert warm(lambda: gpu.kernel(1e-3)) == pytest.approx(1e-3 + 10e-6)


def test_a_restart_forgets_what_came_before(gpu: KnownGpu) -> None:
    seconds_of = clock.work_s(GPU, ahead=True)

    def layer() -> None:
        gpu.kernel(1.0)
        seconds_of.restart()
        gpu.kernel(2e-3)

    assert seconds_of(layer) == pytest.approx(2e-3)


def test_only_the_device_that_is_asked_for_is_touched(gpu: KnownGpu) -> None:
    clock.work_s(GPU, ahead=True)(lambda: gpu.kernel(1e-3))
    assert set(gpu.used) == {GPU}
