"""Finds the tensors between the modules of a chain by running it at two batch sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.capture.batch_layout import BatchLayout
from penstock.capture.chain import Chain, call_next
from penstock.capture.layer_graph import LossFunction, TensorSpec
from penstock.capture.loss_module import BatchCall, loss_in_result
from penstock.capture.model_outputs import StructuredOutputs, flatten_outputs
from penstock.errors import BadInput

__all__ = ["Untouched", "chain_outputs", "chain_results", "on_device_of", "output_specs"]


@dataclass(frozen=True)
class _Output:
    """The tensors that one module returned, and whether they came as a tuple.

    ``result`` is everything that a module returned which also returns the loss.
    """

    tensors: tuple[torch.Tensor, ...]
    is_tuple: bool
    result: Any = None

    @property
    def value(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.tensors if self.is_tuple else self.tensors[0]


def on_device_of(chain: Chain, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves on the device of the chain's parameters."""
    home = next((tensor.device for tensor in chain.parameters()), torch.device("cpu"))
    return [leaf.to(home) for leaf in leaves]


def chain_outputs(
    chain: Chain, call: BatchCall, leaves: Sequence[torch.Tensor], layers: int
) -> list[_Output]:
    """The output of each module, run on detached inputs so that no autograd graph is kept.

    The last of ``layers`` layers returns the loss, which is not sent to another stage.
    """
    by_index = dict(enumerate(leaves))
    outputs: list[_Output] = []
    for name in chain.layer_names:
        module = chain.get_submodule(name)
        with torch.enable_grad():
            first = not outputs
            value = call.call(module, by_index) if first else call_next(module, outputs[-1].value)
        is_last = len(outputs) == layers - 1
        outputs.append(_Output((), False, value) if is_last else _detached(name, value))
    return outputs


def chain_results(layout: BatchLayout, small: _Output, large: _Output) -> StructuredOutputs:
    """The layout of a chain's result, from running the last module with ``n`` and ``n + 1``."""
    if small.result is None:
        flat = flatten_outputs(small.value)
        return StructuredOutputs(flat.structure, output_specs("output", layout, small, large))
    one, other = (
        flatten_outputs(output.result, loss_in_result(output.result, "the last module"))
        for output in (small, large)
    )
    if one.problem:
        return StructuredOutputs(None, (), one.problem)
    try:
        flat = (_Output(tuple(found.tensors), True) for found in (one, other))
        return StructuredOutputs(one.structure, output_specs("output", layout, *flat))
    except BadInput as problem:
        return StructuredOutputs(None, (), str(problem))


def _detached(name: str, value: Any) -> _Output:
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise BadInput(
                f"module {name!r} of the chain returned {type(value).__name__} with a "
                f"{type(tensor).__name__} in it, but only a tensor or a tuple of tensors can pass "
                "to the next module; return those"
            )
    kept = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
    return _Output(kept, isinstance(value, tuple))


def output_specs(
    name: str, layout: BatchLayout, small: _Output, large: _Output
) -> tuple[TensorSpec, ...]:
    """The specs of a module's outputs, from runs with ``n`` and with ``n + 1`` samples."""
    return tuple(
        _spec(name if len(small.tensors) == 1 else f"{name}[{i}]", layout.batch_size, one, other)
        for i, (one, other) in enumerate(zip(small.tensors, large.tensors, strict=True))
    )


def _spec(name: str, samples: int, one: torch.Tensor, other: torch.Tensor) -> TensorSpec:
    shape = tuple(one.shape)
    unlike = [d for d, (a, b) in enumerate(zip(shape, other.shape, strict=True)) if a != b]
    if not unlike:
        # Without a trace it is unknown whether values depend on the samples; assume they do.
        return TensorSpec(name, shape, one.dtype, -1, 1, one.requires_grad, reduced=True)
    dim = unlike[0]
    rows = other.shape[dim] - shape[dim]
    if len(unlike) > 1 or shape[dim] != rows * samples:
        raise BadInput(
            f"the output of module {name!r} has shape {shape} for {samples} samples and "
            f"{tuple(other.shape)} for {samples + 1}, but one dimension must be a multiple of the "
            "samples and the others fixed; reshape it, or join the module with the next one"
        )
    return TensorSpec(name, shape, one.dtype, dim, rows, one.requires_grad)


class Untouched:
    """Restores buffers and random state of a chain and its loss on leaving."""

    def __init__(self, chain: Chain, loss: LossFunction | None) -> None:
        self._buffers = dict(chain.named_buffers())
        if isinstance(loss, nn.Module):
            self._buffers |= dict(loss.named_buffers(prefix="loss"))
        self._values = {name: tensor.clone() for name, tensor in self._buffers.items()}
        self._versions = {name: tensor._version for name, tensor in self._buffers.items()}
        devices = {p.device for p in chain.parameters() if p.device.type == "cuda"}
        self._random = torch.random.fork_rng(devices=list(devices))

    def changed(self) -> list[str]:
        """The buffers that were written since the start."""
        return [name for name in self._buffers if self._was_written(name)]

    def _was_written(self, name: str) -> bool:
        # Batch normalisation writes its statistics without changing their version counter.
        buffer = self._buffers[name]
        if buffer._version != self._versions[name]:
            return True
        return not buffer.is_meta and not torch.equal(buffer, self._values[name])

    def __enter__(self) -> "Untouched":
        self._random.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._random.__exit__(*error)
        with torch.no_grad():
            for name in self.changed():
                self._buffers[name].copy_(self._values[name])
