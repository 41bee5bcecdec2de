"""Stages that several ranks share by tensor parallelism train as one device does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.tensor_cases import (
    TABLE,
    batch_of,
    captured_gpt,
    compared,
    continued,
    grouped_plan,
    keeps_a_group_that_was_left,
    llama_differences,
    refusals,
    small_gpt,
    unequal_with_settings,
    unusual_refusal,
    with_a_failure,
    with_shards_left_out,
)

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.tables import Constraints

LAYERS = 15
"""Of the small GPT at the granularity of modules."""


def one_group(schedule: str = "1f1b") -> Plan:
    return Plan((Stage(range(LAYERS), (0,), (4,)),), 3, 4, schedule, tensor_groups=((0, 1),))


def group_last() -> Plan:
    """A stage of one rank, then one of two replicas of two ranks, whose numbers are mixed."""
    stages = Stage(range(7), (2,), (4,)), Stage(range(7, LAYERS), (0, 1), (2, 2))
    return Plan(stages, 3, 4, "1f1b", tensor_groups=((1, 3), (0, 4), (2,)))


def plain() -> Plan:
    stages = Stage(range(6), (0, 1), (3, 1)), Stage(range(6, LAYERS), (2, 3, 4), (2, 1, 1))
    return Plan(stages, 3, 4, "1f1b")


def interleaved() -> Plan:
    """Two groups with two stages each, by blocks, whose ranks also pass activations on."""
    cuts = ((0, 1, 0), (1, 2, 1), (2, 3, 0), (3, 5, 1))
    stages = tuple(Stage(range(lo, hi), (device,), (3,)) for lo, hi, device in cuts)
    return Plan(stages, 4, 3, "interleaved", tensor_groups=((0, 2), (1, 3)))


def group_of_four() -> Plan:
    return Plan((Stage(range(LAYERS), (0,), (4,)),), 3, 4, "1f1b", tensor_groups=((0, 1, 2, 3),))


def replicas_of_groups() -> Plan:
    """Two replicas of two ranks each hold the whole model."""
    stages = (Stage(range(LAYERS), (0, 1), (3, 1)),)
    return Plan(stages, 3, 4, "gpipe", tensor_groups=((0, 2), (1, 3)))


def zero_bubble_v() -> Plan:
    """Stages go down and up again over two groups."""
    cuts = ((0, 1, 0), (1, 2, 1), (2, 3, 1), (3, 5, 0))
    stages = tuple(Stage(range(lo, hi), (device,), (3,)) for lo, hi, device in cuts)
    return Plan(stages, 4, 3, "zb-v", tensor_groups=((0, 1), (2, 3)))


@pytest.mark.parametrize(
    "plans",
    [
        (grouped_plan(LAYERS, 7), grouped_plan(LAYERS, 11, "gpipe", recompute=True)),
        (grouped_plan(LAYERS, 5, "zb-h1"), group_last()),
    ],
    ids=["first", "last"],
)
def test_replicas_of_groups_beside_a_plain_stage_equal_one_device(plans: tuple[Plan, ...]) -> None:
    for found in launch_workers(compared, (plans,), workers=5, threads=1):
        assert found == [[]] * len(plans)


def test_other_transports_and_stages_of_one_group() -> None:
    plans = (interleaved(), with_recompute(interleaved(), False, by_block=True))
    transports = ("shared-memory", "process-groups")
    for found in launch_workers(compared, (plans, transports, "block"), workers=4, threads=1):
        assert found == [[]] * len(plans)


@pytest.mark.parametrize(
    ("plans", "granularity"),
    [((group_of_four(), replicas_of_groups()), "module"), ((zero_bubble_v(),), "block")],
    ids=["one stage", "several"],
)
def test_four_ranks_as_a_group_as_replicas_and_as_stages_equal_one_device(
    plans: tuple[Plan, ...], granularity: str
) -> None:
    for found in launch_workers(compared, (plans, (), granularity), workers=4, threads=1):
        assert found == [[]] * len(plans)


def test_a_norm_that_leaves_out_shards_is_found_in_the_first_step() -> None:
    for found in launch_workers(with_shards_left_out, (one_group(),), workers=2, threads=1):
        assert found.startswith("RunFailed: the first step is not that of your module, and nothing")
        assert "gradient norm is" in found


def test_a_model_of_hugging_face_is_divided_by_its_own_plan() -> None:
    for found in launch_workers(llama_differences, workers=3, threads=1):
        assert found == []


@pytest.mark.parametrize("autocast", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_lengths_metrics_and_autocast_are_as_on_one_device(autocast: torch.dtype | None) -> None:
    stages = Stage(range(7), (0,), (4,)), Stage(range(7, LAYERS), (1,), (4,))
    plan = Plan(stages, 3, 4, "1f1b", tensor_groups=((0, 1), (2, 3)))
    for found in launch_workers(unequal_with_settings, (plan, autocast), workers=4, threads=1):
        assert found == []


def test_code_that_torch_cannot_run_on_shards_is_refused_with_its_line() -> None:
    for found in launch_workers(unusual_refusal, workers=2, threads=1):
        assert found.startswith("BadInput: the stage of layers 0 to 3 does not run on its shards")
        assert "`y *= 0.9`" in found and "in '0' (no numbers) divide what counts heads" in found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(grouped_plan(LAYERS, 7), group_last(), marks=pytest.mark.slow),
        (group_last(), plain()),
        pytest.param(plain(), group_last(), marks=pytest.mark.slow),
    ],
    ids=["groups to groups", "groups to one rank each", "one rank each to groups"],
)
def test_checkpoints_are_whole_and_go_on_under_another_plan(
    tmp_path: Path, before: Plan, after: Plan
) -> None:
    arguments = (str(tmp_path), before, after)
    for found in launch_workers(continued, arguments, workers=5, threads=1):
        assert found == []


def test_the_connections_of_a_group_that_was_left_are_closed() -> None:
    (kept,) = launch_workers(keeps_a_group_that_was_left, workers=1, threads=1)
    assert not kept


def test_a_failure_of_one_rank_of_a_group_ends_all() -> None:
    found = launch_workers(with_a_failure, (grouped_plan(LAYERS, 7),), workers=5, threads=1)
    assert found[1].startswith("RunFailed: rank 1, stage 0, B0: a hook of the user's")
    for rank in (0, 2, 3, 4):
        assert found[rank].startswith(
            f"RunFailed: rank {rank} stopped: rank 1, stage 0, B0: a hook"
        )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sharded": (
        {"constraints": Constraints(sharding="optimizer")},
        'sharding="optimizer" does not work with the tensor',
    ),
    "compiled": ({"compile": True}, "compile=True does not work with the tensor groups of a plan"),
    "no table": ({"tensor_parallel": None}, "model SmallGPT does not say how its layers are div"),
    "no layer": ({"tensor_parallel": {"blocks.*.x": "colwise"}}, "for 'blocks.*.x', which must"),
    "no linear layer": ({"tensor_parallel": {"words": "colwise"}}, "for 'words', which must be"),
    "no such split": ({"tensor_parallel": {"head": "both"}}, "says \"both\" for 'head', which"),
    "adafactor": ({"optimizer": torch.optim.Adafactor}, "Adafactor does not work with the tensor"),
    "heads": (
        {"tensor_parallel": TABLE},
        "in 'blocks.0' (self.heads = 4) divide what counts heads or widths by the size of the",
    ),
}


def test_what_does_not_work_with_tensor_groups_is_refused_on_all_ranks() -> None:
    settings = [options for options, _ in REFUSED.values()]
    for found in launch_workers(refusals, (one_group(), settings), workers=2, threads=1):
        for (name, (_, expected)), message in zip(REFUSED.items(), found, strict=True):
            assert message.startswith("BadInput: ") and expected in message, (name, message)


@pytest.mark.parametrize("schedule", ["chimera", "pipedream"])
def test_schedules_that_groups_cannot_run_are_refused(schedule: str) -> None:
    from penstock.runtime.pipeline import Pipeline

    stages = Stage(range(8), (0,), (4,)), Stage(range(8, LAYERS), (1,), (4,))
    plan = Plan(stages, 4, 4, schedule, tensor_groups=((0, 1), (2,)))
    with pytest.raises(BadInput, match=f"schedule '{schedule}' .* does not work with the tensor"):
        Pipeline(captured_gpt(small_gpt()), batch_of(0), plan=plan)
