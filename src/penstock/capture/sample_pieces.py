"""Supports Python code that splits a tensor by sample and joins it again, while it is traced.

    pieces = torch.split(features, counts.tolist())      as many pieces as samples
    torch.cat(pieces)                                    the tensor itself

`PieceSizes` stands for such a list of numbers, and a single `_EveryPiece` for all pieces.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from penstock.capture.capture_errors import REMEDY, GoesByValues, current_line
from penstock.capture.torch_calls import replaced

__all__ = ["NotJoined", "PieceSizes", "count_of_pieces", "divided", "listing_sizes"]

_SPLITS = frozenset(
    [torch.split, torch.Tensor.split, torch.split_with_sizes, torch.Tensor.split_with_sizes]
)
_JOINS = frozenset([torch.cat, torch.concat, torch.concatenate])


class NotJoined(GoesByValues):
    """Numbers of a list, or pieces, are used for something else; ``line`` made the list."""

    def __init__(self, line: str) -> None:
        super().__init__(
            f"the model asks for values sample by sample at {line}, but slices of a batch have "
            f"other numbers of samples; write the line with tensor operations, or {REMEDY}"
        )
        self.line = line


class _Refusing:
    """Raises `NotJoined` for every use."""

    def __init__(self, line: str) -> None:
        self.line = line

    def _refuse(self, *operands: Any) -> NoReturn:
        raise NotJoined(self.line)

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


for _name in ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow"):
    setattr(_Refusing, f"__{_name}__", _Refusing._refuse)
    setattr(_Refusing, f"__r{_name}__", _Refusing._refuse)
for _name in ("getitem", "contains", "iter", "len", "bool", "neg", "index", "int", "float"):
    setattr(_Refusing, f"__{_name}__", _Refusing._refuse)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Refusing, f"__{_name}__", _Refusing._refuse)


class PieceSizes(_Refusing):
    """The list of the numbers in ``tensor``, one for each piece."""

    def __init__(self, tensor: torch.Tensor, line: str) -> None:
        super().__init__(line)
        self.tensor = tensor


class _EveryPiece(_Refusing):
    """The only entry of what should be a list of the pieces of ``tensor`` along ``dim``."""

    def __init__(self, tensor: torch.Tensor, dim: int, sizes: PieceSizes) -> None:
        super().__init__(sizes.line)
        self.tensor, self.dim, self.sizes = tensor, dim, sizes

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes of a piece; the one along ``dim`` is not a single number."""
        sizes: list[Any] = list(self.tensor.shape)
        sizes[self.dim] = _Refusing(self.line)
        return tuple(sizes)

    def reshape(self, *shape: Any) -> "_EveryPiece":
        """Reshape; the first dimension must be the split one, and stays -1."""
        wanted = shape[0] if isinstance(shape[0], tuple | list) else shape
        if self.dim or wanted[0] != -1:
            self._refuse()
        return _EveryPiece(self.tensor.reshape(*wanted), 0, self.sizes)

    view = reshape

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Join the pieces again; everything else is refused."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        every = next(leaf for leaf in leaves if isinstance(leaf, _EveryPiece))
        listed: Any = args[0] if args else kwargs.get("tensors")
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        alone = isinstance(listed, list | tuple) and [*listed] == [every]
        if func in _JOINS and alone and dim % every.tensor.dim() == every.dim:
            return every.tensor
        every._refuse()

    def to(self, *args: Any, **kwargs: Any) -> "_EveryPiece":
        """The pieces on another device, or in another type."""
        return _EveryPiece(self.tensor.to(*args, **kwargs), self.dim, self.sizes)


@contextlib.contextmanager
def listing_sizes(lines: Collection[str]) -> Iterator[None]:
    """At ``lines``, ``tolist()`` of a traced tensor returns `PieceSizes`."""
    plain = FakeTensor.tolist

    # Modes do not see this function, because for fake tensors it is written in Python.
    def listed(self: FakeTensor) -> Any:
        line = current_line() if lines else ""
        return PieceSizes(self, line) if line in lines else plain(self)

    with replaced(FakeTensor, "tolist", listed):
        yield


def divided(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pieces, if ``func`` splits a tensor by `PieceSizes`; else None."""
    if func not in _SPLITS:
        return None
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, PieceSizes)]
    if not found:
        return None
    tensor, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return (_EveryPiece(tensor, dim % tensor.dim(), found[0]),)


def count_of_pieces(value: Any) -> Any:
    """How many pieces or piece sizes ``value`` lists; None if it lists something else."""
    if isinstance(value, PieceSizes):
        return value.tensor.shape[0]
    if isinstance(value, list | tuple):
        match value:
            case [_EveryPiece() as only]:
                return only.sizes.tensor.shape[0]
            case _:
                pass
    return None
