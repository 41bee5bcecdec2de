"""Settings of a pipeline, with checks that run before anything is built."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from penstock.capture.tensor_split import SplitTable
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.transport.channels import TransportChoice
from penstock.schedule.registry import FAMILIES
from penstock.schedule.weight_rule import OptimizerSync

__all__ = [
    "OnNonFinite",
    "RankSettings",
    "Verification",
    "check_settings",
    "check_tensor_schedule",
    "check_tensor_settings",
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
    gradient_noise: bool = False
    seed: int = 0
    compare_replicas_every: int = 50
    tensor_parallel: SplitTable | None = None


def check_tensor_settings(
    plan: Plan,
    settings: RankSettings,
    compile: bool,
    metrics: object,
    dynamic: object,
    optimizer_sync: OptimizerSync,
) -> None:
    """Raise `BadInput` for a setting that does not work with a plan's tensor groups."""
    if not plan.tensor_groups:
        return
    check_tensor_schedule(plan)
    wanted = {
        f"autocast={settings.autocast}": settings.autocast is not None,
        "shard_optimizer=True": settings.shard_optimizer,
        "gradient_noise=True": settings.gradient_noise,
        "compile=True": compile,
        "metrics": bool(metrics),
        "dynamic": bool(dynamic),
        f'optimizer_sync="{optimizer_sync}"': optimizer_sync != "before",
    }
    for what in (name for name, is_wanted in wanted.items() if is_wanted):
        raise not_with_groups(what)


def check_tensor_schedule(plan: Plan) -> None:
    """Raise `BadInput` for a schedule that a plan's tensor groups cannot run."""
    family = FAMILIES.get(plan.schedule)
    if plan.tensor_groups and plan.mirrored:
        raise not_with_groups(f"schedule '{plan.schedule}' (it holds stages twice)")
    if plan.tensor_groups and family is not None and not family.flushes:
        raise not_with_groups(f"schedule '{plan.schedule}' (it has no flush)")


def not_with_groups(what: str) -> BadInput:
    """The error for something that tensor groups cannot do."""
    return BadInput(
        f"{what} does not work with the tensor groups of a plan; leave it out, or plan without "
        f"tensor groups"
    )


def check_settings(
    clip_norm: float | None,
    timeout_s: float,
    settings: RankSettings,
    verify: str,
    verify_every: int,
    optimizer_sync: str,
    on_non_finite: str,
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
    }
    for name, every in intervals.items():
        if every < 0:
            raise BadInput(f"{name} is {every}; it must be a number of steps, or 0 for never")
