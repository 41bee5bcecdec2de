"""Plans carried out by real processes: what they did is what the plan says, and mistakes show."""

from dataclasses import replace

import pytest
from rehearse.rehearsal_cases import (
    emulation,
    layered,
    looped,
    replicated,
    straight,
    weights_first_on_rank_3,
)

from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.rehearse.emulated_links import Started
from penstock.rehearse.rehearsal import Rehearsal, differences, rehearse
from penstock.timeline.metrics import iteration_s

ROUNDING_S = 1e-6


def rehearsed(plan: Plan, *, tied: bool = False, skip: bool = False, **settings: str) -> Rehearsal:
    return rehearse(emulation(plan, layered(8, tied=tied, skip=skip), **settings))


def check(rehearsal: Rehearsal) -> None:
    """Order and bytes are those of the plan, and nothing was faster than it can be."""
    assert differences(rehearsal) == []
    # Every wait is at least as long as planned, so no rank can be ahead of the simulator. It may be
    # ahead where the order of messages on a link is another by chance; these plans leave none.
    assert rehearsal.ends_s[0] >= rehearsal.prediction.iteration_s - ROUNDING_S
    last_begin_s = rehearsal.begins_s[-1] - rehearsal.begins_s[0]
    last_s = rehearsal.ends_s[-1] - last_begin_s / rehearsal.emulation.time_scale
    assert iteration_s(rehearsal.timeline) == pytest.approx(last_s, rel=0.01)
    kinds = {e.kind for e in rehearsal.timeline.events}
    assert kinds == {event.kind for event in rehearsal.prediction.timeline.events}


@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_a_plan_with_replicas_is_carried_out_as_planned(transport: str) -> None:
    rehearsal = rehearsed(replicated(), transport=transport)
    check(rehearsal)
    sent = [t.transfer for t in rehearsal.transfers_of(1)]
    # 5 micro-batches of 2 rows and of 1 row, of 420,000 bytes each, over the slow link.
    assert sum(t.bytes for t in sent if (t.source, t.target) == (0, 2)) == 5 * 420_000


@pytest.mark.parametrize(
    ("plan", "tied", "skip"),
    [
        pytest.param(straight("zb-h1"), True, False, id="split backwards, tied weights"),
        pytest.param(straight("1f1b", recompute=True), False, True, id="recompute, skips"),
        pytest.param(looped(), False, False, id="several stages a device"),
        pytest.param(looped(), False, True, id="several stages a device, which share tensors"),
        pytest.param(straight("chimera"), True, False, id="every stage twice"),
    ],
)
def test_other_kinds_of_plans_are_carried_out_too(plan: Plan, tied: bool, skip: bool) -> None:
    check(rehearsed(plan, tied=tied, skip=skip))


def test_two_swapped_actions_that_send_nothing_are_noticed_in_what_was_done() -> None:
    found = differences(rehearse(emulation(straight("zb-h1"), layered(8)), weights_first_on_rank_3))
    assert len(found) == 2
    assert found[0].startswith("iteration 0: action ")
    assert "of rank 3 was 3W1 where the schedule has 3W0" in found[0]


def test_bytes_that_the_plan_does_not_have_are_noticed() -> None:
    right = rehearsed(looped())
    first = right.transfers[0]
    more = first.transfer._replace(bytes=first.transfer.bytes + 1000)
    changed = Started(more, first.ready_s, first.start_s, first.end_s)
    wrong = replace(right, transfers=(changed, *right.transfers[1:]))
    assert differences(right) == []
    (found,) = differences(wrong)
    assert "bytes where the plan has" in found


def test_stages_that_share_no_tensor_are_refused() -> None:
    whole = layered(8, skip=True)
    cut = replace(whole, edges=tuple(edge for edge in whole.edges if edge.producer != 3))
    with pytest.raises(BadInput, match="stages 1 and 2 share no tensor") as refused:
        rehearse(emulation(straight("1f1b"), cut))
    assert "\n" not in str(refused.value)


def in_turn() -> Plan:
    """The stage on two devices gives each of them whole micro-batches."""
    plan = replicated()
    first, middle, last = plan.stages
    whole = (plan.micro_batch_size,) * middle.replicas
    return replace(plan, stages=(first, replace(middle, slices=whole, in_turn=True), last))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(straight("1f1b"), schedule="fbp-as"), "a rank does one thing at a time"),
        (straight("spectrain"), "without a flush"),
        (in_turn(), r"stages \[1\] take whole micro-batches in turn"),
    ],
)
def test_what_the_emulation_would_carry_out_otherwise_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        rehearse(emulation(plan, layered(8)))


@pytest.mark.parametrize(
    ("host", "cluster", "words"),
    [
        ({}, {"messages_in_order": True}, r'go in order, as over NCCL.*"as ready" into a copy'),
        ({"full_speed_devices": 1}, {}, r"share cores \(full_speed_devices\)"),
    ],
)
def test_a_cluster_that_is_not_emulated_is_refused(
    host: dict[str, int], cluster: dict[str, bool], words: str
) -> None:
    usual = emulation(straight("1f1b"), layered(8))
    hosts = tuple(replace(one, **host) for one in usual.cluster.hosts)
    with pytest.raises(BadInput, match=words):
        rehearse(replace(usual, cluster=replace(usual.cluster, hosts=hosts, **cluster)))
