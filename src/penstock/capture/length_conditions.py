"""What the code of a model assumes about the lengths of a batch, found while it is traced.

A look-up of positions needs ``length <= 512``; a branch that the example took may need
``length > 16``. A batch that violates such a condition is refused before it runs.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from penstock.capture.batch_layout import BatchLayout
from penstock.capture.lengths import Length, LengthPlaces, LengthsOf, SizeFormula
from penstock.errors import BadInput

__all__ = ["LEAVES", "LengthConditions", "guards_of"]

LEAVES = "leaves"
"""The name that `penstock.capture.loss_module.LossModule` gives the tensors of a batch."""

LEAST_TRACED = 2
"""Tracing treats sizes 0 and 1 as constants, so its results hold from this size on."""

KEPT = 4096

GUARDS = "_guards_fn"
"""The submodule of an exported module that checks the sizes of its inputs."""


class _Sized:
    """The interface of a tensor that a guard uses."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def size(self) -> tuple[int, ...]:
        """The shape."""
        return self._shape


@dataclass(frozen=True, eq=False)
class LengthConditions:
    """Conditions on the lengths of a batch.

    ``guards`` raises `AssertionError` for shapes that the code cannot handle. ``shapes`` are those
    of the traced batch. ``relations`` are formulas for lengths that depend on others.
    """

    lengths: tuple[Length, ...] = ()
    places: LengthPlaces = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    example: LengthsOf = ()
    guards: Callable[..., Any] | None = None
    relations: tuple[tuple[int, SizeFormula], ...] = ()
    _known: dict[LengthsOf, str] = field(default_factory=dict[LengthsOf, str])

    def with_relations(self, relations: tuple[tuple[int, SizeFormula], ...]) -> "LengthConditions":
        """A copy with relations among the lengths."""
        return replace(self, relations=relations, _known={})

    def problem(self, found: LengthsOf) -> str:
        """Why a batch of these lengths cannot be run; empty if it can."""
        if found not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[found] = next(self._problems(found), "")
        return self._known[found]

    def check(self, model_name: str) -> None:
        """Raise `BadInput` if a length was declared with a range that the code cannot handle."""
        for number, length in enumerate(self.lengths):
            for limit in (max(length.min, LEAST_TRACED), length.max):
                if limit is None or (limit == LEAST_TRACED and length.min < LEAST_TRACED):
                    continue
                found = (*self.example[:number], limit, *self.example[number + 1 :])
                problem = next(self._broken_guards(found), "")
                if problem:
                    raise BadInput(
                        f"length '{length.name}' is declared from {length.min} to {length.max}, "
                        f"but {model_name} as captured needs {problem}; declare a range that it "
                        "takes"
                    )

    def _problems(self, found: LengthsOf) -> Iterator[str]:
        names = [length.name for length in self.lengths]
        for number, formula in self.relations:
            expected = formula.at(found)
            if found[number] != expected:
                yield (
                    f"length '{names[number]}' is {found[number]}, but the model as captured needs "
                    f"{self._named(str(formula.expression))}, which is {expected}; give batches in "
                    "which it is"
                )
        for name, size in zip(names, found, strict=True):
            if size < LEAST_TRACED:
                yield (
                    f"the batch has {name} {size}, but a length must be at least {LEAST_TRACED}; "
                    "pad the batch"
                )
        for condition in self._broken_guards(found):
            values = ", ".join(f"{name} {n}" for name, n in zip(names, found, strict=True))
            yield (
                f"the batch has {values}, but the model as captured needs {condition}; pad or trim "
                "the batch, or capture again with an example of this length"
            )

    def _broken_guards(self, found: LengthsOf) -> Iterator[str]:
        if self.guards is None:
            return
        shapes = [list(shape) for shape in self.shapes]
        for places, size in zip(self.places, found, strict=True):
            for leaf, dim in places:
                shapes[leaf][dim] = size
        try:
            self.guards(*(_Sized(tuple(shape)) for shape in shapes))
        except AssertionError as broken:
            yield self._conditions_text(str(broken).removeprefix("Guard failed: "))
        except ZeroDivisionError:
            yield "longer ones"

    def _conditions_text(self, guard: str) -> str:
        """A guard with the user's names of lengths."""
        called = {
            (leaf, dim): self.lengths[number].name
            for number, places in enumerate(self.places)
            for leaf, dim in places
        }

        def name(match: re.Match[str]) -> str:
            leaf, dim = map(int, match.groups())
            return called.get((leaf, dim), "samples" if dim == 0 else match.group(0))

        return re.sub(rf"{LEAVES}_(\d+)\.size\(\)\[(\d+)\]", name, guard)

    def _named(self, formula: str) -> str:
        for number, length in enumerate(self.lengths):
            formula = re.sub(rf"\blength{number}\b", length.name, formula)
        return formula


def guards_of(exported: fx.GraphModule, layout: BatchLayout) -> LengthConditions:
    """The conditions of an exported module on the lengths that ``layout`` declares."""
    if not layout.lengths:
        return LengthConditions()
    guards = getattr(exported, GUARDS, None)
    shapes = tuple(leaf.shape for leaf in layout.leaves)
    rows = max(layout.batch_size, LEAST_TRACED)
    return LengthConditions(
        layout.lengths,
        layout.length_places,
        tuple((rows, *shape[1:]) for shape in shapes),
        layout.example_lengths,
        guards.forward if guards is not None else None,
    )
