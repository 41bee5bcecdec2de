"""Ranks that are given only what they read of a batch train exactly as on whole batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime import counted_reading, loaders_of_parts, part_cases
from runtime.counted_reading import BATCH, INPUT_BYTES, SAMPLES, TARGET_BYTES
from runtime.part_cases import CASES

from penstock.capture.batch.part import BatchPart
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.batch_needs import BatchNeeds, LeafNeed
from penstock.runtime.processes.launch import launch_workers

STEPS = 2 * SAMPLES // BATCH


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The data's directory, and what `counted_reading.every_way` gave on each rank."""
    directory = tmp_path_factory.mktemp("data")
    counted_reading.write_files(directory)
    return directory, launch_workers(counted_reading.every_way, (directory,), workers=4, threads=1)


def bytes_read(found: Any, name: str) -> list[tuple[int, int]]:
    """The bytes of inputs and of targets that each rank read."""
    return [(rank[name]["bytes"][0], rank[name]["bytes"][1]) for rank in found]


@pytest.mark.timeout(300)
def test_a_rank_reads_only_what_its_stage_needs(counted: tuple[Path, Any]) -> None:
    _, found = counted
    inputs, targets = STEPS * BATCH * INPUT_BYTES, STEPS * BATCH * TARGET_BYTES
    assert bytes_read(found, "whole") == [(inputs, targets)] * 4
    assert bytes_read(found, "parts") == [(inputs, 0), (0, 0), (0, 0), (0, targets)]


