"""Every planner by the name that the command line uses; the first is the default."""

from penstock.plan.data_parallel import data_parallel
from penstock.plan.dynamic_program import dynamic_program
from penstock.plan.problem import Planner
from penstock.plan.search import search
from penstock.plan.single_device import single_device

__all__ = ["PLANNERS"]

PLANNERS: dict[str, Planner] = {
    "search": search,
    "dynamic-program": dynamic_program,
    "data-parallel": data_parallel,
    "single-device": single_device,
}
