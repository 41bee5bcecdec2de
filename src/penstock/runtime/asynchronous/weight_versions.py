"""Weights of each forward and backward of a stage, if updates do not wait for a flush.

Autograd keeps the weights of a forward for its backward by reference: a parameter itself, or for a
view such as ``weight.t()`` the memory behind it. So a forward runs with *leaves*, tensors that
replace the parameters, and the backward sees what their memory contains by then:

    newest, not predicted   one set of leaves in the parameters' own memory: the current weights
    newest, predicted       one set with its own memory, written before every pass
    kept versions           the parameters move to other memory before an update, and the leaves of
                            the old version keep the old memory while a micro-batch needs it
    kept predictions        a set with its own memory for every micro-batch in flight

Leaves have their own version counters, so autograd does not reject these intended writes. Their
gradients are those of the parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.runtime.asynchronous.predicted_step import PredictedSteps
from penstock.runtime.asynchronous.staleness_log import PassRecord, StalenessLog
from penstock.schedule.weight_rule import WeightRule
from penstock.torch_internals import flat_weights, own_parameters

Leaves: TypeAlias = list[torch.Tensor]
"""Leaf tensors that replace parameters, in their order; gradients go to the parameters."""


class ParameterSlots:
    """The places where a module keeps its trained parameters.

    A parameter with several names counts once. Other parameters are not replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: list[nn.Parameter] = []
        self._slots: list[tuple[Any, Any, int]] = []
        numbers: dict[nn.Parameter, int] = {}
        for part in module.modules():
            # Recurrent modules also keep a list of their weights.
            flat, flat_names = flat_weights(part)
            for name, parameter in own_parameters(part).items():
                if parameter is None or not parameter.requires_grad:
                    continue
                number = numbers.setdefault(parameter, len(numbers))
                if number == len(self.parameters):
                    self.parameters.append(parameter)
                self._slots.append((own_parameters(part), name, number))
                if name in flat_names:
                    self._slots.append((flat, flat_names.index(name), number))

    @contextmanager
    def holding(self, leaves: Leaves) -> Iterator[None]:
        """Hold ``leaves`` in the module instead of its parameters."""
        self._put(leaves)
        try:
            yield
        finally:
            self._put(self.parameters)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for container, key, number in self._slots:
            container[key] = tensors[number]


def aliases(parameters: Sequence[nn.Parameter]) -> Leaves:
    """Leaves that share the parameters' memory but have their own version counters."""
    return [leaf_of(parameter.data, parameter) for parameter in parameters]


def new_leaves(parameters: Sequence[nn.Parameter]) -> Leaves:
    """Leaves with their own uninitialised memory."""
    return [leaf_of(torch.empty_like(p.data), p) for p in parameters]


