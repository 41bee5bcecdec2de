"""Every planner by the name that the command line uses; the first is the default."""

from penstock.plan.bapipe import bapipe
from penstock.plan.dapple import dapple
from penstock.plan.data_parallel import data_parallel
from penstock.plan.dynamic_program import dynamic_program
from penstock.plan.gpipe import gpipe
from penstock.plan.pipedream import pipedream
from penstock.plan.piper import piper
from penstock.plan.problem import Planner
from penstock.plan.search import search_from
from penstock.plan.single_device import single_device
from penstock.plan.spp import spp

__all__ = ["PLANNERS", "STARTING_PLANNERS"]

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
"""All but the default, which improves on their plans; quick ones first."""

PLANNERS: dict[str, Planner] = {"search": search_from(STARTING_PLANNERS), **STARTING_PLANNERS}
