"""Notes what calls do while a model runs, so that they can be kept whole when it is traced.

A wrapper passes calls to `CallNotes`. It notes the tensors that a call returns, the parameters that
it reads, and whether its operators are heavy or random; or the reason why it cannot be kept whole.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.called_by_name import Callee
from penstock.capture.opaque import LOWEST
from penstock.capture.operators import heavy_operator, random_operator
from penstock.capture.torch_calls import replaced

__all__ = ["CallNote", "CallNotes", "ResultNote", "tensors_of"]


@dataclass(frozen=True)
class ResultNote:
    """A tensor that a call returned, with its values.

    If ``listed`` is given, the call returned a list of that type with an entry for each sample.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    with_gradient: bool
    value: torch.Tensor
    listed: type | None = None


@dataclass(frozen=True)
class CallNote:
    """A call: its results (a `ResultNote` for each tensor) and the structure around them.

    ``reads`` are the names of the parameters and buffers of its module that it read, which have
    ``parameters`` elements. ``problem`` is the reason why it cannot be kept whole.
    """

    callee: Callee
    results: tuple[Any, ...]
    structure: pytree.TreeSpec
    reads: frozenset[str]
    parameters: int
    heavy: bool
    random: bool
    problem: str = ""


def tensors_of(module: nn.Module | None) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name."""
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class CallNotes(TorchDispatchMode):
    """Watches a run of a model; ``found`` are the noted calls in order."""

    def __init__(self, leaves: Mapping[int, torch.Tensor] | list[torch.Tensor]) -> None:
        super().__init__()
        self.found: list[CallNote] = []
        self.inside: _OpenCall | None = None
        values = leaves.values() if isinstance(leaves, Mapping) else leaves
        self._made = {_storage(leaf) for leaf in values}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.inside is not None:
            self.inside.before(func, (args, kwargs or {}), self._made)
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                if self.inside is not None:
                    self.inside.known.add(_storage(value))
                else:
                    self._made.add(_storage(value))
        return result

    def call(
        self,
        callee: Callee,
        module: nn.Module | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``function(*args, **kwargs)`` and note it; calls inside it are not noted."""
        if self.inside is not None:
            return function(*args, **kwargs)
        before = _state(module, args, kwargs)
        self.inside = watch = _OpenCall(module, (args, kwargs))
        try:
            with watch.for_backward():
                result = function(*args, **kwargs)
        finally:
            self.inside = None
        values, structure = pytree.tree_flatten(result)
        self._made |= {_storage(v) for v in values if isinstance(v, torch.Tensor)}
        problem = watch.problem
        if _state(module, args, kwargs) != before:
            problem = "changes its arguments, or attributes of its module"
        if not all(isinstance(v, torch.Tensor | bool | int | float | str | None) for v in values):
            problem = "returns something that is neither a tensor nor a plain constant"
        # All tensors of a module's forward: for another batch it may read others of them.
        own = tensors_of(module)
        reads = frozenset(own) if callee.name == "forward" else watch.reads
        self.found.append(
            CallNote(
                callee,
                tuple(_noted(value) for value in values),
                structure,
                reads,
                sum(own[name].numel() for name in reads),
                watch.heavy,
                watch.random,
                problem,
            )
        )
        return result


class _OpenCall:
    """A call that is running."""

    def __init__(self, module: nn.Module | None, arguments: Any) -> None:
        self.heavy = self.random = False
        self.problem = ""
        self.known = {
            _storage(t) for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)
        }
        self._names = {_storage(tensor): name for name, tensor in tensors_of(module).items()}
        self._read: set[str] = set()

    @contextlib.contextmanager
    def for_backward(self) -> Iterator[None]:
        """Note code that runs again in the backward: by then its module has other tensors."""
        again = "runs code of the model again in backward"
        begin: Any = checkpoint._checkpoint_hook.__init__

        def hook(hooks: Any, *args: Any) -> None:
            self.problem = again
            begin(hooks, *args)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            below: Any = super(LOWEST, cls)
            held = pytree.tree_leaves([[*a] if isinstance(a, nn.ModuleList) else a for a in args])
            if any(callable(one) for one in held):
                self.problem = again
            return below.apply(*args, **kwargs)

        with (
            replaced(LOWEST, "apply", classmethod(apply)),
            replaced(checkpoint._checkpoint_hook, "__init__", hook),
        ):
            yield

    @property
    def reads(self) -> frozenset[str]:
        """The names of the module's tensors that were read."""
        return frozenset(self._read)

    def before(self, func: Any, arguments: Any, made: set[StorageWeakRef]) -> None:
        """Note an operator; ``made`` are the storages of tensors made outside the call."""
        self.heavy |= heavy_operator(func)
        self.random |= random_operator(func)
        for value in pytree.tree_leaves(arguments):
            if not isinstance(value, torch.Tensor) or _storage(value) in self.known:
                continue
            name = self._names.get(_storage(value))
            if name is not None:
                self._read.add(name)
            elif _storage(value) in made or value.requires_grad:
                self.problem = "reads a tensor of the model that is not among its arguments"


def _noted(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    return ResultNote(shape, stride, value.dtype, value.device, value.requires_grad, value.detach())


def _state(module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    """What a call must not change: its arguments, and its module's attributes and buffers."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    parts = [] if module is None else list(module.modules())
    held = [*leaves, *tensors_of(module).values()]
    versions = [v._version for v in held if isinstance(v, torch.Tensor)]
    attributes = [{name: id(value) for name, value in vars(part).items()} for part in parts]
    return [id(leaf) for leaf in leaves], structure, versions, attributes


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Identifies a storage, even after it is freed; does not keep it alive."""
    return StorageWeakRef(tensor.untyped_storage())
