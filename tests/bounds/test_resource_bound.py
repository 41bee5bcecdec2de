"""The bound for every order: random orders, random plans under every family, exact orders."""

import itertools
from dataclasses import replace
from math import inf
from random import Random

import pytest
from bound_strategies import bound_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from near_tight_plans import near_tight
from random_pipelines import random_pipeline

from penstock.bounds.links import link_limits
from penstock.bounds.lower_bound import (
    ANY_ORDER,
    WHOLE_BACKWARDS,
    bound_of_size,
    gap,
    lower_bound,
)
from penstock.bounds.resource_bound import chains_of, resource_bound
from penstock.bounds.shortened_chain import ShortenedChain, shortened
from penstock.bounds.visits import (
    Replicas,
    Setting,
    recompute_s,
    replica_counts,
    visit_times,
)
from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.schedule_costs import with_costs
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.placement import placement_of_style
from penstock.schedule.registry import FAMILIES
from penstock.simulate.catalogue import workload_of
from penstock.simulate.plain import play
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
    """No term of the bound refutes that a plan of ``problem`` takes ``seconds``."""
    (size,) = problem.micro_batch_sizes
    bar_s = seconds * (1 + ROUNDING)
    assert bound_of_size(problem, size).seconds <= bar_s
    assert resource_bound(problem, {size: bar_s}).seconds <= bar_s


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
    assert sum(gap < 0.01 for gap in gaps) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_none_of_twelve_thousand_plans_that_lose_little_beats_the_bound(part: int):
    tried = sum(near_tight_is_kept(seed) for seed in range(part * 600, part * 600 + 600))
    assert tried >= 550


