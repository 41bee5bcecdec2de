"""What goes to a rank's device: rows that it reads, each once. Torch's meta device stands in."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.transport.stream_model import boundaries_of
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.batch.part import PartialLeaf
from penstock.plan.plan import Plan, Stage
from penstock.runtime.clock import StepClock
from penstock.runtime.program import DeviceCopies, Program, lower
from penstock.runtime.transport.channels import PipelineChannels
from penstock.runtime.transport.messages import BoundaryTensors, RankMessages
from penstock.schedule.action import Action

DEVICE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Within, the numbers of rows of tensors that are copied to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def on_one_rank(replicas: int) -> Plan:
    """Two stages on the same devices, two micro-batches of four rows."""
    slices = tuple(4 // replicas for _ in range(replicas))
    stages = tuple(Stage(range(s, s + 1), tuple(range(replicas)), slices) for s in (0, 1))
    return Plan(stages, 2, 4, "breadth-first")


class Idle:
    """A stage that computes nothing."""

    def has_work(self, kind: str) -> bool:
        return True

    def work(self, kind: str) -> Callable[[int, Any], Any]:
        return lambda micro_batch, received: received


def program(plan: Plan, boundaries: Sequence[BoundaryTensors], rank: int) -> Program:
    """What a rank with both stages does in a step of eight rows."""
    tensors, stages = boundaries[0].tensors, {0: Idle(), 1: Idle()}
    ends = ((), tensors), (tensors, ())
    programs: Any = {n: SimpleNamespace(received=r, sent=s) for n, (r, s) in enumerate(ends)}

    def channels(messages: RankMessages) -> PipelineChannels:
        return PipelineChannels(rank, None, programs, StepClock(), messages, DEVICE)

    return lower(plan, boundaries, rank, (8, ()), stages, channels, training=True)


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_row_is_copied_once_for_all_stages(replicas: int) -> None:
    work = program(on_one_rank(replicas), boundaries_of(2), replicas - 1)
    leaf, device = torch.arange(16.0).view(8, 2), DeviceCopies(DEVICE)
    with Copies() as copies:
        inputs = [work.work(stage, {0: leaf, 1: leaf}, (stage,), device) for stage in (0, 1)]
    assert copies.rows == [4 // replicas] * 2
    assert all(x.device == DEVICE for each in inputs for (x,) in each.leaves)


def test_rows_on_the_device_are_views_and_parts_move_as_they_are() -> None:
    leaf = torch.arange(16.0).view(8, 2)
    here = DeviceCopies(leaf.device).rows(leaf, range(2, 4), range(4))
    assert here.data_ptr() == leaf[2:].data_ptr()
    part = PartialLeaf((8, 2), leaf.dtype, 0.0, (range(4, 8),), leaf[4:])
    device = DeviceCopies(DEVICE)
    with Copies() as copies:
        moved = [device.rows(part, range(4, 6), range(4, 8)) for _ in range(2)]
    assert copies.rows == [4] and all(x.device == DEVICE and x.shape == (2, 2) for x in moved)


def test_a_missing_gradient_is_none_for_the_next_stage_too() -> None:
    (boundary,) = boundaries_of(2)
    channels = program(on_one_rank(1), (boundary,), 0).channels
    channels.begin()
    send = channels.sender(Action("B", 1, 0))
    assert send is not None
    send([None])
    assert channels.receiver(Action("B", 0, 0))() == [None]
