"""Make optimizers and learning-rate schedules from a job's settings."""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from penstock.errors import BadInput
from penstock.runtime.update.training import state_bytes_of
from penstock.train.job import OptimizerSettings, member_at

Named: TypeAlias = Iterable[tuple[str, nn.Parameter]]
"""Parameters with their names in the model."""

TRIED_SIDE = 256

LEAST_SHARE = 0.1
"""The fraction of the learning rate at the end of a cosine schedule."""


def optimizer_factory(settings: OptimizerSettings) -> Callable[[Named], Optimizer]:
    """A function that makes the optimizer of named parameters; each rank calls it with its own.

    All ranks make the same groups, some of them empty, since a checkpoint numbers them.
    """
    kinds = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "muon": MuonWithAdamW}
    kind = kinds.get(settings.name)
    if kind is None:
        kind, given = member_at(settings.name), dict(settings.arguments)
        keys = {"weight_decay"} - given.keys()
    else:
        given = dict[str, Any]()
        keys = {"weight_decay", "betas", "momentum", "fused", "foreach"}
    given |= {key: getattr(settings, key) for key in keys & signature(kind).parameters.keys()}

    def make(named: Named) -> Optimizer:
        groups = parameter_groups(settings, named)
        try:
            return kind(groups, lr=settings.learning_rate, **given)
        except (TypeError, ValueError) as problem:
            raise BadInput(
                f"optimizer '{settings.name}' cannot be made: {problem}; see its documentation, "
                f"and write arguments = {{ ... }}"
            ) from None

    return make


def state_bytes_per_parameter_byte(settings: OptimizerSettings) -> float:
    """Bytes of optimizer state for each byte of a matrix; the optimizer is tried on a small one."""
    tried = nn.Parameter(torch.ones(TRIED_SIDE, TRIED_SIDE))
    return state_bytes_of(optimizer_factory(settings), [("", tried)])[0]


def parameter_groups(settings: OptimizerSettings, named: Named) -> list[Any]:
    """Parameters as an optimizer takes them: as they are, or in groups by patterns of names."""
    chosen = [dict(group) for group in settings.groups]
    if settings.no_decay:
        chosen.append({"parameters": settings.no_decay, "weight_decay": 0.0})
    if not chosen:
        return [parameter for _, parameter in named]
    if settings.name == "muon":
        raise BadInput(
            "optimizer.name is 'muon', which has groups of its own (matrices and the rest); leave "
            "groups and no_decay out"
        )
    rest: dict[str, Any] = {"params": []}
    groups: list[dict[str, Any]] = []
    for group in chosen:
        given = group.pop("parameters")
        if "learning_rate" in group:
            group["lr"] = group.pop("learning_rate")
        patterns = (given,) if isinstance(given, str) else tuple(given)
        groups.append({**group, "params": [], "patterns": patterns})
    for name, parameter in named:
        fits = (g for g in groups if any(fnmatchcase(name, one) for one in g["patterns"]))
        next(fits, rest)["params"].append(parameter)
    for group in groups:
        del group["patterns"]
    return [rest, *groups]


def learning_rate_schedule(
    settings: OptimizerSettings, steps: int, updates_per_step: int = 1
) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """A function that makes the learning-rate schedule over ``steps`` steps.

    "plateau" is torch's ``ReduceLROnPlateau``, which follows a metric. If weights are updated
    several times in a step, all its updates have the same rate.

    share(k) = (k + 1) / w                                        for k < w, then
    share(k) = 0.1 + 0.45 (1 + cos(pi * (k - w) / (steps - w)))   or 1 if the rate is constant

    w is ``warm_up_steps``. A cosine rises over at most half of its steps, so that it always reaches
    the full rate; a constant rate depends on no number of steps, so that a run may be prolonged.
    """
    steps = settings.schedule_steps or steps
    warm_up = settings.warm_up_steps
    if settings.schedule == "cosine":
        warm_up = min(warm_up, steps // 2)

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        if settings.schedule == "constant":
            return 1.0
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (steps - warm_up))))
        return LEAST_SHARE + (1 - LEAST_SHARE) * wave

    if settings.schedule == "plateau":
        return lambda optimizer: ReduceLROnPlateau(optimizer, **settings.plateau)
    return lambda optimizer: Resumable(optimizer, lambda update: share(update // updates_per_step))


class Resumable(LambdaLR):
    """A schedule that takes the number of updates from a checkpoint, and no rate."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        own = zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True)
        for group, rate, share in own:
            group["lr"] = rate * share(self.last_epoch)


class MuonWithAdamW(Optimizer):
    """``torch.optim.Muon`` for parameters of two dimensions, ``torch.optim.AdamW`` for the rest.

    Muon (K. Jordan et al., 2024) is for matrices only. Its updates are scaled to the size of
    AdamW's (Liu et al., Muon is Scalable for LLM Training, 2025, section 2.2), so that one learning
    rate and one weight decay serve both. Embeddings count as matrices. ``fused`` and ``foreach``
    are for AdamW; Muon steps matrix by matrix. There are two parameter groups; one may be empty.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        fused: bool = True,
        foreach: bool = False,
    ) -> None:
        own = list(parameters)
        matrices = [parameter for parameter in own if parameter.dim() == 2]
        others = [parameter for parameter in own if parameter.dim() != 2]
        self._parts: list[Optimizer] = [
            Muon(
                [{"params": matrices}],
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            AdamW(
                [{"params": others}],
                lr=lr,
                weight_decay=weight_decay,
                betas=betas,
                fused=fused,
                foreach=foreach,
            ),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set state and groups of both; `load_state_dict` calls this."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let both optimizers work on this optimizer's groups and state."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state = self.state
