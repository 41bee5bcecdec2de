"""An exponential moving average of the weights, which each rank keeps of what it steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import BadInput
from penstock.runtime.metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class ExponentialAverage:
    """A callback that keeps an exponential moving average of the trained weights.

        average = decay * average + (1 - decay) * weights        after every step that is taken

    It begins with the weights after the first such step, as ``torch.optim.swa_utils.AveragedModel``
    does, and is float32 for weights of 16 bits. Buffers are not averaged.

        average = ExponentialAverage(0.999)
        pipe.notify(average)
        ...
        with average.weights(pipe):
            pipe.evaluate(batch)
            pipe.save_pretrained("averaged")

    Each rank keeps what its optimizer steps, so that replicas that divide the optimizer's state
    divide the average, too. Checkpoints of the pipeline have it, and any plan continues from it;
    give it to `notify` before `load`.

    Raises:
        BadInput: ``decay`` is not within [0, 1).
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise BadInput(f"decay is {self.decay}; it must be >= 0 and below 1, such as 0.999")

    @torch.no_grad()
    def __call__(self, pipe: Any, event: object) -> None:
        """Update the average after a step that is taken."""
        if not isinstance(event, StepMetrics) or event.skipped:
            return
        averages = pipe._training.averages
        for parameter, name in pipe._training.names.items():
            if name in averages:
                average = averages[name]
                average.lerp_(parameter.to(average.dtype), 1 - self.decay)
            else:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                averages[name] = parameter.detach().to(wide, copy=True)

    @contextmanager
    def weights(self, pipe: Any) -> Iterator[None]:
        """Hold the averaged weights in ``pipe``; all ranks must do the same meanwhile.

        It can be evaluated and its weights be saved, but not trained.

        Raises:
            BadInput: the pipeline was not given this to `notify`, or has averaged weights already.
        """
        training, engine = pipe._training, pipe._engine
        pipe._drain()
        if training.averages is None or training.averaged:
            raise BadInput(
                "there are no averaged weights to use; give the ExponentialAverage to "
                "pipe.notify(), and enter weights(pipe) once at a time"
            )

        @torch.no_grad()
        def give(values: dict[str, torch.Tensor]) -> None:
            for parameter, name in training.names.items():
                if name in values:
                    parameter.copy_(values[name])
            engine.share_values()

        own = {name: p.detach().to("cpu", copy=True) for p, name in training.names.items()}
        training.averaged = True
        try:
            give(training.averages)
            yield
        finally:
            training.averaged = False
            if not engine.has_ended:
                give(own)
