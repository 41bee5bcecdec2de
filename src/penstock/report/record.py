"""Read a run directory: plan, prediction, measurement, and the steps of the training.

Its rows of steps and evaluations are written as `penstock.runtime.metrics` says.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import read_cluster
from penstock.errors import BadInput
from penstock.files import Entry, check_document, parse_json, read_document
from penstock.plan.json_file import read_plan
from penstock.plan.plan import Plan
from penstock.profile.json_file import read_profile
from penstock.profile.model_profile import ModelProfile
from penstock.text import seconds_text
from penstock.timeline.json_file import read_timeline
from penstock.timeline.metrics import peak_memory_bytes
from penstock.timeline.timeline import Timeline

NEEDED = (
    "plan.json",
    "profile.json",
    "cluster.toml",
    "predicted.json",
    "measured.json",
    "metrics.jsonl",
    "summary.json",
)


class StepRecord(Entry):
    """One training step; ``verified`` says how it compared with the user's module, if compared."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=False)

    step: int
    loss: float
    samples_per_s: float = 0.0
    verified: str = ""


class EvaluationRecord(Entry):
    """The loss on held-out data after a step."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=False)

    step: int
    evaluation_loss: float


@dataclass(frozen=True, slots=True)
class MeasuredLength:
    """Batches of about these lengths: their share of the data, predicted and measured seconds.

    ``measured_s`` is the median over ``steps`` steps; 0 if no step had such a batch.
    """

    lengths: Mapping[str, int]
    share: float
    predicted_s: float
    measured_s: float
    steps: int

    def __str__(self) -> str:
        named = ", ".join(f"{name} {size}" for name, size in self.lengths.items())
        predicted = f"{named}: predicted {1000 * self.predicted_s:.1f} ms"
        if not self.steps:
            return f"{predicted}, no such step"
        error = 100 * (self.predicted_s / self.measured_s - 1)
        measured = f"measured {1000 * self.measured_s:.1f} ms over {self.steps} steps"
        return f"{predicted}, {measured} ({error:+.1f} %)"


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A plan in words that a run has tried, with seconds of a step; or why it could not be tried.

    ``measured_s`` is the median over steps of what the slowest rank took; 0 for a plan that failed.
    """

    plan: str
    predicted_s: float
    measured_s: float = 0.0
    failure: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        """The plan, the predicted and the measured time, in words."""
        if self.failure:
            return f"{self.plan}: {self.failure}", seconds_text(self.predicted_s), "failed"
        return self.plan, seconds_text(self.predicted_s), seconds_text(self.measured_s)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Place, time and software of the last start of a run, as rank 0 sees it.

    ``load_before`` and ``load_during`` are the machine's averages over a minute, at the start and
    at the end. ``versions`` are those of packages.
    """

    began: str
    command: str
    host: str
    hosts: int
    processor: str
    cores: int
    memory_bytes: float
    load_before: float
    versions: Mapping[str, str]
    load_during: float = 0.0


class RunSummary(Entry):
    """The main numbers of a run; peaks are in the order of the plan's ranks."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=False, allow_inf_nan=False)

    job: str
    workers: int
    steps: int
    loss: float
    samples_per_s: float
    predicted_s: float
    measured_s: float = Field(gt=0)
    measured_peak_memory_bytes: tuple[float, ...] = ()
    by_length: tuple[MeasuredLength, ...] = ()
    drift: tuple[str, ...] = ()
    tried: tuple[TriedPlan, ...] = ()
    busy: str = ""
    circumstances: Circumstances | None = None


