"""A tensor that several stages of one device read is sent to that device once."""

from itertools import pairwise

import pytest
import torch
from runtime.stage.skip_cases import simulated, trained_alone, trained_under

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.runtime.processes.launch import launch_workers

MICRO_BATCHES, SIZE, STEPS = 4, 4, 2
RESIDUALS, UNET = "attention residuals", "u-net"

CUTS = {
    (RESIDUALS, 6): (0, 2, 3, 4, 5, 6, 9),
    (RESIDUALS, 4): (0, 2, 4, 5, 9),
    (RESIDUALS, 2): (0, 4, 9),
    (UNET, 6): (0, 1, 3, 4, 5, 6, 8),
    (UNET, 4): (0, 1, 4, 6, 8),
}
"""Later stages read results of several earlier ones of another device."""


def planned(
    name: str, schedule: str, homes: list[tuple[int, ...]], slices: list[tuple[int, ...]]
) -> Plan:
    """A model in as many stages as there are homes."""
    cuts = pairwise(CUTS[name, len(homes)])
    parts = zip(cuts, homes, slices, strict=True)
    stages = (Stage(range(*cut), devices, rows) for cut, devices, rows in parts)
    return Plan(tuple(stages), MICRO_BATCHES, SIZE, schedule)


def sent_in_a_step(tried: list[tuple[str, Plan]], devices: int) -> list[int]:
    """The number of messages of each plan, which trains as one process does.

    They are those that the simulator has, to the byte.
    """
    cluster = Cluster("one host", (Host("host", (Device("cpu", 1e9),) * devices, 1e9),))
    ranks = launch_workers(trained_under, (tried, STEPS), workers=devices, threads=1)
    counts: list[int] = []
    for (name, plan), *found in zip(tried, *ranks, strict=True):
        alone = trained_alone(name, STEPS)
        for own in found:
            assert own["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        first = found[0]
        for what in ("weights", "predicted"):
            torch.testing.assert_close(first[what], alone[what], rtol=1e-12, atol=1e-14)
        assert first["sent"] == simulated(name, plan, cluster)
        counts.append(len(first["sent"]))
    return counts


def test_interleaved_stages_of_a_device_share_what_they_read() -> None:
    """Five messages down and five up in a micro-batch; nine, or seven, if each stage got all."""
    homes = [(0,), (1,)] * 3
    kept, unet = (planned(name, "interleaved", homes, [(SIZE,)] * 6) for name in (RESIDUALS, UNET))
    by_stage, by_block = with_recompute(kept, True), with_recompute(kept, False, by_block=True)
    tried = [(RESIDUALS, kept), (RESIDUALS, by_stage), (RESIDUALS, by_block), (UNET, unet)]
    assert sent_in_a_step(tried, 2) == [10 * MICRO_BATCHES] * 4


def test_so_do_the_stages_of_a_v_with_backwards_in_halves() -> None:
    """Three messages down and three up in a micro-batch, or two; one more if each stage got all."""
    homes = [(0,), (1,), (1,), (0,)]
    plans = [(name, planned(name, "zb-v", homes, [(SIZE,)] * 4)) for name in (RESIDUALS, UNET)]
    again = [(name, with_recompute(plan, True)) for name, plan in plans]
    assert sent_in_a_step([*plans, *again], 2) == [6 * MICRO_BATCHES, 4 * MICRO_BATCHES] * 2


def test_a_mirrored_pipeline_has_one_stage_a_device_in_each_direction() -> None:
    plan = planned(RESIDUALS, "chimera", [(0,), (1,)], [(SIZE,)] * 2)
    assert sent_in_a_step([(RESIDUALS, plan)], 2) == [2 * MICRO_BATCHES]


def test_stages_that_divide_rows_otherwise_are_sent_their_own() -> None:
    homes = [(0, 1), (2, 3)] * 2
    alike, unlike = (
        planned(RESIDUALS, "interleaved", homes, [(2, 2), (1, 3), (2, 2), last])
        for last in ((1, 3), (3, 1))
    )
    found = sent_in_a_step([(RESIDUALS, alike), (RESIDUALS, unlike)], 4)
    # From (2, 2) to (1, 3) rows there are three messages, as many as to (3, 1). If the last stage
    # has other rows than the second, the first sends to both; and of the second one message leaves
    # its device.
    assert found == [3 * 3 * 2 * MICRO_BATCHES, (4 * 3 + 1) * 2 * MICRO_BATCHES]
