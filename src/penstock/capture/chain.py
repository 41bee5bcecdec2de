"""A chain of modules, one after another, each of which is a layer.

    Chain([embed, block, block, head], loss)      layers 0, 1, 2, 3, loss

The modules may contain anything (data-dependent control flow, custom kernels). Between two
neighbours only a tensor or a tuple of tensors may pass.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from penstock.capture.contract import LossFunction
from penstock.errors import BadInput


class Chain(nn.Module):
    """Modules that run one after another, each on what the previous one returned.

    A tuple is passed as separate arguments to the next module. ``loss`` follows the conventions for
    batches: ``loss(output, target)``, or ``loss(output, batch)`` for dict batches. Without ``loss``
    the last module returns the scalar loss. ``modules`` may be a dict, whose keys name the layers.
    Calling the chain returns the last module's output, without the loss.

    >>> chain = Chain([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], nn.functional.cross_entropy)
    >>> print(*chain.state_dict())
    0.weight 0.bias 2.weight 2.bias

    Raises:
        BadInput: no modules, an entry that is not a module, or the name "loss".
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] | Mapping[str, nn.Module],
        loss: LossFunction | None = None,
    ) -> None:
        super().__init__()
        if isinstance(modules, Mapping):
            named = dict(cast(Mapping[str, nn.Module], modules))
        else:
            named = {str(index): module for index, module in enumerate(modules)}
        for name, module in named.items():
            if not isinstance(module, nn.Module):
                raise BadInput(
                    f"entry {name!r} of the chain is a {type(module).__name__}, but must be an "
                    "nn.Module; wrap functions in a module"
                )
            if name == "loss":
                raise BadInput(
                    'a module of the chain is named "loss"; pass it as loss=..., or rename'
                )
            self.add_module(name, module)
        if not named:
            raise BadInput("the chain has no modules, at least 1 is needed; pass a list of modules")
        self._names = tuple(named)
        self.loss = loss

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the modules, in order."""
        return self._names

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The last module's output."""
        first, *rest = (self.get_submodule(name) for name in self._names)
        value = first(*inputs, **named_inputs)
        for module in rest:
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value
