"""Callbacks: functions of the user that are called on events of a pipeline.

    def show(pipe, event):
        match event:
            case StepMetrics(): ...
            case Evaluation(): ...

Every rank calls its callbacks, with equal events, in the order of the list.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from penstock.errors import BadInput
from penstock.runtime.checkpoints.checkpoint import complete_in, read_state
from penstock.runtime.checkpoints.loader_state import StatefulLoader
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.user_metrics import Evaluation


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written completely after ``step`` steps."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Closing:
    """The pipeline is about to be closed after ``step`` steps. It can still be used."""

    step: int


Event: TypeAlias = StepMetrics | Evaluation | Saved | Closing
"""Event after a step, after an evaluation, after a checkpoint, or before closing."""

Callback: TypeAlias = Callable[[Any, Event], object]
"""``callback(pipe, event)``: its result is ignored, an exception ends the training."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise `BadInput` if a callback cannot be called."""
    for place, callback in enumerate(callbacks):
        if not callable(callback):
            raise BadInput(
                f"callback {place} is a {type(callback).__name__}; give functions "
                f"callback(pipe, event)"
            )


@dataclass
class Followed:
    """A value of evaluations, ``"loss"`` or the name of a metric, and the ``best`` so far.

    Of a metric that is better where it is ``highest``, ``best`` has the other sign.
    """

    by: str
    highest: bool
    best: float = inf

    def improves(self, evaluation: Evaluation, least: float = 0.0) -> bool:
        """Return whether an evaluation beats all before by more than ``least``; NaN never does."""
        values = {"loss": evaluation.loss, **evaluation.metrics}
        if self.by not in values:
            raise BadInput(f"evaluations have no '{self.by}'; follow one of {', '.join(values)}")
        own = -values[self.by] if self.highest else values[self.by]
        better = own < self.best - least
        self.best = own if better else self.best
        return better


def stop_early(
    evaluations: int, *, by: str = "loss", highest: bool = False, least: float = 0.0
) -> Callback:
    """A callback for `Pipeline.notify` that stops a training which gets no better.

        pipe.notify(stop_early(3), keep_best("best"))

    After ``evaluations`` in a row that are not better than the best by more than ``least``,
    `Pipeline.stop` is called. ``by`` is ``"loss"`` or the name of a metric, which is better where
    it is higher if ``highest``. Each call of `Pipeline.evaluate` is an evaluation. A script
    that is started again counts from 0.
    """
    if evaluations < 1:
        raise BadInput(f"stop_early was given {evaluations} evaluations; it needs at least 1")
    followed, since = Followed(by, highest), 0

    def follow(pipe: Any, event: Event) -> None:
        nonlocal since
        if isinstance(event, Evaluation):
            since = 0 if followed.improves(event, least) else since + 1
            if since >= evaluations:
                pipe.stop()

    return follow


def keep_best(directory: Path | str, *, by: str = "loss", highest: bool = False) -> Callback:
    """A callback for `Pipeline.notify` that keeps the checkpoint of the best evaluation.

    After an evaluation that is better than all before, ``directory`` has a checkpoint of these
    weights alone, as `Pipeline.save` writes it; so evaluate with the training's own weights, not
    with an average. A training that resumes keeps it until there is a better one. ``by`` and
    ``highest`` are those of `stop_early`.
    """
    folder, followed = Path(directory), Followed(by, highest)
    begun = False

    def follow(pipe: Any, event: Event) -> None:
        nonlocal begun
        if not isinstance(event, Evaluation):
            return
        if not begun and (kept := complete_in(folder)):
            followed.best = float(read_state(kept[-1])["extra"]["best"])
        begun = True
        if followed.improves(event):
            pipe.save(folder, extra={"best": followed.best}, keep=1)

    return follow


def save_at_sigterm(directory: Path | str, *, loader: StatefulLoader | None = None) -> Callback:
    """A callback for `Pipeline`: after SIGTERM, a checkpoint is written and the script ends.

        callbacks=[show, save_at_sigterm("checkpoints", loader=loader)]

    It is enough that one rank receives the signal. All ranks take the step that they are in, or the
    next one, save as `Pipeline.save` does, and leave by ``SystemExit`` with code 143 (128 + 15).
    So an agent that has received no signal itself takes the end for a failure, and starts its ranks
    again. Torchrun's agents send SIGTERM when they are terminated, and when a host joins or a rank
    fails. They kill ranks that have not ended after 30 seconds.

    The exception leaves `Pipeline.step`, so the loop does not see the last step. Callbacks in front
    of this one do.

    Before the first step SIGTERM ends the process at once, because there is nothing to save. A
    further SIGTERM is ignored, because schedulers may send one to each process beside the agent's.
    The main thread must take the steps.
    """
    requested: bool | None = None  # None: this rank does not listen yet

    def follow(pipe: Any, event: Event) -> None:
        nonlocal requested

        def request(number: int, frame: FrameType | None) -> None:
            nonlocal requested
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            requested = True
            pipe.stop()

        if not isinstance(event, StepMetrics):
            return
        if requested is None:
            requested = False
            signal.signal(signal.SIGTERM, request)
        # A callback may have stopped the training for another reason, without a signal.
        if pipe.stopping and any(pipe._engine.world.all_gather(requested)):
            pipe.save(directory, loader=loader)
            raise SystemExit(128 + signal.SIGTERM)

    return follow
