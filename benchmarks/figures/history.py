"""How figures of result files changed since they were first recorded, worse included."""

from collections.abc import Iterator
from dataclasses import dataclass

from expressions import value_of
from results import results

__all__ = ["history_table"]


@dataclass(frozen=True)
class Figure:
    """A figure of a result file, and the commit of the file's first record that has it."""

    words: str
    file: str
    first: str
    expression: str
    digits: int
    better: str
    """`more` or `less`."""
    why: str
    at_first: str = ""
    """The expression of the first record, where its fields had other names."""


FIGURES = (
    Figure(
        "overhead of an action on 2 ranks, median of schedules, us",
        "runtime/results.json",
        "3d230063",
        "median(overhead[ranks == 2].overhead_s) * 1e6",
        0,
        "less",
        "not looked into",
    ),
    Figure(
        "overhead over torch's, both over Gloo, 2 ranks, median",
        "runtime/results.json",
        "3eec9dcf",
        "median(gloo[ranks == 2].overhead_ratio)",
        2,
        "less",
        "runs differ by as much",
    ),
    Figure(
        "efficiency, median of schedules",
        "runtime/results.json",
        "3d230063",
        "median(efficiency.efficiency)",
        3,
        "more",
        "not measured again since 21 November",
    ),
    Figure(
        "`search` on `bert-48`, dapple-a, ms",
        "planning/results.json",
        "cf5613bb",
        'rows[model == "bert-48"][cluster == "dapple-a"].answers[planner == "search"].iteration_s'
        " * 1000",
        1,
        "less",
        "split backwards, several stages a device",
    ),
    Figure(
        "gap above the bound, median, %",
        "planning/results.json",
        "cf5613bb",
        'median(rows.answers[planner == "search"].gap) * 100',
        1,
        "less",
        "the bound is of every order now, was of whole backwards; replicas pay for batch norm",
    ),
    Figure(
        "CPU seconds of `search`, median",
        "planning/results.json",
        "cf5613bb",
        'median(rows.answers[planner == "search"].planning_cpu_s)',
        1,
        "less",
        "split backwards came in; load 4 to 8 in a third of the rows",
    ),
    Figure(
        "whole process of `penstock plan`, the slowest case, CPU seconds",
        "planning/speed.json",
        "ce0c51e0",
        "max(speeds.cpu_s)",
        1,
        "less",
        "1,024 devices; plans with split backwards came in",
    ),
    Figure(
        "million actions a second of the simulator, median",
        "simulator/results.json",
        "45f8f3b3",
        "median(playing.engine_actions_per_s) / 1e6",
        1,
        "more",
        "inner loops changed twice, last from numba to C++",
    ),
    Figure(
        "capture of the Llama of 80 layers, CPU seconds",
        "capture/results.json",
        "f6c5c02f",
        "median(rows[layers == 80].seconds)",
        1,
        "less",
        "stages run your modules, no exported graph; another machine, busy at first",
        "median(rows[layers == 80].all_s)",
    ),
    Figure(
        "a lost worker, seconds to the next step, worst",
        "reliability/lost_worker.json",
        "4c37bfdb",
        "max(runs.all_s)",
        1,
        "less",
        "a busy machine at first, then an idle one",
    ),
)


def history_table() -> Iterator[str]:
    """First and last value of each figure, and whether that is better."""
    yield "| figure | first | now | | why |"
    yield "|---|--:|--:|---|---|"
    for figure in FIGURES:
        then = results(f"{figure.file}@{figure.first}")
        before = value_of(figure.at_first or figure.expression, then)
        now = value_of(figure.expression, results(figure.file))
        first, last = (f"{value:.{figure.digits}f}" for value in (before, now))
        if first == last:
            verdict = "the same"
        else:
            verdict = "better" if (now > before) == (figure.better == "more") else "**worse**"
        yield f"| {figure.words} | {first} | {last} | {verdict} | {figure.why} |"
