"""The tables and sentences that a page must have, as the benchmarks' scripts make them of results.

Each function gives texts; where lines are broken does not matter.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from statistics import median

from ages import has_history, made
from history import history_table
from results import BENCHMARKS, ROOT, beside, results, script

__all__ = ["EXPECTED", "expected"]


@cache
def expected(page: str) -> tuple[str, ...]:
    """The texts that a page must have."""
    return tuple(EXPECTED[page]()) if page in EXPECTED else ()


def lines(tables: Iterable[Iterable[str]]) -> Iterator[str]:
    for table in tables:
        yield "\n".join(table)


def capture() -> Iterator[str]:
    yield "\n".join(script("capture.py").table(results("capture/results.json")["rows"]))
    yield "\n".join(script("stage_forward.py").table(results("capture/stage_forward.json")))


def convergence() -> Iterator[str]:
    summary, cases = script("convergence/summary.py"), results("convergence/results.json")["cases"]
    yield from map(summary.table_of, cases)
    yield "\n".join(summary.errors_table(cases))
    rows = results("convergence/throughput.json")["rows"]
    yield script("convergence/throughput.py").table_of(rows)


def fsdp() -> Iterator[str]:
    yield script("fsdp.py").table().strip()
    yield script("fsdp.py").summary()


def history() -> Iterator[str]:
    if has_history():
        yield "\n".join(history_table())


def gpu() -> Iterator[str]:
    """Estimates are those of all layers together over their measured time."""
    for row in results("gpu/alone.json")["rows"].values():
        measured, predicted = row["step_s"], row["predicted_s"]
        yield (
            f"| {1e3 * measured:.1f} | {1e3 * predicted:.1f} | "
            f"{100 * (predicted / measured - 1):+.1f} % | {row['estimate_all']:.2f} |"
        )


def hardware() -> Iterator[str]:
    yield "\n".join(script("hardware.py").table(results("hardware/results.json")["rows"]))


def largest() -> Iterator[str]:
    benchmark, found = script("largest.py"), results("largest/results.json")
    yield benchmark.layout_counts(found["runs"])
    yield from (table.strip() for table in benchmark.tables(found).values())
    yield benchmark.counts(found["runs"])


def meet_seldom() -> Iterator[str]:
    for name, of in results("meeting/results.json")["contenders"].items():
        figures = of["steps_per_s"], of["faster_than_search"], of["held_out_losses"][9]
        seconds = of["seconds_to_equal_loss"]
        told = f"{seconds:.1f}" if seconds is not None else "not in 300 steps"
        words = f"`{name}`" if name == "search" else name
        yield f"| {words} | {' | '.join(f'{each:.2f}' for each in figures)} | {told} |"


def memory() -> Iterator[str]:
    """Rows of one schedule are those of its two ranks."""
    words = {"none": "no", "some": "half of the layers", "all": "all layers"}
    rows = sorted(
        results("memory/digits.json"), key=lambda r: (r["schedule"], r["recompute"], r["rank"])
    )
    for first, second in list(pairwise(rows))[::2]:
        cells = [
            f"{row[key] / 2**20:.1f}"
            for row in (first, second)
            for key in ("predicted_bytes", "measured_bytes")
        ]
        yield f"| `{first['schedule']}` | {words[first['recompute']]} | {' | '.join(cells)} |"


def models() -> Iterator[str]:
    yield from lines(script("models/page.py").parts(results("models/results.json")).values())


def optimality() -> Iterator[str]:
    benchmark = script("optimality/schedule_optimality.py")
    rows = results("optimality/results.json")["rows"]
    yield from lines((benchmark.table(rows), benchmark.optima(rows)))


def papers() -> Iterator[str]:
    found = results("papers/results.json")
    with beside(BENCHMARKS / "papers"):
        tables = script("papers.py").tables(found)
    yield from (table.strip() for table in tables.values())


def planning() -> Iterator[str]:
    tables, rows = script("planning/tables.py"), results("planning/results.json")["rows"]
    yield from lines(tables.page_tables(rows).values())
    yield from tables.summary_words(rows)
    yield script("planning/speed.py").speed_table(results("planning/speed.json")["speeds"])
    drawn = results("planning/random.json")["rows"]
    yield from script("planning/random_problems.py").random_table(drawn)


def prediction() -> Iterator[str]:
    def cells(row: dict[str, float]) -> str:
        predicted, measured = (f"{1e3 * row[key]:,.1f} ms" for key in ("predicted_s", "measured_s"))
        return f"{predicted} | {measured} | {100 * row['error']:+.1f} %"

    document = results("prediction/forty_runs.json")
    forty = script("prediction/forty_table.py")
    yield "\n".join(forty.table(document))
    yield forty.words(document)
    rows = results("prediction/schedules.json")["rows"]
    yield "\n".join(f"| {row['plan']} | {cells(row)} |" for row in rows)
    for kind in ("schedules", "wide"):
        runs = (results(f"prediction/{kind}_4_workers{which}.json") for which in ("_first", ""))
        yield "\n".join(
            f"| {first['plan']} | {cells(first)} | {cells(second)} |"
            for first, second in zip(*(run["rows"] for run in runs), strict=True)
        )


def readme() -> Iterator[str]:
    cases = results("runtime/results.json")["end-to-end"]
    words = script("runtime/tables.py").in_words
    yield from (words(row) for row in cases)

    tables, rows = script("planning/tables.py"), results("planning/results.json")["rows"]
    bert = [row for row in rows if row["model"] == "bert-48" and "dapple" in row["cluster"]]
    yield "`search` is {:.2f}, {:.2f} and {:.2f} times".format(*map(tables.over_published, bert))
    alike = (
        row["every_schedule"]["best"]["iteration_s"] / tables.search_of(row)["iteration_s"]
        for row in bert
    )
    yield "it is {:.3f}, {:.3f} and {:.3f} times as fast".format(*alike)
    gaps = (100 * tables.gap_of(row) for row in bert)
    yield "more than {:.1f}, {:.1f} and {:.1f} % faster".format(*gaps)
    even = [tables.over_published(row) for row in rows if row["model"] == "resnet-50"]
    yield f"{min(even):.2f} to {max(even):.2f} on six clusters"

    estimates = results("hardware/results.json")["rows"]
    others = [row for row in estimates if (row["model"], row["tokens"]) != ("MPT-1b", 2048)]
    within = sum(abs(row["error"]) <= 0.2 for row in others)
    yield f"within 20 % of {within} of {len(others)} published runs"
    errors = [abs(run["error"]) for run in results("prediction/forty_runs.json")["rows"]]
    middle, worst = 100 * median(errors), 100 * max(errors)
    yield f"off by {middle:.1f} % in the median and {worst:.1f} % at worst"
    short = [-row["error"] for row in on_shared_cores("schedules")]
    yield (
        f"predictions of eleven schedules were {100 * min(short):.0f} to {100 * max(short):.0f} % "
        "too short"
    )
    worst = max(abs(row["error"]) for row in on_shared_cores("wide"))
    yield f"the same eleven schedules were within {100 * worst:.1f} %"


def on_shared_cores(kind: str) -> list[dict[str, float]]:
    """The predictions on four workers that share two cores, which were made twice."""
    runs = (results(f"prediction/{kind}_4_workers{which}.json") for which in ("_first", ""))
    return [row for run in runs for row in run["rows"]]


def start_here() -> Iterator[str]:
    rows = results("planning/results.json")["rows"]
    plan = script("planning/tables.py").search_of(rows[0])
    assert (rows[0]["model"], rows[0]["cluster"]) == ("bert-48", "dapple-a")
    stages, count = plan["stages"].count(":") + 1, plan["micro_batches"]
    order = plan["schedule"]
    yield f"search: {stages} stages x 2 replicas, 3 on each device, {order}; {count} micro-"
    yield f"iteration {1e3 * plan['iteration_s']:.0f} ms, {100 * plan['gap']:.1f} % above the bound"


BENCHMARKED = {
    "Which architectures of `transformers` work ([models](models.md))": "models/results.json",
    "The runtime adds less to an action than torch's ([runtime](runtime.md))": (
        "runtime/results.json"
    ),
    "Simulating is fast enough for planners ([schedules](schedules.md))": (
        "simulator/results.json"
    ),
}
"""The promises of README that a benchmark holds."""


def promises() -> Iterator[str]:
    yield "\n".join(script("promises.py").table(results("promises/results.json")))
    for promise, name in BENCHMARKED.items() if has_history() else ():
        commit, day = made(name)
        yield f"| {promise} | `benchmarks/{name}` | {day} | `{commit}` |"


def rehearsal() -> Iterator[str]:
    benchmark = script("rehearsal/rehearse.py")
    path = BENCHMARKS / "rehearsal" / "results.json"
    yield "\n".join(benchmark.table_of(benchmark.read_results(path)))
    found = results("rehearsal/two_hosts.json")
    low, high = found["spread_s"]
    rows = {
        f"ours, predicted (`{found['schedule']}`)": found["predicted_s"],
        "ours, rehearsed": found["rehearsed_s"],
        f"ours, trained (median of {found['rounds']}, {low:.3f} to {high:.3f})": found["trained_s"],
        **{f"torch, {name}": seconds for name, seconds in found["rivals_s"].items()},
    }
    yield from (f"| {name} | {seconds:.3f} |" for name, seconds in rows.items())
    yield f"which is `{found['best_rival']}`"
    cases = results("runtime/results.json")["end-to-end"]
    short = [
        100 * (1 - one["plans"]["once"]["predicted_s"] / one["seconds"]["once"])
        for row in cases
        for one in row["rounds"]
        if row["ranks"] == 2  # of four ranks two share a core
    ]
    yield f"{min(short):.0f} to {max(short):.0f} % too short"


def reliability() -> Iterator[str]:
    tables = script("reliability/tables.py")
    readers, chaos = results("reliability/readers.json"), results("reliability/chaos.json")
    lost, elastic = results("reliability/lost_worker.json"), results("reliability/elastic.json")
    yield tables.readers_table(readers["readers"])
    yield tables.commands_table(results("reliability/commands.json"))
    yield tables.faults_table(chaos["faults"])
    yield tables.phases_table(chaos["faults"])
    yield tables.counts_in_words(chaos["faults"])
    yield tables.soak_table(results("reliability/soak.json")["trends"])
    yield tables.lost_workers_table(lost["runs"])
    yield tables.elastic_table(elastic)
    yield from (chaos["date"], chaos["machine"])
    yield from (found["machine"]["date"][:10] for found in (lost, elastic))


def runtime() -> Iterator[str]:
    found = results("runtime/results.json")
    yield from lines(script("runtime/tables.py").page_tables(found).values())
    for row in found["options"]:
        small, large = (f"{size / 1e6:.0f} MB" for size in row["optimizer_bytes"])
        state = f"{small} instead of {large}" if row["option"] == "shard_optimizer" else "the same"
        yield f"| {row['ratio']:.3f} | {state} |"
    yield "\n".join(script("verify.py").table(results("verify/results.json")["cases"]))


def schedules() -> Iterator[str]:
    """Ours are bold where they are shorter by more than the authors' were rounded."""
    rows = results("schedules/results.json")["rows"]
    for groups in ("4, 32", "8, 64", "16, 64"):
        cells = [
            f"{row['theirs']:.1f} / "
            + (f"**{row['ours']:.2f}**" if row["verdict"] == "shorter" else f"{row['ours']:.2f}")
            for row in rows
            if row["case"] == f"{groups}, 1:1.2:0.9"
        ]
        yield f"| {groups} | {' | '.join(cells)} |"
    of_torch = results("schedules/torch_results.json")["rows"]
    pairs = {(row["torch_class"], row["family"]) for row in of_torch if row["ours"] is not None}
    for theirs, ours in sorted(pairs):
        ratios = [
            row["ours"] / row["theirs"]
            for row in of_torch
            if (row["torch_class"], row["family"]) == (theirs, ours) and row["ours"] is not None
        ]
        shorter = sum(ratio < 1 - 1e-9 for ratio in ratios)
        longer = sum(ratio > 1 + 1e-9 for ratio in ratios)
        counts = (len(ratios), shorter, len(ratios) - shorter - longer, longer)
        mean = sum(ratios) / len(ratios)
        name = theirs.removeprefix("Schedule")
        yield f"| {name} | `{ours}` | {' | '.join(map(str, counts))} | {mean:.3f} |"
    yield from script("simulator/parts.py").summary_words(results("simulator/results.json"))
    with beside(ROOT / "tests"):
        published = [make() for make in script("simulator/published_tables.py").TABLES.values()]
    yield from (line for table in published for line in table if line.startswith("| "))


