"""Weighting of the parts of a loss over micro-batches of unequal size.

    loss      = sum_t c_t num_t / den_t                      of a whole batch
    a step    = sum_m sum_t c_t num_tm / den_t(whole step)   over its micro-batches m

So every reduction over samples between the model and the loss gets a factor, and every value of the
batch alone that is combined with it (``mask.sum()``) is replaced by that of the whole step:

    action            a call that                          in a micro-batch
    rows              averages over samples                times its share of the step's samples
    targets           is a cross entropy                   times its targets / those of the step
    count             is a mean over numbers of the data   times its elements / those of the step
    whole, position   takes a number or value of the batch that of the whole step
    addend, position  adds something without samples       that of the whole step times the share
    result            is a statistic of the batch alone    that of the whole step

The actions are found by a walk back from the loss over recorded calls. Batch statistics of
activations (a mean over samples that is not simply added up) cannot be taken over a whole step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from penstock.capture.loss.loss_path import LossPath, loss_path
from penstock.capture.record.absent import call_name
from penstock.capture.record.calls import (
    Address,
    ProgramRecord,
    RecordedCall,
    TensorReference,
)
from penstock.capture.record.sizes import ValueSizes
from penstock.capture.record.user_lines import line_in_words, line_with_source
from penstock.errors import BadInput
from penstock.torch_internals import NoFunctionCalls, pytree

_BY_TARGETS = ("cross_entropy", "nll_loss")
_MEANS = frozenset(
    [
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
        *("kl_div", "ctc_loss", "binary_cross_entropy_with_logits", "cosine_embedding_loss"),
        *("margin_ranking_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss"),
        *("triplet_margin_loss", "triplet_margin_with_distance_loss", "poisson_nll_loss"),
        *("gaussian_nll_loss", "hinge_embedding_loss", "multilabel_soft_margin_loss"),
    ]
)
_SUMS = frozenset(
    [
        *("sum", "nansum", "matmul", "mm", "bmm", "mv", "dot", "einsum", "tensordot", "inner"),
        *("vdot", "count_nonzero", "__matmul__", "linear"),
    ]
)
_LINEAR = frozenset(
    [
        *("to", "float", "double", "half", "bfloat16", "type_as", "type", "cuda", "cpu"),
        *("view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "permute", "transpose"),
        *("t", ".T", ".mT", "unbind", "split", "select", "__getitem__", "contiguous", "clone"),
        *("detach", "nan_to_num", "mean", "sum", "neg", "__neg__", "positive"),
    ]
)
_ADD = frozenset(
    [
        *("add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__"),
        *("__isub__", "sub_", "rsub", "subtract", "stack", "cat", "where"),
    ]
)
_MUL = frozenset(
    [
        *("mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply", "dot", "inner"),
        *("matmul", "__matmul__", "mm", "mv"),
    ]
)
_DIV = frozenset(["div", "__truediv__", "__itruediv__", "div_", "true_divide", "divide"])
ARITHMETIC = (_ADD - {"stack", "cat", "where"}) | _MUL | _DIV
"""Names of sums, products and quotients."""


REMEDY = (
    "return a mean or a sum, or divide a sum by a number that depends on the batch alone; or list "
    "the terms of the loss, as in loss=[(1.0, first), (0.5, second)], and such a term is averaged "
    "over micro-batches"
)


Counting: TypeAlias = Literal["loss", "rows", "lost", ""]
"""Rule that merges a number in an output from those of slices: as the loss, of which it is a
part; by samples; not at all, since it is computed from weighed parts; or by samples, inexactly.
"""


@dataclass(frozen=True)
class LossAction:
    """Change to a call in a micro-batch; ``position`` counts leaves of arguments."""

    kind: Literal["rows", "targets", "count", "whole", "addend", "result"]
    position: int = -1


@dataclass
class LossParts:
    """Actions by number of event; and why samples act on one another in the loss, if they do.

    ``has_sums``: a part of the loss is a sum over samples, which needs no action but is no mean.
    ``path`` are the calls of which this holds.
    """

    actions: dict[int, list[LossAction]] = field(default_factory=dict[int, list[LossAction]])
    mixing: str = ""
    has_sums: bool = False
    path: LossPath = field(default_factory=dict[Any, Any])

    @property
    def mode(self) -> Literal["rows", "targets", "step"]:
        """Weighting of slices: by samples, by targets, or part by part."""
        every = [action.kind for found in self.actions.values() for action in found]
        if self.has_sums:
            return "step"
        if all(kind == "rows" for kind in every):
            return "rows"
        return "targets" if every == ["targets"] else "step"


class NotFromSlices(BadInput):
    """The loss is no sum over slices of a batch: ``why`` says which call makes it so."""

    def __init__(self, event: RecordedCall, why: str) -> None:
        name = f"'{event.address[1]}' at"
        super().__init__(
            f"the loss cannot be computed from slices of a batch: {name} "
            f"{line_with_source(event.line)} {why}; {REMEDY}"
        )
        self.why = f"{name} {line_in_words(event.line)} {why}"


class MustOpen(Exception):
    """A unit makes the loss, or a part of it: its calls must be seen."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self.unit = unit


