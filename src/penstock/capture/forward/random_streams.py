"""Random numbers of a stage's run: what all stages draw is equal, what one draws is its own."""

import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from penstock.capture.forward.partial_forward import StageRun, StageTask
from penstock.capture.record.outside_state import (
    GeneratorsState,
    RandomState,
    generators_state,
    random_state,
    restore_generators,
    restore_random_state,
    seed_generators,
)
from penstock.device import device_in_use

Generators: TypeAlias = tuple[RandomState, GeneratorsState | None]
"""The states of torch's generator, and of Python's and numpy's where they are drawn from."""


def seeded(task: StageTask, run: StageRun) -> Generators | None:
    """Seed what all stages draw equally between units; return the states to restore."""
    if not task.draws_alike:
        return None
    draws_python = task.recorded.draws_python
    if task.draws_in_all:
        run.own_seed = int(torch.empty((), dtype=torch.int64).random_())
    before = random_state(device_in_use()), generators_state() if draws_python else None
    if task.draws_in_all:
        torch.manual_seed(run.seed)
    if draws_python:
        seed_generators(run.seed)
    return before


def restore_generators_of(before: Generators | None) -> None:
    """Restore what `seeded` has returned."""
    if before is not None:
        restore_random_state(device_in_use(), before[0])
        if before[1] is not None:
            restore_generators(before[1])


def in_stream(run: StageRun, key: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call that draws, from a stream of its own."""
    device = device_in_use()
    state = random_state(device)
    torch.manual_seed(zlib.crc32(repr((run.seed, run.own_seed, key)).encode()))
    try:
        return call(*args, **kwargs)
    finally:
        restore_random_state(device, state)
