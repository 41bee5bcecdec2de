"""The engine is the plain simulator, to rounding; and the plain simulator shares cores."""

from itertools import pairwise
from math import isclose

from hypothesis import given, settings
from reference import plain_simulator as plain
from reference.plain_workload import PlainWorkload
from reference.same_spans import assert_engine_plays
from strategies import Case, cases

from penstock.plan.ordering import order_of
from penstock.simulate.catalogue import workload_of
from penstock.simulate.trace import spans_of_actions


def made(case: Case) -> PlainWorkload:
    """The workload of a case."""
    order = order_of(case.plan)
    return PlainWorkload.of(workload_of(case.plan, case.profile, case.cluster, order))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_compiled_engine_equals_the_plain_one(case: Case) -> None:
    workload = made(case)
    assert_engine_plays(workload, plain.play(workload))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_computing_devices_of_a_host_share_its_cores_exactly(case: Case) -> None:
    """Integrated over its span, a device's share of the host gives the seconds of its work."""
    workload = made(case)
    trace = plain.play(workload)
    computing: list[list[tuple[float, float]]] = [[] for _ in workload.host_slots]
    played = list(zip(spans_of_actions(workload, trace), workload.hosts, strict=True))
    for ((_, ((_, spans),)), host), step in zip(played, trace.steps, strict=True):
        computing[host] += [*spans, step]
    for (work, ((actions, spans),)), host in played:
        slots = workload.host_slots[host] or len(workload.devices)
        for action, (start_s, end_s) in zip(actions, spans, strict=True):
            done_s = share_s(computing[host], slots, start_s, end_s)
            needed_s = work.replicas[workload.instances.of(action)].work.seconds(action.kind)
            assert isclose(done_s, needed_s, rel_tol=1e-6, abs_tol=1e-6)


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
