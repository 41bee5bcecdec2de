"""Calls of a stage's module in training.

A stage runs the user's own forward on his own modules. While it runs, linear layers may have
another ``forward``, with the same results: for backwards in two halves, they defer the gradients of
their weights (see `penstock.capture.forward.deferred_weights`); else large ones accumulate them
directly.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from penstock.capture.forward.deferred_weights import (
    LARGE,
    DeferredGradients,
    accumulating_linear,
    deferred_linear,
)
from penstock.capture.forward.partial_forward import RunContext
from penstock.capture.forward.stage_module import StageModule
from penstock.torch_internals import own_parameters


def casts_kept(
    device: torch.device, autocast: torch.dtype | None
) -> AbstractContextManager[object]:
    """Share what autocast has cast between forwards; no weight may change meanwhile.

    Else autograd would keep one copy of each weight for every forward in flight. Autocast drops
    its copies at the end of its outermost context, which this is, and in which it is off.
    """
    if autocast is None:
        return nullcontext()
    return torch.autocast(device.type, autocast, enabled=False)


def entering(tensor: torch.Tensor) -> torch.Tensor:
    """A received tensor as a leaf of the graph, of which autocast keeps no copy.

    It takes leaves that are no views for weights.
    """
    return tensor.detach().view_as(tensor).requires_grad_()


class StageCall(Protocol):
    """Caller of a stage's module in a forward.

    ``gathers``: ranks gather parameters in it, so one without rows takes part in any mode.
    ``records``: it runs as with gradients even where none are recorded.
    """

    gathers: bool = False
    records: bool = False

    @property
    def in_evaluation(self) -> "StageCall":
        """Call of the stage in evaluation, in which nothing is compiled or deferred."""
        return self

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage; if ``deferred`` is given, linear layers defer weight gradients to it."""
        ...

    def set_context(self, context: RunContext) -> None:
        """Say which run the next one is."""
        ...

    def others(self) -> list[nn.Parameter]:
        """Parameters that get gradients in the first half although ``deferred`` has products."""
        ...

    def in_backward(self) -> AbstractContextManager[None]:
        """Put into modules what they hold during a call, for the backward."""
        return nullcontext()


class ProgramCall(StageCall):
    """Caller of a stage that runs the user's program; modules with these ``ids`` stay as is."""

    def __init__(self, module: StageModule, ids: Collection[int] = ()) -> None:
        self._module = module
        self._deferred: DeferredGradients | None = None
        self._small: list[tuple[dict[str, Any], Any]] = []
        self._large: list[tuple[dict[str, Any], Any]] = []
        for part in module.own_modules():
            if id(part) in ids:
                continue
            if type(part) is nn.Linear:
                large = part.weight.numel() >= LARGE
                (self._large if large else self._small).append((part.__dict__, self._linear(part)))
            elif type(part).__name__ == "Conv1D" and hasattr(part, "nf"):
                # The linear layer of GPT-2 in transformers, whose weight is transposed.
                self._small.append((part.__dict__, self._linear(part, transposed=False)))

    def _linear(
        self, part: Any, *, transposed: bool = True
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        tensors = own_parameters(part)

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias, deferred = tensors.get("weight"), tensors.get("bias"), self._deferred
            # A weight that is computed is no parameter.
            if weight is None or (deferred is None and not transposed):
                return type(part).forward(part, x)
            if deferred is None:
                return accumulating_linear(x, weight, bias)
            if transposed:
                return deferred_linear(deferred, x, weight, bias)
            rows = x.view(-1, x.size(-1))
            made = deferred_linear(deferred, rows, weight, bias, transposed=False)
            return made.view((*x.size()[:-1], part.nf))

        return forward

    def set_context(self, context: RunContext) -> None:
        """Say which run the next one is."""
        self._module.set_context(context)

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> Any:
        """Run the stage, with other forwards of its linear layers."""
        self._deferred = deferred
        replaced = self._large if deferred is None else [*self._large, *self._small]
        with forwards_put(replaced):
            return self._module.run(leaves, inputs)

    def others(self) -> list[nn.Parameter]:
        """All that is trained: a weight may also be read by other code than its linear layer."""
        return [parameter for parameter in self._held if parameter.requires_grad]

    @cached_property
    def _held(self) -> list[nn.Parameter]:
        return list(self._module.parameters())


@contextmanager
def forwards_put(forwards: Sequence[tuple[dict[str, Any], Any]]) -> Iterator[None]:
    """Put other forwards into modules (given by their dicts); those of the user's own stay."""
    put: list[dict[str, Any]] = []
    for place, forward in forwards:
        if "forward" not in place:
            place["forward"] = forward
            put.append(place)
    try:
        yield
    finally:
        for place in put:
            place.pop("forward", None)
