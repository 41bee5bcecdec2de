"""One optimizer that uses Muon for matrices and AdamW for all other parameters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

__all__ = ["MuonWithAdamW"]


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
        learning_rate: float,
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
                lr=learning_rate,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            AdamW(
                [{"params": others}],
                lr=learning_rate,
                weight_decay=weight_decay,
                betas=betas,
                fused=fused,
                foreach=foreach,
            ),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    @property
    def parts(self) -> Sequence[Optimizer]:
        """The two optimizers."""
        return self._parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set state and groups of both; `load_state_dict` calls this."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let both optimizers work on this optimizer's groups and state."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state = self.state
