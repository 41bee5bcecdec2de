"""Arguments of `Pipeline` that are tables of a job file, too; they load no torch."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import BadInput
from penstock.files import Table
from penstock.plan.problem import MEMORY_RESERVE, RecomputeOption, ShardingChoice, StateChoice

Quantise: TypeAlias = Callable[[str, Any], Any]
"""Function that makes a quantised weight of a name in the model, and the weight."""


@dataclass(frozen=True, slots=True)
class LossScaling(Table):
    """Growth and backoff of the loss scale.

    It starts at ``initial``, is multiplied by ``growth`` after ``growth_interval`` steps without an
    overflow and by ``backoff`` at every overflow. A run whose gradients overflow at ``smallest``
    fails.

    Raises:
        BadInput: a number is outside its range.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    smallest: float = 2.0**-14

    def __post_init__(self) -> None:
        within = {
            "initial": (self.initial, self.smallest <= self.initial < math.inf, ">= smallest"),
            "growth": (self.growth, 1 <= self.growth < math.inf, ">= 1"),
            "backoff": (self.backoff, 0 < self.backoff < 1, "between 0 and 1"),
            "growth_interval": (self.growth_interval, self.growth_interval >= 1, ">= 1"),
            "smallest": (self.smallest, 0 < self.smallest < math.inf, "> 0"),
        }
        for name, (value, good, limit) in within.items():
            if not good:
                raise BadInput(f"{name} of the loss scaling is {value}; it must be {limit}")


@dataclass(frozen=True, slots=True)
class Weights(Table):
    """A directory of initial weights, as written by Hugging Face's ``save_pretrained``.

    ``new`` are patterns (``"classifier.*"``) of tensors of the model that may be missing in the
    directory; they are initialised. ``unused`` are patterns of tensors in the directory that the
    model may lack. ``quantise(name, weight)`` makes the quantised weight of a model that is
    quantised on the meta device: each rank calls it for what it holds, on its own device.
    """

    directory: Path | str
    new: Sequence[str] = ()
    unused: Sequence[str] = ()
    quantise: Quantise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints(Table):
    """Constraints of a plan that `Pipeline` finds: an argument of it, as of `penstock plan`.

    ``schedule`` is one name, or several with commas between them. ``micro_batch_size`` and
    ``max_stages`` 0 leave these free. ``recompute`` is "auto", "stage", "on", "blocks" or "off";
    ``sharding`` what ranks of a stage divide: "off", "optimizer" (as ZeRO-1), "parameters" (as
    FSDP) or "auto". ``state_on`` is where the optimizer's state is: "device", "host" or "auto".
    ``memory_reserve`` is the share of each device's memory that stays free.
    ``pins`` fix parts of the plan, such as "stages: 4" or "lm_head: alone". With ``remeasure``
    layers and links are measured again, whatever an earlier start has found.
    """

    planner: str = "search"
    schedule: str = "auto"
    micro_batch_size: int = 0
    max_stages: int = 0
    recompute: RecomputeOption = "auto"
    sharding: ShardingChoice = "off"
    state_on: StateChoice = "device"
    memory_reserve: float = MEMORY_RESERVE
    pins: tuple[str, ...] = ()
    remeasure: bool = False

    @property
    def text(self) -> str:
        """All that a plan depends on, as JSON."""
        return json.dumps(asdict(replace(self, remeasure=False)))
