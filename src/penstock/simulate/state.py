"""The state of a play, as compiled functions read it: by name, from one address."""

from penstock.flat_record import reader
from penstock.simulate.layout import PARTS

__all__ = ["in_state"]

in_state = reader("state", PARTS)
"""What makes of the array of `penstock.simulate.layout` its parts by name."""
