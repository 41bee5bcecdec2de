"""Runs the user's own module directly; a pipeline must give the same results.

Nothing that capture made takes part: hooks, custom backwards and all else in the module act as in
the user's own script. The module's tensors get the pipeline's values while it runs. Afterwards
tensors, gradients, attributes and random states are restored.
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.capture.as_trained import as_trained
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.torch_calls import TorchCalls
from penstock.runtime.stages.replay import random_state, restore_random_state
from penstock.runtime.verify.loss_terms import LossTerms, MeasuredLoss, accumulate
from penstock.runtime.verify.random_calls import random_call
from penstock.runtime.verify.result import Values
from penstock.runtime.verify.without_dropout import WithoutDropout

__all__ = ["OwnRun", "Reference", "in_double", "run_own_module"]


CONTAINERS = (list, dict, set, OrderedDict, defaultdict)


@dataclass(frozen=True)
class OwnRun:
    """The ``values`` of the user's module on a batch, by first names in the model.

    ``types`` are the element types of the tensors with gradients. ``dropped``: dropout had to be
    switched off. ``random`` names the line that draws other random numbers, if there is one.
    """

    values: Values
    types: frozenset[torch.dtype]
    dropped: bool
    random: str


@dataclass(frozen=True)
class Reference:
    """The results of the user's module; ``run`` is set on rank 0 only, the rest on all ranks.

    ``dropped``: its dropout was off. ``skipped`` is the reason if there are no results to compare
    with.
    """

    name: str
    dropped: bool
    skipped: str
    run: OwnRun | None


def run_own_module(
    graph: LayerGraph,
    values: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    micro_batches: Sequence[range],
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    double: bool = False,
) -> OwnRun:
    """Run forward and backward of the user's module and loss, with ``values`` as its tensors.

    ``micro_batches`` are the rows of each micro-batch; one range runs the whole batch at once.
    Dropout is off. With ``double`` all numbers given are in float64.
    """
    module = graph.own_module()
    placed = [leaf.to(device) for leaf in leaves]
    off, seen = WithoutDropout(), TrainedTypes()

    # In half precision small gradients become zero unless the loss is scaled, as in the pipeline.
    scale = float(placed[0].shape[0]) if autocast == torch.float16 else 1.0

    def run() -> float:
        precision = torch.autocast(device.type, autocast) if autocast else nullcontext()
        with seen, off:
            if len(micro_batches) > 1:
                parts = [measured_loss(module, placed, rows, precision) for rows in micro_batches]
                return accumulate(parts, scale)
            with precision:
                loss = module(*placed)[0]
            if loss.requires_grad:
                loss.backward(loss.new_tensor(scale))
            return float(loss.detach())

    names = names_of(module)
    with ExitStack() as around:
        around.enter_context(kept_random_state(device))
        around.enter_context(kept_attributes(module))
        around.enter_context(as_trained(module, module.get_submodule("model")))
        held = around.enter_context(own_tensors(module, names, values, device, double=double))
        around.enter_context(torch.enable_grad())
        before = random_state(device)
        loss = run()
        gradients, buffers = results(held, scale)
        found = "" if same_state(before, random_state(device)) else random_call(run, device)
    types = frozenset(seen.types) | {gradient.dtype for gradient in gradients.values()}
    return OwnRun(Values(loss, gradients, buffers), types, off.dropped, found)


class TrainedTypes(TorchCalls):
    """While active, collects the element types of results that require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``, and record the type of its result."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            self.types.add(result.dtype)
        return result


def measured_loss(
    module: nn.Module, leaves: Sequence[torch.Tensor], rows: range, precision: Any
) -> MeasuredLoss:
    """The loss of some rows, with the means in it."""
    terms = LossTerms()
    with precision, terms:
        loss = module(*(leaf[rows.start : rows.stop] for leaf in leaves))[0]
    return terms.measured(loss, len(rows))


def names_of(module: nn.Module) -> dict[str, str]:
    """Map the names of all tensors, duplicates included, to first names in the user's model."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name.removeprefix("model."))
    return names


@contextmanager
def own_tensors(
    module: nn.Module,
    names: Mapping[str, str],
    values: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    double: bool,
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Within, the module's tensors have ``values`` and no gradients; yields them by first name.

    Parameters stay the same objects, since the user's code may hold them. Those without values (on
    the meta device) are replaced, and in ``double`` all, since gradients have the old type.
    """
    held: dict[str, torch.Tensor] = {}
    with ExitStack() as undo:
        for name, first in names.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            is_buffer = last in owner._buffers
            old = (owner._buffers if is_buffer else owner._parameters)[last]
            assert old is not None
            value = values[first].detach() if first in values else old.detach()
            if first not in held and (is_buffer or old.is_meta or double):
                held[first] = replacement(old, value.to(device), copied=is_buffer)
            elif first not in held:
                assert isinstance(old, nn.Parameter)
                undo.callback(put_back, old, old.data, old.grad)
                old.grad = None
                old.data = value.to(device)
                held[first] = old
            if held[first] is not old:
                undo.callback(set_tensor, owner, last, old)
                set_tensor(owner, last, held[first])
        yield held


def in_double(value: torch.Tensor) -> torch.Tensor:
    """The values in float64; whole numbers and truth values as they are."""
    return value.double() if value.is_floating_point() else value


def replacement(old: torch.Tensor, value: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """A tensor to take the place of ``old``; a parameter keeps its hooks."""
    if not isinstance(old, nn.Parameter):
        return value.clone() if copied else value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new


def set_tensor(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a tensor by ``setattr``, with which recurrent modules update their weight lists."""
    setattr(owner, name, tensor)


def put_back(parameter: nn.Parameter, data: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Undo the changes of `own_tensors` to a parameter."""
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


def results(
    held: Mapping[str, torch.Tensor], scale: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of the unscaled loss, and copies of the buffers."""
    gradients = {
        name: tensor.grad.detach() / scale if scale != 1.0 else tensor.grad.detach()
        for name, tensor in held.items()
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None
    }
    buffers = {n: t.detach().clone() for n, t in held.items() if not isinstance(t, nn.Parameter)}
    return gradients, buffers


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Within, code may change attributes of modules, also lists and dicts; restored afterwards."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    contents: dict[int, tuple[Any, Any]] = {}
    for part in module.modules():
        kept.append((part.__dict__, dict(part.__dict__)))
        for value in part.__dict__.values():
            if type(value) in CONTAINERS:
                contents[id(value)] = (value, value.copy())
    try:
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)
        for container, before in contents.values():
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Within, random numbers may be drawn; all generators are restored afterwards."""
    states, plain = random_state(device), random.getstate()
    try:
        yield
    finally:
        restore_random_state(device, *states)
        random.setstate(plain)


def same_state(before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]) -> bool:
    """Whether the states are equal, so no random number was drawn in between."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(before, after, strict=True)
    )
