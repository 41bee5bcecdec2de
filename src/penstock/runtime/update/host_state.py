"""The optimizer's step and state in host memory, for any optimizer.

As in Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021: between
steps parameters and gradients are on the GPU, and a step computes on copies in host memory.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.device import is_gpu, wait_for
from penstock.errors import BadInput
from penstock.machine import free_host_memory
from penstock.runtime.processes.world import World
from penstock.text import counted, size_text


class HostState:
    """Copies in host memory of those ``parameters`` that are on a GPU, for an optimizer.

    Within `in_place` a parameter and its gradient are copies there, and so is what the optimizer
    makes like them. Values are copied from the device every time, because checkpoints, averages
    and a user's own code may have changed them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if is_gpu(p.device)]
        self._values = [room_for(p) for p in self._parameters]
        self._gradients = [room_for(p) for p in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Hold parameters in host memory; at the end copy their new values to the GPU."""
        own = [(p, p.data, p.grad) for p in self._parameters]
        rooms = list(zip(own, self._values, self._gradients, strict=True))
        with torch.no_grad():
            for (_, data, gradient), value, room in rooms:
                value.copy_(data, non_blocking=True)
                if gradient is not None:
                    room.copy_(gradient, non_blocking=True)
        for device in {data.device for _, data, _ in own}:
            wait_for(device)
        try:
            for (parameter, _, gradient), value, room in rooms:
                move_parameter(parameter, value, None if gradient is None else room)
            yield
        finally:
            changed = [parameter.data for parameter in self._parameters]
            for parameter, data, gradient in own:
                move_parameter(parameter, data, gradient)
        with torch.no_grad():
            for (_, data, _), value in zip(own, changed, strict=True):
                data.copy_(value, non_blocking=True)


def move_parameter(
    parameter: nn.Parameter, data: torch.Tensor, gradient: torch.Tensor | None
) -> None:
    """Give a parameter other memory; a gradient must be on the parameter's device at any time."""
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


def room_for(parameter: nn.Parameter) -> torch.Tensor:
    """Host memory for a parameter's values, to and from which a GPU copies behind the host."""
    kind = {"dtype": parameter.dtype, "pin_memory": True}
    return torch.empty_strided(parameter.shape, parameter.stride(), **kind)


def check_host_room(world: World, parameters: Iterable[nn.Parameter], state: float) -> None:
    """Raise `BadInput` if a host cannot hold its ranks' copies and optimizer state.

    ``state`` is the bytes that the optimizer keeps for each byte of parameters. All ranks must call
    this, before anything is kept.
    """
    own = sum(p.nbytes for p in parameters if is_gpu(p.device)) * (2 + state)
    host, free = world.hosts[world.rank], free_host_memory()
    wanted = [bytes for name, bytes in world.all_gather((host, own)) if name == host]

    def check() -> None:
        if sum(wanted) > free.bytes:
            raise BadInput(
                f"optimizer state in host memory takes {size_text(sum(wanted))} for "
                f"{counted(len(wanted), 'rank')} of the host of rank {world.rank}, and "
                f"{size_text(free.bytes)} are left ({free.limit}); start fewer ranks there, divide "
                f'the state (sharding="optimizer"), or keep it on the devices (state_on="device")'
            )

    world.all_succeed(check)
