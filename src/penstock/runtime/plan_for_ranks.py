"""The plan for as many ranks as were started, made once and shared by all."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

from penstock.document import json_text, parse_json
from penstock.errors import BadInput, Infeasible
from penstock.plan.json_file import plan_from_json, plan_to_json, read_plan, write_plan
from penstock.plan.plan import Plan
from penstock.runtime.processes.store import met_at
from penstock.runtime.processes.world import check_environment

__all__ = ["plan_for_ranks"]

CALLS = count()
"""Numbers the calls, which every rank makes in the same order."""

MakePlan = Callable[[int], Plan]
"""Makes a plan for a number of ranks."""


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
        Infeasible: no plan fits in the memory of so many ranks; on all ranks.
    """
    folder, size = Path(directory), int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return kept_plan(make, folder, 1)
    check_environment()
    key = f"penstock/plan/{next(CALLS)}"
    store, rank, _ = met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    if rank == 0:
        try:
            plan = kept_plan(make, folder, size)
        except (BadInput, Infeasible) as cause:
            refusal = {"refused": type(cause).__name__, "why": str(cause)}
            store.set(key, json_text(refusal))
            raise
        store.set(key, json_text(plan_to_json(plan)))
        return plan
    store.wait([key])
    told = parse_json(store.get(key).decode(), key, "plan")
    if isinstance(told, dict) and "refused" in told:
        kind = Infeasible if told["refused"] == Infeasible.__name__ else BadInput
        raise kind(str(told["why"]))
    return plan_from_json(told, key)


def kept_plan(make: MakePlan, folder: Path, ranks: int) -> Plan:
    """The plan in the file for so many ranks; if there is none, it is made and written."""
    place = place_of(folder, ranks)
    if place.exists():
        return read_plan(place)
    plan = make(ranks)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(plan, place)
    return plan


def place_of(folder: Path, ranks: int) -> Path:
    """The file with the plan for so many ranks."""
    return folder / f"plan-{ranks}.json"
