"""Run the user's own module, whose results a pipeline must give, and find the means in its loss.

Nothing that capture made takes part: hooks, custom backwards and all else in the module act as in
the user's own script. The module's tensors get the pipeline's values while it runs. Afterwards
tensors, gradients, attributes and random states are restored.

While it runs, the means that its loss is made of are found, with their numbers of terms:

    loss = cross_entropy(a, words) + 0.1 * cross_entropy(b, next)        two means
    loss = (errors * mask).sum() / mask.sum()                            one mean
    loss = mse_loss(output, target)                                      none: rows count
    loss = ctc_loss(output, words, reduction="sum")                      none: all of it counts

Gradient accumulation over micro-batches weights each mean by its own number of terms, and the rest
of the loss by rows, unless it is one sum.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import hypot
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from penstock.capture.forward.restored import kept_attributes, kept_buffers
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.loss.loss_parts import reduction_of
from penstock.capture.record.absent import Absent
from penstock.capture.record.model_state import place_of_state, value_at
from penstock.capture.record.outside_state import (
    generators_state,
    kept_random_state,
    random_state,
    restore_generators,
    same_generators,
    same_state,
)
from penstock.capture.record.torch_calls import TorchCalls, backward_seen
from penstock.capture.record.user_lines import line_in_words, line_of_user
from penstock.capture.tensor_parts import give_scales, is_quantised, plain_parts, rebuilt
from penstock.runtime.update.host_state import move_parameter
from penstock.runtime.verify.cause import cause_of
from penstock.runtime.verify.without_dropout import WithoutDropout
from penstock.torch_internals import gradient_hooks, holder_of, own_buffers, tensors_in, write_count

DIVISIONS = frozenset(
    [
        torch.div,
        torch.true_divide,
        torch.Tensor.div,
        torch.Tensor.__truediv__,
        torch.Tensor.div_,  # also of ``loss /= count``
    ]
)


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of ``rows`` samples: its means, their numbers of terms and their factors in it.

    ``alone``: the loss is a single mean and nothing else. ``adds``: it is a sum over the samples.
    """

    loss: torch.Tensor
    rows: int
    means: tuple[torch.Tensor, ...]
    counts: tuple[float, ...]
    factors: tuple[float, ...]
    alone: bool
    adds: bool

    @property
    def rest(self) -> float:
        """The value of the loss without its means."""
        # Not computed as a difference then, since a mean without terms is NaN.
        if self.alone:
            return 0.0
        parts = zip(self.factors, self.means, strict=True)
        return float(self.loss.detach()) - sum(f * float(mean.detach()) for f, mean in parts)


