"""The engine is the plain simulator, to rounding; and the plain simulator shares cores."""

from itertools import pairwise
from math import isclose

import numpy as np
from hypothesis import given, settings
from reference import plain_simulator as plain
from reference.plain_workload import PlainWorkload
from strategies import Case, cases

from penstock.plan.ordering import order_of
from penstock.schedule.action import Action
from penstock.simulate import compiled
from penstock.simulate.catalogue import workload_of
from penstock.simulate.trace import Trace, first_actions
from penstock.simulate.workload import DeviceWork, Workload

RELATIVE = 1e-9
ABSOLUTE_S = 1e-9


def made(case: Case) -> PlainWorkload:
    """The workload of a case."""
    order = order_of(case.plan)
    return PlainWorkload.of(workload_of(case.plan, case.profile, case.cluster, order))


def assert_equal(one: Trace, other: Trace) -> None:
    """Every span the same, not only the end."""
    for field in ("actions", "messages", "buckets", "steps", "iteration_s"):
        np.testing.assert_allclose(
            getattr(one, field), getattr(other, field), RELATIVE, ABSOLUTE_S, err_msg=field
        )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_compiled_engine_equals_the_plain_one(case: Case) -> None:
    workload = made(case)
    trace = plain.play(workload)
    assert_equal(compiled.play(workload), trace)
    assert isclose(
        compiled.played_s(workload.parts, compiled.orders_of(workload)),
        trace.iteration_s,
        rel_tol=RELATIVE,
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_computing_devices_of_a_host_share_its_cores_exactly(case: Case) -> None:
    """Integrated over its span, a device's share of the host gives the seconds of its work."""
    workload = made(case)
    trace = plain.play(workload)
    computing: list[list[tuple[float, float]]] = [[] for _ in workload.host_slots]
    for position, first in enumerate(first_actions(workload)):
        work = workload.devices[position]
        count = len(workload.schedule.of(work.group))
        computing[workload.hosts[position]] += [
            *trace.actions[first : first + count],
            trace.steps[position],
        ]
    for position, first in enumerate(first_actions(workload)):
        work = workload.devices[position]
        host = workload.hosts[position]
        slots = workload.host_slots[host] or len(workload.devices)
        for index, action in enumerate(workload.schedule.of(work.group)):
            start_s, end_s = trace.actions[first + index]
            done_s = share_s(computing[host], slots, start_s, end_s)
            needed_s = seconds_of(workload, work, action)
            assert isclose(done_s, needed_s, rel_tol=1e-6, abs_tol=1e-6)


def seconds_of(workload: Workload, work: DeviceWork, action: Action) -> float:
    """Seconds of an action at full speed."""
    return work.replicas[workload.instances.of(action)].work.seconds(action.kind)


def share_s(
    computing: list[tuple[float, float]], slots: int, start_s: float, end_s: float
) -> float:
    """Seconds of work that one device gets done between two times."""
    times = sorted(
        {start_s, end_s, *(t for span in computing for t in span if start_s < t < end_s)}
    )
    done_s = 0.0
    for lo, hi in pairwise(times):
        middle = (lo + hi) / 2
        running = sum(start < middle < end for start, end in computing)
        done_s += (hi - lo) * min(1.0, slots / max(1, running))
    return done_s
