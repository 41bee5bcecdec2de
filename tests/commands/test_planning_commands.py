import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands.refusals import Penstock, refused

from penstock.plan.json_file import read_plan
from penstock.planners.search.search import PLANNERS
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import LengthCosts, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.text import seconds_text
from penstock.timeline.json_file import read_timeline, timeline_from_json

PLAN_KEYS = {
    "planner",
    "schedule",
    "micro_batches",
    "micro_batch_size",
    "stages",
    "iteration_s",
    "samples_per_s",
    "tokens_per_s",
    "mfu",
    "price_per_hour",
    "lower_bound_s",
    "bound_argument",
    "bound_covers",
    "gap",
    "spp_bound_s",
    "bubble",
    "peak_memory_bytes",
    "fits",
    "memory_reserve",
    "optimizer_bytes_per_parameter_byte",
    "planning_s",
    "speedup_over_one_device",
    "speedup_over_data_parallel",
    "rivals",
}


@pytest.fixture
def problem(problem: list[str]) -> list[str]:
    """The same with a planner that is soon done."""
    return [*problem, "--planner", "dapple"]


def test_plan_answers_with_exactly_the_promised_keys(
    penstock: Penstock, problem: list[str]
) -> None:
    answer = penstock("plan", *problem, "--json")
    assert answer.code == 0
    assert set(answer.values) == PLAN_KEYS
    assert set(answer.values["stages"][0]) == {"layers", "devices", "slices", "recompute"}
    assert answer.output.count("\n") == 1


def test_a_profile_of_lengths_is_predicted_length_by_length(
    penstock: Penstock, problem: list[str], tmp_path: Path, small_profile: ModelProfile
) -> None:
    layers, edges = small_profile.layers, small_profile.edges
    twice = tuple(replace(layer, forward_s=layer.forward_s.scaled(2.0)) for layer in layers)
    by_length = (
        LengthCosts((("length", 16),), 0.75, layers, edges),
        LengthCosts((("length", 64),), 0.25, twice, edges),
    )
    write_profile(replace(small_profile, by_length=by_length), tmp_path / "profile.json")
    out = ["-o", f"{tmp_path}/plan.json"]
    answer = penstock("plan", *problem, *out, "--json").values
    short, long = answer["by_length"]
    assert (short["lengths"], short["share"]) == ({"length": 16}, 0.75)
    # The costs of the short ones are those of the profile itself here.
    assert short["iteration_s"] == answer["iteration_s"] < long["iteration_s"]
    mean_s = 0.75 * short["iteration_s"] + 0.25 * long["iteration_s"]
    assert answer["expected_s"] == pytest.approx(mean_s, rel=1e-12)
    told = penstock("simulate", f"{tmp_path}/plan.json").output
    assert f"mean over lengths {seconds_text(mean_s)} (length 16: " in told


def test_the_plan_is_no_slower_than_one_device_or_data_parallelism_and_obeys_the_bound(
    penstock: Penstock, problem: list[str]
) -> None:
    values = penstock("plan", *problem, "--planner", "search", "--json").values
    assert values["speedup_over_one_device"] >= 1
    parallel = values["speedup_over_data_parallel"]
    assert parallel is None or parallel >= 1
    assert values["iteration_s"] >= values["lower_bound_s"] > 0
    assert values["gap"] == pytest.approx(values["iteration_s"] / values["lower_bound_s"] - 1)
    assert len(values["peak_memory_bytes"]) == 4


def test_speedups_agree_with_the_baselines_planned_alone(
    penstock: Penstock, problem: list[str]
) -> None:
    values = penstock("plan", *problem, "--json").values
    parallel = penstock("plan", *problem, "--planner", "data-parallel", "--json")
    if parallel.code == 0:
        ratio = parallel.values["iteration_s"] / values["iteration_s"]
        assert values["speedup_over_data_parallel"] == pytest.approx(ratio)
    else:
        assert values["speedup_over_data_parallel"] is None


