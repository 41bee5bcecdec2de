"""A loop that uses weights of other ranks is right within full_model(), and refused outside."""

import re
from pathlib import Path
from typing import Any

import pytest
from runtime.full_model_cases import FORMS, faults, forms, loaded_by, plans
from started_scripts import by_workers

from penstock.runtime.processes.launch import launch_workers

pytestmark = pytest.mark.timeout(300)

EXAMPLE = Path(__file__).parents[2] / "examples" / "moving_teacher.py"
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], ...]:
    """What both ranks have seen of the forms of a loop."""
    return launch_workers(forms, workers=2, threads=1)


def test_every_form_is_right_within_full_model(found: tuple[dict[str, Any], ...]) -> None:
    for rank, seen in enumerate(found):
        wrong = {name: gap for name, gap in seen["inside"].items() if not gap < TOLERANCE}
        assert not wrong, f"rank {rank}"


def test_what_a_loop_does_to_each_weight_alone_is_right(found: tuple[dict[str, Any], ...]) -> None:
    for seen in found:
        assert seen["by name"] < TOLERANCE


@pytest.mark.parametrize("name", FORMS)
def test_outside_of_it_every_form_is_refused(found: tuple[dict[str, Any], ...], name: str) -> None:
    said, after = zip(*(seen["outside"][name] for seen in found), strict=True)
    assert any(text.startswith("WeightElsewhere") for text in said)
    for text in after:  # also on a rank that had nothing to refuse
        assert "which rank" in text and "this one" in text and "full_model()" in text


def test_it_is_right_however_weights_are_divided() -> None:
    for rank, seen in enumerate(launch_workers(plans, workers=2, threads=1)):
        wrong = {name: gap for name, gap in seen.items() if not gap < TOLERANCE}
        assert not wrong, f"rank {rank}"


def test_errors_within_leave_the_pipeline_usable() -> None:
    first, second = launch_workers(faults, workers=2, threads=1)
    for seen in (first, second):
        assert "rank 1 wrote to 'teacher.0.weight'" in seen["one"]
        assert "leave the block first" in seen["step"]
        assert "of other ranks take" in seen["memory"] and "rank0_only=True" in seen["memory"]
        assert seen["verified"]
    assert "in the loop" in second["raised"] and first["raised"] == "None"
    assert first["changed"] == ["student.0.bias"] and first["kept"]


def test_a_state_that_some_ranks_alone_load_is_refused() -> None:
    first, second = launch_workers(loaded_by, workers=2, threads=1)
    assert first == second
    refused = {name: said for name, said in first.items() if said != "trained"}
    # All of the teacher is on rank 0, which alone may load it.
    assert refused.keys() == {"rank 0 "}
    assert re.fullmatch(
        r"rank 0 has loaded \d+ weights into the model since the last step, some of which other "
        r"ranks hold, and rank 1 0, .*full_model\(rank0_only=True\):` on rank 0",
        refused["rank 0 "],
    )


def test_the_example_moves_a_teacher_as_in_one_process() -> None:
    # The script ends in an error where a weight differs from one process.
    printed, _ = by_workers(EXAMPLE)
    ours, theirs = re.findall(r"\d\.\d{4}", printed)
    assert ours == theirs, printed
