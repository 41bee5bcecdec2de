"""Prediction of what each optimizer will subtract from a parameter in its next step.

Asynchronous methods predict weights ``s`` updates ahead as ``W - s * step``. A step is computed
from the optimizer's state after its latest update, before the next gradient is known. So it assumes
that the next gradients are like the averages in that state.

    SGD with momentum   lr * buffer                              SpecTrain, arXiv 1809.02839, 3.2
    Adam                lr * m' / (sqrt(v') + eps)               XPipe, arXiv 1911.04610, section 3
    AdamW               lr * (m' / (sqrt(v') + eps) + decay * W) PipeOptim, arXiv 2312.00839
    Muon                lr' * orthogonal(buffer) + lr * decay * W

``m'`` and ``v'`` are bias-corrected. ``lr'`` is Muon's rate for the parameter's shape. SGD's buffer
already includes weight decay and dampening. With Nesterov momentum the actual step is
``lr * (gradient + momentum * buffer)``; for constant gradients both steps are equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from penstock.errors import BadInput
from penstock.torch_internals import muon_direction, muon_rate

State: TypeAlias = dict[str, Any]
Group: TypeAlias = dict[str, Any]
StepFunction: TypeAlias = Callable[[torch.Tensor, State, Group], torch.Tensor | None]


def momentum_step(parameter: torch.Tensor, state: State, group: Group) -> torch.Tensor | None:
    """SGD's step; ``None`` before its first step."""
    buffer = state.get("momentum_buffer")
    return None if buffer is None else buffer * float(group["lr"])


def adam_step(parameter: torch.Tensor, state: State, group: Group) -> torch.Tensor | None:
    """The step of Adam and AdamW; ``None`` before the first step."""
    if "exp_avg" not in state:
        return None
    steps, rate = float(state["step"]), float(group["lr"])
    first, second = group["betas"]
    squares = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    root = squares.sqrt().div_(math.sqrt(1 - second**steps)).add_(group["eps"])
    step = (state["exp_avg"] / root).mul_(rate / (1 - first**steps))
    decay = group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
    return step.add_(parameter, alpha=rate * decay) if decay else step


def muon_step(parameter: torch.Tensor, state: State, group: Group) -> torch.Tensor | None:
    """The step of torch's Muon; ``None`` before the first step."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return None
    rate = float(group["lr"])
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    direction = muon_direction(buffer, *settings).to(parameter.dtype)
    step = direction * muon_rate(rate, group["adjust_lr_fn"], parameter.shape)
    decay = group["weight_decay"]
    return step.add_(parameter, alpha=rate * decay) if decay else step


STEPS: dict[type[Optimizer], StepFunction] = {
    SGD: momentum_step,
    Adam: adam_step,
    AdamW: adam_step,
    Muon: muon_step,
}


class PredictedSteps:
    """The predicted steps of the parameters of one optimizer.

    A combined optimizer lists the optimizers that it consists of in ``parts``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: Sequence[Optimizer] = getattr(optimizer, "parts", (optimizer,))
        for part in self._parts:
            check_predictable(part)
        self._known: list[Group] = []
        self._update_rules: dict[torch.Tensor, tuple[StepFunction, Group]] = {}

    @torch.no_grad()
    def predict(
        self, parameters: Sequence[nn.Parameter], updates: int, into: Sequence[torch.Tensor]
    ) -> None:
        """Write the weights predicted ``updates`` updates ahead, or copy them before any update.

        Autograd does not see that ``into`` is written to.
        """
        state = self._optimizer.state
        for parameter, target in zip(parameters, into, strict=True):
            step = None
            if updates and parameter in state:
                step_of, group = self._update_rule_of(parameter)
                step = step_of(parameter.detach(), state[parameter], group)
            if step is None:
                target.data.copy_(parameter)
            else:
                torch.sub(parameter, step, alpha=updates, out=target.data)

    def _update_rule_of(self, parameter: nn.Parameter) -> tuple[StepFunction, Group]:
        """The step function and group of a parameter; loading a state creates new groups."""
        if self._optimizer.param_groups is not self._known:
            self._known = self._optimizer.param_groups
            self._update_rules = {
                own: (STEPS[type(part)], group)
                for part in self._parts
                for group in part.param_groups
                for own in group["params"]
            }
        return self._update_rules[parameter]


def check_predictable(optimizer: Optimizer) -> None:
    """Raise `BadInput` for an optimizer whose next step cannot be predicted."""
    if type(optimizer) not in STEPS:
        known = ", ".join(sorted(kind.__name__ for kind in STEPS))
        raise BadInput(
            f"optimizer {type(optimizer).__name__} has no known prediction of its next step; use "
            f"one of {known}, or a schedule that predicts nothing, such as 'pipedream'"
        )
    if isinstance(optimizer, SGD) and not all(g["momentum"] for g in optimizer.param_groups):
        raise BadInput(
            "optimizer SGD has momentum 0, so it keeps no average of gradients that could predict "
            "its next step; give it a momentum, or use a schedule that predicts nothing, such as "
            "'pipedream'"
        )
