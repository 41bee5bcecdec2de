"""One stage of a model that was captured once for each bucket of lengths.

    leaves, received --> lengths of the batch --> the stage captured for these --> sent

The stages of all buckets share their dicts of parameters, buffers and modules. So a change to the
tensors of one (a move to a device, first values, a weight version) changes all.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from penstock.capture.lengths import LengthsOf

__all__ = ["BucketPart", "BucketStage", "LengthSource", "graphs_in"]

LengthSource = tuple[int, int] | int
"""Where a stage finds a length: index of a leaf and dimension; or the length itself."""

MADE = ("_constants", "_bodies")
"""Attributes that capture itself created; they belong to one length, whatever their name."""


class BucketPart:
    """The stage captured for one bucket; ``places`` are the indices of its leaves among all."""

    def __init__(self, module: nn.Module, places: Sequence[int]) -> None:
        self.module = module
        self.places = tuple(places)


class BucketStage(nn.Module):
    """A stage for all buckets; for its arguments see `layer_graph.StageProgram`.

    ``leaves`` is the number of leaves that are passed; ``sources`` say where the lengths are found.
    """

    def __init__(
        self,
        parts: Mapping[LengthsOf, BucketPart],
        leaves: int,
        sources: Sequence[LengthSource],
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self._leaves = leaves
        self._sources = tuple(sources)
        for number, part in enumerate(self.parts.values()):
            _name_apart(part.module, number)
            _adopt(self, part.module)

    def part_for(self, leaves: Sequence[torch.Tensor]) -> BucketPart:
        """The stage that was captured for a batch with these leaves."""
        lengths = tuple(
            source if isinstance(source, int) else leaves[source[0]].shape[source[1]]
            for source in self._sources
        )
        return self.parts[lengths]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage that was captured for the batch's lengths."""
        leaves = tensors[: self._leaves]
        part = self.part_for(leaves)
        return part.module(*(leaves[place] for place in part.places), *tensors[self._leaves :])


def graphs_in(module: nn.Module) -> list[fx.GraphModule]:
    """The captured graphs of a stage with their regions, of every bucket."""
    roots = [module]
    if isinstance(module, BucketStage):
        roots = [part.module for part in module.parts.values()]
    found = {id(part): part for root in roots for part in root.modules()}
    return [part for part in found.values() if isinstance(part, fx.GraphModule)]


def _name_apart(module: nn.Module, number: int) -> None:
    """Give what capture created a different name in every bucket."""
    if not isinstance(module, fx.GraphModule):
        return
    for name in MADE:
        if name in module._modules:
            module._modules[f"{name}{number}"] = module._modules.pop(name)
    for node in module.graph.nodes:
        first, dot, rest = str(node.target).partition(".")
        if node.op == "get_attr" and first in MADE:
            node.target = f"{first}{number}{dot}{rest}"
    module.recompile()


def _adopt(own: nn.Module, other: nn.Module) -> None:
    """Let both modules share all parameters, buffers and children."""
    if own is other:
        return
    for name, child in other._modules.items():
        known = own._modules.get(name)
        if known is None:
            own._modules[name] = child
        elif child is not None:
            _adopt(known, child)
    own._parameters.update(other._parameters)
    own._buffers.update(other._buffers)
    own._non_persistent_buffers_set |= other._non_persistent_buffers_set
    for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        other.__dict__[shared] = own.__dict__[shared]
