"""Plans whose binding resource can be said beforehand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.advice.assessment import Baselines, assess_plan
from penstock.advice.explain import (
    Explanation,
    explain_plan,
    explanation_words,
    why_slower,
)
from penstock.advice.path_shares import all_reduces, path_shares, utilisations
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.lower_bound import LowerBound
from penstock.plan.plan import Plan, Stage
from penstock.planners.problem import problem_of_plan
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.timeline.timeline import Event, Timeline


def model(
    forwards_s: tuple[float, ...], parameter_bytes: int = 0, tensor_bytes: float = 0.0
) -> ModelProfile:
    """A chain; a backward takes twice its forward, a sample saves a byte in every layer."""
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(0.0, seconds),
            Affine(0.0, seconds),
            Affine(0.0, seconds),
            parameter_bytes,
            saved_bytes=Affine(0.0, 1.0),
        )
        for i, seconds in enumerate(forwards_s)
    )
    size = Affine(0.0, tensor_bytes)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(len(layers) - 1))
    return ModelProfile("model", layers, edges, batch_size=8)


def cluster(memory_bytes: float = 1e9, rate: float = 1e12) -> Cluster:
    hosts = tuple(
        Host(name, (Device("d", memory_bytes),) * 2, link_bytes_per_s=rate, port_bytes_per_s=rate)
        for name in ("a", "b")
    )
    return Cluster("two hosts", hosts)


def pipeline(cuts: tuple[int, ...], micro_batches: int, *, recompute: bool = False) -> Plan:
    """A stage between any two cuts, each on one device of its own, on hosts in turn."""
    devices = (0, 2, 1, 3)
    stages = tuple(
        Stage(range(lo, hi), (devices[i],), (1,), recompute)
        for i, (lo, hi) in enumerate(pairwise(cuts))
    )
    return Plan(stages, micro_batches, 1, "1f1b", planner=f"{len(stages)} stages")


def parallel(micro_batches: int = 1) -> Plan:
    return Plan((Stage(range(2), (0, 2), (1, 1)),), micro_batches, 2, "1f1b", planner="parallel")


def explained(plan: Plan, profile: ModelProfile, machines: Cluster) -> Explanation:
    problem = problem_of_plan(plan, profile, machines)
    planned = assess_plan(plan, problem, Baselines(1.0), LowerBound(1.0, "a test"))
    found = explain_plan(planned, problem)
    assert sum(s.seconds for s in found.shares) == pytest.approx(planned.prediction.iteration_s)
    return found


def test_a_slow_stage_binds_and_the_other_one_fills_and_drains() -> None:
    found = explained(pipeline((0, 1, 2), 8), model((1.0, 4.0)), cluster())
    assert (found.shares[0].kind, found.shares[0].where) == ("compute", "stage 1")
    assert found.seconds("compute") == pytest.approx(8 * 12.0)
    assert found.seconds("fill and drain") == pytest.approx(3.0)
    assert found.forward_s == pytest.approx(1.0 + 8 * 4.0)
    assert found.busiest.resource == "computing on device 2 (stage 1)"
    words = explanation_words(found)
    assert words[0].startswith("Bound by computing in stage 1, 97.0 % of the iteration; then fill")


def test_a_slow_link_binds_and_is_named_with_its_hosts() -> None:
    slow = model((1.0, 1.0), tensor_bytes=10.0)
    found = explained(pipeline((0, 1, 2), 8), slow, cluster(rate=1.0))
    assert found.shares[0].kind == "transfers"
    assert "port of " in found.busiest.resource and found.busiest == found.busiest_link
    assert "to " in found.where("transfers")


def test_an_all_reduce_that_outlasts_the_backward_binds() -> None:
    found = explained(parallel(), model((1.0, 1.0), parameter_bytes=1000), cluster(rate=100.0))
    assert (found.shares[0].kind, found.shares[0].where) == ("all-reduce", "stage 0")
    assert found.all_reduce and found.all_reduce.stage == 0
    assert found.all_reduce.after_s == pytest.approx(20.0)
    assert found.all_reduce.hidden_s == pytest.approx(0.0)


def test_recompute_is_a_share_of_its_own() -> None:
    plain = explained(pipeline((0, 1, 2), 8), model((1.0, 1.0)), cluster())
    again = explained(pipeline((0, 1, 2), 8, recompute=True), model((1.0, 1.0)), cluster())
    assert plain.seconds("recompute") == 0.0
    assert again.seconds("recompute") > 0.0
    assert "computing activations again" in explanation_words(again)[0]


def test_memory_that_forbids_a_better_cut_is_told_with_its_figures() -> None:
    """Stage 0 would have to keep two more layers' activations for both micro-batches in flight."""
    profile, uneven = model((1.0,) * 4), pipeline((0, 1, 4), 8)
    found = explained(uneven, profile, cluster(memory_bytes=3.0))
    assert found.forbidden and found.forbidden.fullest
    assert found.forbidden.text == "moving layer 1 from stage 1 to stage 0"
    assert found.forbidden.fullest.needed_bytes == 4.0
    assert found.forbidden.iteration_s < found.iteration_s
    assert any(
        "Memory forbids moving layer 1 from stage 1 to stage 0: " in sentence
        and "4 B of 3 B" in sentence
        for sentence in explanation_words(found)
    )
    assert explained(uneven, profile, cluster(memory_bytes=4.0)).forbidden is None


