"""The tables of measured and simulated figures are those of the benchmarks' recorded results."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"


def results(path: str) -> Any:
    return json.loads((BENCHMARKS / path).read_text(encoding="utf-8"))


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Scripts of a benchmark find those beside them, and leave no modules behind."""
    before = set(sys.modules)
    yield monkeypatch
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_convergence(scripts: pytest.MonkeyPatch) -> None:
    scripts.syspath_prepend(BENCHMARKS / "convergence")
    summary = script_at("benchmarks/convergence/summary.py", "convergence_summary")
    text = page("docs/benchmarks/convergence.md")
    cases = results("convergence/results.json")["cases"]
    assert len(cases) == 11
    for case in cases:
        assert summary.table_of(case) in text, case["case"]
    assert "\n".join(summary.errors_table(cases)) in text


def test_spectrain_converges_with_the_leads_of_its_paper_too() -> None:
    """`floor(k / 2) + N - k - 1` updates ahead in forwards, and `floor(k / 2)` in backwards."""
    found = 0
    for case in results("convergence/results.json")["cases"]:
        stages = int(case["case"].rpartition("/")[2])
        for row in case["rows"]:
            if row["method"] == "spectrain-published":
                assert row["leads"] == [
                    [k // 2 + stages - k - 1 for k in range(stages)],
                    [k // 2 for k in range(stages)],
                ]
                found += 1
    assert found == 9


def test_throughput_without_a_flush() -> None:
    script = script_at("benchmarks/convergence/throughput.py", "convergence_throughput")
    text = page("docs/benchmarks/convergence.md")
    rows = results("convergence/throughput.json")["rows"]
    assert script.table_of(rows) in text
    gains = [row["synchronous_s"] / row["spectrain_s"] for row in rows]
    assert f"from {min(gains):.2f} to {max(gains):.2f} times as fast" in " ".join(text.split())
    prices = [row["pipedream_s"] / row["spectrain_s"] for row in rows]
    words = f"from {min(prices):.2f} to {max(prices):.2f} times the updates of `pipedream`"
    assert words in " ".join(text.split())
    again = script.row_of(script.MODELS[0], rows[0]["link_gb_per_s"])
    seconds = {name: value for name, value in again.items() if name.endswith("_s")}
    assert seconds == pytest.approx({name: rows[0][name] for name in seconds}, rel=1e-12)


def test_rehearsals(scripts: pytest.MonkeyPatch) -> None:
    scripts.syspath_prepend(BENCHMARKS / "rehearsal")
    script = script_at("benchmarks/rehearsal/rehearse.py", "rehearsals")
    found = script.read_results(BENCHMARKS / "rehearsal" / "results.json")
    text = page("docs/benchmarks/rehearsal.md")
    assert "\n".join(script.table_of(found)) in text
    errors = [abs(one.error) for one in found]
    median, worst = 100 * script.median_error(found), 100 * max(errors)
    assert f"median error of {median:.1f} %, and at most {worst:.1f} %" in " ".join(text.split())
    assert [one.case for one in found if one.differences] == []


def test_two_hosts() -> None:
    text = page("docs/benchmarks/rehearsal.md")
    found = results("rehearsal/two_hosts.json")
    low, high = found["spread_s"]
    rows = {
        f"ours, predicted (`{found['schedule']}`)": found["predicted_s"],
        "ours, rehearsed": found["rehearsed_s"],
        f"ours, trained (median of {found['rounds']}, {low:.3f} to {high:.3f})": found["trained_s"],
        **{f"torch, {name}": seconds for name, seconds in found["rivals_s"].items()},
    }
    for name, seconds in rows.items():
        assert f"| {name} | {seconds:.3f} |" in text
    words = " ".join(text.split())
    assert f"{found['faster']:.2f} times as fast as torch's best schedule" in words
    assert f"which is `{found['best_rival']}`" in words
    error = found["predicted_s"] / found["trained_s"] - 1
    assert f"**The prediction is {-100 * error:.0f} % too short**" in text
    ours = found["losses"]["ours"]
    assert all(abs(loss / ours - 1) < 1e-6 for loss in found["losses"].values())
    assert found["differences"] == []


def test_simulator(scripts: pytest.MonkeyPatch) -> None:
    scripts.syspath_prepend(BENCHMARKS / "simulator")
    parts = script_at("benchmarks/simulator/parts.py", "simulator_parts")
    document = results("simulator/results.json")
    readme = page("benchmarks/simulator/README.md")
    for name, table in parts.page_tables(document).items():
        assert "\n".join(table) in readme, name
    for sentence in parts.summary_words(document):
        assert sentence in " ".join(readme.split())
        assert sentence in " ".join(page("docs/benchmarks/schedules.md").split())


def test_predictions_of_every_kind_of_schedule() -> None:
    readme = page("benchmarks/prediction/README.md")
    rows = results("prediction/schedules.json")["rows"]
    table = [
        f"| {row['plan']} | {1e3 * row['predicted_s']:.1f} ms | {1e3 * row['measured_s']:.1f} ms "
        f"| {100 * row['error']:+.1f} % |"
        for row in rows
    ]
    assert len(table) == 11
    assert "\n".join(table) in readme


@pytest.mark.parametrize("kind", ["schedules", "wide"])
def test_predictions_on_shared_cores(kind: str) -> None:
    runs = [results(f"prediction/{kind}_4_workers{which}.json")["rows"] for which in ("_first", "")]
    table = [
        f"| {pair[0]['plan']} |"
        + "|".join(
            f" {1e3 * row['predicted_s']:,.1f} ms | {1e3 * row['measured_s']:,.1f} ms "
            f"| {100 * row['error']:+.1f} % "
            for row in pair
        )
        + "|"
        for pair in zip(*runs, strict=True)
    ]
    assert len(table) == 11
    assert "\n".join(table) in page("benchmarks/prediction/README.md")


def test_predictions_of_long_actions_on_shared_cores() -> None:
    """They are within the 10 % that the page claims."""
    rows = [
        row
        for which in ("_first", "")
        for row in results(f"prediction/wide_4_workers{which}.json")["rows"]
    ]
    errors = sorted(abs(row["error"]) for row in rows)
    assert len(errors) == 22 and errors[-1] < 0.1
    words = f"The median error is {50 * (errors[10] + errors[11]):.1f} %, the worst "
    assert f"{words}{100 * errors[-1]:.1f} %" in page("benchmarks/prediction/README.md")


def test_peak_memory() -> None:
    found = {
        (row["schedule"], row["recompute"], row["rank"]): [
            f"{row[key] / 2**20:.1f}" for key in ("predicted_bytes", "measured_bytes")
        ]
        for row in results("memory/digits.json")
    }
    text = page("docs/how-it-works/memory.md")
    words = {"none": "no", "some": "half of the layers", "all": "all layers"}
    for schedule, recompute, rank in found:
        cells = [*found[schedule, recompute, 0], *found[schedule, recompute, 1]]
        line = f"| `{schedule}` | {words[recompute]} | {' | '.join(cells)} |"
        assert line in text, (schedule, recompute, rank)


def test_distance_from_the_optimum() -> None:
    script = script_at("benchmarks/optimality/schedule_optimality.py", "schedule_optimality")
    rows = results("optimality/results.json")["rows"]
    readme = page("benchmarks/optimality/README.md")
    assert "\n".join(script.table(rows)) in readme
    assert "\n".join(script.optima(rows)) in readme


def zero_bubble_cell(row: dict[str, Any]) -> str:
    """Theirs and ours; ours bold where it is shorter by more than theirs was rounded."""
    ours = f"{row['ours']:.2f}"
    return f"{row['theirs']:.1f} / " + (f"**{ours}**" if row["verdict"] == "shorter" else ours)


def test_zero_bubble_beside_its_authors_generators() -> None:
    rows = results("schedules/results.json")["rows"]
    text = page("docs/benchmarks/schedules.md")
    for groups in ("4, 32", "8, 64", "16, 64"):
        cells = [zero_bubble_cell(row) for row in rows if row["case"] == f"{groups}, 1:1.2:0.9"]
        assert len(cells) == 6
        assert f"| {groups} | {' | '.join(cells)} |" in text
    counted = [sum(row["verdict"] == verdict for row in rows) for verdict in ("shorter", "equal")]
    assert len(rows) == sum(counted)
    assert f"Of the {len(rows)} cells {counted[0]} are shorter, {counted[1]} equal" in text


def test_orders_beside_those_of_torch() -> None:
    rows = results("schedules/torch_results.json")["rows"]
    text = page("docs/benchmarks/schedules.md")
    section = text.partition("\n## Beside PyTorch's schedules\n")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|") and "`" in line]
    assert len(shown) == 10
    for line in shown:
        theirs, ours, *_ = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        ratios = [
            row["ours"] / row["theirs"]
            for row in rows
            if (row["torch_class"], row["family"]) == (f"Schedule{theirs}", ours)
            and row["ours"] is not None
        ]
        shorter = sum(ratio < 1 - 1e-9 for ratio in ratios)
        longer = sum(ratio > 1 + 1e-9 for ratio in ratios)
        counts = (len(ratios), shorter, len(ratios) - shorter - longer, longer)
        mean = sum(ratios) / len(ratios)
        assert line == f"| {theirs} | `{ours}` | {' | '.join(map(str, counts))} | {mean:.3f} |"


def test_reliability() -> None:
    tables = script_at("benchmarks/reliability/tables.py", "reliability_tables")
    text = page("docs/benchmarks/reliability.md")
    readers, chaos = results("reliability/readers.json"), results("reliability/chaos.json")
    assert tables.readers_table(readers["readers"]) in text
    assert tables.commands_table(results("reliability/commands.json")) in text
    assert tables.faults_table(chaos["faults"]) in text
    assert not any(found["failures"] for found in readers["readers"])
    assert tables.phases_table(chaos["faults"]) in text
    assert tables.counts_in_words(chaos["faults"]) in text
    assert chaos["date"] in text
    assert chaos["machine"] in text
    if (BENCHMARKS / "reliability/soak.json").exists():
        assert tables.soak_table(results("reliability/soak.json")["trends"]) in text
    lost = results("reliability/lost_worker.json")
    assert tables.lost_workers_table(lost["runs"]) in text
    assert lost["machine"]["date"][:10] in text


def test_losses_under_torchrun() -> None:
    tables = script_at("benchmarks/reliability/tables.py", "reliability_tables")
    text = page("docs/benchmarks/reliability.md")
    found = results("reliability/elastic.json")
    assert tables.elastic_table(found) in text
    assert found["machine"]["date"][:10] in text
    four, two = (found["planned_s"][ranks] for ranks in ("4", "2"))
    assert f"took {four:.1f} s for four ranks and {two:.1f} s for two" in " ".join(text.split())
    assert {run["largest_difference_of_losses"] for run in found["worker"]} == {0.0}


def test_forty_predicted_runs() -> None:
    script = script_at("benchmarks/prediction/forty_table.py", "forty_table")
    document = results("prediction/forty_runs.json")
    assert len(document["rows"]) == 40
    for text in (page("benchmarks/prediction/README.md"),):
        assert "\n".join(script.table(document)) in text
        assert script.words(document) in " ".join(text.split())
