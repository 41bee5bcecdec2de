"""The files of a run: how they are read and written, and what is recorded while it runs."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import read_cluster, write_cluster
from penstock.errors import BadInput
from penstock.files import json_text, read_text, write_pieces, write_text
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import ModelProfile
from penstock.report.record import read_rows
from penstock.runtime.metrics import StepMetrics, evaluation_row, numbers_in, step_row
from penstock.runtime.user_metrics import Evaluation

RUNS = Path("runs")

LAUNCH = ".launch"
"""The file with the name of the launch that has written a directory."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run; every file is written completely or not at all."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The directory with one subdirectory for each checkpoint."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file with one JSON object for each step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self.path / "tensorboard"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the directory against other runs; the lock ends with this process at the latest.

        The directory also keeps the name of the launch, see `is_of_this_launch`.
        """
        with (self.path / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(
                    f"run directory '{self.path}' is in use by another run; wait until that has "
                    f"ended, or name another with --out"
                ) from None
            if name := launch_name():
                write_text(self.path / LAUNCH, name)
            yield

    @property
    def is_of_this_launch(self) -> bool:
        """Return whether ranks that the same torchrun has started began or resumed the run in it.

        The ranks of one launch are started again when one fails or when hosts come and go.
        """
        name, kept = launch_name(), self.path / LAUNCH
        is_same = bool(name) and kept.exists() and read_text(kept, "launch") == name
        return is_same and self.is_planned

    @property
    def is_costed(self) -> bool:
        """Return whether profile and cluster have been measured already."""
        return (self.path / "profile.json").exists() and (self.path / "cluster.toml").exists()

    def write_costs(self, profile: ModelProfile, cluster: Cluster) -> None:
        """Save what was measured, so that a resumed run need not measure again.

        Plans that were made with other costs are deleted.
        """
        self.forget_plans()
        write_profile(profile, self.path / "profile.json")
        write_cluster(cluster, self.path / "cluster.toml")

    def read_costs(self) -> tuple[ModelProfile, Cluster]:
        """The profile and cluster that `write_costs` wrote."""
        return read_profile(self.path / "profile.json"), read_cluster(self.path / "cluster.toml")

    @property
    def is_planned(self) -> bool:
        """Return whether the run in it has had a plan, and so can be resumed."""
        return (self.path / "plan.json").exists()

    def write_plan(self, plan: Plan, ranks: int) -> None:
        """Save the plan that ``ranks`` ranks follow, and keep it for a later start of as many."""
        write_plan(plan, self.path / "plan.json")
        write_plan(plan, self.path / f"plan-{ranks}.json")

    def kept_plan(self, ranks: int) -> Plan | None:
        """The plan that this number of ranks has followed; None if there is none."""
        place = self.path / f"plan-{ranks}.json"
        return read_plan(place) if place.exists() else None

    def forget_plans(self) -> None:
        for place in self.path.glob("plan-*.json"):
            place.unlink()

    @property
    def schedule(self) -> dict[str, int]:
        """The last step of the run, and the step until which its learning rate falls."""
        place = self.path / "schedule.json"
        return json.loads(read_text(place, "schedule")) if place.exists() else {}

    def write_schedule(self, end: int, falls_until: int) -> None:
        schedule = {"end": end, "falls_until": falls_until}
        write_text(self.path / "schedule.json", json_text(schedule))


def launch_name() -> str:
    """The name of this launch that torchrun was given (``--rdzv-id``) or drew; empty if none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name


def new_run(job_name: str, out: str | Path | None) -> RunDirectory:
    """An empty directory for a new run: ``out``, or one under ``runs`` named after job and time."""
    path = Path(out) if out else RUNS / f"{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if os.path.exists(path / "metrics.jsonl"):
        raise BadInput(
            f"run directory '{path}' holds a run already; add --resume to continue it, or name "
            f"another with --out"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"run directory '{path}' cannot be made ({error}); name another with --out"
        ) from None
    return RunDirectory(path)


