"""The constraint program for the schedules of a pipeline, for the CP-SAT solver of OR-Tools."""

# The solver's package is only partly typed.
# pyright: basic

from collections.abc import Mapping
from dataclasses import dataclass

from ortools.sat.python import cp_model
from reference.solver_process import solved

from penstock.schedule.action import Action, ActionKind
from penstock.schedule.bound import arcs_of, windows_of
from penstock.schedule.shape import PipelineShape

__all__ = ["Solution", "solve"]


@dataclass(frozen=True)
class Solution:
    """The start of every action, and a lower bound on the makespan, in the units of the shape."""

    start: dict[Action, int]
    bound: int


def solve(
    shape: PipelineShape,
    *,
    split: bool,
    known: Mapping[Action, int],
    longest: int,
    least: int,
    time_limit_s: float,
    work_limit: float,
) -> Solution:
    """Start times of least makespan, for a shape whose costs and memory are integers.

    ``known`` are the starts of a valid schedule with makespan ``longest``. No schedule takes less
    than ``least``. The search returns the best so far after ``time_limit_s`` seconds, or after
    ``work_limit`` units of the solver's deterministic time, which is the same on every machine.
    """
    windows = windows_of(shape, split=split)
    model = cp_model.CpModel()
    seconds = {a: round(shape.cost(a.stage).seconds(a.kind)) for a in windows.head_s}
    start = {
        action: model.new_int_var(
            round(head), longest - round(windows.tail_s[action]) - seconds[action], str(action)
        )
        for action, head in windows.head_s.items()
    }
    for before, after, transfer in arcs_of(shape, split=split):
        model.add(start[after] >= start[before] + seconds[before] + round(transfer))
    recomputed = add_devices(model, shape, start, seconds, longest, split)
    add_memory(model, shape, start, seconds, longest, split)
    makespan = model.new_int_var(least, longest, "makespan")
    for action in start:
        if action.kind in ("W", "B"):
            model.add(makespan >= start[action] + seconds[action])
    model.minimize(makespan)
    for action, variable in start.items():
        model.add_hint(variable, known[action])
    for action, (variable, present) in recomputed.items():
        model.add_hint(present, action in known)
        if action in known:
            model.add_hint(variable, known[action])
    answer = solved(str(model.proto), work_limit=work_limit, time_limit_s=time_limit_s)
    if answer is None:
        return Solution(dict(known), least)
    starts = {action: answer.values[variable.index] for action, variable in start.items()}
    return Solution(starts, max(least, round(answer.bound)))


def add_devices(model, shape: PipelineShape, start, seconds, longest: int, split: bool):
    """No two actions of a device group overlap. Returns the start and the presence of every R.

    On a stage that recomputes there are two cases. With R, nothing runs between R and the backward.
    Without R, nothing runs between F and the backward. Waits count as part of the interval.
    """
    intervals = [[] for _ in range(shape.groups)]
    recomputed = {}
    for action, begin in start.items():
        if not (shape.recomputes(action.stage) and action.kind != "W"):
            group = shape.group_of(action.stage, action.micro_batch)
            intervals[group].append(
                model.new_fixed_size_interval_var(begin, seconds[action], f"at {action}")
            )
    back: ActionKind = "I" if split else "B"
    for forward, begin in start.items():
        stage, m = forward.stage, forward.micro_batch
        if forward.kind != "F" or not shape.recomputes(stage):
            continue
        backward, again = Action(back, stage, m), Action("R", stage, m)
        present = model.new_bool_var(f"has {again}")
        again_begin = model.new_int_var(0, longest, str(again))
        end = start[backward] + seconds[backward]
        model.add(again_begin >= begin + seconds[forward])
        model.add(start[backward] >= again_begin + seconds[forward]).only_enforce_if(present)
        one = model.new_optional_fixed_size_interval_var(
            begin, seconds[forward], present, f"at {forward}"
        )
        intervals[shape.group_of(stage, m)] += [
            one,
            span(model, again_begin, end, longest, present),
            span(model, begin, end, longest, present.negated()),
        ]
        recomputed[again] = (again_begin, present)
    for of_group in intervals:
        model.add_no_overlap(of_group)
    return recomputed


def span(model, begin, end, longest: int, present):
    """An optional interval of any length between two expressions."""
    length = model.new_int_var(0, longest, "")
    return model.new_optional_interval_var(begin, length, end, present, "")


def add_memory(model, shape: PipelineShape, start, seconds, longest: int, split: bool) -> None:
    """At any time a group's saved bytes fit, and no stage exceeds its in-flight limit.

    Where a group has a single stage and W needs all that F saved, the waits of `arcs_of` say the
    same. This is the form that holds in general.
    """
    held = [[] for _ in range(shape.groups)]
    in_flight = {}
    last: ActionKind = "W" if split else "B"
    for forward, begin in start.items():
        if forward.kind != "F":
            continue
        stage, m = forward.stage, forward.micro_batch
        group, cost = shape.group_of(stage, m), shape.cost(stage)
        free = start[Action(last, stage, m)] + seconds[Action(last, stage, m)]
        middle = free
        if split:
            middle = start[Action("I", stage, m)] + seconds[Action("I", stage, m)]
        if shape.memory_bytes:
            length = model.new_int_var(0, longest, "")
            held[group].append(
                (model.new_interval_var(begin, length, middle, ""), round(cost.saved_bytes))
            )
            if split:
                length = model.new_int_var(0, longest, "")
                held[group].append(
                    (
                        model.new_interval_var(middle, length, free, ""),
                        round(cost.bytes_until_weight_backward),
                    )
                )
        if shape.in_flight_limit and shape.group_of(stage) == shape.group_of(stage, 1):
            length = model.new_int_var(0, longest, "")
            in_flight.setdefault(stage, []).append(model.new_interval_var(begin, length, free, ""))
    for group, pairs in enumerate(held):
        if pairs:
            model.add_cumulative(
                [interval for interval, _ in pairs],
                [bytes_ for _, bytes_ in pairs],
                round(shape.memory_bytes[group]),
            )
    for stage, spans in in_flight.items():
        if shape.mirrored:
            model.add_cumulative(spans, [1] * len(spans), shape.limit(stage))
