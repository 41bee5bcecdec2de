"""A plan with what is known of its time before it is simulated."""

from dataclasses import dataclass

from penstock.plan.plan import Plan

__all__ = ["Candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the seconds of its iteration by the formula of the planner that made it."""

    plan: Plan
    estimate_s: float