def loss_parts(
    record: ProgramRecord,
    others: Sequence[ProgramRecord],
    sizes: ValueSizes,
    loss: int,
    terms: Sequence[int] = (),
    taken: RecordedCall | None = None,
    sized: Sequence[ProgramRecord] = (),
) -> LossParts:
    """Return how the parts of the loss, a value of ``record``, count.

    ``others`` are recordings of other samples: a number that differs there is of the batch.
    ``sized`` are those of all other sizes. ``terms`` are values of terms that the user has listed:
    one that is neither mean nor sum counts by samples. So do all if the loss depends on a number of
    activations, which ``taken`` takes.
    """
    walk = _Walk(record, others, sizes)
    if not terms:
        walk.back(loss, taken)
    for term in terms:
        own = _Walk(record, others, sizes)
        try:
            own.back(term, taken)
        except BadInput:
            own = _Walk(record, others, sizes)
            own.act(record.values[term].maker, LossAction("rows"))
            own.mixing = "a term of the loss is neither a mean nor a sum over samples"
        walk.add(own)
    walk.values_asked_for()
    actions = {number: found for number, found in walk.found.items() if found}
    path = loss_path(record, sized, loss, walk.deciding | set(actions))
    return LossParts(actions, walk.mixing, walk.has_sums, path)


def counting_of(
    record: ProgramRecord,
    others: Sequence[ProgramRecord],
    sizes: ValueSizes,
    value: int | None,
    parts: LossParts,
) -> Counting:
    """Return how a number counts that is returned with the loss, which has these ``parts``."""
    if value is None or sizes.has_samples(value) or value not in record.dependent:
        return ""
    own = _Walk(record, others, sizes)
    is_linear = True
    try:
        own.back(value)
    except (BadInput, MustOpen):
        is_linear = False
    if is_linear and own.has_sums <= parts.has_sums:
        if all(set(found) <= {*parts.actions.get(n, ())} for n, found in own.found.items()):
            return "loss"
        is_mean = not own.mixing and not own.has_sums
        if is_mean and parts.actions.keys().isdisjoint(own.found):
            kinds = {action.kind for found in own.found.values() for action in found}
            return "rows" if kinds <= {"rows"} else ""
    scaled = {
        number
        for number, found in parts.actions.items()
        if any(action.kind != "result" for action in found)
    }
    return "lost" if scaled & record.behind([record.values[value].maker]) else ""


