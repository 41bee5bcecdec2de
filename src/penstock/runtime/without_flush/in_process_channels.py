"""Passes tensors between the stages of one process, and gradients back."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.capture.layer_graph import StageProgram
from penstock.runtime.execute import PreparedAction
from penstock.runtime.stages.runner import Tensors
from penstock.schedule.action import Action

__all__ = ["InProcessChannels"]

Key = tuple[int, int]
"""A stage and a micro-batch."""


class InProcessChannels:
    """`Channels` between all stages of a plan in one process: nothing is sent, nothing waits."""

    device = 0

    def __init__(self, programs: Sequence[StageProgram]) -> None:
        self._programs = programs
        makers = {spec.name: s for s, program in enumerate(programs) for spec in program.sent}
        self._readers: dict[str, list[int]] = {name: [] for name in makers}
        for stage, program in enumerate(programs):
            for spec in program.received:
                self._readers[spec.name].append(stage)
        self._makers = [
            sorted({makers[spec.name] for spec in program.received}) for program in programs
        ]
        self._consumers = [
            sum(stage in own for own in self._makers) for stage in range(len(programs))
        ]
        self._inputs: dict[Key, dict[str, torch.Tensor]] = {}
        self._gradients: dict[Key, dict[str, torch.Tensor]] = {}
        self._reports: dict[Key, int] = {}

    def in_turn(self, queues: Sequence[deque[PreparedAction]]) -> Iterator[PreparedAction]:
        """The steps of all stages, each when its inputs are available."""
        while any(queues):
            for queue in queues:
                while queue and self._is_ready(queue[0]):
                    yield queue.popleft()

    def _is_ready(self, step: PreparedAction) -> bool:
        key = (step.stage, step.micro_batch)
        if step.kind == "F":
            return len(self._inputs.get(key, ())) == len(self._programs[step.stage].received)
        return step.kind not in "BI" or self._reports.get(key, 0) == self._consumers[step.stage]

    def receiver(self, action: Action) -> Callable[[], Tensors]:
        """A function that takes the inputs of a forward, or the gradients of its results."""
        key, program = (action.stage, action.micro_batch), self._programs[action.stage]

        def inputs() -> Tensors:
            found = self._inputs.pop(key, {})
            return [found[spec.name] for spec in program.received]

        def gradients() -> Tensors:
            self._reports.pop(key, None)
            found = self._gradients.pop(key, {})
            return [found.get(spec.name) for spec in program.sent]

        if action.kind in "RW":
            return tuple
        return inputs if action.kind == "F" else gradients

    def sender(self, action: Action) -> Callable[[Tensors], None] | None:
        """A function that passes tensors to their readers, or gradients to their producers."""
        stage, micro_batch = action.stage, action.micro_batch

        def outputs(sent: Tensors) -> None:
            for spec, tensor in zip(self._programs[stage].sent, sent, strict=True):
                assert tensor is not None
                for reader in self._readers[spec.name]:
                    inputs = self._inputs.setdefault((reader, micro_batch), {})
                    inputs[spec.name] = tensor.detach()

        def gradients(found: Tensors) -> None:
            names = [spec.name for spec in self._programs[stage].received]
            own = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            for maker in self._makers[stage]:
                key = (maker, micro_batch)
                sums = self._gradients.setdefault(key, {})
                for spec in self._programs[maker].sent:
                    if spec.name in own:
                        before, gradient = sums.get(spec.name), own[spec.name]
                        sums[spec.name] = gradient if before is None else before + gradient
                self._reports[key] = self._reports.get(key, 0) + 1

        if action.kind in "RW":
            return None
        return outputs if action.kind == "F" else gradients

    def drain(self) -> None:
        """Nothing to wait for."""
