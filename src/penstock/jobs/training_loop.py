"""The training loop that every rank of a run executes over the same batches, and what it shows."""

import math
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.errors import BadInput, LossNotFinite
from penstock.jobs.job import Job
from penstock.jobs.optimizers import learning_rate_schedule, optimizer_factory
from penstock.jobs.profile_job import build_and_capture
from penstock.jobs.run_directory import Records, RunDirectory
from penstock.jobs.train_request import TrainResult
from penstock.plan.ordering import updates_per_batch
from penstock.plan.plan import Plan
from penstock.runtime.batch_needs import BatchNeeds
from penstock.runtime.callbacks import Callback
from penstock.runtime.measured_memory import MeasuredMemory
from penstock.runtime.metrics import PAUSE, StepMetrics, evaluation_row
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.settings import Safety, Update
from penstock.runtime.tables import Constraints
from penstock.runtime.trackers import track
from penstock.runtime.user_metrics import Evaluation
from penstock.timeline.drift import DriftWatch
from penstock.timeline.timeline import Timeline
from penstock.waiting import notice_if_long, say
from penstock.words import counted

MOST_TO_ONE_CHECKPOINT = 3
"""A run that has gone back to one checkpoint so many times ends at the next bad step."""


@dataclass
class RollBack:
    """The steps that a run leaves out, because they were bad before it went back.

    ``checkpoints`` is the directory of checkpoints. ``tell`` is called after the run has gone back,
    with the step of the checkpoint and what happened.
    """

    pipe: Pipeline
    checkpoints: Path
    tell: Callable[[int, str], None]
    left_out: set[int] = field(default_factory=set[int])
    _times: Counter[int] = field(default_factory=Counter[int])

    def after(self, failure: LossNotFinite) -> int:
        """Load the last checkpoint and return its step; all ranks must call this."""
        try:
            start = self.pipe.load(self.checkpoints)
        except BadInput as none:
            raise failure.at(f"the run cannot go back to a checkpoint ({none})") from None
        if self._times[start] == MOST_TO_ONE_CHECKPOINT:
            raise failure.at(
                f"the run has gone back to step {start} {MOST_TO_ONE_CHECKPOINT} times already"
            )
        self._times[start] += 1
        self.left_out.add(failure.step)
        self.tell(start, f"{failure}; back to step {start}, without the batch of {failure.step}")
        return start


WARM_UP_STEPS = 3
"""Steps at the start that are not measured: caches fill and connections are made."""

SAMPLED_TIMELINES = 20
"""How many iterations of a run are looked at in full, unless it is long."""

LONGEST_UNSAMPLED = 100
"""Of so many steps at least one is looked at in full."""


def pauses_at(step: int, start: int, every: int, pause_after: int) -> bool:
    """Whether ranks pause after a step, so that the run continues in another way.

    They do so at the checkpoint number ``pause_after``, counted from ``start`` (0: at none), if
    one is written ``every`` so many steps.
    """
    if not (pause_after and every) or step % every:
        return False
    return step // every - start // every >= pause_after


@dataclass(frozen=True)
class RunPart:
    """A part of a run: from a checkpoint to a later one, all ranks follow one plan.

    ``resume_from`` is the checkpoint's directory. ``planned`` is the simulated iteration, which
    only rank 0 has. ``before`` is what came of earlier parts. The part ends before the run does at
    the checkpoint number ``pause_after``.
    """

    job: Job
    plan: Plan
    directory: RunDirectory
    planned: Timeline | None = None
    resume_from: Path | None = None
    device: str = "cpu"
    shown: bool = True
    timeout_s: float = LIMIT_S
    before: TrainResult = field(default_factory=TrainResult)
    pause_after: int = 0


@dataclass(frozen=True)
class PartReport:
    """What a rank knows of a part that has ended, besides the result of the run so far.

    ``timeline`` is of a step of about median time. ``start`` is the number of steps taken before
    the part. ``data_ended``: the data had no batch for a step that was left.
    """

    result: TrainResult
    timeline: Timeline
    memory: MeasuredMemory
    start: int
    data_ended: bool


