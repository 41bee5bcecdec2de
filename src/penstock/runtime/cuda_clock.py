"""The clock of a rank with a GPU: compute is noted by events on its stream, read when asked for.

The host only launches work, so its own times say nothing about compute. Recording an event waits
for nothing; the first who asks for the records waits until all of them have happened.
"""

import time

import torch

from penstock.runtime.clock import Record, StepClock

__all__ = ["CudaClock", "clock_for"]

ON_THE_HOST = ("SEND", "RECV")
"""What the host does: its own times are the right ones."""


class Moment(float):
    """A moment of the host at which ``event`` was recorded."""

    event: torch.cuda.Event


class CudaClock(StepClock):
    """A `StepClock` whose moments are also events on the current stream of ``device``.

    Events are made once and recorded again in the next iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        super().__init__(self._moment)
        self.start_s = float(self.start_s)

    def restart(self) -> None:
        """Begin an iteration."""
        self._used = 0
        super().restart()
        self.start_s = float(self.start_s)

    def _moment(self) -> float:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        moment = Moment(time.perf_counter())
        moment.event = self._events[self._used]
        moment.event.record(torch.cuda.current_stream(self._device))
        self._used += 1
        return moment

    @property
    def records(self) -> list[Record]:
        """All that was noted, in seconds of the host's clock; waits for the device."""
        torch.cuda.synchronize(self._device)
        # The device is idle, so this event happens as soon as it is recorded.
        reference = torch.cuda.Event(enable_timing=True)
        reference.record(torch.cuda.current_stream(self._device))
        now_s = time.perf_counter()
        reference.synchronize()

        def seconds(kind: str, moment: float) -> float:
            if kind in ON_THE_HOST or not isinstance(moment, Moment):
                return float(moment)
            return now_s - moment.event.elapsed_time(reference) / 1e3

        self._records = [
            (kind, stage, micro_batch, seconds(kind, start), seconds(kind, end), peer, size)
            for kind, stage, micro_batch, start, end, peer, size in self._records
        ]
        return super().records

    @property
    def busy_s(self) -> float:
        """Seconds that the device computed; waits for what was noted."""
        total_s = 0.0
        for kind, _, _, start, end, *_ in self._records:
            if kind not in "FBIWR":
                continue
            if isinstance(start, Moment) and isinstance(end, Moment):
                end.event.synchronize()
                total_s += start.event.elapsed_time(end.event) / 1e3
            else:
                total_s += end - start
        return total_s


def clock_for(device: torch.device) -> StepClock:
    """The clock that sees what ``device`` does."""
    return CudaClock(device) if device.type == "cuda" else StepClock()
