"""The bound for every order: random orders, random plans under every family, cases by hand."""

from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near_tight_plans import near_tight
from random_pipelines import random_pipeline

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.costs.link_bound import CoreWork, hosts_of
from penstock.costs.lower_bound import (
    ANY_ORDER,
    WHOLE_BACKWARDS,
    bound_of_size,
    gap,
    lower_bound,
)
from penstock.costs.schedule_costs import with_costs
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.catalogue import workload_of
from penstock.simulate.compiled import play
from penstock.simulate.score import make_score

ROUNDING = 1e-9

NAMES = (
    "gpipe",
    "1f1b",
    "zb-h2",
    "zero-bubble",
    "interleaved",
    "breadth-first",
    "hanayo",
    "zb-v",
    "v-min",
    "chimera",
    "dualpipe",
    "dualpipe-v",
    "list",
)
"""At least one of each kind: whole and split, every placement, both directions, made for costs."""


def random_order_beats_it_not(seed: int) -> bool:
    """A random pipeline of any kind in a random order; False where it is one without a flush."""
    random = Random(seed)
    drawn = random_pipeline(random, slots=random.random() < 0.3)
    if drawn.schedule.weights.micro_batches_per_update:
        return False
    cluster, plan = random_links(random, drawn.cluster), drawn.plan
    seconds = play(workload_of(plan, drawn.profile, cluster, drawn.schedule)).iteration_s
    problem = PlanningProblem(
        drawn.profile,
        cluster,
        plan.global_batch,
        (plan.micro_batch_size,),
        schedules=("chimera",) if plan.mirrored else ("zb-v",),
    )
    assert_kept(problem, seconds)
    return True