@dataclass
class Measurements:
    """Times of the steps so far, and timelines of some of the latest."""

    seconds: list[float] = field(default_factory=list)
    timelines: deque[tuple[float, Timeline]] = field(
        default_factory=lambda: deque(maxlen=2 * SAMPLED_TIMELINES)
    )

    def add(self, seconds: float, timeline: Timeline | None) -> None:
        self.seconds.append(seconds)
        if timeline is not None:
            self.timelines.append((seconds, timeline))

    @property
    def steady(self) -> list[float]:
        """The times of the steps after the warm-up, or of all steps if there are no others."""
        return self.seconds[WARM_UP_STEPS:] or self.seconds

    def typical(self) -> tuple[float, Timeline]:
        """The median step time, and the timeline of the sampled step that is closest to it."""
        typical_s = median(self.steady)
        nearest = min(self.timelines, key=lambda sample: abs(sample[0] - typical_s))
        return typical_s, nearest[1]


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
        constraints=Constraints(sharding="optimizer") if job.shard_optimizer else None,
        metrics=job.metrics,
        timeout_s=timeout_s,
        verify=job.verify,
        update=Update(
            weights=job.weights,
            seed=job.seed,
            loss_scaling=job.loss_scaling if job.autocast == "float16" else None,
            gradient_dtype=job.gradients_in(),
            schedule_follows="evaluation" if job.follows_evaluations else "loss",
            **job.meetings,
            # A run that rolls back does so where the pipeline stops.
            on_non_finite="skip" if job.on_non_finite == "skip" else "stop",
        ),
        safety=Safety(compare_replicas_every=job.compare_replicas_every),
    )
    pipe.notify(*filter(None, (job.average,)), *job.callbacks)
    return pipe


def train_part(part: RunPart, termination: "Termination", say: Callable[[str], None]) -> PartReport:
    """Train from the first step, or from a checkpoint, to the end of the part."""
    job = part.job
    with notice_if_long(say, "building the model and the stages"):
        trackers = trackers_of(part.directory.path, job, part.plan, say)
        tracked = replace(job, callbacks=(*job.callbacks, *trackers))
        made = pipeline_of(tracked, part.plan, part.device, part.timeout_s)
    with termination.stopping(made), made as pipe:
        start = pipe.load(part.resume_from) if part.resume_from else 0
        return train(pipe, part, start)


def train(pipe: Pipeline, part: RunPart, start: int) -> PartReport:
    """The training loop: step, record, display; at intervals evaluate and write a checkpoint."""
    job, directory, first = part.job, part.directory, pipe.rank == 0
    measured, memory = Measurements(), list[MeasuredMemory]()
    display = display_for(start, job.steps, shown=part.shown and first)
    loss, step, samples = math.nan, start, job.batch_size * job.accumulate
    lengths = deque[Mapping[str, int]]()
    pipe.print_with(display.note)
    if job.compile:
        display.note(f"compiled on rank {pipe.rank}: {counted(pipe.compiled_graphs, 'graph')}")
    with closing(display), closing(Records(directory, start, writes=first)) as records:

        def gone_back(to: int, why: str) -> None:
            records.go_back(to)
            display.note(why)

        watch = DriftWatch(part.planned or Timeline((), 0), job.accumulate)
        back = RollBack(pipe, directory.checkpoints, gone_back)
        steps = trained(pipe, job, start, memory, lengths, back)
        words = "the first step" if job.verify == "off" else "the first step, and the model's own"
        for metrics in notice_of_first(steps, display.note, words):
            step, loss, samples = metrics.step, metrics.loss, metrics.samples
            if metrics.non_finite:
                back.left_out.add(step)
                display.note(f"step {step} was left out: {metrics.non_finite}")
            timeline = pipe.timeline() if is_sampled(step, start, job.steps) else None
            measured.add(metrics.seconds, timeline)
            if timeline is not None and first and not job.dynamic:
                records.drift(step, watch.add(timeline))
            verified = str(pipe.verified) if pipe.verified is not None and step == 1 else ""
            records.step(metrics, verified, lengths.popleft())
            display.step(step, metrics)
            if job.evaluate_every and step % job.evaluate_every == 0:
                evaluation = evaluate(pipe, job)
                records.evaluation(step, evaluation)
                display.note(f"step {step}: {in_words(evaluation)}")
                if job.follows_evaluations:
                    pipe.step_schedule(evaluation_row(step, evaluation)[job.optimizer.follows])
            if job.checkpoint_every and step % job.checkpoint_every == 0:
                # On the CPU, saving in the background would copy all state, which is not planned.
                pipe.save(directory.checkpoints, wait=part.device == "cpu")
            pauses = pauses_at(step + 1, start, job.checkpoint_every, part.pause_after)
            if pauses and first and step + 1 < job.steps:
                pipe.stop(PAUSE)
            if pipe.stopping == PAUSE:
                break
            if pipe.stopping:
                display.note(f"step {step}: a callback or a signal has ended the training")
                break
        if step == start:
            raise BadInput(nothing_left(job, start))
        paused = pipe.stopping == PAUSE
        save_at_the_end(pipe, part, step, with_weights=not paused)
        if not measured.timelines:
            measured.timelines.append((measured.seconds[-1], pipe.timeline()))
    typical_s, timeline = measured.typical()
    before = part.before
    result = replace(
        before,
        steps=step,
        loss=loss,
        measured_s=typical_s,
        samples_per_s=samples / typical_s,
        verified=before.verified or str(pipe.verified or ""),
        left_out_steps=tuple(sorted({*before.left_out_steps, *back.left_out})),
        drift=tuple(map(str, watch.drifts)),
        paused=paused,
    )
    peak = (memory or [MeasuredMemory()])[-1]
    return PartReport(result, timeline, peak, start, step < job.steps and not pipe.stopping)


