"""The training loop that every rank of a run executes over the same batches, and what it shows."""

import math
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.errors import BadInput, LossNotFinite
from penstock.machine import core_seconds
from penstock.plan.ordering import updates_per_batch
from penstock.plan.plan import Plan
from penstock.plan_here import load_here
from penstock.report.record import Circumstances
from penstock.runtime.batch_needs import BatchNeeds
from penstock.runtime.callbacks import Callback, keep_best, stop_early
from penstock.runtime.measured_memory import MeasuredMemory
from penstock.runtime.metrics import END, PAUSE, StepMetrics, evaluation_row
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.processes.world import World
from penstock.runtime.tables import Constraints
from penstock.runtime.trackers import track
from penstock.runtime.user_metrics import Evaluation
from penstock.simulate.by_length import LengthPrediction
from penstock.text import counted, seconds_text
from penstock.timeline.drift import DriftWatch
from penstock.timeline.timeline import Timeline
from penstock.train.job import Job
from penstock.train.optimizers import learning_rate_schedule, optimizer_factory
from penstock.train.profile_job import build_and_capture
from penstock.train.run_directory import Records, RunDirectory
from penstock.train.train_request import Log, TrainRequest, TrainResult
from penstock.waiting import notice_if_long, say

MOST_TO_ONE_CHECKPOINT = 3
"""The most rollbacks to one checkpoint; then the run ends at the next bad step."""

WAIT_LIMIT_STEPS, LEAST_WAIT_LIMIT_S = 20, 60.0
"""The most a rank waits for another: this number of predicted steps, or of seconds if longer."""

WARM_UP_STEPS = 3
"""Steps at the start that are not measured: caches fill and connections are made."""

SAMPLED_TIMELINES = 20
"""Iterations of a run whose timeline is collected, unless it is long."""

LONGEST_UNSAMPLED = 100
"""The most steps from one collected timeline to the next."""


def pauses_at(step: int, start: int, every: int, pause_after: int) -> bool:
    """Return whether ranks pause after a step, so that the run continues in another way.

    They do so at the checkpoint number ``pause_after``, counted from ``start`` (0: at none), if
    one is written after every ``every`` steps.
    """
    if not (pause_after and every) or step % every:
        return False
    return step // every - start // every >= pause_after


@dataclass(frozen=True)
class JobRun:
    """A run as one of its ranks sees it. On other ranks than 0, ``say`` prints nothing.

    ``history`` is the result of earlier parts. With ``pause_after`` this part ends before the run
    does, at the checkpoint of this number.
    """

    world: World
    directory: RunDirectory
    job: Job
    request: TrainRequest
    say: Log
    circumstances: Circumstances
    history: TrainResult
    pause_after: int


TOLD = "step_s", "peaks", "resumes", "loads_weights"
"""The fields of a `RunPart` that rank 0 sends to the others after the plan."""


@dataclass(frozen=True)
class RunPart:
    """A part of a run in which all ranks follow one plan, from the first step or a checkpoint.

    ``peaks`` are the predicted bytes of each worker. Only rank 0 has the predicted ``timeline`` of
    a step, ``by_length`` where batches have lengths, and the profile's ``other_load``.
    """

    plan: Plan
    step_s: float = 0.0
    peaks: tuple[float, ...] = ()
    resumes: bool = False
    loads_weights: bool = True
    timeline: Timeline | None = None
    by_length: tuple[LengthPrediction, ...] = ()
    other_load: float = 0.0


def pipeline_of(job: Job, plan: Plan, device: str, timeout_s: float = LIMIT_S) -> Pipeline:
    """The job's pipeline on this rank, with the optimizer's settings and first weights."""
    graph = build_and_capture(job)
    pipe = Pipeline(
        graph,
        job.example_batch(),
        plan=plan,
        optimizer=optimizer_factory(job.optimizer),
        learning_rate_schedule=learning_rate_schedule(
            job.optimizer, job.steps, updates_per_batch(plan) or 1
        ),
        clip_norm=job.clip_norm or None,
        autocast=job.autocast_dtype(),
        device=device,
        constraints=Constraints(sharding="optimizer") if job.shards_optimizer else None,
        metrics=job.metrics,
        timeout_s=timeout_s,
        verify=job.verify,
        update=job.update,
        safety=Safety(compare_replicas_every=job.compare_replicas_every, idle_ranks=True),
    )
    pipe.notify(*filter(None, (job.average,)), *job.callbacks)
    return pipe


