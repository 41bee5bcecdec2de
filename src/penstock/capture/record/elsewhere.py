"""Weights of other ranks in the user's own loop, between the runs of his program.

After the first step a rank has the weights of its own stages. All ranks run the same loop, so what
it does to each weight by itself is done where that weight is:

    p.mul_(0.9)                  on its holders
    average[name].lerp_(p, 0.1)  on its holders; elsewhere the average becomes absent, too
    teacher.lerp_(student, 0.1)  `WeightElsewhere`, unless the rank has both or neither
    p.norm().item()              `WeightElsewhere` where the weight is not
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.capture.record.absent import (
    DRAWN,
    VALUES,
    Absent,
    NeedsValues,
    absent_call,
    by_shape_only,
    call_name,
    memory_of,
    writes_first,
)
from penstock.errors import BadInput, WeightElsewhere
from penstock.text import numbered
from penstock.torch_internals import has_other_users, pytree

ASKING = VALUES | {"__format__", "__array__", "backward", "data_ptr", "storage", "untyped_storage"}
"""Calls of the loop that need values."""


@dataclass(frozen=True, eq=False)
class Whence:
    """Place of the weight ``name``: on the ranks ``holders``, and not on this ``rank``.

    ``here`` gives the weights and buffers of this rank, by name.
    """

    name: str
    holders: Sequence[int]
    rank: int
    here: Callable[[], Iterable[tuple[str, torch.Tensor]]]

    def __str__(self) -> str:
        holders = numbered("rank", self.holders)
        return f"parameter '{self.name}', which {holders} and not rank {self.rank} (this one) holds"

    def refusal(self, what: str) -> WeightElsewhere:
        """The error of a call, in words that end before the weight."""
        remedy = "do it within `with pipe.full_model():`, where every rank has all weights"
        return WeightElsewhere(f"{what} {self}; {remedy}")

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of the loop that reads the weight, or what was computed from it."""
        name = call_name(func)
        if name in ASKING:
            raise self.refusal(f"{name.strip('_')}() needs the values of")
        if (found := by_shape_only(func, name, args, kwargs)) is not None:
            return found
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written: Any = tensors[0] if writes_first(name) else kwargs.get("out")
        present = [tensor for tensor in tensors if type(tensor) is not Absent]
        if present:
            self.check_apart(name, present, written)
        elif written is not None and name in DRAWN:  # as on its holders: the same numbers follow
            args, kwargs = pytree.tree_map_only(Absent, torch.empty_like, (args, kwargs))
            func(*args, **kwargs)
            return written
        needed_grad = getattr(written, "needs_grad", False)
        try:
            found = absent_call(func, args, kwargs)
        except NeedsValues as needed:
            raise self.refusal(f"{name.strip('_')}() needs the values of") from needed
        if written is not None:  # a leaf stays one, whatever is written to it
            written.needs_grad = needed_grad
        for made in pytree.tree_leaves(found):
            if type(made) is Absent and made.whence is None:
                made.whence = self
        return found

    def check_apart(self, name: str, present: Sequence[torch.Tensor], written: Any) -> None:
        """Raise `WeightElsewhere` if one of the tensors ``present`` must not meet the weight.

        That is one of this rank's weights, and what is ``written`` if others share its memory: it
        alone would become absent. Lists of tensors must all be here or all be elsewhere.
        """
        name = name.strip("_.=")
        shared = [t for t in present if isinstance(t, nn.Parameter) or has_other_users(t)]
        known = {memory_of(tensor): own for own, tensor in self.here()} if shared else {}
        for tensor in shared:
            if own := known.get(memory_of(tensor)):
                raise self.refusal(f"{name} would mix '{own}' with")
        if name.startswith("foreach") or any(tensor is written for tensor in shared):
            raise self.refusal(f"{name} would mix tensors of this rank with")


class StateLoads:
    """Counter of the weights that this rank's loop loads into modules, between two steps.

    A rank that loads weights of others relies on these to do the same.
    """

    def __init__(self) -> None:
        self._count, self._relies = 0, False

    def check(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        """Refuse to load a weight of another rank into one of this rank, or the other way."""
        for key, own in module.named_parameters(recurse=False):
            given = state_dict.get(f"{prefix}{key}")
            if not isinstance(given, torch.Tensor):
                continue
            absent = [t for t in (own, given) if type(t) is Absent and t.whence is not None]
            if len(absent) == 1:
                present = given if absent[0] is own else own
                absent[0].whence.check_apart("load_state_dict", [present], own)
            self._count += 1
            self._relies |= len(absent) == 2

    def taken(self) -> float:
        """Return the count, below 0 where none was of another rank, and reset it."""
        found = self._count if self._relies else -self._count
        self._count, self._relies = 0, False
        return float(found)


def check_loads(taken: Sequence[float]) -> None:
    """Raise `BadInput` if a rank relies on others that have not loaded what it has."""
    relying = next((rank for rank, count in enumerate(taken) if count > 0), -1)
    other = next((rank for rank, count in enumerate(taken) if abs(count) != taken[relying]), -1)
    if relying >= 0 <= other:
        raise BadInput(
            f"rank {relying} has loaded {taken[relying]:.0f} weights into the model since the last "
            f"step, some of which other ranks hold, and rank {other} {abs(taken[other]):.0f}, so "
            f"that the model is of two states; call load_state_dict on every rank, or within `with "
            f"pipe.full_model(rank0_only=True):` on rank 0"
        )


TORCH_DATA: Any = torch.Tensor.data


class CheckedData:
    """``Parameter.data`` as in torch, but for weights that are given values of another rank."""

    users = 0

    def __get__(self, parameter: Any, kind: Any = None) -> Any:
        return TORCH_DATA.__get__(parameter, kind)

    def __set__(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        if type(value) is Absent and value.whence is not None:
            known = {id(tensor): own for own, tensor in value.whence.here()}
            own = known.get(id(parameter), "parameter")
            raise value.whence.refusal(f"{own}.data = ... would take values from")
        TORCH_DATA.__set__(parameter, value)


def refuse_foreign_values(modules: Iterable[nn.Module], loads: StateLoads) -> Callable[[], None]:
    """Check what sets weights without a call that is seen: ``load_state_dict`` and ``p.data = x``.

    Returns what ends that.
    """
    handles = [module.register_load_state_dict_pre_hook(loads.check) for module in modules]
    kind: Any = nn.Parameter
    CheckedData.users += 1
    kind.data = CheckedData()

    def end() -> None:
        CheckedData.users -= 1
        for handle in handles:
            handle.remove()
        if not CheckedData.users:
            del kind.data

    return end
