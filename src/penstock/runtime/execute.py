"""The loop that carries out actions: this rank's part of one iteration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import PenstockError, RunFailed
from penstock.runtime.clock import Clock
from penstock.runtime.stages.runner import StageRunner, Tensors
from penstock.runtime.transport.channels import Channels
from penstock.schedule.action import Action
from penstock.timeline.timeline import EventKind

__all__ = ["PreparedAction", "execute", "steps_of"]


class PreparedAction(NamedTuple):
    """An action with all that it calls, looked up once for many iterations.

    Or what is done between actions, such as an update of the weights (``STEP``).
    """

    kind: EventKind
    stage: int
    micro_batch: int
    receive: Callable[[], Tensors]
    work: Callable[[int, Tensors], Tensors]
    send: Callable[[Tensors], None] | None


def steps_of(
    order: Sequence[Action], stages: Mapping[int, StageRunner], channels: Channels
) -> tuple[PreparedAction, ...]:
    """``order``, one device's actions of a schedule, ready to be run again and again."""
    return tuple(
        PreparedAction(
            action.kind,
            action.stage,
            action.micro_batch,
            channels.receiver(action),
            stages[action.stage].work(action.kind),
            channels.sender(action),
        )
        for action in order
    )


def execute(
    steps: Iterable[PreparedAction], channels: Channels, clock: Clock, *, drains: bool = True
) -> None:
    """Run ``steps``, each before the next is asked for; gradients accumulate in place.

    The loop knows no schedule by name: it does what the actions say. ``receive`` returns what the
    producers of an action sent, ``send`` returns at once; compute is timed apart from waiting.
    Where it ``drains``, it ends when all that it sent is on its way.

    Raises:
        RunFailed: a stage raised, or a peer vanished; names rank, action and cause.
        Stalled: a peer did not send in time.
    """
    now, add = clock.now, clock.add
    for kind, stage, micro_batch, receive, work, send in steps:
        try:
            received = receive()
            start = now()
            result = work(micro_batch, received)
            add(kind, stage, micro_batch, start, now())
            if send is not None:
                send(result)
        except PenstockError:
            raise
        except Exception as cause:
            text = str(cause).strip().partition("\n")[0] or type(cause).__name__
            where = f"rank {channels.device}, stage {stage}, {kind}{micro_batch}"
            raise RunFailed(f"{where}: {text}") from cause
    if drains:
        channels.drain()
