"""Planners and schedules from outside: functions, and entry points of other packages.

A planner is a function from a problem and a score to a plan (`penstock.plan.problem.Planner`). A
schedule is a function from the shape of a pipeline to an order (`penstock.schedule.outside`). Both
are called by a name from then on, in this process.
"""

from dataclasses import replace
from importlib.metadata import entry_points
from math import inf

from penstock.errors import BadInput, PluginFailed
from penstock.plan.plan import Plan
from penstock.plan.problem import Planner, PlanningProblem, Score
from penstock.planners.search.search import PLANNERS
from penstock.schedule.family import Family
from penstock.schedule.outside import AnySchedule, called
from penstock.schedule.registry import FAMILIES
from penstock.simulate.simulation import check_plan_fits_inputs

BUILT_IN = frozenset(PLANNERS)


def planner_name(planner: str | Planner) -> str:
    """The name of a planner; a function is added under its own."""
    return planner if isinstance(planner, str) else add_planner(name_of(planner), planner)


def schedule_name(schedule: str | AnySchedule) -> str:
    """The name of a schedule; a function is added under its own."""
    if isinstance(schedule, str):
        return schedule
    name = name_of(schedule.make if isinstance(schedule, Family) else schedule)
    FAMILIES.add(name, schedule)
    return name


def name_of(function: object) -> str:
    """The name of a function as the command line would write it."""
    return getattr(function, "__name__", type(function).__name__).strip("_<>").replace("_", "-")


def add_planner(name: str, planner: object) -> str:
    """Register a planner, whose plans are checked, as ``name``; returns the name."""
    if name in BUILT_IN:
        raise BadInput(f"planner '{name}' is one of the package; give yours another name")
    if not callable(planner):
        raise BadInput(f"planner '{name}' is a {type(planner).__name__}, not a function")

    def checked(problem: PlanningProblem, score: Score) -> Plan:
        found = called(f"planner '{name}'", lambda: planner(problem, score), Plan)
        try:
            check_plan_fits_inputs(found, problem.profile, problem.cluster)
            seconds = score(found)
        except BadInput as cause:
            raise PluginFailed(f"planner '{name}': {cause}") from cause
        if found.global_batch != problem.global_batch:
            wrong = f"for batches of {found.global_batch} samples, not {problem.global_batch}"
        elif found.schedule not in problem.schedules:
            allowed = ", ".join(problem.schedules)
            wrong = f"with schedule '{found.schedule}', which is not allowed here ({allowed})"
        elif seconds == inf:
            wrong = "that does not fit in memory or breaks a pin"
        else:
            return replace(found, planner=name)
        raise PluginFailed(f"planner '{name}' returned a plan {wrong}; let it return another")

    PLANNERS[name] = checked
    return name


def add_installed() -> None:
    """Add the entry points ``penstock.planners`` and ``penstock.schedules`` of other packages."""
    _ = FAMILIES.installed
    for point in entry_points(group="penstock.planners"):
        if point.name not in PLANNERS:
            add_planner(point.name, called(f"entry point '{point.value}'", point.load, object))
