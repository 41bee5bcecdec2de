"""What stages of one process hand one another: tensors to those who read them, gradients back."""

from collections.abc import Mapping, Sequence

import torch

from penstock.capture.layer_graph import StageProgram
from penstock.runtime.stages.runner import Tensors
from penstock.schedule.action import Action

__all__ = ["Exchange"]


class Exchange:
    """What stages hand one another, by micro-batch."""

    def __init__(self, programs: Sequence[StageProgram]) -> None:
        self._programs = programs
        makers = {spec.name: s for s, program in enumerate(programs) for spec in program.sent}
        self._inputs: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._gradients: dict[tuple[int, int], dict[str, torch.Tensor | None]] = {}
        self._reports: dict[tuple[int, int], int] = {}
        self._readers: dict[str, list[int]] = {name: [] for name in makers}
        for stage, program in enumerate(programs):
            for spec in program.received:
                self._readers[spec.name].append(stage)
        self._makers = [
            sorted({makers[spec.name] for spec in program.received}) for program in programs
        ]
        self._consumers = [
            sum(stage in makers_of for makers_of in self._makers) for stage in range(len(programs))
        ]

    def is_ready(self, action: Action) -> bool:
        """Whether all that ``action`` takes is there."""
        key = (action.stage, action.micro_batch)
        match action.kind:
            case "F":
                return len(self._inputs.get(key, ())) == len(self._programs[action.stage].received)
            case "B" | "I":
                return self._reports.get(key, 0) == self._consumers[action.stage]
            case "W" | "R":
                return True

    def take_inputs(self, action: Action) -> Tensors:
        """The tensors of a forward."""
        inputs = self._inputs.pop((action.stage, action.micro_batch), {})
        return [inputs[spec.name] for spec in self._programs[action.stage].received]

    def put_outputs(self, action: Action, sent: Tensors) -> None:
        """Give what a forward made to those who read it."""
        for spec, tensor in zip(self._programs[action.stage].sent, sent, strict=True):
            assert tensor is not None
            for reader in self._readers[spec.name]:
                inputs = self._inputs.setdefault((reader, action.micro_batch), {})
                inputs[spec.name] = tensor.detach()

    def take_gradients(self, action: Action) -> Tensors:
        """The gradients of what a forward sent, each summed over those who read it."""
        key = (action.stage, action.micro_batch)
        self._reports.pop(key, None)
        found = self._gradients.pop(key, {})
        return [found.get(spec.name) for spec in self._programs[action.stage].sent]

    def put_gradients(self, action: Action, gradients: Tensors) -> None:
        """Give the gradients of what a stage received to those who made it."""
        found: Mapping[str, torch.Tensor | None] = {
            spec.name: gradient
            for spec, gradient in zip(self._programs[action.stage].received, gradients, strict=True)
        }
        for maker in self._makers[action.stage]:
            key = (maker, action.micro_batch)
            sums = self._gradients.setdefault(key, {})
            for spec in self._programs[maker].sent:
                gradient = found.get(spec.name)
                if gradient is not None:
                    before = sums.get(spec.name)
                    sums[spec.name] = gradient if before is None else before + gradient
            self._reports[key] = self._reports.get(key, 0) + 1
