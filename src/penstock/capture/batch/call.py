"""Conventions for passing a batch to a model and its loss, in one place."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, TypeGuard

import torch
from torch import nn

from penstock.capture.batch.layout import BatchLayout
from penstock.capture.contract import Loss, LossFunction
from penstock.capture.record.absent import Absent
from penstock.errors import BadInput
from penstock.torch_internals import NoFunctionCalls


@dataclass(frozen=True)
class BatchCall:
    """Arguments of the model, and of the loss function, that are made of a batch.

    =============  =======================================  ==============================
    batch          without a loss function                  with one
    =============  =======================================  ==============================
    tensor         ``model(batch)`` gives the loss          refused: no target
    tuple, list    ``model(*batch)`` gives the loss         ``loss(model(*inputs), target)``
    dict           ``model(**batch)`` gives the loss        ``loss(model(**inputs), batch)``
    =============  =======================================  ==============================

    ``inputs`` of a tuple are all but its last entry; of a dict, the keys that ``forward`` accepts.
    """

    layout: BatchLayout
    inputs: BatchLayout
    targets: BatchLayout

    @classmethod
    def of(cls, layout: BatchLayout, forward: Callable[..., Any], *, has_loss: bool) -> "BatchCall":
        """The call for batches of ``layout``."""
        structure = layout.structure
        if not has_loss:
            return cls(layout, layout, replace(layout, structure=()))
        if isinstance(structure, Mapping):
            parameters = inspect.signature(forward).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            keys = [key for key in structure if takes_all or key in parameters]
            if not keys:
                raise BadInput(
                    f"forward accepts none of the batch's keys {sorted(structure)}; "
                    "rename the keys to the names of forward's arguments"
                )
            return cls(layout, layout.part(*keys), layout)
        if isinstance(structure, list | tuple) and len(structure) >= 2:
            last = len(structure) - 1
            return cls(layout, layout.part(*range(last)), layout.part(last))
        raise BadInput(
            "a loss function was given, but the batch holds no target; "
            "let the loader yield (*inputs, target) or a dict"
        )

    def call(self, model: Callable[..., Any], leaves: Mapping[int, torch.Tensor]) -> Any:
        """Call ``model`` on its entries of the batch."""
        inputs = self.inputs.rebuild(leaves)
        if isinstance(inputs, dict):
            return model(**inputs)
        if isinstance(inputs, list | tuple):
            return model(*inputs)
        return model(inputs)

    def target(self, leaves: Mapping[int, torch.Tensor]) -> Any:
        """Return what the loss function gets besides the output; without one, the whole batch."""
        if self.targets.structure == ():
            return self.layout.rebuild(leaves)
        targets = self.targets.rebuild(leaves)
        return targets if isinstance(targets, dict) else targets[0]

    @property
    def target_leaves(self) -> frozenset[int]:
        """The leaves in `target`."""
        alone = self.targets.structure != ()
        return frozenset((self.targets if alone else self.layout).indices)

    def leaves(self, batch: Any, read: Collection[int]) -> dict[int, torch.Tensor]:
        """The leaves of ``batch`` by index; entries that are not in ``read`` may be missing."""
        structure = self.layout.structure
        if isinstance(structure, Mapping) and isinstance(batch, Mapping):
            keys = [key for key in structure if key in batch]
            for key in structure:
                if key not in batch and set(self.layout.part(key).indices) & set(read):
                    raise BadInput(
                        f"the batch has no '{key}', from which the outputs are computed; give it"
                    )
            if keys:
                return self.layout.part(*keys).indexed(batch)
        elif self.inputs is not self.layout:
            alone = len(self.inputs.structure) == 1 and isinstance(batch, torch.Tensor)
            inputs = (batch,) if alone else batch
            if isinstance(inputs, list | tuple) and len(inputs) == len(self.inputs.structure):
                return self.inputs.indexed(inputs)
        return dict(enumerate(self.layout.flatten(batch)))


def loss_in_result(result: Any, name: str) -> torch.Tensor:
    """The scalar loss in what a model returned.

    It is the result itself, its attribute or entry ``loss``, or its first entry.
    """
    if isinstance(result, torch.Tensor):
        loss: Any = result
    elif isinstance(result, Mapping) and "loss" in result:
        loss = result["loss"]
    elif getattr(result, "loss", None) is not None:
        loss = getattr(result, "loss")  # noqa: B009
    elif isinstance(result, Sequence) and result:
        loss = result[0]
    else:
        loss = None
    if not isinstance(loss, torch.Tensor):
        raise BadInput(
            f"{name} returned {type(result).__name__} without a loss; "
            "pass loss=..., or put the labels into the batch so that the model computes it"
        )
    if type(loss) is Absent and loss.is_unknown:
        return loss  # another stage computes it, and not even its shape is known here
    with NoFunctionCalls():  # no call of the user's program
        is_scalar = not loss.dim()
    if not is_scalar:
        shape = ", ".join(str(n) if isinstance(n, int) else "samples" for n in loss.shape)
        raise BadInput(
            f"{name} gave a loss of shape ({shape}), but a scalar is needed; "
            "pass loss=..., or take the mean"
        )
    return loss


class WeightedLosses(nn.Module):
    """The weighted sum of loss functions of the same output and target.

    Slices of a batch are weighted for each term separately. Terms that are modules keep their
    parameters, under their index in the list.

    >>> one, two = nn.functional.mse_loss, nn.functional.l1_loss
    >>> loss = WeightedLosses([(1.0, one), (0.5, two)])
    >>> float(loss(torch.tensor([1.0]), torch.tensor([3.0])))
    5.0
    """

    def __init__(self, terms: Sequence[tuple[float, LossFunction]]) -> None:
        super().__init__()
        if not terms:
            raise BadInput("loss is an empty list; give it pairs of a number and a loss function")
        self._terms = list[tuple[float, LossFunction]]()
        for place, entry in enumerate(terms):
            if not is_term(entry):
                raise BadInput(
                    f"entry {place} of loss is {entry!r}, but must be a pair of a number and a "
                    f"loss function, as in loss=[(1.0, first), (0.5, second)]"
                )
            factor, function = entry
            self._terms.append((float(factor), function))
            if isinstance(function, nn.Module):
                self.add_module(str(place), function)

    def __len__(self) -> int:
        """The number of terms."""
        return len(self._terms)

    def terms(self, output: Any, target: Any) -> list[Any]:
        """The result of each function times its factor, in order."""
        found: list[Any] = []
        for factor, function in self._terms:
            value = function(output, target)
            found.append(value * factor if isinstance(value, torch.Tensor) else value)
        return found

    def forward(self, output: Any, target: Any) -> torch.Tensor:
        """The weighted sum."""
        return reduce(add, self.terms(output, target))


def is_term(entry: Any) -> TypeGuard[tuple[float, LossFunction]]:
    """Return whether an entry of the list is a pair of a number and a callable."""
    pair = isinstance(entry, tuple | list) and len(entry) == 2
    return pair and isinstance(entry[0], int | float) and callable(entry[1])


def loss_function(loss: Loss | None) -> LossFunction | None:
    """A loss as one function; a list of weighted terms becomes their sum."""
    if isinstance(loss, list | tuple):
        return WeightedLosses(loss)
    if isinstance(loss, type):
        raise BadInput(
            f"loss is the class {loss.__name__}; give an object of it: loss={loss.__name__}()"
        )
    if loss is None or callable(loss):
        return loss
    raise BadInput(
        f"loss is a {type(loss).__name__}; give a function loss(output, target), or a list of "
        f"weighted functions, as in loss=[(1.0, first), (0.5, second)]"
    )