def train_part(run: JobRun, part: RunPart, termination: "Termination") -> "TrainedPart":
    """Train from the first step, or from a checkpoint, to the end of the part."""
    job = run.job if part.loads_weights else replace(run.job, weights=None)
    with notice_if_long(run.say, "building the model and the stages"):
        trackers = trackers_of(run.directory.path, job, part.plan, run.say)
        best = [keep_best(run.directory.path / "best")] if job.keep_best else []
        early = [stop_early(job.stop_early)] if job.stop_early else []
        tracked = replace(job, callbacks=(*job.callbacks, *trackers, *best, *early))
        limit_s = wait_limit_s(part.step_s)
        made = pipeline_of(tracked, part.plan, run.request.device, limit_s)
    with termination.stopping(made), made as pipe:
        trained = TrainedPart(run, part, pipe)
        trained.train()
        return trained


COMPARED_STEPS = 10
"""After this number of steps of a part their median is compared with the prediction."""

LARGEST_ERROR, LEAST_LOAD = 0.15, 0.05
"""The error of a prediction that is worth a line: 39 of the 40 recorded runs have less
(`benchmarks/prediction`). And the share by which other programs must slow down to be a reason."""


def changed_load(before: float, now: Sequence[float]) -> str:
    """The most that other programs slow a rank down, and the usual slow-down before, in words.

    Empty if there are no other programs, now or before. Each load is as
    `penstock.measure.machine_load.other_load`.

    >>> changed_load(0.0, [0.01, 0.4])
    'other programs make work take up to 40 % longer (0 % while it was measured)'
    """
    if max(before, *now) < LEAST_LOAD:
        return ""
    longer, measured = f"{100 * max(now):.0f} % longer", f"{100 * before:.0f} %"
    return f"other programs make work take up to {longer} ({measured} while it was measured)"


