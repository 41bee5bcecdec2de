"""A GPU's clock says when the device did what."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.errors import PeerFailed, Stalled
from penstock.runtime.clock import AHEAD, DeviceClock, StepClock, clock_for, clock_offsets
from penstock.runtime.processes.heartbeat import HEARTBEAT


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

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

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


def test_events_are_when_the_device_came_to_them(device: Device) -> None:
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
        assert (message.start_s, message.end_s) == pytest.approx((behind_s + 0.2,) * 2)
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


def received(clock: StepClock, device: Device, seconds: float) -> None:
    """A message of micro-batch 3 from rank 1, for which the device waits."""
    start = clock.now()
    device.launch(seconds)
    clock.add("RECV", 2, 3, start, clock.now(), 1)


@pytest.fixture
def waits(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What this rank says that it waits for, whenever it looks; a look lasts 0.01 s."""
    found: list[str] = []

    def sleep(seconds: float) -> None:
        wait = HEARTBEAT.wait
        found.append(wait.what() if wait is not None else "")
        device.host_s += 0.01

    monkeypatch.setattr("penstock.device.time.sleep", sleep)
    monkeypatch.setattr(HEARTBEAT, "limit_s", 1.0)
    yield found
    HEARTBEAT.wait = None


def test_the_host_is_a_few_actions_ahead_of_the_device(device: Device, waits: list[str]) -> None:
    clock = DeviceClock(torch.device("cuda", 0), check=lambda: None)
    clock.restart()
    for number in clock.paced(range(10)):
        assert device.free_s - device.host_s <= AHEAD * 0.1
        assert (device.free_s > device.host_s) == (number > 0)
        start = clock.now()
        device.launch(0.1)
        clock.add("F", 0, number, start, clock.now())
    assert set(waits) == {f"its GPU to end F of micro-batch {n} for stage 0" for n in range(7)}
    clock.settle()
    assert device.host_s >= device.free_s and HEARTBEAT.wait is None


def test_a_message_that_comes_in_time_has_its_own_limit(device: Device, waits: list[str]) -> None:
    """The limit is that of one wait, and computing has none."""
    clock = DeviceClock(torch.device("cuda", 0), check=lambda: None)
    for seconds in (0.9, 0.9):
        received(clock, device, seconds)
        start = clock.now()
        device.launch(5.0)
        clock.add("F", 0, 0, start, clock.now())
    clock.settle()
    assert "a message of micro-batch 3 from rank 1 for stage 2" in waits
    assert clock.busy_s == pytest.approx(10.0, abs=1e-3)


def test_a_message_that_does_not_come_is_named(device: Device, waits: list[str]) -> None:
    clock = DeviceClock(torch.device("cuda", 0), check=lambda: None)
    received(clock, device, 100.0)
    with pytest.raises(Stalled, match="waited 1 s for a message of micro-batch 3 from rank 1"):
        clock.settle()
    assert device.host_s < 102


def test_a_rank_that_has_failed_ends_the_wait(device: Device, waits: list[str]) -> None:
    def failed() -> None:
        raise PeerFailed("another rank has failed")

    clock = DeviceClock(torch.device("cuda", 0), check=failed)
    received(clock, device, 100.0)
    with pytest.raises(PeerFailed):
        clock.settle()
    assert HEARTBEAT.wait is not None and HEARTBEAT.wait.peer == 1


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


class OtherHost:
    """Two ranks on two hosts; the clock of the other is 40 s ahead, and messages take time."""

    one_host, size = False, 2

    def __init__(self, delays_s: list[float]) -> None:
        self.delays_s = delays_s
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def barrier(self) -> None:
        self.now_s += 1.0

    def all_gather(self, moment_s: float) -> list[float]:
        """The other looks at its clock after a delay, and its answer takes as long."""
        delay_s = self.delays_s.pop(0) if self.delays_s else 0.5
        self.now_s += 2 * delay_s
        return [moment_s, moment_s + delay_s + 40.0]

    def broadcast(self, value: list[float]) -> list[float]:
        return value


@pytest.mark.parametrize("delays_s", [[0.3, 0.01, 0.2], [0.01], [0.3, 0.2, 0.01, 0.2]])
def test_clocks_are_compared_in_the_round_with_the_quickest_answer(delays_s: list[float]) -> None:
    world: Any = OtherHost(delays_s)
    assert clock_offsets(world, world.now) == pytest.approx([0.0, -40.01])
