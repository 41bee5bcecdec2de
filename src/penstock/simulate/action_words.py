"""An action as one integer, a *word*, for the compiled engine.

A STEP, a WAIT and a HOLD are words too. From the lowest bit on, a word has the kind (3 bits),
whether the action makes the last gradients before an update (1), the instance (20) and the
micro-batch. In a STEP the micro-batch only tells the iteration. In a WAIT, which waits for a step,
it is the number of that step. A HOLD precedes a forward that runs beside backwards; there it is how
many words the other stream may have left when the forward starts.
"""

from penstock.schedule.action import ACTION_KINDS

__all__ = [
    "HOLD",
    "INSTANCE_MASK",
    "INSTANCE_SHIFT",
    "KIND_MASK",
    "MICRO_SHIFT",
    "PIECES",
    "STEP",
    "UPDATES",
    "WAIT",
]

STEP = len(ACTION_KINDS)
WAIT = STEP + 1
HOLD = STEP + 2

PIECES = STEP + 1
"""Kinds of work of a replica: its actions by kind, then its part of the step."""

KIND_MASK = 7
UPDATES = 8
INSTANCE_SHIFT = 4
INSTANCE_MASK = (1 << 20) - 1
MICRO_SHIFT = 24
