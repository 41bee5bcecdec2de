"""The plan for as many ranks as were started, made once and shared by all."""

from collections.abc import Callable
from pathlib import Path

from penstock.errors import BadInput, Infeasible
from penstock.files import json_text, parse_json
from penstock.plan.json_file import plan_from_json, plan_to_json, read_plan, write_plan
from penstock.plan.plan import Plan
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.processes.world import World, join_world

NAME = "rank 0's plan"

MakePlan = Callable[[int], Plan]
"""Function that makes a plan for a number of ranks."""


def plan_for_ranks(make: MakePlan, directory: Path | str) -> Plan:
    """The plan for the ranks that torchrun has started; every rank must call this.

        plan = plan_for_ranks(
            lambda ranks: plan_pipeline(profile, cluster.first(ranks), 32, time_limit_s=2.0), "run"
        )

    Rank 0 reads ``directory/plan-<ranks>.json``. If there is no such file, it calls ``make(ranks)``
    and writes it. The other ranks receive the plan from rank 0, so they need not see the directory.

    The files are for one model and one batch size. Delete them when either changes.

    Raises:
        BadInput: the file cannot be read, or ``make`` refuses; on all ranks.
        Infeasible: no plan fits in the memory of these ranks; on all ranks.
    """
    folder, world = Path(directory), join_world("cpu", LIMIT_S)

    def planned() -> Plan | None:
        if world.rank:
            return None
        place = folder / f"plan-{world.size}.json"
        if place.exists():
            return read_plan(place)
        plan = make(world.size)
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, place)
        return plan

    plan = shared_plan(world, world.all_succeed(planned, BadInput, Infeasible))
    world.leave()
    assert plan is not None
    return plan


def shared_plan(world: World, plan: Plan | None) -> Plan | None:
    """Return rank 0's plan, if it has one, on every rank; all must call this."""
    text = world.broadcast(json_text(plan_to_json(plan)) if plan else "")
    return plan or (plan_from_json(parse_json(text, NAME, "plan"), NAME) if text else None)
