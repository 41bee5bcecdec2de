"""Settings of a pipeline, with checks that run before anything is built."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from penstock.capture.tensor_split import SplitTable
from penstock.errors import BadInput
from penstock.runtime.transport.transport import TransportChoice
from penstock.schedule.weight_rule import OptimizerSync

__all__ = [
    "OnNonFinite",
    "RankSettings",
    "Verification",
    "check_settings",
    "uses_of_settings",
]

Verification: TypeAlias = Literal["first-step", "off"]
"""When training is compared with the whole model."""

OnNonFinite: TypeAlias = Literal["stop", "skip"]
"""Whether a step with NaN or infinity raises an error, or is left out on all ranks."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How a rank computes and communicates; every rank has the same settings.

    The fields are arguments of `Pipeline`, where they are explained.
    """

    autocast: torch.dtype | None = None
    transport: TransportChoice = "auto"
    shard_optimizer: bool = False
    seed: int = 0
    compare_replicas_every: int = 50
    tensor_parallel: SplitTable | None = None


def uses_of_settings(
    settings: RankSettings,
    compile: bool,
    optimizer: object,
    optimizer_sync: str,
    on_non_finite: str,
) -> dict[str, str]:
    """What the arguments of `Pipeline` use, for `check_conflicts`."""
    autocast = f"autocast={settings.autocast}" * (settings.autocast is not None)
    return {
        "autocast": autocast,
        "loss_scaling": autocast * (settings.autocast == torch.float16),
        "optimizer": "shard_optimizer=True" * settings.shard_optimizer,
        "compile": "compile=True" * compile,
        "undoing": 'optimizer_sync="after"' * (optimizer_sync == "after"),
        "skip": 'on_non_finite="skip"' * (on_non_finite == "skip"),
        "no optimizer": "a pipeline without an optimizer" * (optimizer is None),
    }


def check_settings(
    clip_norm: float | None,
    timeout_s: float,
    settings: RankSettings,
    verify: str,
    verify_every: int,
    optimizer_sync: str,
    on_non_finite: str,
    check_every: int,
) -> None:
    """Raise `BadInput` for an invalid setting."""
    choices = {
        "verify": (verify, get_args(Verification)),
        "optimizer_sync": (optimizer_sync, get_args(OptimizerSync)),
        "on_non_finite": (on_non_finite, get_args(OnNonFinite)),
    }
    for name, (choice, choices_of) in choices.items():
        if choice not in choices_of:
            allowed = " or ".join(f'"{each}"' for each in choices_of)
            raise BadInput(f'{name} is "{choice}"; it must be {allowed}')
    if clip_norm is not None and not clip_norm > 0:
        raise BadInput(f"clip_norm is {clip_norm}; it must be > 0, or None for no clipping")
    if not timeout_s > 0:
        raise BadInput(f"timeout_s is {timeout_s}; it must be > 0")
    intervals = {
        "compare_replicas_every": settings.compare_replicas_every,
        "verify_every": verify_every,
        "check_every": check_every,
    }
    for name, every in intervals.items():
        if every < 0:
            raise BadInput(f"{name} is {every}; it must be a number of steps, or 0 for never")