class _Walk:
    """A walk from the loss back over the calls that made it."""

    def __init__(
        self, record: ProgramRecord, others: Sequence[ProgramRecord], sizes: ValueSizes
    ) -> None:
        self.record, self.sizes = record, sizes
        self._others = [other.by_address for other in others]
        self._answers = {
            event.answer
            for event in record.events
            if event.reads_values and not event.depends and type(event.answer) in (int, float)
        }
        # Ones and zeros that a program requests are equal to flags and dimensions.
        self._numbers = {answer for answer in self._answers if isinstance(answer, float)}
        self.found: dict[int, list[LossAction]] = {}
        self.deciding: set[int] = set()
        """Events that were walked over: sums, factors and reductions."""
        self.mixing = ""
        self.has_sums = False
        self._done: set[int] = set()
        self._statistics: set[int] = set()
        self._sampled: set[int] = set()
        """Values that depend on samples, though they may have no dimension of samples."""
        self._shared: set[int] = set()
        """Values made of what all samples share alone: those of a slice are those of the batch."""
        self._drawn: set[int] = set()
        """Values made of random numbers, which are one draw for all samples."""
        for number, value in enumerate(record.values):
            event = record.events[value.maker]
            if self._is_shared(event):
                self._shared.add(number)
            elif sizes.has_samples(number) or any(read in self._sampled for read in event.reads):
                self._sampled.add(number)
            if event.random or any(read in self._drawn for read in event.reads):
                self._drawn.add(number)

    def _is_shared(self, event: RecordedCall) -> bool:
        if event.address[0] == "":
            return bool(event.leaves & self.record.program.call.layout.shared)
        return (
            bool(event.reads)
            and self._shared.issuperset(event.reads)
            and not any(
                varies(self._others, event, position, entry)
                for position, entry in enumerate(pytree.tree_leaves(event.args))
            )
        )

    def values_asked_for(self) -> None:
        """Take what decides about a branch of the loss, as ``if (y == 4).any()``, from the step.

        The same holds of ``y.unique()``, whose size programs read. A number that a program requests
        may be the size of something in its micro-batch, so it stays that of the micro-batch.
        """
        events = self.record.events
        last = max((number for number, event in enumerate(events) if event.is_unit), default=-1)
        for event in events[last + 1 :]:
            if event.depends:
                continue
            if event.reads_values and isinstance(event.answer, bool):
                decisive = [value for value in event.reads if not self.sizes.has_samples(value)]
            else:
                decisive = [value for value in event.makes if _has_own_size(event)]
            for value in decisive:
                if value in self._sampled and value not in self.record.dependent:
                    self.act(self.record.values[value].maker, LossAction("result"))

    def _maker(self, value: int) -> tuple[int, RecordedCall]:
        """The call that made a value, with its number."""
        number = self.record.values[value].maker
        return number, self.record.events[number]

    def act(self, number: int, action: LossAction) -> None:
        """Note an action."""
        own = self.found.setdefault(number, [])
        if action not in own:
            own.append(action)

    def _of_samples(self, entry: Any) -> bool:
        """Return whether an argument depends on samples through stages."""
        value = value_in(entry)
        return value in self.record.dependent and value in self._sampled

    def _has_samples(self, entry: TensorReference) -> bool:
        return value_in(entry) >= 0 and self.sizes.has_samples(value_in(entry))

    def _is_whole(self, event: RecordedCall, position: int, entry: Any) -> bool:
        """A value of the batch alone without samples in it; or a number that is one."""
        if isinstance(entry, TensorReference):
            if not isinstance(entry.value, int) or entry.value in self.record.dependent:
                return False
            is_of_all = self.sizes.has_samples(entry.value) or entry.value in self._shared
            is_of_step = entry.value in self._sampled or entry.value in self._drawn
            return is_of_step and not is_of_all
        if isinstance(entry, bool) or not isinstance(entry, int | float):
            return False
        return entry in self._answers or varies(self._others, event, position, entry)

    def add(self, other: "_Walk") -> None:
        """Take up what a walk from another term has found."""
        for number, own in other.found.items():
            for action in own:
                self.act(number, action)
        self.deciding |= other.deciding
        self.mixing = self.mixing or other.mixing
        self.has_sums = self.has_sums or other.has_sums

    def back(self, loss: int, taken: RecordedCall | None = None) -> None:
        """Walk back from a value without samples (iteratively: models are deep)."""
        if taken is not None:
            raise NotFromSlices(taken, "takes a number of its own values, on which it depends")
        todo = [loss]
        while todo:
            value = todo.pop()
            if value not in self._done:
                self._done.add(value)
                todo += self._walked(value)

    def _walked(self, value: int) -> list[int]:
        """Decide about the call that made a value; returns the values to walk to."""
        number, event = self._maker(value)
        self.deciding.add(number)
        if value not in self._sampled:
            self.act(number, LossAction("rows"))
            return []
        if event.is_unit:
            raise MustOpen(event.address[0])
        leaves = pytree.tree_leaves(event.args)
        mixed = [entry for entry in leaves if self._of_samples(entry)]
        name = str(event.address[1])
        if any(self._has_samples(entry) for entry in mixed):
            self._reduction(value, mixed)
            return []
        if name in _LINEAR and leaves and self._of_samples(leaves[0]):
            return [entry.value for entry in mixed]
        if isinstance(event.func, type) and mixed:
            return [mixed[0].value]  # an own autograd function that scales, or adds to a backward
        if name in _ADD:
            return self._sum(number, name, leaves)
        divides = name in _DIV and leaves and mixed and leaves[0] is mixed[0]
        if len(mixed) == 1 and (name in _MUL or divides):
            self._factors(number, event, leaves)
            return [mixed[0].value]
        where = line_in_words(event.line)
        if any(torch.Size(entry.shape).numel() == 1 for entry in mixed):
            raise NotFromSlices(event, "is not linear in a mean or sum over the samples")
        self._mix(f"'{name}' at {where} is computed from sums over samples")
        self.act(number, LossAction("rows"))
        return []

    def _factors(self, number: int, event: RecordedCall, leaves: Sequence[Any]) -> None:
        """Take factors that are numbers or values of the batch from the whole step."""
        for position, entry in enumerate(leaves):
            if self._is_whole(event, position, entry):
                self.act(number, LossAction("whole", position))

    def _mix(self, why: str) -> None:
        self.mixing = self.mixing or why

    def _sum(self, number: int, name: str, leaves: Sequence[Any]) -> list[int]:
        """A sum of terms: those that depend on stages are walked to, others are shared out."""
        further: list[int] = []
        for position, entry in enumerate(leaves):
            of_batch = isinstance(entry, TensorReference) and not isinstance(entry.value, str)
            is_number = type(entry) in (int, float) and name not in ("stack", "cat")
            if value_in(entry) in self.record.dependent:
                further.append(value_in(entry))
            elif name == "where" and position == 0:
                self.act(number, LossAction("whole", position))
            elif of_batch or is_number:
                self.act(number, LossAction("addend", position))
        return further

    def _reduction(self, value: int, mixed: Sequence[TensorReference]) -> None:
        """A call that takes samples and gives none: a mean or sum over them."""
        number, event = self._maker(value)
        name, (args, kwargs) = str(event.address[1]), event.args
        reduces = name in _MEANS or name in _BY_TARGETS
        if name in _SUMS or (reduces and reduction_of(kwargs) not in ("mean", "batchmean")):
            self.has_sums = True
        elif name in _BY_TARGETS and not _target(args, kwargs).dtype.is_floating_point:
            self.act(number, LossAction("targets"))
        elif name == "mean" and mixed[0].value in self.record.decided:
            raise NotFromSlices(event, "is over as many numbers as activations decide")
        elif name == "mean" or reduces:
            # Over numbers in proportion to the samples, or over as many as the data decide.
            by_rows = self.sizes.is_proportional(mixed[0].value)  # pyright: ignore[reportArgumentType]
            self.act(number, LossAction("rows" if by_rows else "count"))
        else:
            where = line_in_words(event.line)
            if torch.Size(self.record.values[value].shape).numel() == 1:
                raise NotFromSlices(event, "is neither a mean nor a sum over the samples")
            self._mix(f"'{name}' at {where} is neither a mean nor a sum over samples")
            self.act(number, LossAction("rows"))
        for position, entry in enumerate(pytree.tree_leaves(event.args)):
            self._whole_statistics(entry)  # targets and weights, too
            is_number = isinstance(entry, float) and entry in self._numbers
            if is_number or varies(self._others, event, position, entry):
                self.act(number, LossAction("whole", position))
        for entry in mixed:
            self._before_reduction(entry.value)  # pyright: ignore[reportArgumentType]

    def _before_reduction(self, value: int) -> None:
        """Factors before a sum, as in ``(x / mask.sum()).sum()``, and statistics in them."""
        todo = [value]
        while todo:
            own = todo.pop()
            if own in self._done or own not in self._sampled:
                continue
            self._done.add(own)
            number, event = self._maker(own)
            if event.is_unit or event.args is None:
                continue
            leaves = pytree.tree_leaves(event.args)
            mixed = [entry for entry in leaves if self._of_samples(entry)]
            # A sum over samples of activations that acts on rows again mixes the samples.
            if self.sizes.has_samples(own) and not all(map(self._has_samples, mixed)):
                where = line_in_words(event.line)
                statistic = "takes a statistic of the samples' activations"
                self._mix(f"'{event.address[1]}' at {where} {statistic}")
            name = str(event.address[1])
            for entry in leaves:
                self._whole_statistics(entry)
            if name in _MUL | _DIV and len(mixed) == 1 and leaves[0] is mixed[0]:
                self._factors(number, event, leaves)
            todo += [entry.value for entry in mixed]

    def _whole_statistics(self, entry: Any) -> None:
        """Statistics of the batch alone within a factor, as in ``(a - a.mean()) / a.std()``."""
        todo = [entry]
        while todo:
            value = value_in(todo.pop())
            if value < 0 or value in self.record.dependent or value in self._statistics:
                continue
            self._statistics.add(value)
            number, event = self._maker(value)
            if self.sizes.has_samples(value) and event.args is not None:
                leaves = pytree.tree_leaves(event.args)
                computes = event.address[1] in ARITHMETIC
                for position, given in enumerate(leaves if computes else ()):
                    is_number = not isinstance(given, TensorReference)
                    if is_number and self._is_whole(event, position, given):
                        self.act(number, LossAction("whole", position))
                todo += leaves
            elif value in self._sampled and not self.sizes.has_samples(value):
                self.act(number, LossAction("result"))


