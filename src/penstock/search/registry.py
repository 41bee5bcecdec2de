"""Every planner by the name that the command line uses; the first is the default."""

from penstock.plan.problem import Planner
from penstock.planners.registry import STARTING_PLANNERS
from penstock.search.search import search_from

__all__ = ["PLANNERS", "STARTING_PLANNERS"]

PLANNERS: dict[str, Planner] = {"search": search_from(STARTING_PLANNERS), **STARTING_PLANNERS}