def latest_run(job_name: str, out: str | Path | None) -> RunDirectory:
    """The run to continue: ``out``, or the newest run of that job under ``runs``."""
    if out:
        if not os.path.exists(Path(out) / "plan.json"):
            raise BadInput(
                f"run directory '{out}' holds no run to resume; name one that 'penstock train' "
                f"wrote, or leave out --resume"
            )
        return RunDirectory(Path(out))
    pattern = f"{job_name}-[0-9]*-[0-9]*"
    runs = sorted(path for path in RUNS.glob(pattern) if (path / "plan.json").exists())
    if not runs:
        raise BadInput(
            f"there is no run of job '{job_name}' under '{RUNS}' to resume; name its directory "
            f"with --out, or leave out --resume"
        )
    return RunDirectory(runs[-1])


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows of ``metrics.jsonl`` after ``step``: a resumed run takes these steps again.

    Damaged lines are dropped, such as a last one that a crash cut off.
    """
    kept = (row for row in read_rows(path, damaged=False) if row["step"] <= step) if step else ()
    write_pieces(path, (f"{json.dumps(row)}\n".encode() for row in kept))


class Records:
    """The records of rank 0; other ranks write nothing.

    A resumed run first drops what was recorded after the checkpoint that it starts from. Each
    record is on the disk, as a line and for TensorBoard, when its method returns. So a full disk is
    an error of that method, which names the file.
    """

    def __init__(self, directory: RunDirectory, start: int, *, writes: bool) -> None:
        self._directory, self._writes = directory, writes
        self._files = ExitStack()
        self._open(start)

    def _open(self, start: int) -> None:
        if not self._writes:
            return
        directory = self._directory
        drop_rows_after(directory.metrics, start)
        with named(directory.tensorboard):
            self._board = self._files.enter_context(closing(EventFile(directory.tensorboard)))
            self._board.purge(start + 1)
        self._lines = self._files.enter_context(directory.metrics.open("ab", buffering=0))

    def go_back(self, step: int) -> None:
        """Drop what was recorded after ``step``; these steps will be taken again."""
        self.close()
        self._open(step)

    def step(
        self, metrics: StepMetrics, verified: str = "", lengths: Mapping[str, int] | None = None
    ) -> None:
        """Record a step, with the result of verification, if any, and the batch's lengths."""
        row = step_row(metrics)
        if verified:
            row["verified"] = verified
        if lengths:
            row["lengths"] = dict(lengths)
        self._write(metrics.step, row)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._write(step, evaluation_row(step, evaluation))

    def drift(self, step: int, factors: Mapping[str, float]) -> None:
        """Show on TensorBoard how many times as long as planned each stage and link took."""
        if self._writes:
            self._show(step, {f"drift/{name}": factor for name, factor in factors.items()})

    def close(self) -> None:
        self._files.close()

    def _write(self, step: int, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        with named(self._directory.metrics):
            write_all(self._lines, f"{json.dumps(row)}\n".encode())
        self._show(step, numbers_in(row))

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        with named(self._directory.tensorboard):
            self._board.add(step, values)


class EventFile:
    """A file of TensorBoard's format in a folder, without TensorBoard's thread that writes it.

    The thread fails by itself where the disk is full, with a traceback, and the training gets the
    error some steps later.
    """

    def __init__(self, folder: Path) -> None:
        # Only rank 0 needs these, and importing them takes a while.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._event, self._writer = Event, RecordWriter
        self._put(file_version="brain.Event:2")

    def purge(self, step: int) -> None:
        """Let TensorBoard drop what earlier files have from ``step`` on."""
        self._put(step=step, session_log={"status": 1})  # START, in the format's words

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a value to each of some curves."""
        shown = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._put(step=step, summary={"value": shown})

    def close(self) -> None:
        self._file.close()

    def _put(self, **fields: Any) -> None:
        event, record = self._event(wall_time=time.time(), **fields), BytesIO()
        self._writer(record).write(event.SerializeToString())
        write_all(self._file, record.getvalue())


def write_all(file: FileIO, data: bytes) -> None:
    """Write to a file without a buffer, which may take a part only where the disk is nearly full.

    A buffer would keep what has found no place, and fail again when it is closed.
    """
    while data:
        data = data[file.write(data) :]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name ``path`` in disk errors of the block; Python's own do not say what was written."""
    try:
        yield
    except OSError as cause:
        if cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from cause
