"""What a user asks of a training run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.plan.problem import MEMORY_RESERVE, ShardingChoice

__all__ = ["Log", "TrainRequest"]

Log = Callable[[str], None]
"""Prints one line about what happens."""


@dataclass(frozen=True)
class TrainRequest:
    """The options of ``penstock train``.

    ``plan`` is a plan file (None: make a plan with ``planner``, ``schedule`` and ``sharding`` that
    leaves the fraction ``memory_reserve`` of the memory free). ``out`` is the run directory (None:
    a new one under ``runs`` or, with ``resume``, the newest there). ``shown`` false: display
    nothing.
    ``verify`` false: do not compare the first step with the whole model, whatever the job says.
    ``save_weights`` is a directory for the final weights (None: the job's). The run goes on while
    no more than ``may_lose`` workers are missing, which were killed or stopped answering. With
    ``replan`` it gets a new plan at the next checkpoint when ranks or links are slower than
    planned.
    """

    workers: int = 4
    steps: int = 0
    plan: Path | None = None
    planner: str = "search"
    schedule: str = "auto"
    sharding: ShardingChoice = "off"
    memory_reserve: float = MEMORY_RESERVE
    resume: bool = False
    out: Path | None = None
    device: str = "cpu"
    shown: bool = True
    save_weights: Path | None = None
    verify: bool = True
    may_lose: int = 0
    replan: bool = False