def leaf_of(memory: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A leaf in ``memory`` whose gradient is that of the parameter.

    It is a parameter itself, since some layers add to gradients directly for parameters only.
    """
    leaf = nn.Parameter(memory)
    leaf.grad_dtype = parameter.grad_dtype
    leaf.grad = parameter.grad
    return leaf


class WeightVersions:
    """The weights of one stage, and which of them each pass uses.

    Micro-batches are numbered from the start or the latest `restart`, in the order in which the
    stage runs their forwards and backwards. Around every pass:

        with versions.forward(m): ...       run the forward
        with versions.recompute(m): ...     run it again, if the first kept only its inputs
        with versions.backward(m): ...      run the backward
        versions.update(step)               ``step`` changes the parameters from their gradients

    This class uses the newest weights as they are (``vanilla``); the other rules are subclasses.
    Gradients accumulate in ``parameter.grad``, which must exist and stay the same tensor.
    ``updates`` counts the updates since the start. ``most_copies`` is the largest number of copies
    of the weights at any time, including the parameters.
    """

    def __init__(self, module: nn.Module, stage: int = 0) -> None:
        self.stage = stage
        self.slots = ParameterSlots(module)
        self.updates = 0
        self.most_copies = 1
        self.log = StalenessLog(stage)
        self._forwarded_at: dict[int, int] = {}
        self._live: Leaves | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, each once."""
        return self.slots.parameters

    @property
    def copies(self) -> int:
        """The current number of copies of the weights, including the parameters."""
        return 1

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Hold the weights for the forward of ``micro_batch`` in the module."""
        self._forwarded_at[micro_batch] = self.updates
        leaves = self.leaves_of_forward(micro_batch)
        self.most_copies = max(self.most_copies, self.copies)
        with self.slots.holding(leaves):
            yield

    @contextmanager
    def recompute(self, micro_batch: int) -> Iterator[None]:
        """Hold the weights of the backward in the module, to recompute its forward."""
        with self.slots.holding(self.leaves_of_backward(micro_batch)):
            yield

    @contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Hold the weights for ``micro_batch``'s backward in the tensors that autograd saved.

        The module has them too, in case its backward recomputes something.
        """
        leaves = self.leaves_of_backward(micro_batch)
        self.most_copies = max(self.most_copies, self.copies)
        with self.slots.holding(leaves):
            yield
        self.release(micro_batch)
        before = self._forwarded_at.pop(micro_batch)
        self.log.passed(PassRecord(self.stage, micro_batch, before, self.updates))

    def update(self, step: Callable[[], object]) -> None:
        """Change the weights; ``step`` does so in place."""
        self.before_update()
        step()
        self.updates += 1
        self.log.updated(self.updates, self.parameters)

    def restart(self) -> None:
        """Number micro-batches from 0 again; none may be in flight."""
        self.updates = 0
        self._forwarded_at.clear()
        self._live = None
        self.log.restart()

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        """The leaves for the forward of ``micro_batch``."""
        if self._live is None:
            self._live = aliases(self.parameters)
        return self._live

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        """The leaves of its forward, with the values for its backward."""
        return self.leaves_of_forward(micro_batch)

    def release(self, micro_batch: int) -> None:
        """Release what ``micro_batch`` needed, when its backward has ended."""

    def before_update(self) -> None:
        """Prepare for an update, before the parameters change in place."""


class KeptVersions(WeightVersions):
    """Both passes of a micro-batch use the same version of the weights, which is kept until then.

    ``version_of(m)`` is the number of updates in that version; it must not decrease with ``m``.
    With ``None`` it is the newest version at the forward (PipeDream, SOSP 2019, section 3.3).
    """

    def __init__(
        self, module: nn.Module, stage: int, version_of: Callable[[int], int] | None
    ) -> None:
        super().__init__(module, stage)
        self._version_of = version_of
        self._used: dict[int, int] = {}
        self._kept: dict[int, Leaves] = {}
        self._free: list[list[torch.Tensor]] = []
        self._next = 0

    @property
    def copies(self) -> int:
        return 1 + sum(version < self.updates for version in self._kept)

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        wanted = self.updates if self._version_of is None else self._version_of(micro_batch)
        self._used[micro_batch] = wanted
        self._next = micro_batch + 1
        if wanted == self.updates and wanted not in self._kept:
            self._kept[wanted] = aliases(self.parameters)
        return self._kept[wanted]

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        return self._kept[self._used[micro_batch]]

    def release(self, micro_batch: int) -> None:
        del self._used[micro_batch]
        self._forget()

    def before_update(self) -> None:
        """Move the parameters to other memory, if a micro-batch needs the version they hold."""
        if not self._needed(self.updates):
            self._kept.pop(self.updates, None)
            return
        if self.updates not in self._kept:
            self._kept[self.updates] = aliases(self.parameters)
        room = self._free.pop() if self._free else [torch.empty_like(p) for p in self.parameters]
        for parameter, memory in zip(self.parameters, room, strict=True):
            parameter.data = memory.copy_(parameter.detach())

    def update(self, step: Callable[[], object]) -> None:
        super().update(step)
        self._forget()
        self.most_copies = max(self.most_copies, self.copies)

    def restart(self) -> None:
        super().restart()
        self._used.clear()
        self._kept.clear()
        self._next = 0

    def _needed(self, version: int) -> bool:
        """Return whether a micro-batch in flight, or the next one, uses ``version``."""
        oldest = min(self._used.values(), default=version + 1)
        if self._version_of is not None:
            oldest = min(oldest, self._version_of(self._next))
        return version >= oldest

    def _forget(self) -> None:
        """Free the memory of versions that are no longer needed."""
        for version in [v for v in self._kept if v < self.updates and not self._needed(v)]:
            self._free.append([leaf.data for leaf in self._kept.pop(version)])


class PredictedWeights(WeightVersions):
    """Every pass uses weights that are predicted some updates ahead.

    All micro-batches share one set of leaves, whose values are written for each pass from the
    newest weights: SpecTrain (arXiv 1809.02839, section 3.2), and with a backward lead of 0
    PipeOptim (arXiv 2312.00839). Under a rule with a bellwether the first micro-batch of an update
    makes the prediction that all its micro-batches use (XPipe, arXiv 1911.04610, section 3). The
    forwards of an update and the backwards of the previous one alternate, so both predictions are
    kept. Autograd reads the leaves, so the prediction that a pass needs is swapped into them.
    """

    def __init__(self, module: nn.Module, stage: int, rule: WeightRule, steps: PredictedSteps):
        super().__init__(module, stage)
        self._leads = dict(zip("FB", rule.leads_of(stage), strict=True))
        self._steps = steps
        size = rule.micro_batches_per_update
        self._size = size if rule.bellwether and size > 1 else 0
        self._leaves: Leaves = []
        self._other: list[torch.Tensor] = []
        self._in_leaves: tuple[str | int, int] | None = None
        self._in_other: tuple[str | int, int] | None = None

    @property
    def copies(self) -> int:
        return 1 + bool(self._leaves) + bool(self._other)

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        if self._hold("F", micro_batch) and self._leads["F"]:
            now, lead = self.updates, self._leads["F"]
            self.log.predicted(micro_batch, now, lead, self._leaves, self.parameters)
        return self._leaves

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        self._hold("B", micro_batch)
        return self._leaves

    def restart(self) -> None:
        super().restart()
        self._in_leaves = self._in_other = None

    def _hold(self, kind: str, micro_batch: int) -> bool:
        """Put the prediction for a pass into the leaves; returns whether it is new."""
        lead = self._leads[kind]
        wanted = (kind, micro_batch // self._size) if self._size else (lead, self.updates)
        if not self._leaves:
            self._leaves = new_leaves(self.parameters)
        if self._size and self._in_leaves is not None and self._in_leaves[0] != kind:
            self._exchange()
        if self._in_leaves == wanted:
            return False
        self._steps.predict(self.parameters, lead, self._leaves)
        self._in_leaves = wanted
        return True

    def _exchange(self) -> None:
        if not self._other:
            self._other = [torch.empty_like(p) for p in self.parameters]
        for leaf, other in zip(self._leaves, self._other, strict=True):
            held = leaf.data.clone()
            leaf.data.copy_(other)
            other.copy_(held)
        self._in_leaves, self._in_other = self._in_other, self._in_leaves


class KeptPredictions(WeightVersions):
    """Weights are predicted once for the forward, and the backward uses the same.

    This is version 2 of SpecTrain's authors: every micro-batch in flight keeps its own prediction.
    """

    def __init__(self, module: nn.Module, stage: int, rule: WeightRule, steps: PredictedSteps):
        super().__init__(module, stage)
        self._lead = rule.leads_of(stage)[0]
        self._steps = steps
        self._kept: dict[int, Leaves] = {}
        self._free: list[Leaves] = []

    @property
    def copies(self) -> int:
        return 1 + len(self._kept)

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        leaves = self._free.pop() if self._free else new_leaves(self.parameters)
        self._steps.predict(self.parameters, self._lead, leaves)
        self._kept[micro_batch] = leaves
        if self._lead:
            self.log.predicted(micro_batch, self.updates, self._lead, leaves, self.parameters)
        return leaves

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        return self._kept[micro_batch]

    def release(self, micro_batch: int) -> None:
        self._free.append(self._kept.pop(micro_batch))


def make_weight_versions(
    module: nn.Module,
    rule: WeightRule,
    stage: int,
    optimizer: Optimizer,
    *,
    first_stage_depth: int = 1,
) -> WeightVersions:
    """The weights of ``stage`` under ``rule``.

    ``first_stage_depth`` is the number of micro-batches that stage 0 has in flight. It determines
    the version that stage 0 used in each forward.
    """
    per_update = rule.micro_batches_per_update
    match rule.version:
        case "first-stage":
            return KeptVersions(
                module, stage, lambda m: max(0, m - first_stage_depth + 1) // per_update
            )
        case "update-before":
            return KeptVersions(module, stage, lambda m: max(0, m // per_update - 1))
        case "forward" if rule.prediction == "none":
            return KeptVersions(module, stage, None)
        case "forward" | "newest":
            pass
    if rule.prediction == "none" or not any(rule.leads_of(stage)):
        return WeightVersions(module, stage)
    steps = PredictedSteps(optimizer)
    if rule.version == "forward":
        return KeptPredictions(module, stage, rule, steps)
    return PredictedWeights(module, stage, rule, steps)