def test_a_saved_plan_simulates_to_the_figures_of_the_prediction_beside_it(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    planned = penstock("plan", *problem, "-o", path, "--json").values
    assert read_plan(path).global_batch == 12
    played = penstock("simulate", path, "--json").values
    for key in PLAN_KEYS - {"planning_s"}:
        assert played[key] == planned[key], key
    beside = json.loads((tmp_path / "plan.predicted.json").read_text())
    assert beside["iteration_s"] == planned["iteration_s"]
    assert beside["profile"] == problem[0]
    assert "iteration_s" not in json.loads(path.read_text())


def test_simulate_gives_the_timeline_on_request(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    path, out, trace = tmp_path / "plan.json", tmp_path / "t.json", tmp_path / "trace.json"
    penstock("plan", *problem, "-o", path, "--quiet")
    answer = penstock("simulate", path, "--timeline", "-o", out, "--picture", trace, "--json")
    assert set(answer.values) == PLAN_KEYS | {"timeline"}
    timeline = timeline_from_json(answer.values["timeline"])
    assert timeline == read_timeline(out)
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(timeline.events)


def test_simulate_finds_profile_and_cluster_in_a_run_directory(
    penstock: Penstock, run_directory: Path
) -> None:
    answer = penstock("simulate", run_directory / "plan.json", "--json")
    summary = json.loads((run_directory / "summary.json").read_text())
    assert answer.values["iteration_s"] == pytest.approx(summary["predicted_s"])


def test_a_plan_that_does_not_fit_in_memory_is_simulated_and_exits_with_3(
    penstock: Penstock, run_directory: Path
) -> None:
    path = run_directory / "cluster.toml"
    assert penstock("simulate", run_directory / "plan.json", "--json").values["fits"] is True
    path.write_text(path.read_text().replace("memory = 60000000.0", "memory = 1000000.0"))
    answer = penstock("simulate", run_directory / "plan.json", "--json")
    assert (answer.code, answer.values["fits"]) == (3, False)
    (line,) = answer.errors.splitlines()
    assert line.startswith("penstock: error: the plan does not fit in the memory of devices 0, 1")


def test_simulate_has_the_limits_that_plan_has(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    """Devices of 60 MB, of which plans leave 5 % free; with more memory the plan leaves less."""
    out = tmp_path / "plan.json"
    shown = penstock("plan", *problem, "--planner", "dapple", "-o", out).output
    assert "57.0 MB" in shown and "57.0 MB" in penstock("simulate", out).output
    full = max(penstock("simulate", out, "--json").values["peak_memory_bytes"])
    cluster = tmp_path / "four.toml"
    cluster.write_text(cluster.read_text().replace("60000000.0", f"{full / 0.96}"))
    assert penstock("simulate", out, "--json").code == 3


def test_people_get_a_table_and_notes_go_to_standard_error(
    penstock: Penstock, problem: list[str]
) -> None:
    answer = penstock("plan", *problem)
    assert "iteration" in answer.output and "embedding" in answer.output
    assert "not saved" in answer.errors and "not saved" not in answer.output
    assert penstock("plan", *problem, "--quiet").errors == ""


def test_a_time_limit_still_gives_a_plan_that_fits(penstock: Penstock, problem: list[str]) -> None:
    answer = penstock("plan", *problem, "--time-limit", "0.000001", "--json")
    assert answer.code == 0 and answer.values["iteration_s"] > 0


def test_list_names_everything_built_in(penstock: Penstock) -> None:
    values = penstock("list", "--json").values
    assert set(values) == {"jobs", "models", "clusters", "planners", "schedules"}
    assert values["jobs"] == ["gpt-text", "digits", "resnet-digits"]
    assert values["planners"] == list(PLANNERS) and values["schedules"] == list(FAMILIES)
    assert {"bert-48", "xlnet-36", "gnmt-16", "amoebanet-36"} <= set(values["models"])
    assert {"dapple-a", "dapple-a-effective", "graph-8"} <= set(values["clusters"])


def test_report_builds_the_page_and_says_where(penstock: Penstock, run_directory: Path) -> None:
    answer = penstock("report", run_directory, "--json")
    assert answer.values == {"report": str(run_directory / "report.html")}
    assert (run_directory / "report.html").stat().st_size > 10_000
    elsewhere = run_directory.parent / "page.html"
    penstock("report", run_directory, "-o", elsewhere)
    assert elsewhere.exists()


LOADED = """
import sys
from penstock import cli
sys.argv = ["penstock", *sys.argv[1:]]
code = cli.run()
print(*sorted(name for name in sys.modules if name.startswith("penstock.")), sep="\\n")
heavy = {"torch", "transformers", "tensorboard"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else code)
"""

MOST_MODULES = 144


def test_a_plan_loads_few_modules_and_none_of_other_commands() -> None:
    problem = "plan bert-48 --cluster dapple-a --batch 64 --quiet"
    arguments = [sys.executable, "-c", LOADED, *problem.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = [line for line in done.stdout.splitlines() if line.startswith("penstock.")]
    print(*loaded, sep="\n")
    packages = {name.split(".")[1] for name in loaded}
    assert not packages & {"runtime", "capture", "train", "integrations", "rehearse", "measure"}
    assert sum(name.startswith("penstock.commands.") for name in loaded) <= 7
    assert len(loaded) <= MOST_MODULES


def test_a_reader_that_goes_away_is_no_error(problem: list[str]) -> None:
    command = Path(sys.executable).with_name("penstock")
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [command, "list", "--json"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_with_130_and_one_line(
    penstock: Penstock, problem: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("penstock.planners.find_plan.find_plan", interrupted)
    # Shells start what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = penstock("plan", *problem, "--quiet")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (answer.code, answer.errors) == (130, "penstock: interrupted\n")


def test_an_unexpected_error_is_a_line_that_says_where_the_traceback_is(
    penstock: Penstock, problem: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("penstock.planners.find_plan.find_plan", broken)
    answer = penstock("plan", *problem, "--quiet")
    assert answer.code == 4
    assert answer.errors.startswith("penstock: error: ZeroDivisionError: a b; the traceback is in ")
    assert answer.errors.count("\n") == 1
    saved = Path(answer.errors.split()[-1])
    assert "in broken" in saved.read_text()
    saved.unlink()


def test_the_optimizer_decides_what_fits_and_is_recorded_with_the_plan(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "plan.json")
    made = penstock("plan", *problem, "--optimizer", "0.5", "--json", "-o", path).values
    again = penstock("simulate", path, "--json").values
    assert again["peak_memory_bytes"] == pytest.approx(made["peak_memory_bytes"])
    peaks = {
        name: penstock("simulate", path, "--optimizer", name, "--json").values["peak_memory_bytes"]
        for name in ("0", "sgd", "adamw", "adamw-fp32", "adamw8bit")
    }
    most = {name: max(found) for name, found in peaks.items()}
    each = most["sgd"] - most["0"]
    assert each > 0
    assert most["adamw8bit"] == most["sgd"]
    assert most["adamw"] - most["0"] == pytest.approx(2 * each)
    assert most["adamw-fp32"] - most["0"] == pytest.approx(6 * each)

    answer = penstock("plan", *problem, "--optimizer", "lion")
    refused(answer, 2, "optimizer 'lion' is not one of adamw")


def test_pp_is_short_for_a_pin_of_the_number_of_stages(
    problem: list[str], penstock: Callable[..., Any]
) -> None:
    problem = [*problem, "--planner", "search"]  # which keeps pins
    told = [
        json.loads(penstock("plan", *problem, *asked, "--json").output)
        for asked in (["--pp", "2"], ["--pin", "stages: 2"])
    ]
    for answer in told:
        answer.pop("planning_s")
    assert told[0] == told[1]
    assert len(told[0]["stages"]) == 2
    refused(penstock("plan", *problem, "--pp", "3", "--pin", "stages: 2"), 2, "stages: 3")
