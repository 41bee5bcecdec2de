"""Estimates the seconds of operators on hardware that is not present.

    seconds of an operator = max(operations / (share * peak rate),
                                 bytes read and written / (share * memory rate),
                                 launch seconds)

(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009; the shares are those of
`penstock.measure.hardware`.) With ``fuses``, consecutive elementwise operators, sums and norms form
one kernel. What one of them makes for another is neither written nor read, and an input of several
is read once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.measure.fused_attention import ATTENTION, ATTENTION_BACKWARD, attention_operations
from penstock.measure.hardware import Hardware
from penstock.measure.saved_tensors import storage_address

__all__ = ["OperatorSeconds"]


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of attention on the CPU, which PyTorch's table does not contain."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _cpu_attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _attention(query: Any, key: Any, value: Any, is_causal: bool, **_: Any) -> float:
    return attention_operations(query, key, value, is_causal)


def _attention_backward(
    _: Any, query: Any, key: Any, value: Any, result: Any, sums: Any, is_causal: bool, **__: Any
) -> float:
    """Five matrix products where the forward has two, because the scores are computed again."""
    return 2.5 * attention_operations(query, key, value, is_causal)


OPERATIONS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    ATTENTION: _attention,
    ATTENTION_BACKWARD: _attention_backward,
}
"""For each operator that multiplies matrices, the number of its operations from its arguments."""

FREE = frozenset(
    [
        *("_unsafe_view", "device", "empty", "empty_like", "empty_strided"),
        *("new_empty", "new_empty_strided"),
    ]
)
"""Operators that neither compute nor move data, though their schemas do not say so."""

FUSED_BESIDES = frozenset(
    [
        *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"),
        *("_to_copy", "amax", "cat", "clone", "mean", "native_dropout", "native_dropout_backward"),
        *("native_layer_norm", "native_layer_norm_backward", "sum", "var_mean"),
    ]
)
"""What a compiler fuses in addition to elementwise operators."""


class OperatorSeconds(TorchDispatchMode):
    """Sums up the seconds of the operators that run while it is active."""

    def __init__(self, hardware: Hardware, *, fuses: bool = False) -> None:
        super().__init__()
        self._hardware = hardware
        self._chain = FusedKernel() if fuses else None
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all operators so far."""
        return self._seconds + (self._kernel_s(self._chain.bytes) if self._chain else 0.0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        if made and not is_view(func) and name_of(func) not in FREE:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
            if self._chain is not None and is_fused(func):
                self._chain.add(read, made)
            else:
                if self._chain is not None:
                    self._seconds += self._kernel_s(self._chain.end(read))
                self._seconds += self._operator_s(func, [*read, *made], args, kwargs or {}, result)
        return result

    def write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the writes of tensors that outlive the operators: results and saved tensors."""
        if self._chain is not None:
            self._seconds += self._kernel_s(self._chain.end(tensors))

    def _kernel_s(self, moved_bytes: float) -> float:
        """Seconds of one kernel that only moves bytes; zero bytes take no time."""
        hardware = self._hardware
        rate = hardware.sustained_share * hardware.memory_share * hardware.bytes_per_s
        return max(moved_bytes / rate, hardware.launch_s) if moved_bytes else 0.0

    def _operator_s(
        self,
        func: Any,
        tensors: Sequence[torch.Tensor],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
    ) -> float:
        formula = OPERATIONS.get(func.overloadpacket)
        operations = formula(*args, **kwargs, out_val=result) if formula else 0
        half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        hardware = self._hardware
        peak = hardware.half_flops_per_s if half else hardware.flops_per_s
        computing_s = operations / (peak * hardware.sustained_share * self._share(func))
        return max(computing_s, self._kernel_s(sum(map(bytes_of, tensors))))

    def _share(self, func: Any) -> float:
        """The share of the peak rate that the best kernel of an operator reaches."""
        if func.overloadpacket is ATTENTION:
            return self._hardware.attention_share
        if func.overloadpacket is ATTENTION_BACKWARD:
            return self._hardware.attention_backward_share
        return self._hardware.product_share


class FusedKernel:
    """Operators that are fused into one kernel, and the bytes that the kernel moves.

    The result of an operator is written only if something outside the kernel reads it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._read: dict[int, torch.Tensor] = {}
        self._unwritten: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def add(self, read: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Add an operator to the kernel."""
        for tensor in read:
            address = storage_address(tensor)
            if address in self._made or address in self._read:
                continue
            self.bytes += self._written(address) + bytes_of(tensor)
            self._read[address] = tensor
        for tensor in made:
            # Keeping the tensors prevents a storage's address from being reused while known.
            self._unwritten[storage_address(tensor)] = tensor
            self._made.add(storage_address(tensor))

    def end(self, read: Iterable[torch.Tensor]) -> int:
        """End the kernel because an operator outside reads ``read``; returns the bytes moved."""
        self.bytes += sum(self._written(storage_address(tensor)) for tensor in read)
        moved, self.bytes = self.bytes, 0
        self._read.clear()
        self._made.clear()
        return moved

    def _written(self, address: int) -> int:
        """The bytes of a result that must be written now, because another kernel reads it."""
        tensor = self._unwritten.pop(address, None)
        return 0 if tensor is None else bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def name_of(func: Any) -> str:
    """The operator's name without namespace and overload."""
    return func._schema.name.split("::")[-1]


def is_fused(func: Any) -> bool:
    """Whether a compiler fuses an operator with its neighbours."""
    return torch.Tag.pointwise in func.tags or name_of(func) in FUSED_BESIDES


def is_view(func: Any) -> bool:
    """Whether an operator only returns views of its input."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
