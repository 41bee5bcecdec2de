"""The theorem of the runtime: whatever the plan, the result is that of one device."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from runtime.pipeline_cases import run_cases, run_parts

from penstock.errors import BadInput
from penstock.runtime.processes.launch import launch_workers
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, placement_of_style
from penstock.schedule.weight_rule import SYNCHRONOUS


def is_runnable(name: str) -> bool:
    """Whether a family updates weights after a flush."""
    style = FAMILIES[name].placement
    rounds = 2 if style in ("looped", "folded") else 1
    placement = placement_of_style(style, 2, rounds)
    shape = PipelineShape(len(placement), 4, placement, mirrored=style == "mirrored")
    schedule = FAMILIES[name].make(shape)
    return schedule.weights == SYNCHRONOUS


RUNNABLE = [name for name in FAMILIES if is_runnable(name)]
REPLICATIONS = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (3, 1), (2, 2))


Part = tuple[Sequence[str], Sequence[Sequence[int]], dict[str, Any]]
"""Models, replications, and options of `compare_all`."""

FOLDED = {"schedules": ("interleaved", "zb-v")}

PARTS: dict[str, Sequence[Part]] = {
    "chains": [
        (["mlp"], REPLICATIONS, {}),
        (["convolutions"], [(1, 1, 1, 1), (3, 1), (2, 2)], {}),
    ],
    "tied weights and skip tensors": [
        (["gpt2", "t5"], [(1, 1, 1, 1), (2, 1), (1, 3)], {"schedules": ("1f1b",)})
    ],
    "batch norm": [(["resnet"], [(2, 2), (1, 1)], {"schedules": ("1f1b",)})],
    "models of hugging face that round parts to float32": [
        (["llama", "qwen2_tied"], [(1, 1)], {"schedules": ("1f1b",)})
    ],
    "samples with several rows": [
        (["pictures"], [(1, 1, 1), (1, 3)], {"schedules": ("1f1b", "zb-h1")})
    ],
    "recompute": [(["convolutions", "mlp"], [(2, 1), (1, 1, 1)], {"recompute": True})],
    "every schedule": [(["mlp"], [(1,), (1, 1), (2, 1)], {"schedules": RUNNABLE})],
    "stages that share a rank": [
        (["gpt2", "t5"], [(1,), (1, 1), (2, 1)], FOLDED),
        (["convolutions"], [(2,), (1, 1)], FOLDED | {"recompute": True}),
    ],
    "micro-batches in turn": [
        (["mlp"], [(2, 1), (1, 2), (2, 2), (3, 1)], {"in_turn": True}),
        (["mlp", "gpt2"], [(1, 3)], {"in_turn": True, "schedules": ("early-backward", "zb-h1")}),
        (["convolutions"], [(2, 1)], {"in_turn": True, "recompute": True}),
    ],
    "process groups": [
        (["mlp", "convolutions"], [(2, 1), (1, 1, 1)], {"transport": "process-groups"})
    ],
    "messages larger than slots and rings": [
        (["mlp", "convolutions"], [(2, 1), (1, 1, 1)], {"slot_bytes": 64, "ring_bytes": 256})
    ],
}

pytestmark = pytest.mark.timeout(900)


def played(parts: Mapping[str, Sequence[Part]]) -> dict[str, dict[str, list[str]]]:
    """What differs in each case of each part on any of four ranks."""
    results = launch_workers(run_parts, (parts,), workers=4, threads=1)
    assert all(list(found) == list(parts) for found in results)
    return {
        part: {
            case: [
                f"rank {rank}: {what}"
                for rank, ranks in enumerate(results)
                for what in ranks[part][case]
            ]
            for case in results[0][part]
        }
        for part in parts
    }


def assert_all_equal(found: Mapping[str, list[str]], part: Sequence[Part]) -> None:
    """Nothing differs on any rank in any case; and the cases did run."""
    counts = [
        len(names) * len(replications) * len(options.get("schedules", ("gpipe", "1f1b")))
        for names, replications, options in part
    ]
    assert len(found) == sum(counts)
    wrong = {case: what for case, what in found.items() if what}
    assert not wrong, wrong


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, list[str]]]:
    """All parts, played by one set of workers."""
    return played(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_a_pipeline_equals_one_device(results: dict[str, dict[str, list[str]]], part: str) -> None:
    assert_all_equal(results[part], PARTS[part])


def test_eight_ranks_equal_one_device() -> None:
    options = {"schedules": ("1f1b", "zb-h1")}
    for found in launch_workers(run_cases, (["mlp"], [(2, 3, 2, 1)], options), workers=8):
        assert_all_equal(found, [(["mlp"], [(2, 3, 2, 1)], options)])


def test_copies_of_a_stage_cannot_share_statistics_and_are_refused() -> None:
    options = {"schedules": ("chimera",)}
    with pytest.raises(BadInput, match=r"batch normalisation.*'chimera' holds it twice"):
        launch_workers(run_cases, (["convolutions"], [(1, 1)], options), workers=2, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "llama", "qwen2_tied"])
def test_models_equal_one_device_for_every_schedule_and_replication(name: str) -> None:
    part = [([name], REPLICATIONS, {})]
    assert_all_equal(played({name: part})[name], part)