def save_at_the_end(pipe: Pipeline, part: RunPart, step: int, with_weights: bool) -> None:
    """Write a checkpoint of the last step, and ``with_weights`` those that the job asks for."""
    job = part.job
    if not (job.checkpoint_every and step % job.checkpoint_every == 0):
        pipe.save(part.directory.checkpoints)
    if job.save_weights is not None and with_weights:
        pipe.meet()
        with averaged(pipe, job):
            pipe.save_pretrained(job.save_weights)


def notice_of_first(
    steps: Iterator[StepMetrics], note: Callable[[str], None], words: str
) -> Iterator[StepMetrics]:
    """``steps``; if the first takes long, ``note`` prints what is waited for."""
    with notice_if_long(note, words):
        first = list(islice(steps, 1))
    return chain(first, steps)


def trained(
    pipe: Pipeline,
    job: Job,
    start: int,
    memory: list[MeasuredMemory],
    lengths: deque[Mapping[str, int]],
    back: RollBack,
) -> Iterator[StepMetrics]:
    """Train to the end of the run, step by step; adds the memory of one step to ``memory``.

    The lengths of each step's batch are added to ``lengths``; a step of several batches adds none.
    If the job rolls back, steps after the last checkpoint are taken again after a bad one.
    """
    while True:
        try:
            yield from trained_on(pipe, job, start, memory, lengths, back.left_out)
            return
        except LossNotFinite as failure:
            if job.on_non_finite != "roll-back":
                raise
            start = back.after(failure)
            lengths.clear()


def trained_on(
    pipe: Pipeline,
    job: Job,
    start: int,
    memory: list[MeasuredMemory],
    lengths: deque[Mapping[str, int]],
    left_out: Collection[int],
) -> Iterator[StepMetrics]:
    """Train from step ``start`` to the end of the run, without the steps in ``left_out``.

    Without a flush, steps follow one another without a pause up to the next evaluation or
    checkpoint.
    """
    steps = noting_lengths(pipe, steps_of(job, start, pipe.needs), lengths)
    if not updates_per_batch(pipe.plan):
        for step, batches in enumerate(steps, start + 1):
            if step in left_out:
                pipe.skip_step()
                lengths.pop()
                continue
            if step == measured_step(start, job.steps):
                with pipe.measuring_memory() as measured:
                    metrics = pipe.step(*batches)
                memory.append(measured)
            else:
                metrics = pipe.step(*batches)
            yield metrics
        return
    step, before = start, -1
    while step != before:
        before = step
        every = [n for n in (job.evaluate_every, job.checkpoint_every) if n]
        if step + 1 in left_out and next(steps, None) is not None:
            pipe.skip_step()
            lengths.pop()
            step += 1
            continue
        pauses = [n - step % n for n in every] + [n - 1 - step for n in left_out if n > step]
        pause = min(pauses, default=job.steps)
        stream = pipe.stream(batch for (batch,) in islice(steps, pause))
        if step == start:
            stream = measured_first(pipe, stream, memory)
        for metrics in stream:
            step += 1
            yield metrics


def noting_lengths(
    pipe: Pipeline, steps: Iterator[tuple[object, ...]], lengths: deque[Mapping[str, int]]
) -> Iterator[tuple[object, ...]]:
    """``steps``; when a step is requested, the lengths of its batch are added to ``lengths``."""
    for batches in steps:
        lengths.append(pipe.lengths_of(batches[0]) if len(batches) == 1 else {})
        yield batches


def measured_first(
    pipe: Pipeline, steps: Iterator[StepMetrics], memory: list[MeasuredMemory]
) -> Iterator[StepMetrics]:
    """``steps`` of a stream; the memory of some steps after the first is measured.

    There are enough of them to fill the pipeline, so that every stage holds as many weight versions
    as it ever will. The first step is left out: it may be compared with the user's module, which
    takes additional memory.
    """
    yield from islice(steps, 1)
    with pipe.measuring_memory() as measured:
        yield from islice(steps, max(WARM_UP_STEPS, len(pipe.plan.stages)))
    memory.append(measured)
    yield from steps


