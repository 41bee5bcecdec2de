"""The action loop: this rank's part of one iteration."""

from collections.abc import Mapping

from penstock.errors import PenstockError, RunFailed
from penstock.runtime.channels import Channels
from penstock.runtime.clock import Clock
from penstock.runtime.stage_runner import StageRunner
from penstock.schedule.action import Action

__all__ = ["execute"]


def execute(
    order: tuple[Action, ...], stages: Mapping[int, StageRunner], channels: Channels, clock: Clock
) -> None:
    """Run ``order``, one device's actions of a schedule; gradients accumulate in place.

    The loop knows no schedule by name: it does what the actions say. ``receive`` returns what the
    producers of ``action`` sent, ``send`` returns at once; compute is timed apart from waiting.

    Raises:
        RunFailed: a stage raised, or a peer vanished; names rank, action and cause.
        Stalled: a peer did not send in time.
    """
    now, add = clock.now, clock.add
    for action in order:
        kind, index, micro_batch = action.kind, action.stage, action.micro_batch
        stage = stages[index]
        try:
            received = channels.receive(action)
            start = now()
            match kind:
                case "F":
                    result = stage.forward(micro_batch, received)
                case "B":
                    result = stage.backward(micro_batch, received)
                case "I":
                    result = stage.backward_input(micro_batch, received)
                case "W":
                    result = stage.backward_weight(micro_batch)
                case "R":
                    result = stage.recompute(micro_batch)
            add(kind, index, micro_batch, start, now())
            channels.send(action, result)
        except PenstockError:
            raise
        except Exception as cause:
            text = str(cause).strip().partition("\n")[0] or type(cause).__name__
            where = f"rank {channels.device}, stage {index}, {kind}{micro_batch}"
            raise RunFailed(f"{where}: {text}") from cause
    channels.drain()
