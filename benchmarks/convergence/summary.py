"""Results of the runs of a case: means, confidence intervals, samples to a loss, break-even."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10, sqrt
from statistics import fmean, stdev
from typing import Any

from runs import Asked, leads_of
from scipy.stats import t as student

GOAL_SHARE = 0.6
"""Methods must reach the loss that synchronous training has after this share of its samples."""

CONFIDENCE = 0.95

DIVERGED = 1e4
"""From this mean loss on a run counts as diverged."""

OTHER_LEADS = ("spectrain-published", "spectrain-measured")
MUON_METHODS = ("synchronous", "vanilla", "pipedream", "2bw")
ADAM_METHODS = (*MUON_METHODS, "spectrain", *OTHER_LEADS, "xpipe", "pipeoptim")
SGD_METHODS = (*MUON_METHODS, "spectrain", *OTHER_LEADS, "spectrain-v2", "pipeoptim")


@dataclass(frozen=True, slots=True)
class Case:
    """A training task, its optimizer, and the number of stages."""

    task: str
    optimizer: str
    stages: int

    def __str__(self) -> str:
        return f"{self.task}/{self.optimizer}/{self.stages}"

    def holds(self, asked: Asked) -> bool:
        """Return whether a run belongs here."""
        return (asked.task, asked.optimizer, asked.stages) == (
            self.task,
            self.optimizer,
            self.stages,
        )


CASES: tuple[Case, ...] = (
    Case("digits-dense", "sgd", 4),
    Case("digits-dense", "sgd", 8),
    Case("digits-dense", "adamw", 4),
    Case("digits-dense", "muon", 4),
    Case("digits-convolution", "sgd", 4),
    Case("digits-convolution", "adamw", 4),
    Case("text-lstm", "sgd", 4),
    Case("text-transformer", "sgd", 4),
    Case("text-transformer", "adamw", 4),
    Case("text-lstm", "adamw", 4),
    Case("text-transformer", "muon", 4),
)

RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("digits", "sgd"): (0.001, 0.003, 0.01, 0.03),
    ("digits", "adamw"): (0.0003, 0.001, 0.003, 0.01),
    ("digits", "muon"): (0.001, 0.003, 0.01),
    ("text", "sgd"): (0.03, 0.1, 0.3),
    ("text", "adamw"): (0.001, 0.003, 0.01),
    ("text", "muon"): (0.003, 0.01, 0.03),
}
"""The learning rates that every method tries."""

Runs = list[dict[str, Any]]
Curve = list[tuple[int, float, float]]
"""Samples, held-out loss and accuracy of every evaluation."""


def methods_of(case: Case) -> tuple[str, ...]:
    """Methods to compare; texts take long, so the second version of SpecTrain is left out there.

    SpecTrain with the leads of measured costs is there where no other row has those leads.
    """
    methods = {"sgd": SGD_METHODS, "adamw": ADAM_METHODS, "muon": MUON_METHODS}
    long = case.task.startswith("text")
    asked = [m for m in methods[case.optimizer] if not (long and m == "spectrain-v2")]
    own = {m: leads_in(case, m) for m in asked if m != "spectrain-measured"}
    return tuple(m for m in asked if m in own or leads_in(case, m) not in own.values())


def leads_in(case: Case, method: str) -> tuple[tuple[int, ...], ...]:
    """The updates by which a method's stages predict ahead."""
    return leads_of(Asked(case.task, case.optimizer, method, case.stages, 0.0, 0, 0))


def best_rate(method: str, runs: Runs) -> float:
    """The learning rate of the least final loss with the tuning seed."""
    tuned = [r for r in runs if r["asked"]["method"] == method and r["asked"]["seed"] == 0]
    return min(tuned, key=lambda r: r["loss"])["asked"]["learning_rate"]


def summarise(case: Case, runs: Runs) -> dict[str, Any]:
    """Every method at its own best learning rate and at that of synchronous training."""
    common = best_rate("synchronous", runs)
    base = chosen(runs, "synchronous", common)
    curve = mean_curve(base)
    goal = curve[round(GOAL_SHARE * len(curve)) - 1][1]
    measure = goal, samples_to(curve, goal)
    rows: list[dict[str, Any]] = []
    for method in methods_of(case):
        rate = best_rate(method, runs)
        own = chosen(runs, method, rate)
        row = row_of(method, own, *measure) | {"learning_rate": rate}
        row["at_common_rate"] = row_of(method, chosen(runs, method, common), *measure)
        row["curve"] = mean_curve(own)
        rows.append(row | {"leads": leads_in(case, method)})
    return {
        "case": str(case),
        "common_learning_rate": common,
        "goal_loss": goal,
        "goal_samples_synchronous": measure[1],
        "seeds": len(base),
        "rows": rows,
    }


