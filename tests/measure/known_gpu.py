"""A GPU that computes nothing: a host and a device with clocks of their own.

The host launches kernels; the device runs them in order, each for a known time.
"""

from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class Mark:
    """A moment of the stand-in's stream."""

    gpu: "KnownGpu"
    at_s: float

    def query(self) -> bool:
        """Whether it has happened."""
        return self.at_s <= self.gpu.host_s

    def elapsed_time(self, later: "Mark") -> float:
        """Milliseconds until a later mark."""
        return 1000 * (later.at_s - self.at_s)


@dataclass
class KnownGpu:
    """Stands in for the primitives that ``penstock.measure.clock`` takes from a device.

    The first kernels after a flush find nothing in the cache and take ``cold_s`` longer.
    """

    cold_s: float = 0.0
    host_s: float = 100.0
    stream_s: float = 0.0
    flushed: bool = False
    used: list[torch.device] = field(default_factory=list[torch.device])

    def kernel(self, seconds: float, launch_s: float = 10e-6) -> None:
        """Launch a kernel."""
        self.host_s += launch_s
        more_s, self.flushed = self.cold_s * self.flushed, False
        self.stream_s = max(self.stream_s, self.host_s) + seconds + more_s

    def perf_counter(self) -> float:
        """The host's clock."""
        return self.host_s

    def wait_for(self, device: torch.device) -> None:
        """The host waits for all kernels, and a little longer."""
        self.used.append(device)
        self.host_s = max(self.host_s, self.stream_s) + 20e-6

    def timing_mark(self, device: torch.device) -> Mark:
        """The end of the stream."""
        self.used.append(device)
        self.stream_s = max(self.stream_s, self.host_s)
        return Mark(self, self.stream_s)

    def hold(self, device: torch.device, seconds: float) -> None:
        """A kernel that only passes time; the cache stays flushed."""
        self.used.append(device)
        flushed, self.flushed = self.flushed, False
        self.kernel(seconds)
        self.flushed = flushed

    def flush_cache(self, device: torch.device) -> None:
        """The next kernel finds nothing in the cache."""
        self.used.append(device)
        self.flushed = True

    def take_the_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in from now on."""
        for name in ("wait_for", "timing_mark", "hold", "flush_cache"):
            monkeypatch.setattr(f"penstock.measure.clock.{name}", getattr(self, name))
        monkeypatch.setattr("penstock.measure.clock.time", self)
