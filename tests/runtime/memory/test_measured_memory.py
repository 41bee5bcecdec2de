"""Tensors are held and freed as the simulator says: measured peaks beside predicted ones."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from runtime.memory.memory_cases import (
    MICRO_BATCHES,
    ROWS,
    by_block_and_kept,
    graph_of_model,
    peaks_of,
    peaks_of_gpt2,
)
from runtime.pipeline_cases import plan_of
from torch import nn

from penstock.plan.plan import Plan
from penstock.runtime.measured_memory import MeasuredMemory, measured_memory
from penstock.runtime.processes.launch import launch_workers

# What an operator needs while it runs is not in a profile measured on the CPU.
WHILE_RUNNING = 0.12
# What is computed again in a checkpoint is, but a stage's later layers are counted until its end.
OF_CHECKPOINTS = 0.1
# Four bytes each for at most 39 parameters: of a tensor in which AdamW counts its steps, and of a
# number that says in how many places a gradient has arrived.
STEP_COUNTS = 2 * 4 * 39


def two_stages(schedule: str, micro_batches: int, recompute: bool = False) -> Plan:
    layers = len(graph_of_model().layer_names)
    return plan_of(
        layers, (1, 1), schedule, recompute=recompute, micro_batches=micro_batches, rows=ROWS
    )


def measured(plans: Sequence[Plan]) -> list[list[tuple[float, MeasuredMemory, float]]]:
    """For each plan, by rank: predicted peak, what was measured, predicted while nothing runs."""
    by_rank = launch_workers(peaks_of, (plans,), workers=2, threads=1)
    return [[found[index] for found in by_rank] for index in range(len(plans))]


def test_measured_peaks_are_those_predicted() -> None:
    again = two_stages("gpipe", MICRO_BATCHES, recompute=True)
    plans = [
        two_stages("gpipe", MICRO_BATCHES),
        two_stages("1f1b", MICRO_BATCHES),
        two_stages("zb-h1", MICRO_BATCHES),
        again,
    ]
    found = measured(plans)
    for plan, ranks in zip(plans, found, strict=True):
        for rank, (predicted, memory, held) in enumerate(ranks):
            case = f"{plan.schedule}, rank {rank}: {memory.peak_bytes:.0f}, not {predicted:.0f}"
            assert 0 <= memory.held_bytes - held <= STEP_COUNTS, case
            assert predicted <= memory.peak_bytes <= (1 + WHILE_RUNNING) * predicted, case
    gpipe, one_f_one_b, _, recomputed = (ranks[0][1].peak_bytes for ranks in found)
    assert one_f_one_b < 0.7 * gpipe
    assert recomputed < gpipe


def test_peaks_with_the_models_own_checkpoints_are_those_predicted() -> None:
    cases = ((False, "1f1b"), (True, "1f1b"))
    by_rank = launch_workers(peaks_of_gpt2, (cases,), workers=2, threads=1)
    for rank, found in enumerate(by_rank):
        for (reentrant, schedule), (predicted, memory, _) in zip(cases, found, strict=True):
            case = f"{schedule}, rank {rank}, reentrant {reentrant}"
            assert memory.peak_bytes == pytest.approx(predicted, rel=OF_CHECKPOINTS), case


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_peaks_of_recompute_by_block_are_those_predicted_and_losses_the_same(name: str) -> None:
    by_rank = launch_workers(by_block_and_kept, (name,), workers=2, threads=1)
    for rank, (predicted, peak, kept, differ) in enumerate(by_rank):
        case = f"rank {rank}: {peak:.0f}, not {predicted:.0f}; kept {kept:.0f}"
        assert peak == pytest.approx(predicted, rel=OF_CHECKPOINTS), case
        assert peak < 0.8 * kept, case
        assert differ < 1e-6, case


def test_the_last_rank_of_1f1b_holds_no_more_where_there_are_more_micro_batches() -> None:
    plans = [
        replace(two_stages("1f1b", 3), micro_batches=m) for m in (MICRO_BATCHES // 2, MICRO_BATCHES)
    ]
    few, many = measured(plans)
    assert few[1][1].peak_bytes == pytest.approx(many[1][1].peak_bytes, rel=0.01)


def test_a_measurement_counts_what_stays_and_what_comes_and_goes() -> None:
    layers = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 100))
    x = torch.randn(1000, 100)
    parameters = list(layers.parameters())
    with measured_memory(torch.device("cpu"), lambda: parameters) as memory:
        outputs = layers(x)
        del outputs
    own = sum(p.nbytes for p in parameters)
    assert memory.held_bytes == own
    # The first layer's output and ReLU's, then ReLU's (saved for the backward) and the last one's.
    first, last = 1000 * 200 * 4, 1000 * 100 * 4
    assert own + 2 * first <= memory.peak_bytes <= own + 2 * first + last
