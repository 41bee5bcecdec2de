"""The asynchronous order: 1F1B over batches that follow one another without a flush.

After ``K - 1`` warm-up forwards, a stage with ``K`` micro-batches in flight repeats forever

    F(j)  B(j - K + 1)

The part of a batch consists of its forwards and the backwards between them; some of these belong to
earlier batches. A drain consists of the remaining backwards.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.errors import BadInput
from penstock.plan.in_one_process import PlanInOneProcess
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import BatchCut, cut_batch
from penstock.schedule.action import Action
from penstock.schedule.families.asynchronous import asynchronous_depths
from penstock.schedule.shape import PipelineShape
from penstock.schedule.weight_rule import WeightRule


@dataclass(frozen=True)
class AsynchronousOrder:
    """The actions of every stage in each batch, and in a drain.

    ``shape`` is that of one batch. ``depths`` are the numbers of micro-batches that each stage has
    in flight. Micro-batches are numbered modulo those of ``ring`` batches, since no stage works on
    more at once.
    """

    shape: PipelineShape
    depths: tuple[int, ...]
    rule: WeightRule

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a batch."""
        return self.shape.micro_batches

    @property
    def ring(self) -> int:
        """The number of batches after which the numbers of micro-batches repeat."""
        return 1 + -(-(max(self.depths) - 1) // self.micro_batches)

    @property
    def ring_shape(self) -> PipelineShape:
        """The shape with the micro-batches of the whole ring."""
        return replace(self.shape, micro_batches=self.ring * self.micro_batches)

    def recomputes(self, stage: int) -> bool:
        """Return whether the stage recomputes; at depth 1 it still has the activations."""
        return self.shape.recomputes(stage) and self.depths[stage] > 1

    def numbers(self, batch: int) -> range:
        """The numbers of the micro-batches of a batch, which counts from the latest start."""
        first = batch % self.ring * self.micro_batches
        return range(first, first + self.micro_batches)

    def update_with(self, number: int) -> range:
        """The numbers of all micro-batches in the same update as ``number``."""
        per_update = self.rule.micro_batches_per_update
        first = number - number % per_update
        return range(first, first + per_update)

    def part(self, stage: int, batch: int) -> tuple[Action, ...]:
        """The actions of ``stage`` in the part of ``batch``.

        >>> order = AsynchronousOrder(PipelineShape(3, 2), (3, 2, 1), WeightRule(1))
        >>> [" ".join(map(str, order.part(0, batch))) for batch in (0, 1, 2)]
        ['0F0 0F1', '0F2 0B0 0F3 0B1', '0F0 0B2 0F1 0B3']
        """
        found: list[Action] = []
        for number in range(batch * self.micro_batches, (batch + 1) * self.micro_batches):
            found.append(Action("F", stage, self._ringed(number)))
            found += self._backward(stage, number - self.depths[stage] + 1)
        return tuple(found)

    def drain(self, stage: int, batches: int) -> tuple[Action, ...]:
        """The actions of ``stage`` that remain after this number of batches.

        >>> order = AsynchronousOrder(PipelineShape(3, 2), (3, 2, 1), WeightRule(1))
        >>> [" ".join(map(str, order.drain(stage, 3))) for stage in range(3)]
        ['0B0 0B1', '1B1', '']
        """
        total = batches * self.micro_batches
        left = range(max(0, total - self.depths[stage] + 1), total)
        return tuple(action for number in left for action in self._backward(stage, number))

    def _backward(self, stage: int, number: int) -> Iterator[Action]:
        if number < 0:
            return
        if self.recomputes(stage):
            yield Action("R", stage, self._ringed(number))
        yield Action("B", stage, self._ringed(number))

    def _ringed(self, number: int) -> int:
        return number % (self.ring * self.micro_batches)


def asynchronous_order(plan: Plan) -> AsynchronousOrder:
    """The order of a plan with an asynchronous schedule."""
    rule = order_of(plan).weights
    shape = (plan.planned if isinstance(plan, PlanInOneProcess) else plan).shape()
    return AsynchronousOrder(shape, asynchronous_depths(shape, rule), rule)


def cut_for(plan: Plan, samples: int) -> BatchCut:
    """Cut a batch of ``samples`` into as many micro-batches as planned."""
    cut = cut_batch(plan, samples)
    if len(cut.micro_batches) != plan.micro_batches:
        raise BadInput(
            f"a batch of {samples} samples cannot be cut into the plan's {plan.micro_batches} "
            f"micro-batches, and schedule '{plan.schedule}' has no flush to change their number "
            f"at; leave out such batches"
        )
    return cut