def test_recompute_that_memory_demands_is_told() -> None:
    plan = pipeline((0, 2, 4), 8, recompute=True)
    found = explained(plan, model((1.0,) * 4), cluster(memory_bytes=3.5))
    assert found.forbidden and found.forbidden.text == "keeping all activations"


def test_the_loser_is_told_where_its_time_goes() -> None:
    profile = model((1.0, 1.0), parameter_bytes=1000)
    machines = cluster(rate=100.0)
    fast = explained(pipeline((0, 1, 2), 8), profile, machines)
    slow = explained(parallel(4), profile, machines)
    words = why_slower(fast, replace(slow, iteration_s=slow.iteration_s))
    assert words.startswith("parallel loses ")
    assert "against 2 stages" in words
    assert "its all-reduce of stage 0 ends 20.0 s after the last backward" in words
    assert "2 stages's plan has no all-reduce" in words


def test_an_equal_plan_does_not_lose() -> None:
    found = explained(pipeline((0, 1, 2), 8), model((1.0, 1.0)), cluster())
    assert why_slower(found, replace(found, planner="other")) == "other is as fast as 2 stages."


HIDDEN = Timeline(
    (
        *(Event(d, "B", 0, 0, 0.0, 4.0) for d in (0, 2)),
        *(Event(d, "REDUCE", 0, -1, 1.0, 3.0, bytes=8.0) for d in (0, 2)),
        *(Event(d, "REDUCE", 0, -1, 3.0, 6.0, bytes=9.0) for d in (0, 2)),
    ),
    devices=4,
)


def test_all_reduce_beside_the_backward_is_hidden() -> None:
    (found,) = all_reduces(HIDDEN)
    assert (found.seconds, found.hidden_s, found.after_s) == (5.0, 3.0, 2.0)
    shares = {share.kind: share.seconds for share in path_shares(HIDDEN, cluster())}
    assert shares == {"all-reduce": 5.0, "compute": 1.0}


def test_an_all_reduce_between_hosts_uses_their_ports() -> None:
    used = {u.resource: u.share for u in utilisations(HIDDEN, cluster())}
    assert used["the outgoing port of a"] == pytest.approx(5 / 6)
    assert used["computing on device 0 (stage 0)"] == pytest.approx(4 / 6)


def test_hosts_of_one_name_have_ports_of_their_own() -> None:
    hosts = tuple(replace(host, name="same") for host in cluster().hosts)
    first = Event(0, "SEND", 0, 0, 0.0, 1.0, peer=2), Event(2, "RECV", 1, 0, 0.0, 1.0, peer=0)
    second = Event(2, "SEND", 1, 0, 1.0, 4.0, peer=0), Event(0, "RECV", 0, 0, 1.0, 4.0, peer=2)
    used = utilisations(Timeline((*first, *second), devices=4), Cluster("c", hosts))
    ports = [u.share for u in used if u.resource == "the outgoing port of same"]
    assert ports == pytest.approx([3 / 4, 1 / 4])


@pytest.mark.parametrize("half_duplex", [False, True])
def test_separate_links_are_resources_of_their_own(half_duplex: bool) -> None:
    host = Host("a", (Device("d", 1e9),) * 2, 1e9, half_duplex=half_duplex, separate_links=True)
    down = Event(0, "SEND", 0, 0, 0.0, 1.0, peer=1), Event(1, "RECV", 1, 0, 0.0, 1.0, peer=0)
    up = Event(1, "SEND", 1, 0, 2.0, 5.0, peer=0), Event(0, "RECV", 0, 0, 2.0, 5.0, peer=1)
    used = utilisations(Timeline((*down, *up), devices=2), Cluster("c", (host,)))
    shares = {u.resource: u.share for u in used}
    if half_duplex:
        assert shares == {"the link between devices 0 and 1": pytest.approx(4 / 5)}
    else:
        assert shares["the link from device 1 to 0"] == pytest.approx(3 / 5)
        assert shares["the link from device 0 to 1"] == pytest.approx(1 / 5)