def random_plan_of(random: Random, problem: PlanningProblem, schedule: str) -> Plan | None:
    """Any cuts, placement, devices and slices that a family can play; None where none was drawn."""
    layers, devices = len(problem.profile.layers), len(problem.cluster.devices)
    style, size = (
        FAMILIES[schedule].placement,
        random.choice(problem.micro_batch_sizes),
    )
    groups = random.randint(1, devices)
    rounds = {"looped": random.randint(1, 3), "folded": 2}.get(style, 1)
    if schedule in ("list", "zero-bubble") and random.random() < 0.5:
        style, rounds = "folded", 2
    stages = groups * rounds
    free, cuts = random.sample(range(devices), devices), list(range(1, layers))
    if stages > layers:
        return None
    ends = [0, *sorted(random.sample(cuts, stages - 1)), layers]
    held: list[tuple[int, ...]] = []
    for group in range(groups):
        count = random.randint(1, min(size, len(free) - (groups - group - 1)))
        held.append(tuple(free[:count]))
        free = free[count:]
    made: list[Stage] = []
    for stage, group in enumerate(placement_of_style(style, groups, rounds)):
        inside = sorted(random.sample(range(1, size), len(held[group]) - 1))
        rows = [b - a for a, b in zip([0, *inside], [*inside, size], strict=True)]
        again = problem.recompute == "on" or (problem.recompute == "auto" and random.random() < 0.3)
        run = range(ends[stage], ends[stage + 1])
        made.append(Stage(run, held[group], tuple(rows), again))
    return Plan(tuple(made), problem.global_batch // size, size, schedule)


@settings(max_examples=40, deadline=None)
@given(problem=bound_problems(), seed=st.integers(0, 10**6))
def test_no_plan_of_any_family_beats_the_bound(problem: PlanningProblem, seed: int):
    problem = replace(problem, schedules=NAMES)
    random, score, bound = Random(seed), make_score(problem), lower_bound(problem)
    assert bound.argument and bound.covers == ANY_ORDER
    for schedule in NAMES:
        for _ in range(3):
            if plan := random_plan_of(random, problem, schedule):
                assert bound.seconds <= seconds_of(plan, problem, score) * (1 + ROUNDING), plan


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


def test_devices_wait_for_their_first_work():
    # Micro-batches of one sample are on one device each; a second device waits for layer 0.
    problem = replace(every_order(uniform(4), equal_hosts(2), 8), schedules=("zb-v",))
    assert lower_bound(problem).seconds == pytest.approx((4 * 8 * 3 + 1) / 2, rel=3e-3)
    # Mirrored pipelines start at both ends at once.
    assert lower_bound(every_order(uniform(4), equal_hosts(2), 8)).seconds == pytest.approx(48)


def test_whole_backwards_wait_for_the_drain_too():
    problem = every_order(uniform(4), equal_hosts(4), 8)
    whole = replace(problem, schedules=("1f1b",))
    stages = tuple(Stage(range(i, i + 1), (i,), (1,)) for i in range(4))
    assert make_score(whole)(Plan(stages, 8, 1, "1f1b")) == pytest.approx(8 * 3 + 3 * 3)
    assert lower_bound(whole).seconds == pytest.approx(8 * 3 + 3 * 3, rel=3e-3)
    split = lower_bound(replace(problem, schedules=("zb-v",))).seconds
    assert split == pytest.approx(8 * 3 + 3, rel=3e-3)


def test_gradients_of_whole_backwards_are_reduced_beside_the_last_one_only():
    # Messages forbid two stages. Two micro-batches of 12 s, less the 8 s of the last backward, then
    # 16 s of all-reduce; split backwards may leave all their weight halves until then.
    profile = uniform(4, parameter_bytes=10**7, message=1e9)
    problem = every_order(profile, equal_hosts(2, rate=2.5e6), 4, 2)
    whole = lower_bound(replace(problem, schedules=("1f1b",))).seconds
    assert whole == pytest.approx(24 - 8 + 16, rel=3e-3)
    plan = Plan((Stage(range(4), (0, 1), (1, 1)),), 2, 2, "1f1b")
    assert whole <= make_score(problem)(plan) <= 1.2 * whole
    assert lower_bound(problem).seconds < 0.95 * whole


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


def test_what_a_visit_cannot_keep_it_computes_again():
    # Room for half of what a micro-batch saves in all layers: of its four forwards two more.
    profile = uniform(4)
    layers = tuple(replace(layer, saved_bytes=Affine(per_sample=1.0)) for layer in profile.layers)
    problem = every_order(replace(profile, layers=layers), equal_hosts(1, memory=2.0), 8)
    chain = chains_of(problem, 1)[0]
    setting = Setting(problem, chain, link_limits(problem.cluster), (1.0,), 1)
    again_s = recompute_s(setting, Replicas(1, 1), 8)
    assert again_s[0, 4] == pytest.approx(8 * 2) and again_s[0, 2] == pytest.approx(0)
    off = replace(setting, problem=replace(problem, recompute="off"))
    assert recompute_s(off, Replicas(1, 1), 8)[0, 4] == inf


def test_a_visit_takes_in_and_sends_what_passes_each_of_its_cuts():
    # A sample of 3 MB goes down over each cut, and a gradient of 1 MB up; 1 MB a second.
    profile = uniform(3)
    down, up = Affine(per_sample=3e6), Affine(per_sample=1e6)
    profile = replace(profile, edges=tuple(Edge(i, i + 1, f"t{i}", down, up) for i in range(2)))
    problem = every_order(profile, equal_hosts(3, rate=1e6), 10)
    chain = chains_of(problem, 1)[0]
    limits = link_limits(problem.cluster)
    setting = Setting(problem, chain, limits, (1.0, 1.0, 1.0), 1)
    links = visit_times(setting, Replicas(1, 1), 10, 1).first_visit
    # The first layer sends 3 MB and takes in 1 MB, the last the other way round, the middle both.
    for lo, sent, taken in ((0, 3, 1), (1, 4, 4), (2, 1, 3)):
        assert links.send[lo, lo + 1] == pytest.approx(10 * sent)
        assert links.receive[lo, lo + 1] == pytest.approx(10 * taken)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (2, 6), (3, 4)])
def test_exact_orders_of_all_plans_do_not_beat_it(stages: int, micro_batches: int):
    profile, cluster = uniform(stages + 1), equal_hosts(stages)
    problem = replace(
        every_order(profile, cluster, micro_batches), schedules=("exact", "zb-v", "interleaved")
    )
    bound, score, best_s = lower_bound(problem).seconds, make_score(problem), inf
    for plan in small_plans(stages + 1, stages, micro_batches):
        best_s = min(best_s, seconds_of(plan, problem, score))
    assert 0.85 * best_s <= bound <= best_s * (1 + ROUNDING)


