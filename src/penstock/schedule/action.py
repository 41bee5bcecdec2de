"""An action: one pass of one stage on one micro-batch, and its text form."""

import re
from typing import Literal, NamedTuple, TypeAlias, get_args

from penstock.errors import BadInput

ActionKind: TypeAlias = Literal["F", "B", "I", "W", "R"]
"""F: forward. B: whole backward. R: recomputation of the forward. A split backward has two halves:
I computes the gradients of the stage's inputs, W those of its weights."""

ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
"""Every kind. Arrays hold a kind as its index in this tuple."""

KIND_CODES: dict[ActionKind, int] = {kind: code for code, kind in enumerate(ACTION_KINDS)}

KINDS: dict[str, ActionKind] = {kind: kind for kind in ACTION_KINDS}


class Action(NamedTuple):
    """The work of one stage on one micro-batch. Its text form is stage, kind, micro-batch.

    >>> print(Action("F", stage=2, micro_batch=0))
    2F0
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse_action(text: str) -> Action:
    """Parse the text form of an action.

    >>> parse_action("2F0")
    Action(kind='F', stage=2, micro_batch=0)
    """
    match = re.fullmatch(r"(\d{1,9})([FBIWR])(\d{1,9})", text.strip())
    if not match:
        raise BadInput(
            f"action '{text}' is not of the form <stage><kind><micro-batch> with kind one of "
            f"{' '.join(KINDS)}, for example 2F0"
        )
    stage, letter, micro_batch = match.groups()
    return Action(KINDS[letter], int(stage), int(micro_batch))