class TrainedPart:
    """A part of a run while it is trained, and its measurements.

    ``start`` is the number of steps taken before it, ``memory`` that of an early step, and
    ``left_out`` are steps that were bad. ``data_ended``: the data had no batch for a step that was
    left.
    """

    def __init__(self, run: JobRun, part: RunPart, pipe: Pipeline) -> None:
        self._run, self._part, self._job, self._pipe = run, part, run.job, pipe
        self.start = pipe.load(run.directory.checkpoints) if part.resumes else 0
        self.memory = MeasuredMemory()
        self.data_ended = False
        self._step, self._loss, self._samples = self.start, math.nan, 0
        self._left_out = set[int]()
        self._times_back = Counter[int]()
        self._lengths = dict[int, Mapping[str, int]]()
        self._seconds = list[float]()
        self._timelines = deque[tuple[float, Timeline]](maxlen=2 * SAMPLED_TIMELINES)
        self._start, self._busy = core_seconds(), ""
        self._watch = DriftWatch(part.timeline or Timeline((), 0), run.job.accumulate)
        first = pipe.rank == 0
        self._records = Records(run.directory, self.start, writes=first)
        self._display = Display(self.start, run.job.steps, shown=run.request.shown and first)

    def train(self) -> None:
        """Step, record, display; at intervals evaluate and write a checkpoint."""
        job, pipe, note = self._job, self._pipe, self._display.note
        pipe.print_with(note)
        if job.compile:
            note(f"compiled on rank {pipe.rank}: {counted(pipe.compiled_graphs, 'graph')}")
        with closing(self._display), closing(self._records):
            steps = self._steps()
            own = "" if job.verify == "off" else ", and the model's own"
            with notice_if_long(note, f"the first step{own}"):
                first = list(islice(steps, 1))
            for metrics in chain(first, steps):
                self._note(metrics)
                self._act()
                if pipe.stopping:
                    break
            if self._step == self.start:
                raise BadInput(nothing_left(job, self.start))
            if pipe.stopping == END:
                note(f"step {self._step}: a callback or a signal has ended the training")
            self._save_at_the_end()
            if not self._timelines:
                self._timelines.append((self._seconds[-1], pipe.timeline()))
        self.data_ended = self._step < job.steps and not pipe.stopping

    def _note(self, metrics: StepMetrics) -> None:
        """Record and display a step."""
        step, pipe, records = metrics.step, self._pipe, self._records
        self._step, self._loss, self._samples = step, metrics.loss, metrics.samples
        if metrics.non_finite:
            self._left_out.add(step)
            self._display.note(f"step {step} was left out: {metrics.non_finite}")
        self._seconds.append(metrics.seconds)
        if len(self._seconds) == COMPARED_STEPS:
            self._compare()
        # Timelines: 20 or more a run, the last step's, none in the warm-up.
        steps, taken = self._job.steps, step - self.start
        every = max(1, min((steps - self.start) // SAMPLED_TIMELINES, LONGEST_UNSAMPLED))
        warm = taken > WARM_UP_STEPS or steps - self.start <= WARM_UP_STEPS
        if step == steps or (warm and step % every == 0):
            timeline = pipe.timeline()
            self._timelines.append((metrics.seconds, timeline))
            if pipe.rank == 0 and not self._job.dynamic:
                records.drift(step, self._watch.add(timeline))
        verified = str(pipe.verified) if pipe.verified is not None and step == 1 else ""
        records.step(metrics, verified, self._lengths.pop(step))
        self._display.step(step, metrics)

    def _compare(self) -> None:
        """Print a line if the steps until now are far from the prediction, and why that is."""
        world, part = self._run.world, self._part
        loads = world.all_gather(load_here(world, self._start, part.plan.ranks))
        measured_s = median(self._steady)
        if part.by_length or not part.step_s or abs(part.step_s / measured_s - 1) < LARGEST_ERROR:
            return
        self._busy = changed_load(part.other_load, [loads[rank] for rank in part.plan.ranks])
        why = self._busy or "nothing else used these cores; measure again (constraints.remeasure)"
        took, predicted = seconds_text(measured_s), seconds_text(part.step_s)
        self._display.note(f"steps take {took}, predicted were {predicted}: {why}")

    def _act(self) -> None:
        """Evaluate, save or pause, where one of them is due."""
        job, pipe, step = self._job, self._pipe, self._step
        if job.evaluate_every and step % job.evaluate_every == 0:
            evaluation = evaluate(pipe, job)
            self._records.evaluation(step, evaluation)
            metrics = "".join(f", {name} {n:.4f}" for name, n in evaluation.metrics.items())
            self._display.note(f"step {step}: loss on held-out data {evaluation.loss:.4f}{metrics}")
            if job.follows_evaluations:
                pipe.step_schedule(evaluation_row(step, evaluation)[job.optimizer.follows])
        if job.checkpoint_every and step % job.checkpoint_every == 0:
            # On the CPU, saving in the background would copy all state, which is not planned.
            pipe.save(self._run.directory.checkpoints, wait=self._run.request.device == "cpu")
        pauses = pauses_at(step + 1, self.start, job.checkpoint_every, self._run.pause_after)
        if pauses and pipe.rank == 0 and step + 1 < job.steps:
            pipe.stop(PAUSE)

    def _save_at_the_end(self) -> None:
        """Write a checkpoint of the last step, and the weights, unless the run only pauses."""
        job, pipe = self._job, self._pipe
        if not (job.checkpoint_every and self._step % job.checkpoint_every == 0):
            pipe.save(self._run.directory.checkpoints)
        if job.save_weights is not None and pipe.stopping != PAUSE:
            pipe.meet()
            with averaged(pipe, job):
                pipe.save_pretrained(job.save_weights)

    def _steps(self) -> Iterator[StepMetrics]:
        """Train to the end of the run, step by step.

        If the job rolls back, steps after the last checkpoint are taken again after a bad one.
        """
        start = self.start
        while True:
            try:
                yield from self._steps_after(start)
                return
            except LossNotFinite as failure:
                if self._job.on_non_finite != "roll-back":
                    raise
                start = self._go_back(failure)

    def _go_back(self, failure: LossNotFinite) -> int:
        """Load the last checkpoint and return its step; all ranks must call this."""
        try:
            start = self._pipe.load(self._run.directory.checkpoints)
        except BadInput as none:
            raise failure.at(f"the run cannot go back to a checkpoint ({none})") from None
        if self._times_back[start] == MOST_TO_ONE_CHECKPOINT:
            raise failure.at(
                f"the run has gone back to step {start} {MOST_TO_ONE_CHECKPOINT} times already"
            )
        self._times_back[start] += 1
        self._left_out.add(failure.step)
        self._records.go_back(start)
        back = f"back to step {start}, without the batch of {failure.step}"
        self._display.note(f"{failure}; {back}")
        return start

    def _steps_after(self, step: int) -> Iterator[StepMetrics]:
        """Train the steps after ``step``, except those that are left out.

        Without a flush, steps follow one another without a pause up to the next evaluation or
        checkpoint.
        """
        job, pipe = self._job, self._pipe
        every = [n for n in (job.evaluate_every, job.checkpoint_every) if n]
        batches, before = self._batches(step), -1
        while step != before:
            before = step
            if step + 1 in self._left_out and next(batches, None) is not None:
                pipe.skip_step()
                step += 1
                continue
            pauses = [n - step % n for n in every]
            pauses += [n - 1 - step for n in self._left_out if n > step]
            some = islice(batches, min(pauses, default=job.steps))
            for metrics in self._stepped(some, step):
                step += 1
                yield metrics

    def _batches(self, step: int) -> Iterator[tuple[object, ...]]:
        """The batches of each step after ``step``; the lengths of single ones are noted."""
        for number, batches in enumerate(
            batches_of_steps(self._job, step, self._pipe.needs), step + 1
        ):
            own = self._pipe.lengths_of(batches[0]) if len(batches) == 1 else {}
            self._lengths[number] = own
            yield batches

    def _stepped(self, steps: Iterator[tuple[object, ...]], step: int) -> Iterator[StepMetrics]:
        """Take the steps after ``step``; the memory of an early one is measured, or of several.

        It is a warm-up step, so measuring its memory disturbs no measured time unless steps are
        few: the third, since the first creates optimizer state, and both before it keep outputs,
        with which losses are compared. Without a flush there are enough steps after the first to
        fill the pipeline, so that every stage holds as many weight versions as it ever will.
        """
        pipe = self._pipe
        if updates_per_batch(pipe.plan):
            stream = pipe.stream(batch for (batch,) in steps)
            if step == self.start:
                yield from islice(stream, 1)
                with pipe.measuring_memory() as self.memory:
                    yield from islice(stream, max(WARM_UP_STEPS, len(pipe.plan.stages)))
            yield from stream
            return
        for number, batches in enumerate(steps, step + 1):
            is_measured = number == min(self.start + 3, self._job.steps)
            before = nullcontext(self.memory)
            with pipe.measuring_memory() if is_measured else before as self.memory:
                metrics = pipe.step(*batches)
            yield metrics

    def result(self) -> TrainResult:
        """The result of the run so far."""
        before, typical_s = self._run.history, median(self._steady)
        return replace(
            before,
            steps=self._step,
            loss=self._loss,
            measured_s=typical_s,
            samples_per_s=self._samples / typical_s,
            verified=before.verified or str(self._pipe.verified or ""),
            left_out_steps=tuple(sorted({*before.left_out_steps, *self._left_out})),
            drift=tuple(map(str, self._watch.drifts)),
            busy=self._busy or before.busy,
            paused=self._pipe.stopping == PAUSE,
        )

    def timeline(self) -> Timeline:
        """The timeline of the sampled step whose time is closest to the median."""
        typical_s = median(self._steady)
        return min(self._timelines, key=lambda sample: abs(sample[0] - typical_s))[1]

    @property
    def _steady(self) -> list[float]:
        """The times of the steps after the warm-up, or of all steps if there are no others."""
        return self._seconds[WARM_UP_STEPS:] or self._seconds


def wait_limit_s(step_s: float) -> float:
    """Return for how many seconds a rank waits for another, where steps take ``step_s``."""
    return max(LEAST_WAIT_LIMIT_S, WAIT_LIMIT_STEPS * step_s)


def nothing_left(job: Job, start: int) -> str:
    """The error message if there is no step left to take."""
    if start >= job.steps:
        return (
            f"the run has taken {start} steps already and is to take {job.steps}; raise them with "
            f"--steps"
        )
    return f"the data of job '{job.name}' end after {start} steps; give data for {job.steps}"


def batches_of_steps(
    job: Job, start: int, needs: BatchNeeds | None = None
) -> Iterator[tuple[object, ...]]:
    """The batches of each remaining step of a run that has taken ``start`` steps.

    Of each they have what the rank ``needs``, if the data take part. A first step that is verified
    has whole batches.
    """
    if job.reads_parts and job.verify == "first-step" and start == 0:
        whole = islice(job.batches("train"), job.accumulate)
        batches = chain(whole, job.batches("train", job.accumulate, needs))
    else:
        batches = job.batches("train", start * job.accumulate, needs)
    steps = iter(lambda: tuple(islice(batches, job.accumulate)), ())
    return islice(steps, job.steps - start)


def evaluate(pipe: Pipeline, job: Job) -> Evaluation:
    """Loss and metrics on the job's held-out batches, as means weighted by their terms."""
    batches = islice(job.batches("held-out", needs=pipe.needs), job.evaluation_batches)
    with averaged(pipe, job):
        return pipe.evaluate(*batches)


def averaged(pipe: Pipeline, job: Job) -> AbstractContextManager[None]:
    """Give the pipeline averaged weights in the block, if the job keeps them."""
    return job.average.weights(pipe) if job.average is not None else nullcontext()


class Termination:
    """Handler of SIGTERM on this rank; the signal ends the run.

    While a pipeline trains, it stops after a step. Otherwise there is nothing to save, and the
    process ends. Further signals are ignored: a scheduler may send one to every process, and the
    launcher passes its own on. A second one ends the launcher, and with it the ranks.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pipe: Pipeline | None = None
        signal.signal(signal.SIGTERM, self._ask)

    @contextmanager
    def stopping(self, pipe: Pipeline) -> Iterator[None]:
        """Let the signal stop ``pipe`` in the block."""
        self._pipe = pipe
        try:
            yield
        finally:
            self._pipe = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.requested = True
        if self._pipe is None:
            raise SystemExit(128 + number)
        self._pipe.stop()


SHOWN = ("batch_size", "steps", "seed", "accumulate", "clip_norm", "autocast")
"""The fields of a job that trackers show, besides the optimizer's."""


def trackers_of(
    directory: Path, job: Job, plan: Plan, say: Callable[[str], None]
) -> tuple[Callback, ...]:
    """A callback for each tracker of the job; their files are in ``directory/trackers``.

    The job's name is that of the project, and the run directory's that of the run.
    """
    config = {
        **{name: getattr(job, name) for name in SHOWN},
        **{f"optimizer.{name}": str(value) for name, value in asdict(job.optimizer).items()},
        "planner": plan.planner,
        "schedule": plan.schedule,
        "stages": len(plan.stages),
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
    }
    files = directory / "trackers"
    about = {"project": job.name, "name": directory.name, "config": config, "say": say}
    return tuple(track(tracker, files, **about) for tracker in job.trackers)


PLAIN_LINES = 20
"""Lines that a run prints if standard error is not a terminal."""


class Display:
    """A progress bar on a terminal; elsewhere a line every few steps, for logs; or nothing."""

    def __init__(self, start: int, steps: int, *, shown: bool) -> None:
        self._every = max(1, (steps - start) // PLAIN_LINES)
        self._steps, self._shown = steps, shown
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            words = TextColumn("{task.description}")
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), words)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("", total=steps, completed=start)
            self._bar.start()

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Show every few steps, and always the last step."""
        words = (
            f"loss {metrics.loss:.4f}  {metrics.samples_per_s:.0f} samples/s  "
            f"bubble {metrics.bubble:.0%}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=words)
        elif step % self._every == 0 or step == self._steps:
            self.note(f"step {step}/{self._steps}  {words}")

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._shown:
            say(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
