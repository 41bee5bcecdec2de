"""The cores of a host that its devices share, in real time: when each of them has computed.

If more devices compute than there are cores, all of them slow down alike, as in the simulator.
"""

from dataclasses import dataclass, field
from math import inf

from penstock.cluster.cluster import Host

__all__ = ["EmulatedCores", "shares_cores"]


def shares_cores(host: Host) -> bool:
    """Whether the devices of a host have too few cores to compute all at once."""
    return 0 < host.full_speed_devices < len(host.devices)


@dataclass
class EmulatedCores:
    """The work of the devices that compute now. All moments are seconds of one clock."""

    cores: int
    _left_s: dict[int, float] = field(default_factory=dict[int, float])
    _now_s: float = -inf

    def begin(self, device: int, seconds: float, begin_s: float) -> dict[int, float]:
        """A device has begun to compute what takes ``seconds`` alone.

        Returns when each device that computes will have ended, if no other one begins. News of a
        beginning take time, so ``begin_s`` may be before that of another device.
        """
        late_s = max(0.0, self._now_s - begin_s)
        self._advance(max(self._now_s, begin_s))
        self._left_s[device] = seconds
        self._left_s[device] = max(0.0, seconds - late_s * self._rate(len(self._left_s)))
        return self._ends()

    def _rate(self, computing: int) -> float:
        """Seconds of work that each of so many devices does in a second."""
        return min(1.0, self.cores / computing)

    def _advance(self, to_s: float) -> None:
        """Do the work until a moment; those that end before it leave more to the others."""
        ends = self._ends()
        while self._left_s:
            first = min(ends, key=ends.__getitem__)
            until_s = min(to_s, ends[first])
            done_s = (until_s - self._now_s) * self._rate(len(self._left_s))
            self._left_s = {device: left - done_s for device, left in self._left_s.items()}
            self._now_s = until_s
            if until_s < ends[first]:
                return
            del self._left_s[first], ends[first]
        self._now_s = to_s

    def _ends(self) -> dict[int, float]:
        """When each will have ended, if no other one begins."""
        ends: dict[int, float] = {}
        now_s, done_s = self._now_s, 0.0
        by_end = sorted(self._left_s.items(), key=lambda entry: entry[1])
        for position, (device, left_s) in enumerate(by_end):
            now_s += (left_s - done_s) / self._rate(len(by_end) - position)
            done_s = left_s
            ends[device] = now_s
        return ends