def small_plans(layers: int, devices: int, micro_batches: int):
    """Every cut of a chain into stages, on single devices that are taken in every order."""
    for mask in range(1 << (layers - 1)):
        cuts = [0, *(i + 1 for i in range(layers - 1) if mask >> i & 1), layers]
        stages = len(cuts) - 1
        for code in range(devices**stages):
            held = [code // devices**s % devices for s in range(stages)]
            if any(held[s] > max(held[:s], default=-1) + 1 for s in range(stages)):
                continue
            made = tuple(
                Stage(range(cuts[s], cuts[s + 1]), (held[s],), (1,)) for s in range(stages)
            )
            yield Plan(made, micro_batches, 1, "exact")


def test_links_of_a_stage_between_two_others_carry_four_messages():
    # Four seconds of link for a message: a device between two others sends 2 * 10 of them, 80 s.
    # Two devices of one and two layers compute 60 s, one that waits for two layers 60 s and those.
    profile, cluster = uniform(3, message=1e6), equal_hosts(3, rate=0.25e6)
    problem = replace(every_order(profile, cluster, 10), schedules=("zb-v",))
    assert 60 / 1.003 <= lower_bound(problem).seconds <= 66.5


def test_gradients_are_reduced_after_all_forwards():
    # Two samples at once: either both devices share a stage and its gradients, 10 s of link, or
    # the micro-batches of two samples pass one after the other.
    profile = uniform(1, parameter_bytes=10**7)
    problem = every_order(profile, equal_hosts(2, rate=1e6), 2, 2)
    # One device alone computes 6 s; on two all gradients wait for the forward of a second.
    assert lower_bound(problem).seconds == pytest.approx(6.0, rel=3e-3)
    faster = every_order(profile, equal_hosts(2, rate=5e6), 2, 2)
    faster = replace(faster, schedules=("zb-v",))
    assert lower_bound(faster).seconds == pytest.approx(5.0, rel=3e-3)


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


def test_replicas_that_are_counted_in_groups_have_all_their_devices():
    # Data parallelism on 24 devices, which are charged as 17: it has no fill and no messages.
    problem = every_order(uniform(2), equal_hosts(24), 24, 24)
    plan = Plan((Stage(range(2), tuple(range(24)), (1,) * 24),), 1, 24, "1f1b")
    assert make_score(problem)(plan) == pytest.approx(6.0)
    assert lower_bound(problem).seconds == pytest.approx(6.0)


def test_no_plan_fits():
    bound = lower_bound(every_order(uniform(2, parameter_bytes=10), equal_hosts(2, memory=5.0), 4))
    assert bound.seconds == inf and "memory" in bound.argument


def test_a_bound_says_what_it_covers():
    problem = every_order(uniform(3), equal_hosts(2), 4)
    assert lower_bound(problem).covers == ANY_ORDER
    assert lower_bound(replace(problem, schedules=("1f1b",))).covers == WHOLE_BACKWARDS
    # What does not flush is outside of both.
    floor = bound_of_size(problem, 1)
    assert lower_bound(replace(problem, schedules=("zb-v", "2bw"))) == floor


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_shortened_chains_take_no_more_messages(seed: int):
    """Any layers on any devices: no device takes in more of the shortened chain."""
    random = Random(seed)
    profile = random_pipeline(random).profile
    whole, short = (shortened(profile, share, 4) for share in (0.0, random.random()))
    home = {layer: random.randrange(3) for layer in range(len(profile.layers))}
    assert set(short.layers) <= set(whole.layers)
    for device in range(3):
        assert taken_in(short, home, device) <= taken_in(whole, home, device) * (1 + ROUNDING)


def taken_in(chain: ShortenedChain, home: dict[int, int], device: int) -> float:
    """Bytes of one row down and up that come in to a device, each tensor once."""
    return sum(
        tensor.bytes.at(1) + tensor.gradient_bytes.at(1)
        for tensor in chain.tensors
        if home[chain.layers[tensor.producer]] != device
        and any(home[chain.layers[reader]] == device for reader in tensor.consumers)
    )


def test_replicas_are_counted_in_groups():
    counts = replica_counts(1000)
    assert [count.fewest for count in counts][:16] == list(range(1, 17))
    assert all(a.most + 1 == b.fewest for a, b in itertools.pairwise(counts))
    assert counts[-1].most == 1000 and len(counts) < 30


def test_chains_that_stay_long_are_not_tried():
    assert chains_of(every_order(uniform(400), equal_hosts(2), 8), 1) == []
    assert len(chains_of(every_order(uniform(20), equal_hosts(2), 8), 1)[0].layers) == 20