def random_links(random: Random, cluster: Cluster) -> Cluster:
    """Free links, or fast ones, or some that differ from the rule."""
    chance, count = random.random(), len(cluster.devices)
    if chance < 0.5:
        factor = random.choice([1.0, 1e3, 1e9])
        hosts = (
            replace(
                host,
                link_latency_s=0.0,
                port_latency_s=0.0,
                link_bytes_per_s=host.link_bytes_per_s * factor,
                port_bytes_per_s=host.port_bytes_per_s * factor,
            )
            for host in cluster.hosts
        )
        return replace(cluster, hosts=tuple(hosts))
    if chance < 0.7 and count > 1:
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        chosen = random.sample(pairs, random.randint(1, len(pairs)))
        rates = (Link(i, j, random.uniform(2, 1e7), random.uniform(0, 0.1)) for i, j in chosen)
        return replace(cluster, links=tuple(rates))
    return cluster


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_order_of_any_plan_beats_the_bound(seed: int):
    random_order_beats_it_not(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_no_order_of_fifteen_thousand_plans_beats_the_bound(part: int):
    tried = sum(random_order_beats_it_not(seed) for seed in range(part * 900, part * 900 + 900))
    assert tried >= 750


def assert_kept(problem: PlanningProblem, seconds: float) -> None:
    """The bound does not refute that a plan of ``problem`` takes ``seconds``."""
    assert lower_bound(problem).seconds <= seconds * (1 + ROUNDING)


def near_tight_seconds(seed: int) -> tuple[PlanningProblem, float]:
    """The question of a plan that loses little, and its seconds; infinite where it cannot run."""
    case = near_tight(Random(seed))
    return case.problem, seconds_of(case.plan, case.problem, make_score(case.problem))


def near_tight_is_kept(seed: int) -> bool:
    """Whether a plan that loses little can be played; then the bound is not above it."""
    problem, seconds = near_tight_seconds(seed)
    if seconds < inf:
        assert_kept(problem, seconds)
    return seconds < inf


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_plan_that_loses_little_beats_the_bound(seed: int):
    near_tight_is_kept(seed)


def test_plans_that_lose_little_are_near_the_bound():
    # Else they would not tell whether a term is too large.
    cases = [near_tight_seconds(seed) for seed in range(60)]
    gaps = [gap(seconds, lower_bound(problem).seconds) for problem, seconds in cases]
    assert sum(gap < 0.01 for gap in gaps) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_none_of_twelve_thousand_plans_that_lose_little_beats_the_bound(part: int):
    tried = sum(near_tight_is_kept(seed) for seed in range(part * 600, part * 600 + 600))
    assert tried >= 550


def seconds_of(plan: Plan, problem: PlanningProblem, score) -> float:
    """The score of a plan; infinite where its family cannot play it."""
    try:
        return score(with_costs(problem, plan))
    except PenstockError:
        return inf


def uniform(layers: int, *, parameter_bytes: int = 0, message: float = 0.0) -> ModelProfile:
    """Layers of one second a row for each of F, I and W."""
    second = Affine(per_sample=1.0)
    costs = tuple(
        LayerCost(f"layer{i}", second, second, second, parameter_bytes) for i in range(layers)
    )
    tensor = Affine(per_sample=message)
    edges = tuple(Edge(i, i + 1, f"tensor{i}", tensor, tensor) for i in range(layers - 1))
    return ModelProfile("uniform", costs, edges)


def equal_hosts(count: int, rate: float = 1e12, memory: float = 1e12) -> Cluster:
    """One device a host."""
    host = (Device("device", memory),)
    return Cluster("equal", tuple(Host(f"host{i}", host, rate, rate) for i in range(count)))


def every_order(profile: ModelProfile, cluster: Cluster, batch: int, size: int = 1):
    """The problem that allows every family which flushes."""
    return PlanningProblem(profile, cluster, batch, (size,), schedules=NAMES)


def test_a_mirrored_pipeline_holds_a_layer_twice():
    # One layer of nearly all work, on two devices: half of the micro-batches pass each way.
    cost = Affine(per_sample=10.0)
    heavy = LayerCost("heavy", cost, cost, cost)
    light = replace(uniform(1).layers[0], name="light")
    profile = ModelProfile("two", (light, heavy), (Edge(0, 1, "tensor", Affine(), Affine()),))
    problem = replace(every_order(profile, equal_hosts(2), 8), schedules=("dualpipe",))
    plan = Plan(tuple(Stage(range(i, i + 1), (i,), (1,)) for i in range(2)), 8, 1, "dualpipe")
    seconds = make_score(problem)(plan)
    assert seconds < 8 * 30
    assert lower_bound(problem).seconds <= seconds
    assert lower_bound(replace(problem, schedules=("zb-v",))).seconds >= 8 * 30


def seconds_of_link(rate: float, parameters_s: float = 1e6) -> float:
    """The bound for two hosts of one device, and two layers of 3 s a row, of which there are 8.

    A row of 1 MB goes down, its gradient up, at ``rate`` MB a second. A layer's parameters take so
    long to pass the link.
    """
    layers = uniform(2, parameter_bytes=round(parameters_s * rate * 1e6), message=1e6)
    problem = every_order(layers, equal_hosts(2, rate * 1e6, memory=1e15), 8)
    return lower_bound(problem).seconds


def test_where_links_are_slow_one_host_does_all_the_work() -> None:
    # Two stages would take 8 rows of 1 MB each way, 80 s; one host 8 rows of 6 s.
    assert seconds_of_link(0.1) == pytest.approx(48, rel=2e-4)


def test_a_host_with_a_part_of_the_model_passes_every_row() -> None:
    # 8 MB each way at 0.25 MB/s. Both devices together could do all work in 24 s.
    assert seconds_of_link(0.25) == pytest.approx(32, rel=2e-4)


def test_hosts_with_the_whole_model_sum_all_gradients_after_all_forwards() -> None:
    # 8 rows of 2 s on two devices, then twice 10 s of a ring of two.
    assert seconds_of_link(0.1, parameters_s=10) == pytest.approx(8 + 20, rel=2e-4)


def test_a_host_that_shares_few_layers_does_little_of_the_work() -> None:
    """One layer of 24 s in all has 1 s of gradients, the other one far too many."""
    light = uniform(2, parameter_bytes=10**5, message=1e6)
    heavy = replace(light.layers[1], parameter_bytes=10**12)
    problem = every_order(
        replace(light, layers=(light.layers[0], heavy)), equal_hosts(2, 1e5, memory=1e15), 8
    )
    # Of T seconds, sums leave T - 1 for rows: a tenth of a row each second, of 3 s of work.
    seconds = 48 / 1.3 + 0.3 / 1.3
    assert lower_bound(problem).seconds == pytest.approx(seconds, rel=2e-4)


def test_a_model_that_fits_no_host_is_not_left_on_one() -> None:
    profile = uniform(2, parameter_bytes=10**8, message=1e6)
    roomy, tight = (equal_hosts(2, 0.1e6, memory=memory) for memory in (9e8, 7e8))
    assert lower_bound(every_order(profile, roomy, 8)).seconds == pytest.approx(48, rel=2e-4)
    # Each layer alone passes 8 rows.
    assert lower_bound(every_order(profile, tight, 8)).seconds == pytest.approx(80, rel=2e-4)


def test_any_number_of_hosts_may_hold_a_layer_alone_if_they_pass_no_row_more_than_time_allows():
    hosts = hosts_of(equal_hosts(4, 0.1e6))
    work = CoreWork(hosts, 1, 1e6, np.ones(2), np.ones(2), 2.0, 0.0)
    # A row of 1 MB goes in and out of each host in 10 s.
    assert [work.alone(seconds) for seconds in (0.0, 5.0, 10.0)] == [0, 2, 4]


def test_a_layer_that_fits_no_device_is_an_infinite_bound() -> None:
    bound = lower_bound(every_order(uniform(2, parameter_bytes=10), equal_hosts(2, memory=39.0), 4))
    assert bound.seconds == inf and "memory: layer 'layer0'" in bound.argument
    fits = every_order(uniform(2, parameter_bytes=10), equal_hosts(2, memory=40.0), 4)
    assert lower_bound(fits).seconds < inf


def test_links_between_hosts_that_cannot_pass_rows_say_which_layers() -> None:
    layers = uniform(2, parameter_bytes=10**9, message=1e6)
    problem = every_order(layers, equal_hosts(2, 1e5, memory=1e15), 8)
    assert (
        "2 layers from 'layer0' to 'layer1' on one host, or their gradients or 2.00 MB"
        in lower_bound(problem).argument
    )


def test_slices_may_differ_between_stages_of_the_same_devices():
    # Three rows on two devices: one has two of the first layer, the other two of the second.
    profile, cluster = uniform(2), equal_hosts(2)
    problem = replace(every_order(profile, cluster, 12, 3), schedules=("hanayo",))
    slices = ((2, 1), (1, 2))
    stages = tuple(Stage(range(s, s + 1), (0, 1), slices[s]) for s in range(2))
    plan = Plan(stages, 4, 3, "hanayo")
    seconds = make_score(problem)(plan)
    assert seconds == pytest.approx(4 * 9.0, rel=0.1)
    assert lower_bound(problem).seconds <= seconds * (1 + ROUNDING)


def test_a_bound_says_what_it_covers():
    problem = every_order(uniform(3), equal_hosts(2), 4)
    assert lower_bound(problem).covers == ANY_ORDER
    assert lower_bound(replace(problem, schedules=("1f1b",))).covers == WHOLE_BACKWARDS
    # What does not flush is outside of both.
    floor = bound_of_size(problem, 1)
    assert lower_bound(replace(problem, schedules=("zb-v", "2bw"))) == floor