def test_replicas_read_only_their_rows(counted: tuple[Path, Any]) -> None:
    _, found = counted
    inputs, targets = STEPS * BATCH * INPUT_BYTES, STEPS * BATCH * TARGET_BYTES
    shares = [(inputs // 4, 0), (3 * inputs // 4, 0), (0, 0), (0, targets)]
    assert bytes_read(found, "parts, replicas") == shares
    # Of each batch the replicas read different samples, and together all of them.
    for step in range(STEPS):
        own = found[0]["parts, replicas"]["rows"][0][2 * step : 2 * step + 2]
        others = found[1]["parts, replicas"]["rows"][0][6 * step : 6 * step + 6]
        whole = found[0]["whole"]["rows"][0][BATCH * step : BATCH * (step + 1)]
        assert own == [whole[0], whole[4]] and others == whole[1:4] + whole[5:8]


def test_processes_of_the_loader_read_the_parts(counted: tuple[Path, Any]) -> None:
    _, found = counted
    for rank in found:
        assert rank["loader processes"]["losses"] == rank["whole, replicas"]["losses"]
        assert rank["loader processes"]["bytes"] == {0: 0, 1: 0}


def test_a_resumed_run_goes_on_with_the_same_samples(counted: tuple[Path, Any]) -> None:
    _, found = counted
    for rank in found:
        through, stopped, resumed = (
            rank[name] for name in ("parts, replicas", "until stopped", "resumed")
        )
        assert stopped["losses"] + resumed["losses"] == through["losses"]
        assert len(stopped["losses"]) == 7
        for name, weight in through["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name


@pytest.fixture(scope="module")
def cases() -> tuple[dict[str, Any], ...]:
    """Each case with whole batches and with parts, on each rank."""
    names = [case.name for case in CASES]
    return launch_workers(part_cases.both_ways, (names,), workers=4, threads=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_parts_give_the_same_steps_as_whole_batches(
    cases: tuple[dict[str, Any], ...], name: str
) -> None:
    for rank in cases:
        whole, parts = rank[name]
        assert parts["losses"] == whole["losses"]
        assert parts["evaluation"] == whole["evaluation"]
        for parameter, weight in whole["weights"].items():
            assert torch.equal(parts["weights"][parameter], weight), parameter


READ = {
    "three stages": ["x: 0-12", "", "labels: 0-12, skip: 0-12", ""],
    "unequal replicas": [
        "x: 0-1 4-5 8-9",
        "x: 1-4 5-8 9-12",
        "",
        "labels: 0-12, skip: 0-12",
    ],
    "two terms": [
        "x: 0-3 4-7 8-11",
        "",
        "labels: 0-12, skip: 0-2 4-6 8-10",
        "labels: 0-12, skip: 2-4 6-8 10-12",
    ],
    "chimera": [
        "labels: 3-6 9-12, skip: 3-6 9-12, x: 0-3 6-9",
        "",
        "",
        "labels: 0-3 6-9, skip: 0-3 6-9, x: 3-6 9-12",
    ],
    "interleaved": ["x: 0-16", "labels: 0-16, skip: 0-16", "", ""],
    "v": ["labels: 0-16, skip: 0-16, x: 0-16", "", "", ""],
    "an unused rank": ["", "x: 0-12", "", "labels: 0-12, skip: 0-12"],
    "tensor groups": ["x: 0-12", "", "labels: 0-12, skip: 0-12", "x: 0-12"],
    "replicas of tensor groups": 2
    * [
        "labels: 0-1 4-5 8-9, skip: 0-1 4-5 8-9, x: 0-1 4-5 8-9",
        "labels: 1-4 5-8 9-12, skip: 1-4 5-8 9-12, x: 1-4 5-8 9-12",
    ],
}


@pytest.mark.parametrize("name", READ)
def test_what_each_rank_reads(cases: tuple[dict[str, Any], ...], name: str) -> None:
    """A skipped input is read by its stage; opposite stages share; so do ranks of one group."""
    for rank, expected in zip(cases, READ[name], strict=True):
        needs = sorted(rank[name][1]["needs"].items())
        words = [f"{key}: {' '.join(f'{lo}-{hi}' for lo, hi in rows)}" for key, rows in needs]
        if name != "two terms" or expected:
            assert ", ".join(words) == expected


def test_metrics_read_the_target_and_what_else_they_get(
    cases: tuple[dict[str, Any], ...],
) -> None:
    assert [sorted(rank["metrics"][1]["needs"]) for rank in cases] == [
        ["x"],
        [],
        ["labels", "skip", "x"],
        ["labels", "skip", "x"],
    ]
    assert cases[0]["metrics"][1]["losses"][0][3].keys() == {"accuracy", "of labels"}


@pytest.mark.timeout(300)
def test_a_replica_without_rows_reads_one_for_the_statistics() -> None:
    found = launch_workers(part_cases.normalised, workers=3, threads=1)
    for whole, parts in found:
        assert whole[0] == parts[0]
        for name, buffer in whole[1].items():
            assert torch.equal(parts[1][name], buffer), name
    # The last micro-batch has one row, which the second replica reads too.
    assert [rank[1][2] for rank in found] == [
        (range(0, 1), range(2, 3), range(4, 5), range(6, 7)),
        (range(1, 2), range(3, 4), range(5, 7)),
        (),
    ]


@pytest.mark.timeout(300)
def test_samples_with_several_rows_are_given_whole() -> None:
    found = launch_workers(part_cases.several_rows, workers=3, threads=1)
    for whole, parts, _ in found:
        assert parts == whole
    assert [rows for _, _, rows in found] == [[0, 4], [1, 2, 3, 5, 6, 7], []]


@pytest.mark.timeout(300)
def test_lengths_are_told_to_ranks_that_read_nothing() -> None:
    found = launch_workers(part_cases.of_lengths, workers=3, threads=1)
    for rank in found:
        for name in ("words", "tagger"):
            assert rank[name][0] == rank[name][1], name
        untold, other, contradicted = rank["tagger"][2][1]
        assert "rank 1 was given batch 0" in untold and "shows its length 'length'" in untold
        assert "rank 1 was given" in other and "length 5, and rank 0" in other
        assert "rank 0 was given" in contradicted and "the stated length is 5" in contradicted
    assert [rank["tagger"][2][0] for rank in found] == [("tokens",), (), ("labels",)]


REFUSED = {
    "number": "rank 1 was given batch 2 of 12 samples, and rank 0 batch 1 of 12 samples; every",
    "samples": "rank 2 was given batch 1 of 11 samples, and rank 0 batch 1 of 12 samples; every",
    "indices": "rank 1 was given batch 1 of 12 samples, and rank 0 batch 1 (samples 0, 1, 2, 3, ",
    "no leaf": "rank 2 was given batch 1: it lacks batch['labels'], of which this rank reads the "
    "rows 0-11; give leaves={'labels': ...}",
    "rows": "rank 1 was given batch 1: it has 8 rows of batch['x']; give the 9 that this rank "
    "reads (1-3, 5-7, 9-11), or all 12",
    "type": "rank 0 was given batch 1: batch['x'] is of torch.float32, but was of torch.float64",
    "key": "rank 0 was given batch 1: batches have no tensor 'y'; theirs are 'x', 'skip', 'labels'",
    "count": "rank 2 was given batch 1 of 12 samples and batch 1 of 12 samples, and rank 0 batch 1",
    "mixed": "rank 1 was given a whole batch beside parts of others in one step; give only parts",
}


@pytest.mark.timeout(300)
def test_a_wrong_part_is_refused_on_every_rank_and_training_goes_on() -> None:
    found = launch_workers(part_cases.refusals, workers=3, threads=1)
    for rank in found:
        for name, text in REFUSED.items():
            assert rank[name].startswith(f"BadInput: {text}"), name
        for name in ("predict", "verify"):
            assert rank[name].startswith(f"{name}() was given a part of a batch")
        assert rank["not finite"].startswith("LossNotFinite: loss is nan at step 1")
        assert "; tensor 0 of the batch has NaN in row 5; " in rank["not finite"]
        assert rank["first step"].startswith("not compared: a part of a batch was given, and your")
        assert rank["kept"]
        assert rank["after"] == found[0]["after"]


@pytest.mark.timeout(300)
def test_without_a_flush_a_wrong_part_ends_the_run_and_says_why() -> None:
    for text in launch_workers(part_cases.late_refusal, ("pipedream",), workers=3, threads=1):
        assert "rank 2 was given batch 2: it lacks batch['skip']" in text


@pytest.mark.timeout(300)
def test_a_whole_batch_beside_parts_does_not_hang() -> None:
    for text in launch_workers(part_cases.whole_beside_part, workers=3, threads=1):
        assert text.startswith(("RunFailed: ", "Stalled: "))
        assert "what every rank was given of a batch" in text


@pytest.mark.timeout(300)
def test_every_kind_of_loader_gives_the_same_losses(tmp_path: Path) -> None:
    """Arrays in files, a collator of features, and a sampler without torch's loader."""
    loaders_of_parts.write_data(tmp_path)
    found = launch_workers(loaders_of_parts.losses, (tmp_path,), workers=3, threads=1)
    for losses, _ in found:
        assert len(losses["everything"]) == 8
        for kind in ("NumPy", "safetensors", "collator"):
            assert losses[kind] == losses["everything"], kind
        assert losses["sampler"] == losses["everything, sampler"]
    every = 2 * loaders_of_parts.SAMPLES
    assert [taken for _, taken in found] == [
        {"x": every, "skip": 0, "labels": 0},
        {"x": 0, "skip": 0, "labels": 0},
        {"x": 0, "skip": every, "labels": every},
    ]


def needs_of_the_first() -> BatchNeeds:
    stages = (Stage(range(1), (0, 1), (1, 3)), Stage(range(1, 2), (2,), (4,)))
    plan = Plan(stages, 2, 4, "1f1b")
    return BatchNeeds(1, plan, (LeafNeed(0, "x", "batch['x']", (0,)),))


def test_rows_follow_the_size_of_the_batch() -> None:
    needs = needs_of_the_first()
    assert needs.keys == ("x",)
    assert needs.rows("x") == (range(1, 4), range(5, 8))
    assert needs.rows("x", 5) == (range(1, 3), range(4, 5))
    assert needs.rows("y") == ()
    assert needs.pick("x", "abcdefgh") == list("bcdfgh")
    assert str(needs) == "rank 1 reads batch['x'] (rows 1-3, 5-7)"


def test_a_column_is_indexed_or_called_with_the_samples_to_read() -> None:
    needs, data = needs_of_the_first(), torch.arange(40.0)
    indices = [30, 31, 32, 33, 4, 5, 6, 7]
    expected = [31.0, 32.0, 33.0, 5.0, 6.0, 7.0]
    for column in (data, data.numpy(), lambda rows: [float(row) for row in rows]):
        part = needs.read({"x": column, "y": None}, indices, number=4)
        assert part.leaves["x"].tolist() == expected
        assert (part.number, part.samples, list(part.indices)) == (4, 8, indices)
    with pytest.raises(BadInput, match=r"rank 1 reads batch\['x'\], and there is no column 'x'"):
        needs.read({"y": data}, indices)


def test_a_part_states_its_samples() -> None:
    with pytest.raises(BadInput, match="batch 3 has 0 samples"):
        BatchPart(3, 0)
    with pytest.raises(BadInput, match="has 4 samples and 2 indices"):
        BatchPart(3, 4, indices=(1, 2))