def nothing_left(job: Job, start: int) -> str:
    """The error message if there is no step left to take."""
    if start >= job.steps:
        return (
            f"the run has taken {start} steps already and is to take {job.steps}; raise them with "
            f"--steps"
        )
    return f"the data of job '{job.name}' end after {start} steps; give data for {job.steps}"


def steps_of(job: Job, start: int, needs: BatchNeeds | None = None) -> Iterator[tuple[object, ...]]:
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


def is_sampled(step: int, start: int, steps: int) -> bool:
    """Whether to collect a step's timeline: at least 20 in a run, the last one, none in warm-up."""
    every = max(1, min((steps - start) // SAMPLED_TIMELINES, LONGEST_UNSAMPLED))
    warm = step - start > WARM_UP_STEPS or steps - start <= WARM_UP_STEPS
    return step == steps or (warm and step % every == 0)


def evaluate(pipe: Pipeline, job: Job) -> Evaluation:
    """Loss and metrics on the job's held-out batches, as means weighted by their terms."""
    batches = islice(job.batches("held-out", needs=pipe.needs), job.evaluation_batches)
    with averaged(pipe, job):
        return Evaluation.combined([pipe.evaluate(batch) for batch in batches])


def averaged(pipe: Pipeline, job: Job) -> AbstractContextManager[None]:
    """Within, the pipeline has averaged weights, if the job keeps them."""
    return job.average.weights(pipe) if job.average is not None else nullcontext()


def in_words(evaluation: Evaluation) -> str:
    """``loss on held-out data 0.1234, accuracy 0.9876``."""
    metrics = "".join(f", {name} {value:.4f}" for name, value in evaluation.metrics.items())
    return f"loss on held-out data {evaluation.loss:.4f}{metrics}"


def measured_step(start: int, steps: int) -> int:
    """The step whose memory is measured: the third, since the first creates optimizer state, and
    both before it keep outputs, with which losses are compared.

    It is a warm-up step, so measuring its memory disturbs no measured time unless steps are few.
    """
    return min(start + 3, steps)


class Termination:
    """Whether this rank has received SIGTERM, which ends the run.

    While a pipeline trains, it stops after a step. Otherwise there is nothing to save, and the
    process ends. Further signals are ignored: a scheduler may send one to every process, and the
    launcher passes its own on. A second one ends the launcher, and with it the ranks.
    """

    def __init__(self) -> None:
        self.asked = False
        self._pipe: Pipeline | None = None
        signal.signal(signal.SIGTERM, self._ask)

    @contextmanager
    def stopping(self, pipe: Pipeline) -> Iterator[None]:
        """Within, the signal stops ``pipe``."""
        self._pipe = pipe
        try:
            yield
        finally:
            self._pipe = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.asked = True
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
"""How many lines a run prints if standard error is not a terminal."""

SHOW_CURSOR = "\x1b[?25h"


class LiveDisplay:
    """A progress bar that is redrawn in place."""

    def __init__(self, start: int, steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[samples_per_s]:.0f} samples/s"),
            TextColumn("bubble {task.fields[bubble]:.0%}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(
            "train", total=steps, completed=start, loss=float("nan"), samples_per_s=0.0, bubble=0.0
        )
        self._progress.start()

    def step(self, step: int, metrics: StepMetrics) -> None:
        self._progress.update(
            self._task,
            completed=step,
            loss=metrics.loss,
            samples_per_s=metrics.samples_per_s,
            bubble=metrics.bubble,
        )

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class PlainDisplay:
    """A line every few steps, for logs, or nothing."""

    def __init__(self, start: int, steps: int, *, shown: bool) -> None:
        self._every = max(1, (steps - start) // PLAIN_LINES)
        self._steps = steps
        self._shown = shown

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Print every few steps, and always the last step."""
        if step % self._every == 0 or step == self._steps:
            self.note(
                f"step {step}/{self._steps}  loss {metrics.loss:.4f}  "
                f"{metrics.samples_per_s:.0f} samples/s  bubble {metrics.bubble:.0%}"
            )

    def note(self, text: str) -> None:
        if self._shown:
            say(text)

    def close(self) -> None:
        """Nothing to restore."""


def display_for(start: int, steps: int, *, shown: bool) -> LiveDisplay | PlainDisplay:
    """The display that suits standard error; none unless ``shown``."""
    if shown and sys.stderr.isatty():
        return LiveDisplay(start, steps)
    return PlainDisplay(start, steps, shown=shown)


def show_cursor() -> None:
    """Show the cursor again, which the live display of a stopped worker left hidden."""
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
        sys.stderr.flush()
