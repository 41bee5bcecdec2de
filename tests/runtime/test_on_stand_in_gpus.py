"""Ranks with a stand-in GPU each train by NCCL's rules as ranks on CPUs do, to the last bit.

Inside an iteration the host waits for no GPU, but where the user's model itself reads a value. See
`stand_in_gpu` for what the stand-in carries and what it does not.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from runtime.matrix_plans import ONE_OF_EACH_KIND, Case, representative
from runtime.stand_in_training_cases import Run, Trained, train

from penstock.errors import RunFailed
from penstock.runtime.processes.launch import launch_workers

# All runs of a launch are made in the first test that asks for them.
pytestmark = pytest.mark.timeout(900)

OPTIONS: dict[str, Any] = {"micro_batch_rows": 4}

RUNS = {
    "GPT-2 tied, clipped": Run(Case("1f1b", (1, 1), 4, model="gpt2", **OPTIONS), clip_norm=0.5),
    "BatchNorm with replicas": Run(Case("1f1b", (2, 1), 4, model="convolutions", **OPTIONS)),
    "ZeRO-1": Run(
        Case("1f1b", (2, 1), 4, optimizer="adamw", **OPTIONS), shard_optimizer=True, clip_norm=0.5
    ),
    "ZeRO-3": Run(Case("1f1b", (2, 1), 4, optimizer="adamw", **OPTIONS), sharding="parameters"),
    "state on the host": Run(
        Case("1f1b", (1, 2), 4, optimizer="adamw", **OPTIONS), clip_norm=0.5, state_on="host"
    ),
    "ZeRO-1, state on the host": Run(
        Case("1f1b", (2, 1), 4, optimizer="adamw", **OPTIONS),
        shard_optimizer=True,
        clip_norm=0.25,
        state_on="host",
    ),
    "split backwards, state on the host": Run(
        Case("zb-h1", (1, 1), 4, model="gpt2", optimizer="adamw", **OPTIONS), state_on="host"
    ),
    "autocast, recompute": Run(
        Case("1f1b", (1, 2), 4, model="gpt2", autocast=True, recompute=True, **OPTIONS)
    ),
    "interleaved": Run(Case("interleaved", (1, 1), 4, 2, "looped", model="skips", **OPTIONS)),
    "SpecTrain, clipped": Run(Case("spectrain", (1, 1), 4, **OPTIONS), clip_norm=0.5),
    "a gradient of None": Run(Case("1f1b", (1, 1, 1), 4, model="detached", **OPTIONS)),
}

MORE_RUNS = {
    "Llama, zb-h1": Run(Case("zb-h1", (1, 1), 4, model="llama", **OPTIONS)),
    "T5": Run(Case("1f1b", (1, 1), 4, model="t5", **OPTIONS)),
    "2BW with replicas": Run(Case("2bw", (1, 2), 4, **OPTIONS)),
    "tied Qwen2": Run(Case("1f1b", (1, 1), 4, model="qwen2_tied", **OPTIONS)),
    "ResNet on replicas": Run(Case("1f1b", (2, 2), 4, model="resnet", **OPTIONS)),
    "GPT-2, ZeRO-1": Run(
        Case("1f1b", (2, 1), 4, model="gpt2", optimizer="adamw", **OPTIONS), shard_optimizer=True
    ),
    "T5, autocast": Run(Case("zb-h1", (1, 2), 4, model="t5", autocast=True, **OPTIONS)),
    "SpecTrain with replicas": Run(Case("spectrain", (2, 1), 4, **OPTIONS), clip_norm=0.5),
}

READ_BY_MODELS = {
    # Without a cache of keys it asks whether a row of the batch has several texts in it.
    "item: transformers/masking_utils.py",
}


def made(runs: Sequence[Run], ranks: int) -> dict[Run, list[tuple[Trained, Trained]]]:
    """What each rank has after a run, on CPUs and on GPUs."""
    on_cpus, on_gpus = (
        launch_workers(train, (tuple(runs), device), workers=ranks, threads=1)
        for device in (False, True)
    )
    return {
        run: [(cpu[n], gpu[n]) for cpu, gpu in zip(on_cpus, on_gpus, strict=True)]
        for n, run in enumerate(runs)
    }


def by_ranks(runs: Sequence[Run]) -> dict[Run, list[tuple[Trained, Trained]]]:
    """As `made`, with as many ranks as each run needs."""
    grouped: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        grouped[sum(run.case.replicas)].append(run)
    return {run: has for n, some in grouped.items() for run, has in made(some, n).items()}


def assert_equal(run: Run, found: Sequence[tuple[Trained, Trained]]) -> None:
    for rank, (cpu, gpu) in enumerate(found):
        assert (gpu.transport, gpu.backend) == ("GroupTransport", "nccl")
        assert gpu.losses == cpu.losses, f"{run}, rank {rank}"
        assert gpu.tensors == cpu.tensors, f"{run}, rank {rank}: weights or buffers"
        ours = [w for w in gpu.waits if not w.startswith(tuple(READ_BY_MODELS))]
        assert not ours, f"{run}, rank {rank}: the host waits: {ours}"


def largest(schedule: str) -> Run:
    """The representative case of a schedule with the most micro-batches, on several groups."""
    cases = (c for c in representative() if c.schedule == schedule and len(c.replicas) > 1)
    return Run(max(cases, key=lambda case: (case.micro_batches, len(case.replicas))))


@pytest.fixture(scope="module")
def matrix() -> dict[Run, list[tuple[Trained, Trained]]]:
    """A run under each of some schedules, on four ranks."""
    return made([largest(schedule) for schedule in ONE_OF_EACH_KIND], 4)


@pytest.fixture(scope="module")
def runs() -> dict[Run, list[tuple[Trained, Trained]]]:
    return by_ranks([*RUNS.values()])


@pytest.mark.parametrize("schedule", ONE_OF_EACH_KIND)
def test_schedules(schedule: str, matrix: dict[Run, list[tuple[Trained, Trained]]]) -> None:
    run = largest(schedule)
    assert_equal(run, matrix[run])


@pytest.mark.parametrize("name", RUNS)
def test_models_and_options(name: str, runs: dict[Run, list[tuple[Trained, Trained]]]) -> None:
    assert_equal(RUNS[name], runs[RUNS[name]])


def test_another_seed_is_seen(runs: dict[Run, list[tuple[Trained, Trained]]]) -> None:
    """The comparison can fail: ranks hold other weights, and runs have other losses."""
    cpus = [[cpu for cpu, _ in found] for found in runs.values()]
    assert len({each[0].losses for each in cpus}) == len(RUNS)
    assert all(len({cpu.tensors for cpu in each}) > 1 for each in cpus)
    assert all(len(set(each[0].losses)) == len(each[0].losses) for each in cpus)


def test_a_model_that_makes_a_tensor_on_the_host_is_refused() -> None:
    run = Run(Case("1f1b", (1, 1), 4, model="pictures", **OPTIONS))
    with pytest.raises(RunFailed, match=r"at least two devices, cuda:\d and cpu"):
        launch_workers(train, ((run,), True), workers=2, threads=1)


@pytest.mark.slow
def test_all_representative_cases() -> None:
    for run, found in made([Run(case) for case in representative()], 4).items():
        assert_equal(run, found)


@pytest.mark.slow
def test_more_models() -> None:
    for run, found in by_ranks([*MORE_RUNS.values()]).items():
        assert_equal(run, found)