class LossTerms(TorchCalls):
    """Record of means whose terms can be counted, while active."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last: torch.Tensor | None = None
        self._sums: list[torch.Tensor] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        count: torch.Tensor | None = None
        if func is functional.cross_entropy or func is functional.nll_loss:
            count = call_weight(*args, **kwargs)
        elif func in DIVISIONS and isinstance(args[0], torch.Tensor):
            count = args[1] if len(args) > 1 else None
        if is_number(result, trained=True) and is_number(count, trained=False):
            self._seen.append((result, count.clone()))
            # Later changes in place (``loss += ...``) are not part of the mean.
            self._last = result.clone()
            return self._last
        if reduction_of(kwargs) == "sum":
            self._sums.append(result)
        return result

    def measured(self, loss: torch.Tensor, rows: int) -> MeasuredLoss:
        """The means that ``loss`` is made of; of nested means only the outer one."""
        counts: list[float] = []
        means: list[torch.Tensor] = []
        factors: list[float] = []
        for mean, count in reversed(self._seen):
            factor = slope(loss, mean)
            if factor is not None and all(slope(outer, mean) is None for outer in means):
                means.append(mean)
                counts.append(float(count))
                factors.append(factor)
        unchanged = write_count(loss) == 0
        alone = loss is self._last and unchanged
        adds = any(loss is own for own in self._sums) and unchanged
        return MeasuredLoss(loss, rows, tuple(means), tuple(counts), tuple(factors), alone, adds)


@torch.no_grad()
def call_weight(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The divisor of a mean of ``cross_entropy`` or ``nll_loss``, whose parameters these are.

    Valid targets; with class weights, the sum of the weights of the valid targets; for targets
    that are class probabilities, the number of distributions.
    """
    if reduction != "mean" or size_average is False or reduce is False:
        return None
    if target.is_floating_point():
        classes = target.shape[1] if target.dim() > 1 else target.shape[0]
        return torch.tensor(float(target.numel() // classes))
    valid = target.ne(ignore_index)
    if weight is None:
        return valid.sum().double()
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0.0).sum().double()


def is_number(value: object, *, trained: bool) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a scalar tensor with ``requires_grad`` equal to ``trained``."""
    return isinstance(value, torch.Tensor) and not value.dim() and value.requires_grad == trained


def slope(value: torch.Tensor, by: torch.Tensor) -> float | None:
    """The derivative of ``value`` with respect to ``by``; ``None`` if it does not depend on it."""
    (found,) = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
    return None if found is None else float(found)


def accumulate(
    module: nn.Module,
    measured: Sequence[Callable[[], MeasuredLoss]],
    changed: Iterable[torch.Tensor],
    scale: float = 1.0,
) -> float:
    """Run all micro-batches, one at a time; returns the loss of all of them together.

    Gradients are those of ``scale`` times the loss. Each runs forward twice: how much one counts is
    known when the terms of all are counted, and only one at a time is in memory. ``changed`` are
    the tensors that a forward changes.
    """
    with kept_attributes(module), kept_buffers(changed):
        sizes = [size_of(measure()) for measure in measured]
    rows = sum(own for own, _ in sizes)
    totals = [sum(counts) for counts in zip(*(own for _, own in sizes), strict=True)]
    return sum(backward_of(measure(), rows, totals, scale) for measure in measured)


def size_of(part: MeasuredLoss) -> tuple[int, tuple[float, ...]]:
    return part.rows, part.counts


def backward_of(part: MeasuredLoss, rows: int, totals: Sequence[float], scale: float) -> float:
    """Run the backward of a part of ``rows`` rows; returns its part of the loss of all."""
    share = 1.0 if part.adds else part.rows / rows
    roots, seeds = [part.loss], [share]
    value = share * part.rest
    terms = zip(part.means, part.counts, part.factors, totals, strict=True)
    for mean, count, factor, total in terms:
        roots.append(mean)
        seeds.append((count / total - share) * factor)
        value += factor * count / total * float(mean.detach()) if count else 0.0
    starts = [root.new_tensor(scale * seed) for root, seed in zip(roots, seeds, strict=True)]
    if part.loss.requires_grad:
        backward_seen(roots, starts)
    return value


def changed_tensors(graph: LayerGraph, module: nn.Module) -> list[torch.Tensor]:
    """List what a forward of the user's module changes: buffers, attributes, some parameters."""
    names = names_of(module)
    written = (p for n, p in module.named_parameters() if names[n] in graph.written_parameters)
    places = (place_of_state(graph.program, place) for _, place in graph.changed_attributes)
    return [*module.buffers(), *written, *tensors_in([value_at(place) for place in places])]


@dataclass(frozen=True)
class Values:
    """Loss, norm of all gradients, gradients and buffers after one batch, by name."""

    loss: float
    norm: float
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """Results of the user's module on a batch; ``values`` and ``types`` are on rank 0 only.

    ``types`` are the element types of the tensors with gradients. ``dropped``: dropout had to be
    switched off. ``skipped`` is the reason if there are no results to compare with. ``name`` says
    in messages how the module ran.
    """

    name: str = ""
    dropped: bool = False
    skipped: str = ""
    values: Values | None = None
    types: tuple[torch.dtype, ...] = ()


def run_own_module(
    graph: LayerGraph,
    values: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    micro_batches: Sequence[range],
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    double: bool = False,
    limit: float | None = None,
) -> Reference:
    """Run forward and backward of the user's module and loss, with ``values`` as its tensors.

    ``micro_batches`` are the rows of each micro-batch; one range runs the whole batch at once.
    Dropout is off. With ``double`` all numbers given are in float64. A module that draws other
    random numbers is not compared. With a ``limit`` only the cause of a difference is looked for
    (`cause_of`), which is the reference's name.
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
                measured = partial(measured_loss, module, placed, precision)
                every = [partial(measured, own) for own in micro_batches]
                return accumulate(module, every, changed_tensors(graph, module), scale)
            with precision:
                loss = module(*placed)[0]
            if loss.requires_grad:
                backward_seen([loss], [loss.new_tensor(scale)])
            return float(loss.detach())

    names = names_of(module)
    with ExitStack() as around:
        around.enter_context(kept_random_state(device))
        around.enter_context(kept_attributes(module))
        around.enter_context(graph.program.without_caches())
        if not graph.model.training:  # what is partly in evaluation mode by choice stays so
            graph.model.train()
        held = around.enter_context(own_tensors(module, names, values, device, double=double))
        around.enter_context(torch.enable_grad())
        if limit is not None:
            with off, torch.autocast(device.type, autocast, enabled=autocast is not None):
                return Reference(cause_of(module, placed, micro_batches, limit))
        before, of_python = random_state(device), generators_state()
        loss = run()
        gradients = gradients_of(held, scale)
        named = module.named_buffers(remove_duplicate=False)
        buffers = {names[name]: t.detach().clone() for name, t in named if name in names}
        found = ""
        if not same_state(before, random_state(device)):
            with RandomCalls(device) as watch:
                run()
            found = watch.found or "a call that torch's functions do not show"
        elif not same_generators(of_python, generators_state()):
            found = "those of Python's random or of NumPy"
            restore_generators(of_python)
    types = tuple(seen.types | {gradient.dtype for gradient in gradients.values()})
    why = f"random operators, which are not dropout: {found}" if found else ""
    return Reference(
        "", off.dropped, why, Values(loss, norm_of(gradients), gradients, buffers), types
    )


class TrainedTypes(TorchCalls):
    """Element types of results that require gradients, while active."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            self.types.add(result.dtype)
        return result


def measured_loss(
    module: nn.Module, leaves: Sequence[torch.Tensor], precision: Any, rows: range
) -> MeasuredLoss:
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
    """Hold ``values`` without gradients as the module's tensors; yield them by first name.

    Parameters stay the same objects, since the user's code may hold them. Those without values (of
    other ranks, or on the meta device) are replaced. In ``double`` all are, since gradients have
    the old type.
    """
    held: dict[str, torch.Tensor] = {}
    with ExitStack() as undo:
        for name, first in names.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            holder = holder_of(owner, last)
            is_buffer, old = holder is own_buffers(owner), holder[last]
            assert old is not None
            elsewhere = old.is_meta or type(old) is Absent or is_quantised(old)
            parts = plain_parts(first, old)
            if parts.keys() <= values.keys():
                value = rebuilt(first, old, {part: values[part].to(device) for part in parts})
            else:
                value = old.detach().to(device)
            if first not in held and (is_buffer or elsewhere or double):
                held[first] = replacement(old, value, copied=is_buffer)
            elif first not in held:
                assert isinstance(old, nn.Parameter)
                undo.callback(move_parameter, old, old.data, old.grad)
                old.grad = None
                old.data = value
                held[first] = old
            if held[first] is not old:
                # By `setattr`, with which recurrent modules update their lists of weights.
                undo.callback(setattr, owner, last, old)
                setattr(owner, last, held[first])
        yield held


def in_double(value: torch.Tensor) -> torch.Tensor:
    """The values in float64; whole numbers and truth values as they are."""
    return value.double() if value.is_floating_point() else value


def replacement(old: torch.Tensor, value: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """A tensor to take the place of ``old``; a parameter keeps its hooks."""
    if not isinstance(old, nn.Parameter):
        return value.clone() if copied else value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    give_scales(new, value, lambda _, scale: scale)
    before, after = gradient_hooks(old)
    for hook in (before or {}).values():
        new.register_hook(hook)
    for hook in (after or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new


def gradients_of(held: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Gradients of the unscaled loss."""
    return {
        name: tensor.grad.detach() / scale if scale != 1.0 else tensor.grad.detach()
        for name, tensor in held.items()
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None
    }


def norm_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all gradients together."""
    norms = (torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values())
    return hypot(*map(float, norms))


class RandomCalls(TorchCalls):
    """Search for the first function that changes the state of a generator, while active; slow."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found = ""
        self._device = device

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.found:
            return func(*args, **kwargs)
        before = random_state(self._device)
        result = func(*args, **kwargs)
        if not same_state(before, random_state(self._device)):
            self.found = f"{getattr(func, '__name__', func)} at {line_in_words(line_of_user())}"
        return result
