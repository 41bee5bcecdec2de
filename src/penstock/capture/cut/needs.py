"""Parts of a recorded program that a stage needs, for training or for the model's outputs alone.

loss = cross_entropy(scores, labels)        for outputs alone: not needed, nor are the labels
if labels.max() >= classes: raise           answered as on the example: the labels may be missing
if mask.any(): scores = ...                 needed: the mask is no target
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.capture.cut.cut import Cut
from penstock.capture.record.calls import MASK


@dataclass(frozen=True)
class Needs:
    """Events that must be computed, leaves that must be given, and questions that need no answer.

    Questions ``as_on_example`` depend on targets, which may be missing.
    """

    events: frozenset[int]
    leaves: frozenset[int]
    as_on_example: frozenset[int] = frozenset()


def needs_of_outputs(cut: Cut, values: Sequence[int]) -> Needs:
    """Return what makes these values, and decides about the way there."""
    record = cut.record
    needed = record.behind(record.values[value].maker for value in values)
    with_loss = record.behind([record.values[cut.recorded.loss].maker])
    targets = cut.leaves_of(with_loss - needed) - cut.leaves_of(needed)
    answered: set[int] = set()
    for number, event in enumerate(record.events):
        if event.reads_values:
            behind = record.behind([number])
            can_wait = event.func is not None or event.address[1] == MASK
            if can_wait and cut.leaves_of(behind) & targets:
                answered.add(number)
            else:
                needed |= behind
    return Needs(needed, cut.leaves_of(needed), frozenset(answered))
