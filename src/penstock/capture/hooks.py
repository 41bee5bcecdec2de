"""Keeps hooks on gradients in a captured graph, or refuses them with the line.

    h.register_hook(hook)                        a separate call beside what makes ``h``; its stage
                                                 registers the hook on the real tensor
    module.register_full_backward_hook(hook)     a call before the module and one after it, in one
                                                 stage; they use PyTorch's own `BackwardHook`

Tracing sees neither, because hooks are not operators. Forward hooks of modules need nothing, since
their code is traced. Hooks on parameters, registered outside forward, work on the parameters that
stages share with the model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from penstock.capture.capture_errors import current_line
from penstock.capture.opaque import OpaqueTable, call_opaquely, refused
from penstock.capture.operators import OpaqueFacts
from penstock.capture.torch_calls import replaced
from penstock.errors import CaptureFailed

__all__ = ["check_hooks", "keeping_hooks"]

_GLOBAL = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that cannot be kept, before anything is traced.

    Raises:
        CaptureFailed: a hook for all modules, or one of ``register_backward_hook``.
    """
    for kind in _GLOBAL:
        for hook in getattr(modules, kind).values():
            raise CaptureFailed(
                f"a hook for all modules, {_name(hook)}, would run on the modules of Penstock too; "
                "register it on the modules that it is for"
            )
    for name, module in model.named_modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            hook = next(iter(module._backward_hooks.values()))
            raise CaptureFailed(
                f"{type(module).__name__} {name!r} has the hook {_name(hook)} from "
                "register_backward_hook, which stages cannot keep; use register_full_backward_hook"
            )


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


@contextlib.contextmanager
def keeping_hooks(table: OpaqueTable) -> Iterator[None]:
    """Record in ``table`` the gradient hooks that a model's code registers while it is traced."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            stack.enter_context(replaced(owner, name, make(getattr(owner, name))))

        replace(torch.Tensor, "register_hook", functools.partial(_registering, table))
        replace(modules, "BackwardHook", functools.partial(_around_modules, table))
        replace(torch.autograd, "grad", functools.partial(_noting_line, table))
        for owner, name, why in _REFUSED:
            replace(owner, name, functools.partial(_refusing, name, why))
        yield


_KEEPS = "keeps a gradient that no stage shows; read the gradients of parameters instead"
_AT_ONCE = "runs a backward of its own; use torch.autograd.grad"
_OUTSIDE = "must be called outside of forward, where it lasts for all steps"
_REFUSED: Sequence[tuple[Any, str, str]] = (
    (torch.Tensor, "retain_grad", _KEEPS),
    (torch.Tensor, "register_post_accumulate_grad_hook", _OUTSIDE),
    (torch.Tensor, "backward", _AT_ONCE),
    (torch.autograd, "backward", _AT_ONCE),
    (torch.autograd.graph, "register_multi_grad_hook", "watches gradients of several stages"),
)


def _refusing(name: str, why: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            return original(*args, **kwargs)
        raise refused(name, why)

    return refuse


def _noting_line(table: OpaqueTable, original: Callable[..., Any]) -> Callable[..., Any]:
    def grad(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is not None:
            table.differentiated_at = current_line()
        return original(*args, **kwargs)

    return grad


class _Handle:
    """What registering a hook returns while a model is traced."""

    def remove(self) -> NoReturn:
        """Refuse: a stage registers hooks for one forward, and they end with its tensors.

        Raises:
            CaptureFailed: always.
        """
        raise refused("remove", "takes back a hook that every stage registers anew")

    def __enter__(self) -> "_Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _registering(table: OpaqueTable, original: Callable[..., Any]) -> Callable[..., Any]:
    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if get_proxy_mode() is None:
            return original(tensor, hook)
        if not tensor.requires_grad:
            raise refused("register_hook", "is on a tensor that has no gradient")
        if isinstance(tensor, nn.Parameter):
            raise refused("register_hook", f"is on a parameter, and {_OUTSIDE}")
        if _holds_traced(hook):
            raise refused("register_hook", f"has a hook, {_name(hook)}, that uses another tensor")

        def register(made: torch.Tensor) -> None:
            # Forwards that are recomputed run first without gradients.
            if made.requires_grad:
                original(made, hook)

        group = f"register_hook {len(table.calls)}"
        known = OpaqueFacts(group=group, beside_arguments=True)
        call_opaquely(table, register, (tensor,), name="register_hook", known=known)
        return _Handle()

    return register_hook


def _holds_traced(hook: Any) -> bool:
    """Whether a hook reads a tensor of the trace: from its closure, bound arguments or `self`.

    In a stage that tensor would still be the one of the trace.
    """
    held: list[Any] = [getattr(hook, name, None) for name in ("__defaults__", "__kwdefaults__")]
    if isinstance(hook, functools.partial):
        held += [hook.func, hook.args, hook.keywords]
    for cell in getattr(hook, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    owners = [getattr(hook, "__self__", None), *held]
    names = getattr(getattr(hook, "__code__", None), "co_names", ())
    held += [
        vars(owner).get(name) for owner in owners if hasattr(owner, "__dict__") for name in names
    ]
    for value in pytree.tree_leaves(held):
        if isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter):
            return True
        is_function = callable(value) and hasattr(value, "__closure__") and value is not hook
        if is_function and _holds_traced(value):
            return True
    return False


def _around_modules(table: OpaqueTable, original: type[BackwardHook]) -> Callable[..., Any]:
    def around(module: nn.Module, hooks: list[Any], pre_hooks: list[Any]) -> Any:
        if get_proxy_mode() is None:
            return original(module, hooks, pre_hooks)
        return _TracedBackwardHook(table, module, hooks, pre_hooks)

    return around


class _TracedBackwardHook:
    """Replaces PyTorch's `BackwardHook` while tracing by two calls that use a real one.

    In a stage, the call before the module makes one for each forward, and the call after the
    module, in the same stage, uses it.
    """

    def __init__(
        self, table: OpaqueTable, module: nn.Module, hooks: list[Any], pre_hooks: list[Any]
    ) -> None:
        self._table = table
        self._make = functools.partial(BackwardHook, module, hooks, pre_hooks)
        self._now: BackwardHook | None = None
        self._name = f"the backward hook of {type(module).__name__}"
        self._group = f"backward hook {len(table.calls)}"

    def setup_input_hook(self, args: tuple[Any, ...]) -> Any:
        """``args`` of the module, with a gradient that the hooks see."""

        def before(*given: Any) -> Any:
            self._now = self._make()
            return self._now.setup_input_hook(given)

        return self._call(before, args)

    def setup_output_hook(self, result: Any) -> Any:
        """The module's result, with a gradient that the hooks see."""

        def after(given: Any) -> Any:
            assert self._now is not None
            return self._now.setup_output_hook(given)

        return self._call(after, (result,))

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        known = OpaqueFacts(group=self._group)
        return call_opaquely(self._table, function, args, name=self._name, known=known)
