"""A GPU's clock says when the device did what."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.runtime.clock import DeviceClock, StepClock, clock_for


class Device:
    """A device that does what it was given one after another, and the host's clock."""

    def __init__(self) -> None:
        self.host_s = 100.0
        self.free_s = 100.0

    def launch(self, seconds: float) -> None:
        """Give it work; the host goes on after 10 us."""
        self.host_s += 1e-5
        self.free_s = max(self.free_s, self.host_s) + seconds

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.free_s)


class FakeEvent:
    device: Device

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = float("nan")

    def record(self, stream: object) -> None:
        self.at_s = max(self.device.free_s, self.device.host_s)

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert max(self.at_s, other.at_s) <= self.device.host_s, "not yet happened"
        return (other.at_s - self.at_s) * 1e3

    def synchronize(self) -> None:
        self.device.host_s = max(self.device.host_s, self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    FakeEvent.device = found
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.wait())
    monkeypatch.setattr("penstock.runtime.clock.time.perf_counter", lambda: found.host_s)
    yield found


def play(clock: StepClock, device: Device) -> None:
    """Two forwards and a message between them; nothing waits for the device."""
    clock.restart()
    for kind, seconds in (("F", 0.2), ("SEND", 0.0), ("F", 0.3)):
        start = clock.now()
        device.launch(seconds)
        clock.add(kind, 0, 0, start, clock.now())  # type: ignore[arg-type]


def test_compute_is_when_the_device_did_it_and_messages_when_the_host_did(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    device.launch(1.0)
    for _ in range(2):
        behind_s = device.free_s
        launched_s = device.host_s
        play(clock, device)
        assert device.host_s < launched_s + 1e-3, "recording must not wait"
        first, message, second = clock.records
        assert (first.start_s, first.end_s) == pytest.approx((behind_s, behind_s + 0.2))
        assert (second.start_s, second.end_s) == pytest.approx((behind_s + 0.2, behind_s + 0.5))
        assert message.end_s - message.start_s == pytest.approx(1e-5)
        assert message.start_s < launched_s + 1e-3
        assert clock.records == [first, message, second]
        device.launch(1.0)


def test_busy_time_is_the_devices(device: Device) -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    play(clock, device)
    # The launch of the first one takes 10 us, in which the device waits.
    assert clock.busy_s == pytest.approx(0.5 + 1e-5)
    assert type(clock.start_s) is float


def test_every_device_has_its_clock(device: Device) -> None:
    assert isinstance(clock_for(torch.device("cuda", 0)), DeviceClock)
    assert type(clock_for(torch.device("cpu"))) is StepClock


@pytest.mark.cuda
def test_events_of_a_real_device_are_in_order() -> None:
    clock: Any = DeviceClock(torch.device("cuda", 0))
    matrix = torch.randn(2048, 2048, device="cuda")
    clock.restart()
    for micro_batch in range(3):
        start = clock.now()
        matrix = (matrix @ matrix).clamp(-1, 1)
        clock.add("F", 0, micro_batch, start, clock.now())
    records = clock.records
    assert [record.micro_batch for record in records] == [0, 1, 2]
    assert all(record.end_s > record.start_s for record in records)
    assert all(a.end_s <= b.start_s + 1e-5 for a, b in pairwise(records))
