"""Schedules that are no part of the package: what they return is checked before it is used."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, TypeVar

from penstock.errors import BadInput, PenstockError, PluginFailed
from penstock.schedule.family import Family
from penstock.schedule.schedule import Schedule, ScheduleFunction
from penstock.schedule.shape import PipelineShape, placement_of_style
from penstock.schedule.validate import validate

AnySchedule: TypeAlias = ScheduleFunction | Family
"""A function from a shape to an order; or a record that also says which placement it needs."""

Result = TypeVar("Result")

TRIED_MICRO_BATCHES = 4


def called(what: str, call: Callable[[], object], kind: type[Result]) -> Result:
    """Return the result of a function from outside."""
    try:
        found = call()
    except PenstockError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginFailed(
            f"{what} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
    if not isinstance(found, kind):
        wrong = type(found).__name__
        raise PluginFailed(f"{what} returned {wrong}; let it return a {kind.__name__}")
    return found


def checked_family(name: str, schedule: object) -> Family:
    """The record of a schedule from outside, tried on two groups of devices at once."""
    family = schedule if isinstance(schedule, Family) else None
    make = family.make if family else schedule
    if not callable(make):
        raise BadInput(f"schedule '{name}' is a {type(schedule).__name__}, not a function")

    def checked(shape: PipelineShape) -> Schedule:
        return called(f"schedule '{name}'", lambda: make(shape), Schedule)

    found = replace(family, make=checked) if family else Family(checked)
    rounds = found.rounds or (1 if found.placement in ("straight", "mirrored") else 2)
    placement = placement_of_style(found.placement, 2, rounds) if rounds > 1 else ()
    mirrored = found.placement == "mirrored"
    shape = PipelineShape(2 * rounds, TRIED_MICRO_BATCHES, placement, mirrored=mirrored)
    try:
        validate(checked(shape), shape)
    except BadInput as cause:
        raise BadInput(
            f"schedule '{name}' with {shape.stages} stages and {shape.micro_batches} "
            f"micro-batches: {cause}"
        ) from None
    return found
