"""Exported plans run in torch's pipelines, with the losses and gradients of one device."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commands.refusals import Penstock
from scripts import script_at
from started_scripts import by_workers

from penstock.capture.capture import capture_model
from penstock.measure.layer_times import measure_profile
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage
from penstock.profile.json_file import write_profile

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("torch_ranks.py")
EXAMPLE = ROOT / "examples" / "exported_plan.py"
LIGHT = ("--join", "wpe=wte", "--join", "ln_f=h.7")
LAYERS = 11
"""The embedding, eight blocks, the head and the loss."""


pytestmark = pytest.mark.timeout(600)

PLANS = {
    2: {
        "1f1b": ((4,), (0, 1), 8),
        "interleaved": ((3, 6, 8), (0, 1, 0, 1), 4),
        "zb-v": ((2, 5, 7), (0, 1, 1, 0), 8),
        "zb-h1": ((6,), (0, 1), 4),
    },
    4: {
        "gpipe": ((2, 5, 7), (0, 1, 2, 3), 4),
        "zb-h2": ((2, 4, 9), (0, 1, 2, 3), 8),
        "hanayo": ((1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 3, 2, 1, 0), 8),
    },
}
"""By ranks and schedule: the cuts, the rank of each stage, the micro-batches of 16 samples."""


def plan_of(schedule: str, cuts: Sequence[int], ranks: Sequence[int], micro_batches: int) -> Plan:
    bounds, rows = [0, *cuts, LAYERS], 16 // micro_batches
    stages = tuple(
        Stage(range(lo, hi), (rank,), (rows,))
        for lo, hi, rank in zip(bounds[:-1], bounds[1:], ranks, strict=True)
    )
    return Plan(stages, micro_batches, rows, schedule)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The measured profile of the example's model, at block granularity."""
    example = script_at("examples/exported_plan.py", "exported_plan")
    torch.manual_seed(0)
    words = torch.randint(example.WORDS, (2, example.LENGTH))
    graph = capture_model(example.Gpt(), (words, words), loss=example.loss, granularity="block")
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(measure_profile(graph, (words, words)), path)
    return path


def exported(penstock: Penstock, profile: Path, folder: Path, ranks: int) -> None:
    """Each plan for so many ranks, and its layout, in a folder of its own."""
    for schedule, shape in PLANS[ranks].items():
        place = folder / schedule
        place.mkdir()
        write_plan(plan_of(schedule, *shape), place / "plan.json")
        options = ("--profile", profile, "--to", "torch", *LIGHT, "-o", place / "layout.json")
        answer = penstock("export", place / "plan.json", *options)
        assert answer.code == 0, answer.errors


@pytest.mark.parametrize(
    ("ranks", "front_end"),
    [
        pytest.param(2, "names", marks=pytest.mark.slow),
        (4, "names"),
        pytest.param(2, "traced", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_one_device_and_of_penstock(
    penstock: Penstock, profile: Path, tmp_path: Path, ranks: int, front_end: str
) -> None:
    exported(penstock, profile, tmp_path, ranks)
    # Stages of torch's own front end send to themselves where neighbours share a rank.
    plans = {k: v for k, v in PLANS[ranks].items() if front_end == "names" or k != "zb-v"}
    output, *_ = by_workers(SCRIPT, tmp_path, front_end, *plans, ranks=ranks)
    everywhere = json.loads(output)
    assert len(everywhere) == ranks
    for schedule, (_, places, micro_batches) in plans.items():
        seen = [rank[schedule] for rank in everywhere]
        assert [wrong for rank in seen for wrong in rank["wrong"]] == []
        # Each rank sees a part; together they see each parameter once, in torch and in Penstock.
        for who in ("torch", "penstock"):
            assert sorted(name for rank in seen for name in rank[who]) == seen[0]["all"], who
        assert [rank["losses"] for rank in seen] == [
            micro_batches if rank == places[-1] else 0 for rank in range(ranks)
        ]
        with (tmp_path / schedule / "layout.csv").open(newline="") as file:
            written = list(csv.reader(file))
        assert [rank["actions"] for rank in seen] == [written] * ranks
        kinds = {re.sub(r"\d", "", action) for order in written for action in order}
        splits = schedule.startswith("zb")
        assert ({"F", "I", "W"} <= kinds) if splits else (kinds == {"F", "B"})


def test_the_example_trains(penstock: Penstock, profile: Path, tmp_path: Path) -> None:
    exported(penstock, profile, tmp_path, 2)
    output = "".join(by_workers(EXAMPLE, tmp_path / "zb-v" / "layout.json"))
    losses = [float(x) for x in re.findall(r"step \d: loss (\d\.\d+)", output)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2
