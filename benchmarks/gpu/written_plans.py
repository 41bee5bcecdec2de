"""Orders of work and plans with their predictions, made where the compiled core is.

`plans.json` has the pictures of all orders that only the core can make, for the plans of these
parts, and for the plans of eight GPUs what is predicted of each rank.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bare_machine
from runtime.matrix_plans import torchrun_cases

from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, parse_schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["read_plans", "use_written_orders", "write_plans"]

PATH = Path(__file__).parent / "plans.json"

MADE_BY_THE_CORE = ("list", "zb-h1", "zb-v")
"""Schedules whose orders the core searches for."""

LAYERS = {"deep": 14, "deeper": 27, "gpt2": 6}
"""Of the models of the matrix of schedules."""


def key_of(schedule: str, shape: PipelineShape) -> str:
    """What an order depends on."""
    return f"{schedule} {shape!r}"


def read_plans() -> Any:
    """All that was written."""
    return json.loads(PATH.read_text())


def use_written_orders() -> None:
    """Where the core is absent, take its orders from the file."""
    if bare_machine.CORE_IS_HERE:
        return
    orders = read_plans()["orders"]
    for name in MADE_BY_THE_CORE:
        FAMILIES.known[name] = replace(FAMILIES[name], make=partial(written, name, orders))


def written(name: str, orders: Mapping[str, str], shape: PipelineShape) -> Schedule:
    """The order of a shape, as it was made by the core."""
    key = key_of(name, shape)
    if key not in orders:
        raise BadInput(f"no order of '{name}' was written for {shape}; run with --write-plans")
    return parse_schedule(orders[key])


def orders() -> dict[str, str]:
    """The orders of the cases of the matrix."""
    found: dict[str, str] = {}
    for ranks in (2, 4):
        for case in torchrun_cases(ranks, "shared-memory"):
            if case.schedule in MADE_BY_THE_CORE:
                plan = case.plan(LAYERS[case.model])
                found[key_of(case.schedule, plan.shape())] = str(order_of(plan))
    return found


def write_plans() -> None:
    """Make everything anew."""
    from lonely_rank import plans_of_eight_gpus

    if not bare_machine.CORE_IS_HERE:
        raise BadInput("plans are written where the compiled core is")
    found = {"orders": orders(), "eight GPUs": plans_of_eight_gpus()}
    PATH.write_text(json.dumps(found, indent=1) + "\n")
