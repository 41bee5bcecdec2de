"""What the runtime carries out: planning asks before it chooses, the runtime before it runs."""

from penstock.schedule.registry import FAMILIES

__all__ = ["NOT_AS_SIMULATED", "schedule_refusal", "stage_refusal"]

NOT_AS_SIMULATED = frozenset({"fbp-as"})
"""Schedules with a forward and a backward at once, of which a rank runs one after the other."""


def schedule_refusal(schedule: str, *, norms: bool = False, tensor_groups: bool = False) -> str:
    """Why the runtime does not carry out a schedule, in words; empty if it does.

    ``norms``: layers have batch normalisation. ``tensor_groups``: stages are on tensor groups.

    >>> schedule_refusal("1f1b", norms=True), schedule_refusal("gpipe", tensor_groups=True)
    ('', '')
    >>> schedule_refusal("pipedream", tensor_groups=True)
    'has no flush'
    """
    family = FAMILIES.get(schedule)
    if family is None:
        return ""
    if family.placement == "mirrored" and norms:
        return "holds it twice: the copies would average different statistics"
    if family.placement == "mirrored" and tensor_groups:
        return "holds stages twice"
    return "has no flush" if tensor_groups and not family.flushes else ""


def stage_refusal(*, norms: bool, ranks: int) -> str:
    """Why a group of so many ranks cannot run a stage, in words; empty if it can."""
    return "has batch normalisation" if norms and ranks > 1 else ""