def chosen(runs: Runs, method: str, rate: float) -> Runs:
    """All seeds of a method at one learning rate, in order."""
    found = [
        run
        for run in runs
        if run["asked"]["method"] == method and run["asked"]["learning_rate"] == rate
    ]
    return sorted(found, key=lambda run: run["asked"]["seed"])


def row_of(method: str, runs: Runs, goal: float, needed: float) -> dict[str, Any]:
    """Final scores with their intervals, and what the goal costs.

    ``samples_ratio`` is the samples at which the mean curve is at the goal, over those of
    synchronous training (absent where it never gets there). Without a bubble a method is faster by
    1 / (1 - bubble), so from ``break_even_bubble`` on it is the better choice.
    """
    samples = samples_to(mean_curve(runs), goal)
    ratio = samples / needed if isfinite(samples) else None
    return {
        "method": method,
        "seeds": len(runs),
        "diverged": sum(not isfinite(run["loss"]) for run in runs),
        "loss": interval([run["loss"] for run in runs]),
        "accuracy": interval([run["accuracy"] for run in runs]),
        "samples_ratio": ratio,
        "break_even_bubble": None if ratio is None else max(0.0, 1 - 1 / ratio),
        "errors": mean_columns([run["errors"] for run in runs]),
        "differences": runs[0]["differences"],
        "copies": runs[0]["copies"],
    }


def interval(values: list[float]) -> tuple[float, float] | None:
    """Mean and half width of its confidence interval (Student's t); none if a run diverged."""
    if not all(map(isfinite, values)):
        return None
    if len(values) < 2:
        return values[0], inf
    factor = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return fmean(values), factor * stdev(values) / sqrt(len(values))


def samples_to(curve: Curve, goal: float) -> float:
    """The samples to the goal, between evaluations by a straight line; infinite: never."""
    before: tuple[int, float] | None = None
    for samples, loss, _ in curve:
        if loss <= goal:
            if before is None:
                return samples
            share = (before[1] - goal) / (before[1] - loss)
            return before[0] + share * (samples - before[0])
        before = (samples, loss)
    return inf


def mean_curve(runs: Runs) -> Curve:
    """The mean of all seeds' curves, as far as all go."""
    return [
        (points[0][0], fmean(p[1] for p in points), fmean(p[2] for p in points))
        for points in zip(*(run["curve"] for run in runs), strict=False)
    ]


def mean_columns(tables: list[list[list[float]]]) -> list[list[float]]:
    """Tables of one form, averaged place by place."""
    return [
        [fmean(values) for values in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)
    ]


def table_of(summary: dict[str, Any]) -> str:
    """The case as a Markdown table."""
    lines = [
        f"**{summary['case']}** ({summary['seeds']} seeds; goal {summary['goal_loss']:.3f} nats; "
        f"synchronous training's learning rate {summary['common_learning_rate']:g})",
        "",
        "| method | predicts ahead | rate | held-out loss | accuracy | samples to the goal "
        "| break-even bubble | loss at the common rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in summary["rows"]:
        ratio, bubble = row["samples_ratio"], row["break_even_bubble"]
        cells = (
            f"`{row['method']}`",
            leads_in_words(row["leads"]),
            f"{row['learning_rate']:g}",
            in_words(row["loss"]),
            in_words(row["accuracy"]),
            "not reached" if ratio is None else f"{ratio:.2f}x",
            "-" if bubble is None else f"{bubble:.0%}",
            in_words(row["at_common_rate"]["loss"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def leads_in_words(leads: Sequence[Sequence[int]]) -> str:
    """Updates ahead, stage by stage: of forwards and, where they predict, of backwards.

    >>> leads_in_words([(3, 2, 2, 1), (0, 0, 1, 1)]), leads_in_words([(2, 1, 0), ()])
    ('3,2,2,1; 0,0,1,1', '2,1,0')
    """
    return "; ".join(",".join(map(str, each)) for each in leads if each) or "-"


def in_words(value: tuple[float, float] | None) -> str:
    """Mean and half width, or that the loss grew without end."""
    if value is None:
        return "diverged"
    mean, half = value
    return f"{mean:.3f} ± {half:.3f}" if mean < DIVERGED else f"diverged (10^{log10(mean):.0f})"
