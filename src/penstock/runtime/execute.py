"""The loop that runs the actions of one rank in one iteration."""

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
    """An action with the functions that it calls, looked up once for many iterations.

    It can also be work between actions, such as an update of the weights (``STEP``).
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
    """Prepare ``order``, one device's actions of a schedule, to be run repeatedly."""
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
    """Run ``steps`` one after another; gradients accumulate in place.

    The loop knows no schedule by name: it only follows the actions. ``receive`` returns what the
    producers of an action sent. ``send`` returns at once. Compute is timed separately from waiting.
    Each step is requested only when the previous one is done. With ``drains``, the loop waits at
    its end until everything is sent.

    Raises:
        RunFailed: a stage raised an exception, or a peer failed; names rank, action and cause.
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
