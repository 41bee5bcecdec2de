"""Runs of units on tensors without values, or on made-up values if a unit reads values inside."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.capture.record.absent import (
    Absent,
    NeedsValues,
    UnknownSize,
    absent_like,
    check_none_lost,
)
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.stand_ins import made_up, standing_in
from penstock.capture.record.tensor_facts import TensorFacts, is_known
from penstock.torch_internals import NoFunctionCalls, own_buffers, pytree, tensors_in, write_count


class UnitRuns:
    """Runs of units; those in ``valued`` run on made-up values, since they read values inside.

    A unit that turns out to do so is added; with None all units run as they are. Parameters have
    the values of ``originals``, if these have any.
    """

    def __init__(
        self,
        program: UserProgram,
        tensors: TensorFacts,
        originals: Mapping[str, torch.Tensor],
        valued: set[str] | None,
    ) -> None:
        self._program, self._tensors = program, tensors
        self._originals, self.valued = originals, valued

    def run(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        """Return what a unit returns."""
        if self.valued is None:
            return plain(*args, **kwargs)
        if path in self.valued:
            return self._on_values(path, plain, args, kwargs)
        module = self._program.module(path)
        given = (*tensors_in((args, kwargs)), *module.parameters())
        if not any(type(tensor) is Absent for tensor in given):
            return plain(*args, **kwargs)
        held = [(part.__dict__, own_buffers(part)) for part in module.modules()]
        before = [(places, dict(places), buffers, dict(buffers)) for places, buffers in held]
        try:
            result = plain(*args, **kwargs)
            check_none_lost(tensors_in(result))
            if all(map(is_known, tensors_in(result))):
                return result
        except (NeedsValues, Exception):
            pass
        for attributes, kept, buffers, kept_buffers in before:
            attributes.clear()
            attributes.update(kept)
            buffers.update(kept_buffers)
        self.valued.add(path)
        return self._on_values(path, plain, args, kwargs)

    def _on_values(self, path: str, plain: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit on values that are made up, but for those that are here."""
        home, apart = Absent.home, self._tensors.apart
        made: dict[int, torch.Tensor] = {}

        def here(value: Any) -> Any:
            if type(value) is not Absent:
                return value
            if value.is_unknown:
                raise UnknownSize(f"a tensor of unknown size in '{path}'")
            if id(value) not in made:
                with NoFunctionCalls():
                    found = made_up(value.plain, home)
                if value.needs_grad:  # no leaf, so it can be written to
                    found = found.requires_grad_().clone()
                made[id(value)] = found
                apart[found] = self._tensors.is_apart(value)
            return made[id(value)]

        def parameter(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not Absent:
                return tensor
            own = self._originals.get(self._tensors.names.get(id(tensor), ""))
            if own is None or own.is_meta or type(own) is Absent:
                with NoFunctionCalls():
                    found = made_up(tensor.plain, home)
            else:
                found = own.detach().clone()
            apart[found] = True
            return found

        module = self._program.module(path)
        with torch.random.fork_rng(devices=[]), standing_in([module], parameter):
            given, named = pytree.tree_map(here, (args, kwargs))
            versions = {id(tensor): write_count(tensor) for tensor in made.values()}
            result = plain(*given, **named)
        originals = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        back = {id(value): originals[key] for key, value in made.items()}
        for value in made.values():
            if write_count(value) != versions[id(value)]:
                back[id(value)].plain.zero_()  # pyright: ignore

        def away(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in back:
                return back[id(value)]
            found = absent_like(tuple(value.shape), value.dtype, value.requires_grad)
            apart[found] = apart.get(value)
            return found

        return pytree.tree_map(away, result)
