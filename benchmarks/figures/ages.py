"""Which result files are older than the code that they tell of."""

import re
from collections.abc import Iterator
from functools import cache
from subprocess import CalledProcessError
from typing import Any

from results import git, results

__all__ = ["MADE_BY", "aged", "has_history", "made", "older"]

LINE = re.compile(r"\n\*Older than the code:.*<!-- age -->\n")

FIRST = "3d230063"
"""The commit that first recorded a benchmark."""

PLANS = ("bounds", "core", "plan", "planners", "planning", "schedule", "search", "simulate")
PIPELINES = ("capture", "runtime", "jobs", "measure", *PLANS)
MADE_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "docs/benchmarks/capture.md": {
        "capture/results.json": ("capture",),
        "capture/stage_forward.json": ("capture",),
    },
    "docs/benchmarks/convergence.md": {
        "convergence/results.json": ("runtime",),
        "convergence/throughput.json": PLANS,
    },
    "docs/benchmarks/gpu.md": {"gpu/alone.json": ("measure", "runtime", "simulate")},
    "docs/benchmarks/hardware.md": {"hardware/results.json": ("capture", "measure")},
    "docs/benchmarks/largest.md": {"largest/results.json": ("cluster", "measure", *PLANS)},
    "docs/benchmarks/models.md": {"models/results.json": ("capture", "runtime")},
    "docs/benchmarks/papers.md": {"papers/results.json": ("rehearse", *PLANS)},
    "docs/benchmarks/planning.md": {
        "planning/results.json": PLANS,
        "planning/random.json": PLANS,
        "planning/speed.json": PLANS,
    },
    "docs/benchmarks/rehearsal.md": {
        "rehearsal/results.json": ("rehearse", "simulate", "core"),
        "rehearsal/two_hosts.json": PIPELINES,
    },
    "docs/benchmarks/reliability.md": {
        "reliability/readers.json": ("jobs", "plan", "profile", "cluster", "timeline"),
        "reliability/commands.json": ("command_line",),
        "reliability/chaos.json": ("runtime", "jobs"),
        "reliability/soak.json": ("runtime", "jobs"),
        "reliability/lost_worker.json": ("runtime", "jobs"),
        "reliability/elastic.json": ("runtime", "jobs"),
    },
    "docs/benchmarks/runtime.md": {
        "runtime/results.json": ("capture", "runtime"),
        "verify/results.json": ("capture", "runtime"),
    },
    "docs/benchmarks/schedules.md": {
        "schedules/results.json": ("core", "schedule"),
        "schedules/torch_results.json": ("core", "schedule"),
        "optimality/results.json": ("core", "schedule"),
        "simulator/results.json": ("core", "schedule", "simulate"),
    },
    "docs/guides/meet-seldom.md": {"meeting/results.json": PIPELINES},
    "docs/how-it-works/memory.md": {"memory/digits.json": ("capture", "runtime", "simulate")},
}
"""Result files by their page, each with the packages whose code they tell of."""


@cache
def made(name: str) -> tuple[str, str]:
    """The commit and the day of a result file: the oldest it holds, else of its last change."""
    found = dict(recorded(results(name)))
    if "date" in found:
        day, _, time = found["date"].partition(" ")
        if is_known(found.get("commit", "")):
            return found["commit"], day
        return git("rev-list", "-1", f"--before={day} {time or '23:59'} +0000", "HEAD")[:8], day
    log = git("log", "-1", "--format=%h %cs", "--abbrev=8", "--", f"benchmarks/{name}").split()
    return log[0], log[1]


def is_known(commit: str) -> bool:
    """Whether the history here has a commit; one that was made on top of another is gone."""
    try:
        return bool(commit) and git("merge-base", commit, "HEAD") != ""
    except CalledProcessError:
        return False


def has_history() -> bool:
    """Whether the commits are here; a shallow clone has the last one only."""
    return is_known(FIRST)


def recorded(document: Any) -> Iterator[tuple[str, str]]:
    """The oldest date of a result file's parts, with its commit if it says one."""
    if isinstance(document, dict):
        machines = [each for key, each in document.items() if key.endswith("machine")]
        rows = [row for each in document.values() if isinstance(each, list) for row in each]
        machines += [row.get("machine", row) for row in rows if isinstance(row, dict)]
        parts = [document, *(each for each in machines if isinstance(each, dict))]
        dates = [part for part in parts if isinstance(part.get("date", part.get("at")), str)]
        if dates:
            oldest = min(dates, key=lambda part: part.get("date", part.get("at")))
            yield "date", oldest.get("date", oldest.get("at")).replace("T", " ")[:16]
            if "commit" in oldest:
                yield "commit", oldest["commit"]


@cache
def changes_since(commit: str, packages: tuple[str, ...]) -> int:
    """The commits since then that changed one of the packages."""
    folders = (f"src/penstock/{package}" for package in packages)
    return int(git("rev-list", "--count", f"{commit}..HEAD", "--", *folders))


def older() -> Iterator[str]:
    """A line for each result file that is older than its code."""
    for page, files in MADE_BY.items():
        for name, packages in files.items():
            commit, day = made(name)
            if count := changes_since(commit, packages):
                where = ", ".join(packages)
                yield f"{name} ({page}): {commit} of {day}, {count} commits since in {where}"


def aged(page: str, text: str) -> str:
    """The page's text with a line that names its result files that are older than their code."""
    old = [
        f"`{name}` (`{commit}`, {day})"
        for name, packages in MADE_BY.get(page, {}).items()
        for commit, day in [made(name)]
        if changes_since(commit, packages)
    ]
    text = LINE.sub("", text)
    if not old:
        return text
    title, rest = text.split("\n", 1)
    return f"{title}\n\n*Older than the code:* {', '.join(old)}. <!-- age -->\n{rest}"
