"""Dynamic loss scaling, for backward passes in float16.

Gradients too small for float16 would become zero. So the loss is multiplied by a scale before the
backward, and the gradients are divided by it before they are used (Micikevicius et al., Mixed
Precision Training, ICLR 2018, section 3.2). The scale changes as in ``torch.amp.GradScaler``: it
grows after many steps without an overflow. At an overflow it is reduced, and the step is skipped.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from penstock.capture.forward.stage_module import StageProgram
from penstock.errors import BadInput, LossNotFinite
from penstock.runtime.processes.world import World
from penstock.runtime.tables import LossScaling


class LossScaler:
    """The current scale, and the number of steps without an overflow since it last changed.

    The scale applies to the mean loss of a step. But backwards start from sums with one weight for
    each slice, and the number of loss terms of a step is known only after it. So `seed` divides by
    a power of two near the number of terms of the previous step (in the first step, near its number
    of samples). The gradients are divided by the seed that was used, so this choice does not change
    results.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.scale = settings.initial
        self._settings = settings
        self._good_steps = 0
        self._terms = 0.0

    def seed(self, samples: int) -> float:
        """The factor on the weight of every slice in a step of ``samples`` samples."""
        return self.scale * 2.0 ** -round(math.log2(self._terms or samples))

    def update(self, overflow: bool, terms: float, step: int) -> None:
        """Update the scale after step ``step`` with ``terms`` loss terms."""
        settings = self._settings
        if not overflow:
            self._terms = terms
            self._good_steps += 1
            if self._good_steps >= settings.growth_interval:
                self.scale *= settings.growth
                self._good_steps = 0
            return
        if self.scale <= settings.smallest:
            raise LossNotFinite(
                f"gradients overflow float16 at step {step} although the loss is scaled by "
                f"{self.scale:g} only, the smallest scale, no optimizer step was taken",
                "use autocast = bfloat16, lower the learning rate or check the data",
                step,
            )
        self.scale = max(settings.smallest, self.scale * settings.backoff)
        self._terms = terms
        self._good_steps = 0

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps, "terms": self._terms}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._terms = float(state["terms"])


def loss_scaling_for(
    autocast: torch.dtype | None, loss_scaling: LossScaling | None
) -> LossScaling | None:
    """The loss scaling of a run with ``autocast``: float16 always has one, other types never."""
    if autocast == torch.float16:
        return loss_scaling or LossScaling()
    if autocast not in (None, torch.bfloat16):
        raise BadInput(f"autocast is {autocast}; use torch.bfloat16, torch.float16 or None")
    if loss_scaling is not None:
        raise BadInput(
            f"loss_scaling was given, but autocast is {autocast}: only float16 needs it; set "
            f"autocast=torch.float16 or leave loss_scaling out"
        )
    return None


def check_parameter_types(world: World, programs: Mapping[int, StageProgram]) -> None:
    """Raise `BadInput` on every rank if a trained parameter is float16; all ranks must call this.

    Most updates would be too small for float16.
    """
    found = [
        name
        for program in programs.values()
        for name, parameter in program.module.named_parameters()
        if parameter.requires_grad and parameter.dtype == torch.float16
    ]
    names = [name for own in world.all_gather(found) for name in own]
    if names:
        raise BadInput(
            f"parameter '{names[0]}' is float16, as are {len(names) - 1} more; updates would be "
            f"rounded away: keep parameters in float32 (model.float()) and set "
            f"autocast=torch.float16"
        )
