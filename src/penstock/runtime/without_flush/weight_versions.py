"""Which weights each forward and each backward of a stage uses, where updates do not wait.

Autograd remembers the weights of a forward for its backward by reference: a parameter as itself, a
view such as ``weight.t()`` by the memory that it looks into. So a forward runs with *leaves*,
tensors that stand in for the parameters, and a backward sees what is in their memory by then:

    newest, not predicted   one set of leaves in the parameters' own memory: the weights of now
    newest, predicted       one set in memory of its own, written before every pass
    kept versions           the parameters move to other memory before an update, and the leaves of
                            the version before keep the old one while a micro-batch needs it
    kept predictions        a set in memory of its own for every micro-batch in flight

Leaves have version counters of their own, so autograd does not object to what is written on
purpose. Their gradients are those of the parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.runtime.without_flush.parameter_slots import (
    Leaves,
    ParameterSlots,
    aliases,
    new_leaves,
)
from penstock.runtime.without_flush.predicted_step import PredictedSteps
from penstock.runtime.without_flush.staleness_log import PassRecord, StalenessLog
from penstock.schedule.weight_rule import WeightRule

__all__ = ["WeightVersions", "make_weight_versions"]


class WeightVersions:
    """The weights of one stage, and which of them each pass uses.

    Micro-batches are numbered from the start, or from the latest `restart`, in the order in which
    the stage forwards and backwards them. Around every pass:

        with versions.forward(m): ...       run the forward
        with versions.recompute(m): ...     run it once more, where the first kept only its inputs
        with versions.backward(m): ...      run the backward
        versions.update(step)               ``step`` changes the parameters from their gradients

    Here the newest weights are used as they are (``vanilla``); the other rules are subclasses.
    Gradients add up in ``parameter.grad``, which must be there and stay the same tensor.
    ``updates`` counts those since the start. ``most_copies`` is the most copies of the weights that
    there were at once, the parameters among them.
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
        """How many copies of the weights there are now, the parameters among them."""
        return 1

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Within, the module has the weights of the forward of ``micro_batch``."""
        self._forwarded_at[micro_batch] = self.updates
        leaves = self.leaves_of_forward(micro_batch)
        self.most_copies = max(self.most_copies, self.copies)
        with self.slots.holding(leaves):
            yield

    @contextmanager
    def recompute(self, micro_batch: int) -> Iterator[None]:
        """Within, the module has the weights of the backward, for a forward that runs again."""
        with self.slots.holding(self.leaves_of_backward(micro_batch)):
            yield

    @contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Within, what autograd has saved holds the weights of the backward of ``micro_batch``.

        The module has them too, for what a backward computes once more by itself.
        """
        leaves = self.leaves_of_backward(micro_batch)
        self.most_copies = max(self.most_copies, self.copies)
        with self.slots.holding(leaves):
            yield
        self.release(micro_batch)
        before = self._forwarded_at.pop(micro_batch)
        self.log.passed(PassRecord(self.stage, micro_batch, before, self.updates))

    def update(self, step: Callable[[], object]) -> None:
        """Change the weights; ``step`` does it, in place."""
        self.before_update()
        step()
        self.updates += 1
        self.log.updated(self.updates, self.parameters)

    def restart(self) -> None:
        """Number micro-batches from 0 again; none is in flight."""
        self.updates = 0
        self._forwarded_at.clear()
        self._live = None
        self.log.restart()

    def _follow_up(self, micro_batch: int, lead: int, leaves: Leaves) -> None:
        """A prediction was made for a forward."""
        self.log.predicted(micro_batch, self.updates, lead, leaves, self.parameters)

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        """What the forward of ``micro_batch`` runs with."""
        if self._live is None:
            self._live = aliases(self.parameters)
        return self._live

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        """What it ran with, now with the values that its backward is to see."""
        return self.leaves_of_forward(micro_batch)

    def release(self, micro_batch: int) -> None:
        """The backward of ``micro_batch`` has ended."""

    def before_update(self) -> None:
        """The parameters are about to change in place."""


