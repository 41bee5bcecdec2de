"""Custom ``torch.autograd.Function``s keep their own backward in a captured graph.

Tracing records operators, and those of a Function's forward say nothing of its backward. So while a
model is traced, each ``apply`` becomes one call that is kept whole (`penstock.capture.opaque`), and
a stage calls the original. Below the trace (the autograd of a registered operator, a Function that
another one calls) nothing is recorded anyway, and ``apply`` is left alone.

``torch.utils.checkpoint`` with ``use_reentrant=True`` is such a Function, too. What it computes is
traced instead: recomputing is for the plan to decide.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import ModIndex
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from penstock.capture.opaque import OpaqueTable, call_opaquely, refused
from penstock.capture.replaced import replaced

__all__ = ["keeping_custom_functions"]

FUNCTIONS: Any = torch.autograd.function
# What `apply` of every Function ends in. Code may hold `apply` itself under a name of its own.
LOWEST: Any = FUNCTIONS._SingleLevelFunction


@contextlib.contextmanager
def keeping_custom_functions(table: OpaqueTable) -> Iterator[None]:
    """Record each ``apply`` of a Function in ``table`` while a model is traced."""
    under_transforms = FUNCTIONS.custom_function_call

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            below: Any = super(LOWEST, cls)
            return below.apply(*args, **kwargs)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        return call_opaquely(table, cls.apply, args, kwargs, name=f"{cls.__name__}.apply")

    def transformed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Torch's look-up in a mapped function is recorded as a call of itself.
        if get_proxy_mode() is None or cls is ModIndex:
            return under_transforms(cls, *args, **kwargs)
        raise refused(f"{cls.__name__}.apply", "is called within a transform of torch.func")

    with (
        replaced(LOWEST, "apply", classmethod(apply)),
        replaced(FUNCTIONS, "custom_function_call", transformed),
    ):
        yield


def _checkpointed(run: Any, preserve_random_state: bool, *args: Any) -> Any:
    """What a checkpointed call computes; no gradient where no argument has one, as in torch."""
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return run(*args)
    with torch.no_grad():
        return run(*args)
