"""What a search reports while it runs."""

from dataclasses import dataclass

from penstock.plan.plan import Plan

__all__ = ["SearchStep"]


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What is being done, and the best plan so far with its seconds (none and infinite before)."""

    doing: str
    plan: Plan | None
    seconds: float
