"""A step that a search reports while it runs."""

from dataclasses import dataclass

from penstock.plan.plan import Plan

__all__ = ["SearchStep"]


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What is being done, and the best plan so far with its seconds; before, None and infinite."""

    doing: str
    plan: Plan | None
    seconds: float
