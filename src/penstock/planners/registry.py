"""The published planners by the names that the command line uses."""

from penstock.plan.problem import Planner, PlanningProblem
from penstock.planners.bapipe.bapipe import bapipe
from penstock.planners.bapipe.formulas import METHODS
from penstock.planners.dapple.dapple import dapple
from penstock.planners.data_parallel import data_parallel, single_device
from penstock.planners.dynamic_program import dynamic_program
from penstock.planners.gpipe import gpipe
from penstock.planners.pipedream.pipedream import pipedream
from penstock.planners.piper import piper
from penstock.planners.spp.spp import spp

STARTING_PLANNERS: dict[str, Planner] = {
    "single-device": single_device,
    "data-parallel": data_parallel,
    "pipedream": pipedream,
    "dapple": dapple,
    "dynamic-program": dynamic_program,
    "bapipe": bapipe,
    "gpipe": gpipe,
    "piper": piper,
    "spp": spp,
}
"""All but the default, `search`, which improves on their plans and takes them in this order."""

OWN_SCHEDULES: dict[str, tuple[str, ...]] = {
    "bapipe": METHODS,
    "spp": (*PlanningProblem.schedules, "wavefront"),
}
"""Schedules that a planner chooses among by itself instead of `PlanningProblem.schedules`."""