def simulator() -> Iterator[str]:
    parts, document = script("simulator/parts.py"), results("simulator/results.json")
    yield from lines(parts.page_tables(document).values())
    yield from parts.summary_words(document)


EXPECTED: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme,
    "docs/start-here.md": start_here,
    "benchmarks/optimality/README.md": optimality,
    "benchmarks/prediction/README.md": prediction,
    "benchmarks/simulator/README.md": simulator,
    "docs/benchmarks/capture.md": capture,
    "docs/benchmarks/convergence.md": convergence,
    "docs/benchmarks/fsdp.md": fsdp,
    "docs/benchmarks/gpu.md": gpu,
    "docs/benchmarks/hardware.md": hardware,
    "docs/benchmarks/history.md": history,
    "docs/benchmarks/largest.md": largest,
    "docs/benchmarks/models.md": models,
    "docs/benchmarks/papers.md": papers,
    "docs/benchmarks/planning.md": planning,
    "docs/benchmarks/promises.md": promises,
    "docs/benchmarks/rehearsal.md": rehearsal,
    "docs/benchmarks/reliability.md": reliability,
    "docs/benchmarks/runtime.md": runtime,
    "docs/benchmarks/schedules.md": schedules,
    "docs/guides/meet-seldom.md": meet_seldom,
    "docs/how-it-works/memory.md": memory,
}
