"""Keeps the backward of custom ``torch.autograd.Function``s in a captured graph.

Tracing records the operators of a Function's forward, and these say nothing about its backward. So
while a model is traced, each ``apply`` becomes one call that is kept whole (`capture.opaque`), and
a stage calls the original. Inside a registered operator or another Function nothing is recorded
anyway, so ``apply`` is left unchanged there.

``torch.utils.checkpoint`` with ``use_reentrant=True`` is such a Function too. Its content is traced
instead, because the plan decides about recomputation.
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
# Every Function's `apply` ends here, even if code holds `apply` under another name.
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
        # torch looks up indices in a mapped function by a Function, which is recorded as such.
        if get_proxy_mode() is None or cls is ModIndex:
            return under_transforms(cls, *args, **kwargs)
        raise refused(f"{cls.__name__}.apply", "is called within a transform of torch.func")

    with (
        replaced(LOWEST, "apply", classmethod(apply)),
        replaced(FUNCTIONS, "custom_function_call", transformed),
    ):
        yield


def _checkpointed(run: Any, preserve_random_state: bool, *args: Any) -> Any:
    """The result of a checkpointed call; without gradient if no argument has one, as in torch."""
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return run(*args)
    with torch.no_grad():
        return run(*args)
