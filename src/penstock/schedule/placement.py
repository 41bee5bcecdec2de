"""Which device group holds which stages."""

from typing import Literal, TypeAlias

__all__ = ["PlacementStyle", "folded", "looped", "placement_of_style"]

PlacementStyle: TypeAlias = Literal["straight", "looped", "folded", "mirrored"]
"""straight: one stage a group. looped: round after round in one direction. folded: down the groups
and up again. mirrored: every stage twice, for micro-batches of either direction."""


def looped(groups: int, rounds: int) -> tuple[int, ...]:
    """Round after round from the first group to the last (Megatron-LM, SC 2021, section 2.2).

    >>> looped(groups=3, rounds=2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(groups)) * rounds


def folded(groups: int, rounds: int) -> tuple[int, ...]:
    """Down and up, so that the stages at a turn share a group (Zero Bubble's V; Hanayo's waves).

    >>> folded(groups=3, rounds=2)
    (0, 1, 2, 2, 1, 0)
    >>> folded(groups=2, rounds=3)
    (0, 1, 1, 0, 0, 1)
    """
    there = tuple(range(groups))
    return tuple(g for round_ in range(rounds) for g in (there[::-1] if round_ % 2 else there))


def placement_of_style(style: PlacementStyle, groups: int, rounds: int) -> tuple[int, ...]:
    """The placement of ``groups * rounds`` stages; straight and mirrored ones have one round."""
    match style:
        case "straight" | "mirrored":
            return tuple(range(groups))
        case "looped":
            return looped(groups, rounds)
        case "folded":
            return folded(groups, rounds)
