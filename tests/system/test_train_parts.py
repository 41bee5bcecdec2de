"""A job whose data take part: each rank reads what it needs, and losses are the same."""

from pathlib import Path

import pytest
from small_runs import rows_of, train

from penstock.plan.plan import Plan, Stage

THREE_STAGES = Plan(
    (
        Stage(range(0, 1), (0,), (4,)),
        Stage(range(1, 2), (1,), (4,)),
        Stage(range(2, 4), (2,), (4,)),
    ),
    4,
    4,
    "1f1b",
)


def losses_of(folder: Path, data: str) -> list[tuple[float | None, float | None]]:
    """The losses of the steps and evaluations of a run of six steps."""
    result = train(folder, THREE_STAGES, workers=3, data=data)
    assert result.steps == 6
    return [(r.get("loss"), r.get("evaluation_loss")) for r in rows_of(result.run_directory)]


@pytest.mark.timeout(280)
def test_ranks_read_what_they_need_after_the_verified_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = losses_of(tmp_path / "parts", "regression_where_used")
    assert parts == losses_of(tmp_path / "whole", "regression")
    assert len(parts) == 8
    steps = ["train 1", "train 2", "held-out 0", "held-out 1", "train 3", "train 4", "train 5"]
    for rank, keys in enumerate(["(0,)", "()", "(1,)"]):
        read = Path(f"read-by-{rank}.txt").read_text().splitlines()
        assert read == [f"{step}: {keys}" for step in (*steps, *steps[2:4])]
