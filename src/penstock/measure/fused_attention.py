"""Attention as one operator, for tensors without values.

On a GPU ``scaled_dot_product_attention`` is one kernel that never writes the scores. For tensors
without a device PyTorch would decompose it and create a matrix of scores. So calls are replaced by
a custom operator that has shapes and a gradient but no computation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import custom_op, infer_schema
from torch.nn import functional

from penstock.capture.record.torch_calls import TorchCalls


def _results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of attention and the logarithms of the row sums, which the backward needs."""
    result = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return result, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _not_computed(*_: Any) -> Any:
    raise NotImplementedError("stands in for attention where only shapes run")


def shape_only(name: str, made: Callable[..., Any]) -> Any:
    """An operator that gives what ``made`` does, on tensors without values only."""
    schema = infer_schema(made, mutates_args=())
    operator = custom_op(f"penstock::{name}", _not_computed, mutates_args=(), schema=schema)
    operator.register_fake(made)
    return operator


fused_attention = shape_only("fused_attention", _results)
fused_attention_backward = shape_only("fused_attention_backward", _gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    found = fused_attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return (*found, None)


fused_attention.register_autograd(_backward, setup_context=_keep)

ATTENTION = torch.ops.penstock.fused_attention
ATTENTION_BACKWARD = torch.ops.penstock.fused_attention_backward


_CALLS = (
    functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class FusedAttention(TorchCalls):
    """A mode in which every call of ``scaled_dot_product_attention`` is one operator."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, or the custom operator if it is attention.

        The fused kernel computes no gradient of a mask.
        """
        if func not in _CALLS:
            return func(*args, **kwargs)
        return _attend(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Attention; the parameters are those of PyTorch's function."""
    if attn_mask is not None and attn_mask.requires_grad:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **others
        )
    return fused_attention(query, key, value, is_causal)[0]


def attention_operations(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, **_: object
) -> float:
    """Operations of the forward: two matrix products a head, half of that if causal.

    ``query`` is (..., heads, words, width). Keys and values may have fewer heads.
    """
    words, width = query.shape[-2:]
    heads = query.numel() // (words * width)
    products = 2 * heads * words * key.shape[-2] * (width + value.shape[-1])
    return products / 2 if is_causal else products