def value_in(entry: Any) -> int:
    """The number of the value that an argument is; -1 if it is none."""
    if isinstance(entry, TensorReference) and isinstance(entry.value, int):
        return entry.value
    return -1


def _has_own_size(event: RecordedCall) -> bool:
    """Return whether the values of its argument decide about the size of a result."""
    if event.address[1] not in ("unique", "unique_consecutive") or event.args is None:
        return False
    args, kwargs = event.args
    return len(args) == 1 and not kwargs.get("return_inverse", False)


def varies(
    others: Sequence[Mapping[Address, RecordedCall]],
    event: RecordedCall,
    position: int,
    entry: Any,
) -> bool:
    """Return whether an argument is a number that differs in the same call for other samples."""
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        return False
    for events in others:
        other = events.get(event.address)
        if other is None or other.args is None:
            continue
        leaves = pytree.tree_leaves(other.args)
        if position < len(leaves) and leaves[position] != entry:
            return True
    return False


def _target(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs["target"]


def target_count(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The divisor of a mean cross entropy: its targets, or the sum of their class weights."""
    target = _target(args, kwargs)
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
    valid = target.ne(ignored)
    if weight is None:
        return torch.count_nonzero(valid).double()
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0.0).sum().double()


def measured(
    actions: Sequence[LossAction], func: Callable[..., Any], args: Any, kwargs: Any
) -> list[Any]:
    """Return the values of a call in the whole step that micro-batches need: one an action."""
    found: list[Any] = []
    for action in actions:
        match action.kind:
            case "targets":
                found.append(target_count(args, kwargs))
            case "count":
                found.append(args[0].numel())
            case "result":
                found.append(func(*args, **kwargs))
            case "whole" | "addend":
                value = pytree.tree_leaves((args, kwargs))[action.position]
                # The program may write to it later.
                found.append(value.clone() if isinstance(value, torch.Tensor) else value)
            case _:
                found.append(None)
    return found


_OLD_ARGUMENTS = ("size_average", "reduce")
"""Arguments of losses of torch that replace ``reduction``, which then is not read."""


def reduction_of(kwargs: Mapping[str, Any]) -> str:
    """Return the reduction of a loss of torch that is called with ``kwargs``."""
    if all(kwargs.get(name) is None for name in _OLD_ARGUMENTS):
        return kwargs.get("reduction", "mean")
    if kwargs.get("reduce") is False:
        return "none"
    return "sum" if kwargs.get("size_average") is False else "mean"


def _summed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which the loss is a sum."""
    own = {name: value for name, value in kwargs.items() if name not in _OLD_ARGUMENTS}
    return own | {"reduction": "sum"}


def weighed(
    actions: Sequence[LossAction],
    whole: Sequence[Any],
    share: float,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """The call as a micro-batch makes it; ``share`` is its part of the step's samples."""
    factor: Any = None
    for action, value in zip(actions, whole, strict=True):
        match action.kind:
            case "result":
                return value
            case "whole" | "addend":
                leaves, spec = pytree.tree_flatten((args, kwargs))
                with NoFunctionCalls():
                    leaves[action.position] = value if action.kind == "whole" else value * share
                args, kwargs = pytree.tree_unflatten(leaves, spec)
            case "rows":
                factor = share
            case "targets":
                with NoFunctionCalls():
                    factor = target_count(args, kwargs) / value
            case "count":
                if not args[0].numel():  # the mean of nothing is NaN
                    if call_name(func) == "mean":
                        return torch.sum(*args, **kwargs)
                    return func(*args, **_summed(kwargs))
                factor = args[0].numel() / value
    if any(action.kind == "targets" for action in actions) and float(factor) == 0:
        return func(*args, **_summed(kwargs))  # the mean of no target is NaN
    result = func(*args, **kwargs)
    if factor is None:
        return result
    with NoFunctionCalls():  # no call of the user's program
        return _times(result, factor)


def _times(result: Any, factor: Any) -> Any:
    if isinstance(result, torch.Tensor):
        if not result.is_floating_point():
            return result
        return result * (factor.to(result.dtype) if isinstance(factor, torch.Tensor) else factor)
    return type(result)([_times(entry, factor) for entry in result])
