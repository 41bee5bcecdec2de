"""From times to places on a drawing."""

from dataclasses import dataclass

from penstock.words import seconds_text, size_text

__all__ = ["TimeAxis"]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Times from 0 to ``end_s`` between two places.

    ``unit`` other than ``s`` is what a second stands for; then a byte stands for the activations
    that a micro-batch saves.
    """

    left: float
    right: float
    end_s: float
    unit: str = "s"

    @property
    def width(self) -> float:
        """Pixels of the whole axis."""
        return self.right - self.left

    @property
    def pixels_per_s(self) -> float:
        """Pixels of a second."""
        return self.width / self.end_s

    def x(self, time_s: float) -> float:
        """The place of a time."""
        return self.left + time_s * self.pixels_per_s

    def time_text(self, time_s: float) -> str:
        """A time in words.

        >>> TimeAxis(0, 1, 9.0).time_text(2.5), TimeAxis(0, 1, 9.0, "units").time_text(2.5)
        ('2.50 s', '2.5 units')
        """
        return seconds_text(time_s) if self.unit == "s" else f"{round(time_s, 3):g} {self.unit}"

    def size_text(self, size_bytes: float) -> str:
        """Bytes in words.

        >>> TimeAxis(0, 1, 9.0).size_text(2e6), TimeAxis(0, 1, 9.0, "units").size_text(2.5)
        ('2.00 MB', '2.5')
        """
        return size_text(size_bytes) if self.unit == "s" else f"{round(size_bytes, 3):g}"
