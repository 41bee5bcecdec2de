"""Looped, folded and mirrored pipelines, split backwards, turns, several iterations: both engines.

The order is any that can be played; what no schedule family would do is done here too.
"""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from random_pipelines import RandomPipeline, random_pipeline
from reference import plain_simulator as plain
from reference.plain_workload import PlainWorkload
from reference.same_spans import assert_engine_plays

from penstock.simulate.catalogue import workload_of
from penstock.simulate.memory import held_while, memory_samples, peaks_bytes
from penstock.simulate.trace import Trace, spans_of_actions

ABSOLUTE_S = 1e-9


def played(
    seed: int, *, slots: bool = True, together: bool = False
) -> tuple[RandomPipeline, PlainWorkload, Trace]:
    """A random pipeline, played by the plain simulator; steps may wait for all sums."""
    made = random_pipeline(Random(seed), slots=slots, flushes=together)
    inputs = (made.plan, made.profile, made.cluster, made.schedule)
    workload = workload_of(*inputs, iterations=made.iterations)
    plainly = PlainWorkload.of(replace(workload, steps_together=together))
    return made, plainly, plain.play(plainly)


@pytest.mark.parametrize("seed", range(1000, 1200))
def test_the_compiled_engine_equals_the_plain_one(seed: int) -> None:
    _, workload, trace = played(seed)
    assert_engine_plays(workload, trace)


@pytest.mark.parametrize("seed", range(5000, 5060))
def test_so_it_does_where_steps_wait_for_the_sums_of_all(seed: int) -> None:
    _, workload, trace = played(seed, together=True)
    assert_engine_plays(workload, trace)


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_nothing_does_two_things_at_once_and_devices_that_cannot_overlap_do_not(seed: int) -> None:
    _, workload, trace = played(seed)
    occupied: dict[int, list[tuple[float, float]]] = {}
    # Devices with separate links may have several messages on their way while they stand still.
    shared = {
        workload.first_stream + position * workload.streams_each + k
        for position in range(len(workload.devices))
        for k in range(workload.streams_each)
        if workload.talks_at_once(position)
    }
    lanes = [r for r in workload.occupied_by_messages for _ in range(workload.micro_batches)]
    for group, resources in zip(workload.reductions, workload.occupied_by_reductions, strict=True):
        lanes += [resources] * (group.rounds * len(group.buckets))
    for resources, span in zip(lanes, trace.messages + trace.buckets, strict=True):
        if span[1] > span[0]:
            for resource in set(resources) - shared:
                occupied.setdefault(resource, []).append(span)
    number = workload.first_stream
    for position, (_, streams) in enumerate(spans_of_actions(workload, trace)):
        for _, spans in streams:
            # The segments of a last backward leave room for messages between them.
            if workload.overlaps[position]:
                occupied.setdefault(number, []).extend(spans)
            number += 1
    for resource, used in occupied.items():
        used.sort()
        for (_, end_s), (start_s, _) in pairwise(used):
            assert start_s >= end_s - ABSOLUTE_S, resource


@pytest.mark.parametrize("seed", range(3000, 3100))
def test_memory_over_time_reaches_exactly_the_peaks_that_follow_from_the_order(seed: int) -> None:
    made, workload, trace = played(seed)
    if made.schedule.concurrent:
        return
    devices = len(made.cluster.devices)
    held = held_while(made.schedule, workload.instances)
    expected = peaks_bytes(workload.parts.stages, workload.instances.members, held, devices)
    found = [0.0] * devices
    samples = memory_samples(workload, trace)
    for sample in samples:
        found[sample.device] = max(found[sample.device], sample.bytes)
    assert found == pytest.approx(expected, rel=1e-12)
    for device in made.plan.devices:
        mine = [sample.bytes for sample in samples if sample.device == device]
        assert mine[-1] == pytest.approx(mine[0])
        assert min(mine) == pytest.approx(mine[0])
