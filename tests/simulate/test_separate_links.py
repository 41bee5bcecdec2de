"""Hosts whose devices have a link of their own to each other device."""

from random import Random

import pytest
from random_pipelines import random_pipeline
from reference.plain_workload import PlainWorkload
from reproduction.balanced_stages import play_balanced
from reproduction.own_links import seconds_with_own_links

from penstock.simulate import compiled
from penstock.simulate.catalogue import workload_of
from penstock.simulate.trace import spans_of_actions


@pytest.mark.parametrize("transfer_s", [0.5, 1.5, 3.0, 6.0])
def test_messages_to_two_neighbours_pass_at_once(transfer_s: float) -> None:
    """As in a model of links alone; where messages take longer than work, engines are slower."""
    engines_s = play_balanced("1f1b", 4, 32, transfer_s=transfer_s).iteration_s
    links_s = play_balanced("1f1b", 4, 32, transfer_s=transfer_s, separate_links=True).iteration_s
    assert links_s == pytest.approx(seconds_with_own_links("1f1b", 4, 32, 1.0, 2.0, transfer_s))
    assert transfer_s < 3 or links_s < engines_s


def test_on_half_duplex_links_the_two_directions_of_a_pair_take_turns() -> None:
    """Two stages: the link of the pair is both engines of both devices, by another name."""
    for transfer_s in (0.5, 2.0):
        both = [
            play_balanced(
                "1f1b", 2, 16, transfer_s=transfer_s, separate_links=separate, half_duplex=True
            ).iteration_s
            for separate in (False, True)
        ]
        assert both[0] == pytest.approx(both[1])


@pytest.mark.parametrize("seed", range(4000, 4120))
def test_a_device_that_does_not_overlap_computes_nothing_while_its_messages_are_on_their_way(
    seed: int,
) -> None:
    made = random_pipeline(Random(seed), slots=True)
    inputs = (made.plan, made.profile, made.cluster, made.schedule)
    workload = PlainWorkload.of(workload_of(*inputs))
    trace = compiled.play(workload)
    talks: dict[int, list[tuple[float, float]]] = {}
    number = 0
    for message in workload.messages:
        for start_s, end_s in trace.messages[number : number + workload.micro_batches]:
            if end_s > start_s:
                for end in (message.sender, message.receiver):
                    position = workload.replicas[end].position
                    talks.setdefault(position, []).append((start_s, end_s))
        number += workload.micro_batches
    for position, (_, streams) in enumerate(spans_of_actions(workload, trace)):
        if workload.overlaps[position] or not workload.talks_at_once(position):
            continue
        mine = talks.get(position, [])
        for actions, spans in streams:
            for action, (start_s, end_s) in zip(actions, spans, strict=True):
                # A last backward in segments leaves room for messages between them.
                if action.kind in "FIR":
                    assert not any(a < end_s - 1e-9 and b > start_s + 1e-9 for a, b in mine)
