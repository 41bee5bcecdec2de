"""Seconds of a layer, with its backward divided into two halves."""

from dataclasses import dataclass

__all__ = ["PassSeconds"]


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one layer, or of a whole model, at one batch size."""

    forward_s: float
    backward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0

    def halves(self) -> tuple[float, float]:
        """The seconds of a whole backward, divided in the ratio of the separately timed halves.

        The separate halves repeat some work, so their own sum is too large.
        """
        both = self.backward_input_s + self.backward_weight_s
        share = self.backward_input_s / both if both else 0.0
        return self.backward_s * share, self.backward_s * (1 - share)
