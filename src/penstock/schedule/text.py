"""Parses the text form of schedules, which `str` of a `Schedule` writes."""

import re

from penstock.errors import BadInput
from penstock.schedule.action import Action, parse_action
from penstock.schedule.schedule import Schedule, schedule_from_actions

__all__ = ["parse_schedule"]


def parse_schedule(text: str) -> Schedule:
    """Parse the picture of a schedule: one line for each device group.

    >>> picture = "stage 0   F0 F1 B0 B1\\nstage 1   F0 B0 F1 B1"
    >>> str(parse_schedule(picture)) == picture
    True

    Raises:
        BadInput: a line does not start with its stages, or has a word that is not an action.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return schedule_from_actions(parse_line(line) for line in lines)


def parse_line(line: str) -> tuple[Action, ...]:
    """The actions of one line; if it has a single stage, its actions do not repeat the stage."""
    match = re.fullmatch(r"\s*stage (\d+(?:,\d+)*)((?:\s.*)?)", line)
    if not match:
        raise BadInput(
            f"line '{line.strip()}' does not start with its stage or stages; write it like "
            f"'stage 0   F0 F1 B0 B1' or 'stage 0,2  0F0 2F0 2B0 0B0'"
        )
    stages, words = match.groups()
    prefix = "" if "," in stages else stages
    return tuple(parse_action(prefix + word) for word in words.split())
