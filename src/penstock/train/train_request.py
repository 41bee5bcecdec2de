"""The request for a training run, and its result."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.report.record import MeasuredLength, TriedPlan

Log = Callable[[str], None]
"""A function that prints one line about what happens."""


@dataclass(frozen=True)
class TrainRequest:
    """The options of ``penstock train`` that are not about the job.

    ``plan`` is a plan file (None: make a plan that keeps to the job's constraints). ``out`` is the
    run directory (None: a new one under ``runs`` or, with ``resume``, the newest there). ``shown``
    false: display nothing. The run continues while no more than ``may_lose`` workers are missing,
    which were killed or stopped answering. If ``tries`` is more than 1, that number of the best
    plans are tried for a few steps, and a new run continues with the quickest. With ``dry_run`` it
    ends with its plan. ``lr_schedule`` is what becomes of the learning rate where a run is resumed
    for more steps than before. The report shows the ``command`` that started it.
    """

    workers: int = 4
    plan: Path | None = None
    resume: bool = False
    lr_schedule: Literal["", "keep", "stretch"] = ""
    out: Path | None = None
    device: str = "cpu"
    shown: bool = True
    may_lose: int = 0
    tries: int = 1
    dry_run: bool = False
    command: str = ""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run, or of its parts so far: the keys of ``penstock train --json``.

    If batches have different lengths, ``predicted_s`` and ``measured_s`` are means over them. Both
    are those of the last part of the run, if its workers or its plan changed. ``busy`` says how
    much longer work took for other programs, if a prediction was wrong for that. A run that is
    ``paused`` has steps left, and no files of a result yet.
    """

    steps: int = 0
    loss: float = math.nan
    samples_per_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    verified: str = ""
    plan: Path = Path()
    checkpoint: Path = Path()
    report: Path = Path()
    run_directory: Path = Path()
    weights: Path | None = None
    by_length: tuple[MeasuredLength, ...] = ()
    left_out_steps: tuple[int, ...] = ()
    drift: tuple[str, ...] = ()
    busy: str = ""
    tried: tuple[TriedPlan, ...] = ()
    lost_workers: int = 0
    paused: bool = False
