"""Autocast as GPUs have it, on tensors without values that are on the CPU.

Torch has two policies. Both multiply matrices in the lower type. But a GPU computes powers,
exponentials, softmax, norms and losses in float32, where the CPU's keep the lower type; so they
make, and save, twice the bytes. The lists are those of PyTorch's manual, "Automatic Mixed Precision
package: CUDA Ops that can autocast to float32", with the operators that these functions call.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.torch_internals import kernels_for_now, schema_of

TAKES_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow"),
    *("reciprocal", "rsqrt", "sinh", "softplus", "tan", "renorm", "logsumexp", "norm"),
    *("group_norm", "layer_norm", "native_layer_norm", "cdist", "dist", "pdist"),
    *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "cosine_similarity"),
    *("hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "nll_loss2d", "poisson_nll_loss"),
    *("smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
)
"""Operators whose arguments become float32."""

GIVES_FLOAT32 = (
    *("cumprod", "cumsum", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum"),
)
"""Operators that take the lower type, and whose result is float32."""

HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Give ``torch.autocast("cpu", ...)`` the policy of a GPU in the block."""
    with warnings.catch_warnings(), kernels_for_now("aten", "IMPL", "AutocastCPU") as library:
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for names, kernel_of in ((TAKES_FLOAT32, taking_float32), (GIVES_FLOAT32, giving_float32)):
            for operator in (one for name in names for one in overloads_of(name)):
                library.impl(operator, kernel_of(operator))
        yield


def overloads_of(name: str) -> Iterator[Any]:
    """The overloads of an operator that make a tensor, for dimensions by number."""
    packet = getattr(torch.ops.aten, name)
    for operator in (getattr(packet, overload) for overload in packet.overloads()):
        schema = schema_of(operator)
        takes_type = any(argument.name == "dtype" for argument in schema.arguments)
        if schema.is_mutable or "Dimname" in str(schema):
            continue
        if name in TAKES_FLOAT32 or takes_type:
            yield operator


def taking_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(
                *map(in_float32, args), **{key: in_float32(own) for key, own in kwargs.items()}
            )

    return call


def giving_float32(operator: Any) -> Callable[..., Any]:
    place = [argument.name for argument in schema_of(operator).arguments].index("dtype")

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.dtype in HALVES and len(args) < place and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        with torch.autocast("cpu", enabled=False):
            return operator(first, *args, **kwargs)

    return call


def in_float32(value: Any) -> Any:
    """A tensor of a lower type in float32; all else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value
