"""Supports ``len`` and lists of samples in Python code while a model is traced.

    torch.arange(len(scores))            len() gives the symbolic number of samples
    torch.cat(list(features))            a list of the samples that is only joined to a tensor again
    for i in range(scores.shape[0])      refused with the line

Python requires integers for ``len``, ``iter`` and ``range``, so tracing would fix the number of
samples.
"""

import builtins
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.fx.experimental.sym_node import SymNode
from torch.utils import _pytree as pytree

from penstock.capture.capture_errors import REMEDY, GoesByValues, current_line
from penstock.capture.sample_pieces import count_of_pieces, divided
from penstock.capture.torch_calls import TorchCalls, replaced

__all__ = ["every_sample", "symbolic_samples"]


@contextlib.contextmanager
def symbolic_samples() -> Iterator[None]:
    """Within, ``len`` and ``iter`` of traced tensors do not fix the number of samples."""
    plain = builtins.len

    def length(value: Any, /) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and _is_open(value):
            return value.shape[0]
        if isinstance(value, list | tuple) and plain(value) == 1:
            (only,) = value
            if isinstance(only, _EverySample):
                return only.tensor.shape[0]
        pieces = count_of_pieces(value)
        return plain(value) if pieces is None else pieces

    builtins.len = length
    try:
        with _OpenIteration(), replaced(SymNode, "guard_int", _number):
            yield
    finally:
        builtins.len = plain


_AS_NUMBER: Any = SymNode.guard_int


def _number(node: SymNode, file: str, line: int) -> int:
    """A size as an integer; refused if it is the number of samples."""
    sources: Any = getattr(node.shape_env, "var_to_sources", {})
    found = [source for symbol in node.expr.free_symbols for source in sources.get(symbol, [None])]
    if node.has_hint() and any(getattr(source, "idx", None) == 0 for source in found):
        raise GoesByValues(
            f"the model's code fixes the number of samples at {current_line()}, but slices of a "
            "batch have other sizes; take the size from the input (x.shape[0], -1) and leave it in "
            f"tensor operations, or {REMEDY}"
        )
    return _AS_NUMBER(node, file, line)


def _is_open(tensor: torch.Tensor) -> bool:
    return isinstance(tensor.shape[0], torch.SymInt)


class _EverySample:
    """The only entry of what should be a list of all samples of ``tensor``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.line = current_line()

    def _refuse(self, *operands: Any) -> NoReturn:
        raise GoesByValues(
            f"the model goes through the samples one by one at {self.line}, but slices of a batch "
            "have other numbers of samples; write the loop with operations on the whole tensor, "
            f"or {REMEDY}"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Join the samples again; everything else is refused."""
        listed: Any = args[0] if args else (kwargs or {}).get("tensors")
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
        every = _found(args, kwargs or {})
        alone = isinstance(listed, list | tuple) and list(listed) == [every]
        if func is torch.stack and alone and dim == 0:
            return every.tensor
        if func in (torch.cat, torch.concat, torch.concatenate) and alone and dim == 0:
            return every.tensor.flatten(0, 1)
        every._refuse()


def every_sample(tensor: torch.Tensor) -> Any:
    """The only entry of a list that stands for all samples of ``tensor``."""
    return _EverySample(tensor)


def _found(args: Sequence[Any], kwargs: dict[str, Any]) -> _EverySample:
    leaves = pytree.tree_leaves((args, kwargs))
    return next(leaf for leaf in leaves if isinstance(leaf, _EverySample))


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(_EverySample, f"__{_name}__", _EverySample._refuse)
    setattr(_EverySample, f"__r{_name}__", _EverySample._refuse)
for _name in ("getitem", "iter", "len", "bool", "neg", "lt", "le", "gt", "ge", "ne"):
    setattr(_EverySample, f"__{_name}__", _EverySample._refuse)


def _goes_through(input: torch.Tensor, dim: int = 0) -> bool:
    return dim == 0 and input.dim() > 0 and _is_open(input)


class _OpenIteration(TorchCalls):
    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, or return a list whose one entry stands for every sample."""
        # Iteration over a tensor calls unbind, too.
        if func in (torch.Tensor.unbind, torch.unbind) and _goes_through(*args, **kwargs):
            return (_EverySample(args[0]),)
        if func is torch.Tensor.__len__ and args[0].dim() and _is_open(args[0]):
            # list() asks for a length only as a hint, and continues without.
            raise TypeError("the number of samples is not known")
        pieces = divided(func, args, kwargs)
        return func(*args, **kwargs) if pieces is None else pieces