class KeptVersions(WeightVersions):
    """Both passes of a micro-batch use the same version of the weights, which is kept till then.

    ``version_of(m)`` is the number of updates that have made it; ``None`` where that of the forward
    is meant, whichever it is (PipeDream, SOSP 2019, section 3.3). It must not decrease with ``m``.
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
        """Whether a micro-batch in flight, or the next one, uses ``version``."""
        oldest = min(self._used.values(), default=version + 1)
        if self._version_of is not None:
            oldest = min(oldest, self._version_of(self._next))
        return version >= oldest

    def _forget(self) -> None:
        """Free the memory of versions that nothing needs any more."""
        for version in [v for v in self._kept if v < self.updates and not self._needed(v)]:
            self._free.append([leaf.data for leaf in self._kept.pop(version)])


class PredictedWeights(WeightVersions):
    """Every pass uses the newest weights as they are expected some updates later.

    All micro-batches share one set of leaves, whose values are written anew for each pass:
    SpecTrain (arXiv 1809.02839, section 3.2), and with a backward lead of 0 PipeOptim (arXiv
    2312.00839).
    """

    def __init__(self, module: nn.Module, stage: int, rule: WeightRule, steps: PredictedSteps):
        super().__init__(module, stage)
        self._leads = rule.leads_of(stage)
        self._steps = steps
        self._leaves: Leaves = []
        self._holds: tuple[int, int] | None = None

    @property
    def copies(self) -> int:
        return 2 if self._leaves else 1

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        self._write(self._leads[0])
        if self._leads[0]:
            self._follow_up(micro_batch, self._leads[0], self._leaves)
        return self._leaves

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        self._write(self._leads[1])
        return self._leaves

    def restart(self) -> None:
        super().restart()
        self._holds = None

    def _write(self, lead: int) -> None:
        """Put the weights expected ``lead`` updates from now where the leaves are."""
        if not self._leaves:
            self._leaves = new_leaves(self.parameters)
        if self._holds != (self.updates, lead):
            for leaf, parameter in zip(self._leaves, self.parameters, strict=True):
                self._steps.predict(parameter, lead, leaf.data)
            self._holds = (self.updates, lead)


class BellwetherWeights(WeightVersions):
    """Predictions that the first micro-batch of an update makes for all of them.

    XPipe, arXiv 1911.04610, section 3. The forwards of an update and the backwards of the one
    before take turns, so both predictions are kept; autograd looks into the leaves, so the one that
    a pass needs is exchanged into them.
    """

    def __init__(self, module: nn.Module, stage: int, rule: WeightRule, steps: PredictedSteps):
        super().__init__(module, stage)
        self._size = rule.micro_batches_per_update
        self._leads = dict(zip("FB", rule.leads_of(stage), strict=True))
        self._steps = steps
        self._leaves: Leaves = []
        self._other: list[torch.Tensor] = []
        self._in_leaves, self._in_other = ("", -1), ("", -1)

    @property
    def copies(self) -> int:
        return 1 + bool(self._leaves) + bool(self._other)

    def leaves_of_forward(self, micro_batch: int) -> Leaves:
        fresh = self._hold("F", micro_batch // self._size)
        if fresh and self._leads["F"]:
            self._follow_up(micro_batch, self._leads["F"], self._leaves)
        return self._leaves

    def leaves_of_backward(self, micro_batch: int) -> Leaves:
        self._hold("B", micro_batch // self._size)
        return self._leaves

    def restart(self) -> None:
        super().restart()
        self._in_leaves, self._in_other = ("", -1), ("", -1)

    def _hold(self, kind: str, group: int) -> bool:
        """Make the leaves hold the prediction of a pass of a group; say whether it is a new one."""
        if not self._leaves:
            self._leaves = new_leaves(self.parameters)
        if self._in_leaves[0] not in ("", kind):
            self._exchange()
        if self._in_leaves == (kind, group):
            return False
        for leaf, parameter in zip(self._leaves, self.parameters, strict=True):
            self._steps.predict(parameter, self._leads[kind], leaf.data)
        self._in_leaves = (kind, group)
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
    """Weights that are predicted once, for the forward, and used by the backward too.

    Version 2 of SpecTrain's authors: every micro-batch in flight keeps its own prediction.
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
        for leaf, parameter in zip(leaves, self.parameters, strict=True):
            self._steps.predict(parameter, self._lead, leaf.data)
        self._kept[micro_batch] = leaves
        if self._lead:
            self._follow_up(micro_batch, self._lead, leaves)
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

    ``first_stage_depth`` is how many micro-batches stage 0 has in flight: from it follows which
    version it had in each forward.

    Raises:
        BadInput: the rule predicts, and the optimizer cannot.
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
    if rule.bellwether and per_update > 1:
        return BellwetherWeights(module, stage, rule, steps)
    return PredictedWeights(module, stage, rule, steps)