@dataclass(frozen=True)
class RunRecord:
    """Everything the report shows of one run."""

    directory: Path
    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    predicted: Timeline
    measured: Timeline
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    summary: RunSummary

    @property
    def error(self) -> float:
        """The relative error of the predicted iteration time.

        It is negative if the run was slower than predicted.
        """
        return self.summary.predicted_s / self.summary.measured_s - 1.0

    @property
    def verified(self) -> str:
        """The comparison of the first step with the user's module; empty if there was none."""
        return next((step.verified for step in self.steps if step.verified), "")

    @property
    def predicted_peaks(self) -> tuple[float, ...]:
        return peak_memory_bytes(self.predicted)

    @property
    def measured_peaks(self) -> dict[int, float]:
        """Measured peak bytes by device, without devices that measured none."""
        peaks = zip(self.plan.ranks, self.summary.measured_peak_memory_bytes, strict=False)
        return {device: peak for device, peak in peaks if peak > 0}

    @property
    def near_limits(self) -> dict[int, float]:
        """The memory limits, by device, that are at most three times the peak."""
        predicted, measured = self.predicted_peaks, self.measured_peaks
        limits = {device: self.cluster.devices[device].memory_bytes for device in self.plan.ranks}
        return {
            device: limit
            for device, limit in limits.items()
            if 0 < limit <= 3 * max(predicted[device], measured.get(device, 0.0))
        }


def read_run(directory: str | Path) -> RunRecord:
    """Read the run directory that ``penstock train`` wrote."""
    place = Path(directory)
    if not os.path.isdir(place):
        raise BadInput(
            f"run directory '{directory}' does not exist; name one that 'penstock train' wrote"
        )
    missing = [name for name in NEEDED if not os.path.isfile(place / name)]
    if missing:
        raise BadInput(
            f"run directory '{directory}' has no {', '.join(missing)}; name one whose "
            f"'penstock train' went to its end"
        )
    steps, evaluations = read_metrics(place / "metrics.jsonl")
    record = RunRecord(
        directory=place,
        plan=read_plan(place / "plan.json"),
        profile=read_profile(place / "profile.json"),
        cluster=read_cluster(place / "cluster.toml"),
        predicted=read_timeline(place / "predicted.json"),
        measured=read_timeline(place / "measured.json"),
        steps=steps,
        evaluations=evaluations,
        summary=read_document(RunSummary, place / "summary.json", "summary"),
    )
    check_record(record)
    return record


def check_record(record: RunRecord) -> None:
    """Raise `BadInput` if the files cannot belong to one run."""
    plan, devices = record.plan, len(record.cluster.devices)
    placed, layers = plan.stages[-1].layers.stop, len(record.profile.layers)
    strangers = {e.device for t in (record.predicted, record.measured) for e in t.events}
    strangers -= set(plan.ranks)
    problem = ""
    if placed != layers:
        problem = f"plan.json has {placed} layers and profile.json {layers}"
    elif max(plan.ranks) >= devices:
        problem = f"plan.json uses device {max(plan.ranks)} and cluster.toml has {devices} devices"
    elif strangers:
        problem = f"a timeline has events on device {min(strangers)}, which plan.json does not use"
    if problem:
        raise BadInput(f"{record.directory}: {problem}; all must be of one run; run it again")


def read_rows(path: Path, *, damaged: bool = True) -> Iterator[dict[str, Any]]:
    """The rows of ``metrics.jsonl``, each a JSON object with its step; none without such a file.

    A run of millions of steps has gigabytes of rows, so they are never held all at once.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line, path, "metrics")
                if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                    raise BadInput(f"metrics '{path}' is no object with a step; correct it")
            except BadInput as cause:
                if damaged:
                    raise BadInput(f"line {number} of {cause}, or delete the line") from cause
            else:
                yield row


def read_metrics(path: Path) -> tuple[tuple[StepRecord, ...], tuple[EvaluationRecord, ...]]:
    """The steps and the evaluations of ``metrics.jsonl``."""
    steps: list[StepRecord] = []
    evaluations: list[EvaluationRecord] = []
    for row in read_rows(path):
        where = f"{path}, step {row['step']}"
        if "evaluation_loss" in row:
            evaluations.append(check_document(EvaluationRecord, row, where))
        elif "non_finite" not in row:  # a step that was left out has no loss
            steps.append(check_document(StepRecord, row, where))
    return tuple(steps), tuple(evaluations)
