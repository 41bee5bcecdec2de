"""Plans simulated by their loads alone: the load by hand, and what walks over it find."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from bound_strategies import bound_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from point_loads import load_of, question, straight

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.collectives import all_reduce_s
from penstock.core import native
from penstock.core.native import Found, Point, random_walk
from penstock.costs.lower_bound import plan_bound_s
from penstock.costs.tables import search_costs
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.arms import arms_of
from penstock.planners.search.points import plan_of_point, point_of
from penstock.planners.search.search import KINDS
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.shape import PlacementStyle
from penstock.simulate.score import make_score

MEGABYTE = 1_000_000


def problem(message_bytes: float, links: tuple[Link, ...] = ()) -> PlanningProblem:
    """Four layers of 1 s forward and 2 s backward a sample; six devices, each a host of its own."""
    cost = Affine(per_sample=1.0)
    layer = LayerCost("layer", cost, cost, cost, 30 * MEGABYTE)
    size = Affine(per_sample=message_bytes)
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(3))
    hosts = tuple(Host(f"h{i}", (Device("d", 1e12),), 1e9, 1.0 * MEGABYTE) for i in range(6))
    profile = ModelProfile("four", (layer,) * 4, edges)
    return PlanningProblem(profile, Cluster("six", hosts, links), 16, (1, 2))


def plan_on(*devices: int, micro_batches: int = 16) -> Plan:
    """Stages of equally many layers, one device each."""
    each = 4 // len(devices)
    stages = [Stage(range(i * each, (i + 1) * each), (d,), (1,)) for i, d in enumerate(devices)]
    return Plan(tuple(stages), micro_batches, 1, "1f1b")


@pytest.mark.parametrize(
    ("schedule", "style", "devices"),
    [("interleaved", "looped", (0, 1, 0, 1)), ("zb-v", "folded", (0, 1, 1, 0))],
)
def test_a_tensor_goes_to_a_group_once_in_loads_quick_plays_and_simulations(
    schedule: str, style: PlacementStyle, devices: tuple[int, ...]
) -> None:
    near = replace(problem(7.0 * MEGABYTE), schedules=(schedule,))
    size, further = Affine(per_sample=7.0 * MEGABYTE), 3 if style == "looped" else 2
    edges = (*near.profile.edges, Edge(0, further, "tensor0", size, size))
    sent_once = replace(near, profile=replace(near.profile, edges=edges))
    other = (*edges[:-1], Edge(0, further, "another", size, size))
    sent_twice = replace(near, profile=replace(near.profile, edges=other))
    plan = replace(plan_on(*devices), schedule=schedule)
    found: list[list[float]] = []
    for asked in (near, sent_once, sent_twice):
        (arm, *_) = [arm for arm in arms_of(asked, (schedule,)) if arm.style == style]
        point = point_of(asked, arm.rules, plan)
        assert point is not None
        load_s = native.load_s(search_costs(asked), arm.rules, point, question(asked))
        found.append([load_s, arm.play.seconds(point, inf), make_score(asked)(plan)])
    assert found[1] == pytest.approx(found[0])
    assert all(twice > once for once, twice in zip(found[1], found[2], strict=True))


def test_a_device_that_computes_all_the_time_is_the_load():
    asked = problem(0.25 * MEGABYTE)
    # The second stage starts after 2 s and a message, and its gradient still goes back.
    assert load_of(asked, plan_on(0, 1)) == pytest.approx(2 + 0.25 + 16 * 6 + 0.25 + 4)


def test_an_engine_that_sends_all_the_time_is_the_load():
    asked = problem(7.0 * MEGABYTE)
    # The middle stages receive an activation and a gradient for each micro-batch.
    seconds = load_of(asked, plan_on(0, 1, 2, 3))
    assert seconds >= 16 * 2 * 7
    deep = replace(plan_on(0, 1, 2, 3), schedule="gpipe")
    assert seconds <= make_score(asked)(deep) * 1.05


def test_with_a_power_full_resources_beside_the_fullest_count_too():
    asked = problem(7.0 * MEGABYTE)
    fullest = load_of(asked, plan_on(0, 1, 2, 3))
    assert load_of(asked, plan_on(0, 1, 2, 3), 10.0) > fullest
    assert load_of(asked, plan_on(0, 1, 2, 3), 1000.0) == pytest.approx(fullest, rel=0.01)


@pytest.mark.parametrize("power", [1.0, 15.0, 30.0])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_norm_of_equal_loads_grows_with_their_number(stages: int, power: float):
    """Stages that compute all the time and nothing else; each resource alone is known by hand."""
    second = Affine(per_sample=1.0)
    layer = LayerCost("layer", second, second, Affine())
    host = Host("one", (Device("d", 1e12),) * 4, 1e9)
    asked = PlanningProblem(
        ModelProfile("four", (layer,) * 4), Cluster("one", (host,)), 16, (1,), schedules=("1f1b",)
    )
    each = 4 // stages
    loads: list[float] = []
    for s in range(stages):
        # Forwards before it, all micro-batches, and backwards after it.
        loads.append(s * each + 16 * 2 * each + s * each)
        loads.append((s * each if s else 2 * (4 - each) + each) + each + s * each)
        loads.append(s * each + each + (s * each if s else 0))
    expected_s = (sum(load**power for load in loads) / 3) ** (1 / power)
    assert load_of(asked, plan_on(*range(stages)), power) == pytest.approx(expected_s)


def two_hosts_of_four(layers: ModelProfile) -> PlanningProblem:
    """Fast links inside, ports of a megabyte a second between."""
    devices = (Device("d", 1e12),) * 4
    hosts = tuple(Host(f"h{i}", devices, 1e12, 1.0 * MEGABYTE) for i in range(2))
    return PlanningProblem(layers, Cluster("two", hosts), 12, (3,))


@pytest.mark.parametrize("groups", [((0, 1, 4), (2, 3, 5)), ((0, 4, 1), (2, 5, 3))])
def test_all_reduces_take_turns_on_ports_wherever_a_stage_leaves_its_host(
    groups: tuple[tuple[int, ...], ...],
):
    # Two stages over both hosts: their devices are in order of hosts, or begin and end on one.
    cost = Affine(per_sample=1e-3)
    layer = LayerCost("layer", cost, cost, cost, 20 * MEGABYTE)
    asked = two_hosts_of_four(ModelProfile("two", (layer, layer)))
    stages = tuple(Stage(range(s, s + 1), group, (1, 1, 1)) for s, group in enumerate(groups))
    plan = Plan(stages, 4, 3, "1f1b")
    reduced_s = all_reduce_s(asked.cluster, groups[0], 20 * MEGABYTE)
    seconds = load_of(asked, plan)
    assert 2 * reduced_s <= seconds <= make_score(asked)(plan) * 1.01


@pytest.mark.parametrize("half_duplex", [False, True])
def test_half_duplex_hosts_send_and_receive_in_turns(half_duplex: bool):
    # Four messages of 7 s for each micro-batch pass the device in the middle, two each way.
    asked = problem(7.0 * MEGABYTE)
    hosts = tuple(replace(host, half_duplex=half_duplex) for host in asked.cluster.hosts)
    asked = replace(asked, cluster=replace(asked.cluster, hosts=hosts), micro_batch_sizes=(1,))
    ends = [range(1), range(1, 3), range(3, 4)]
    plan = Plan(tuple(Stage(run, (i,), (1,)) for i, run in enumerate(ends)), 16, 1, "gpipe")
    seconds, judged_s = load_of(asked, plan), make_score(asked)(plan)
    messages = 4 if half_duplex else 2
    assert 16 * messages * 7 <= seconds <= judged_s * 1.05
    assert judged_s < 1.2 * seconds


def test_at_a_steady_pace_no_all_reduce_starts_before_the_last_micro_batches() -> None:
    # Two stages, messages take no time. The wide one has three layers on three devices, a row each:
    # 3 s forward, 6 s backward. The other has a layer with 2 s forward a row on one device: 6 s
    # forward, 6 s backward. The wide one has three buckets of 40 s each on a ring of three; the
    # first is complete when a third of the last backward is done.
    asked = replace(problem(0.0), global_batch=18, micro_batch_sizes=(3,))
    equal, reduced_s = asked.profile.layers[:3], 3 * 40 - 4
    slow = replace(equal[0], forward_s=Affine(per_sample=2.0))
    wide, narrow = ((0, 1, 2), (1, 1, 1)), ((3,), (3,))

    def load(stages: tuple[Stage, ...], layers: tuple[LayerCost, ...], *, steady: bool) -> float:
        made = replace(asked, profile=replace(asked.profile, layers=layers))
        return load_of(made, Plan(stages, 6, 3, "1f1b"), steady=steady)

    first = (Stage(range(3), *wide), Stage(range(3, 4), *narrow))
    # The narrow stage computes 72 s, from 3 s on. Its last gradient still goes back.
    assert load(first, (*equal, slow), steady=False) == pytest.approx(3 + 72 + 6 + reduced_s)
    # At a steady pace the same, and the way of one micro-batch through the narrow stage.
    assert load(first, (*equal, slow), steady=True) == pytest.approx(3 + 72 + 6 + 12 + reduced_s)

    last = (Stage(range(1), *narrow), Stage(range(1, 4), *wide))
    # On its own the wide stage is done with its work before the narrow one in front of it.
    assert load(last, (slow, *equal), steady=False) == pytest.approx(6 + 54 + reduced_s)
    # At a steady pace it is not. The way back of twice 6 s hides a part of its all-reduce.
    after_s = 9 + reduced_s - 12
    assert load(last, (slow, *equal), steady=True) == pytest.approx(72 + after_s)


def test_a_stage_that_fits_nowhere_has_no_load():
    asked = problem(1.0)
    host = Host("small", (Device("d", 1.0),) * 6, 1e9)
    assert load_of(replace(asked, cluster=Cluster("small", (host,))), plan_on(0, 1)) == np.inf


def walked(asked: PlanningProblem, start: Plan, seed: int, steps: int = 300) -> list[Found]:
    """Return what a walk from a plan finds."""
    rules, point = straight(asked, start)
    kind = question(asked, KINDS[seed][0], steady=KINDS[seed][1])
    return random_walk(search_costs(asked), rules, point, kind, 0.05, steps, seed)


@settings(max_examples=40, deadline=None)
@given(asked=st.one_of(problems(), bound_problems()), seed=st.integers(0, 3))
def test_a_walk_costs_only_what_changes_and_its_loads_are_those_of_whole_plans(
    asked: PlanningProblem, seed: int
) -> None:
    start = start_of(asked)
    rules, _ = straight(asked, start)
    kind = question(asked, KINDS[seed][0], steady=KINDS[seed][1])
    for found in walked(asked, start, seed):
        assert native.load_s(search_costs(asked), rules, found.point, kind) == found.seconds


@pytest.mark.parametrize(("style", "rounds"), [("looped", 2), ("folded", 2), ("folded", 4)])
def test_walks_serve_placements_with_several_stages_on_a_group(
    style: PlacementStyle, rounds: int
) -> None:
    """No load is above the quick simulation of the same point by much: it is a kind of bound."""
    asked = problem(0.25 * MEGABYTE)
    asked = replace(asked, profile=replace(asked.profile, layers=asked.profile.layers * 4))
    schedules = {"looped": "interleaved", "folded": "hanayo"}
    (arm,) = [
        arm
        for arm in arms_of(asked, (schedules[style],))
        if (arm.style, arm.rounds) == (style, rounds)
    ]
    point = Point(list(range(6)), [0, 1, 2], [], [0, 0], [0, 0], size=0, depth=7)
    arm.play.even_cuts(point)
    found = random_walk(search_costs(asked), arm.rules, point, question(asked), 0.05, 2000, 1)
    assert found
    for one in found:
        assert len(one.point.cuts) - 1 == one.point.groups * rounds
        assert one.seconds <= arm.play.seconds(one.point, np.inf) * 1.05


def start_of(asked: PlanningProblem) -> Plan:
    """All layers on the first device."""
    size = asked.micro_batch_sizes[0]
    stage = Stage(range(len(asked.profile.layers)), (0,), (size,))
    return Plan((stage,), asked.global_batch // size, size, asked.schedules[0])


def walked_plans(asked: PlanningProblem, start: Plan) -> list[Plan]:
    """Return the plans of walks of every kind, under the first schedule."""
    rules, _ = straight(asked, start)
    found = [one for seed in range(4) for one in walked(asked, start, seed, 20_000)]
    return [plan_of_point(asked, rules, one.point, asked.schedules[0], ()) for one in found]


def test_walks_find_the_chain_of_fast_links():
    chain = (3, 0, 5, 2)
    fast = tuple(
        Link(a, b, 1e3 * MEGABYTE, 0.0)
        for one, other in pairwise(chain)
        for a, b in ((one, other), (other, one))
    )
    asked = replace(problem(3.0 * MEGABYTE, fast), micro_batch_sizes=(1,))
    start = plan_on(0, 1, 2, 3)
    plans = walked_plans(asked, start)
    score = make_score(asked)
    best = min(plans, key=score)
    assert [stage.devices[0] for stage in best.stages] in (list(chain), list(chain[::-1]))
    assert score(best) < score(start)
    for plan in plans:
        assert plan_bound_s(asked, plan) <= score(plan)
        assert plan.stages[-1].layers.stop == 4


def test_where_nothing_takes_time_walks_end_too() -> None:
    asked = problem(0.0)
    free = LayerCost("free", Affine(), Affine(), Affine(), 0)
    asked = replace(asked, profile=ModelProfile("free", (free,) * 4, ()))
    plans = walked_plans(asked, plan_on(0, 1))
    assert min(map(make_score(asked), plans)) == 0


INTERRUPTED = """
import _thread, signal, threading
from penstock.cluster.toml_file import find_cluster
from penstock.plan.problem import PlanningProblem
from penstock.profile.find import find_profile
from penstock.planners.search.search import search_steps
from penstock.simulate.score import make_score

# A shell's background jobs ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
problem = PlanningProblem(find_profile("vgg-16"), find_cluster("dapple-b"), 64, (8,))
list(search_steps(problem, make_score(problem), 0.01))  # what it imports is there
threading.Timer(0.05, _thread.interrupt_main).start()
try:
    while True:
        list(search_steps(problem, make_score(problem)))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_during_a_walk_is_an_exception_and_no_crash() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
