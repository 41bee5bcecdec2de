"""The engine is the plain simulator, to rounding; and the plain simulator keeps its rules."""

from itertools import pairwise
from math import isclose

import numpy as np
import pytest
from hypothesis import given, settings
from reference import plain_simulator as plain
from reference.plain_workload import PlainWorkload
from strategies import Case, cases

from penstock.plan.ordering import order_of
from penstock.schedule.action import Action
from penstock.schedule.schedule import parse_schedule
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
        compiled.iteration_s(workload.parts, compiled.orders_of(workload)),
        trace.iteration_s,
        rel_tol=RELATIVE,
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_engine_port_or_compute_stream_does_two_things_at_once(case: Case) -> None:
    workload = made(case)
    trace = plain.play(workload)
    occupied: dict[object, list[tuple[float, float]]] = {}
    transfers = [r for r in workload.occupied_by_messages for _ in range(workload.micro_batches)]
    for group, resources in zip(workload.reductions, workload.occupied_by_reductions, strict=True):
        transfers += [resources] * len(group.buckets)
    for resources, span in zip(transfers, trace.messages + trace.buckets, strict=True):
        if span[1] > span[0]:
            for resource in resources:
                occupied.setdefault(resource, []).append(span)
    for position, first in enumerate(first_actions(workload)):
        order = workload.schedule.of(workload.devices[position].group)
        occupied["compute", position] = [
            *trace.actions[first : first + len(order)],
            trace.steps[position],
        ]
    for resource, used in occupied.items():
        used.sort()
        for (_, end_s), (start_s, _) in pairwise(used):
            assert start_s >= end_s - ABSOLUTE_S, resource


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


@settings(max_examples=60, deadline=None)
@given(cases())
def test_an_iteration_is_never_shorter_than_the_work_of_its_busiest_device(case: Case) -> None:
    workload = made(case)
    busiest_s = max(
        sum(seconds_of(workload, work, action) for action in workload.schedule.of(work.group))
        + work.step_s
        for work in workload.devices
    )
    assert plain.play(workload).iteration_s >= busiest_s * (1 - RELATIVE) - ABSOLUTE_S


@pytest.mark.parametrize("play", [plain.play, compiled.play])
def test_split_backwards_play_in_both_engines(play: object) -> None:
    from penstock.cluster.cluster import Cluster, Device, Host
    from penstock.plan.plan import Plan, Stage
    from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

    layer = LayerCost("l", Affine(1.0), Affine(1.0), Affine(1.0))
    profile = ModelProfile("m", (layer,) * 2, (Edge(0, 1, "t", Affine(), Affine()),))
    device = Device("d", 1e9)
    cluster = Cluster("c", (Host("h", (device,) * 2, float("inf")),))
    plan = Plan((Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))), 2, 1, "1f1b")
    schedule = parse_schedule("""
        stage 0   F0 F1 I0 I1 W0 W1
        stage 1   F0 I0 F1 I1 W0 W1
    """)
    workload = workload_of(plan, profile, cluster, schedule)
    # Stage 0: F0 0-1, F1 1-2, then I0 waits for stage 1's I0 (ends 3) and I1 (ends 5).
    trace = play(workload)  # type: ignore[operator]
    assert trace.actions[:6] == ((0, 1), (1, 2), (3, 4), (5, 6), (6, 7), (7, 8))
    assert trace.iteration_s == 8
