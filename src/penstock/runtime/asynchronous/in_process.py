"""Runs all stages of a plan in one process, for experiments and small models.

The stages, the order of their work and the weights that they use are those of `Pipeline`. But
nothing is sent and nothing waits, so every run gives the same numbers, and no processes are
started. All replicas of a stage are run as one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import Dynamic
from penstock.capture.stage_program import Batch, Loss, StageProgram
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.runtime.asynchronous.order import AsynchronousOrder, asynchronous_order, cut_for
from penstock.runtime.asynchronous.versioned_stage import (
    VersionedStage,
    clip_gradients,
    with_updates,
)
from penstock.runtime.asynchronous.weight_versions import WeightVersions
from penstock.runtime.clock import StepClock
from penstock.runtime.execute import PreparedAction, execute, steps_of
from penstock.runtime.micro_batches import cut_batch, forward_schedule, schedule_of
from penstock.runtime.stages.building import check_layers, graph_of
from penstock.runtime.stages.runner import ModuleRunner, StageInputs, Tensors
from penstock.runtime.steps.training import MakeOptimizer, MakeSchedule
from penstock.schedule.action import Action

__all__ = ["InProcessPipeline", "PlayedStep"]


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """The result of one batch: its mean loss, and the updates of each stage so far."""

    step: int
    loss: float
    learning_rate: float
    samples: int
    updates: tuple[int, ...]


@dataclass(slots=True)
class StageOptimizer:
    """Updates the weights of one stage; ``gradients`` are those of its parameters."""

    parameters: list[nn.Parameter]
    optimizer: Optimizer
    schedule: LRScheduler | None
    clip_norm: float | None
    gradients: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def update(self) -> None:
        """Clip to the norm of this stage's gradients, step, and zero the gradients."""
        if self.clip_norm is not None:
            clip_gradients(self.gradients, self.clip_norm)
        self.step()

    def step(self) -> None:
        """Update the weights, then the learning rate; zero the gradients."""
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        for gradient in self.gradients:
            gradient.zero_()


class InProcessPipeline:
    """A model in training according to a plan, in this process alone.

        player = InProcessPipeline(model, plan, batch, loss=loss, optimizer=make)
        for batch in batches:
            loss = player.step(batch).loss
        player.drain()

    Arguments are those of `Pipeline`. The model's own parameters are trained and always hold the
    newest weights. If the schedule updates without a flush, micro-batches stay in flight between
    steps; `drain` finishes them. Learning-rate schedules count updates. ``measure_every``: measure
    the error of predicted weights every that many updates (0: never). Each stage's `StalenessLog`
    is ``versions[stage].log``.

    Raises:
        BadInput: plan, model and batch do not fit together, or the schedule predicts weights and
            the optimizer does not support it.
        CaptureFailed: the model cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module | LayerGraph,
        plan: Plan,
        batch: Batch,
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer,
        learning_rate_schedule: MakeSchedule | None = None,
        clip_norm: float | None = None,
        granularity: Literal["block", "module", "operator"] = "module",
        measure_every: int = 0,
        dynamic: Dynamic | None = None,
    ) -> None:
        self.plan, self.steps = plan, 0
        self._graph = graph_of(model, batch, loss, granularity, dynamic)
        if self._graph.others:
            raise BadInput(
                "InProcessPipeline takes batches of one kind, and the captured model has "
                "other_examples; use Pipeline"
            )
        check_layers(plan, self._graph)
        self._programs = [self._graph.stage(stage.layers) for stage in plan.stages]
        self._clip_norm = clip_norm
        owned = parameters_by_first_stage(self._programs)
        self._optimizers = [
            stage_optimizer(parameters, optimizer, learning_rate_schedule, clip_norm)
            for parameters in owned
        ]
        device = self._graph.recorded.device
        self._runners = [ModuleRunner(program, device) for program in self._programs]
        rule = order_of(plan).weights
        self._asynchronous = asynchronous_order(plan) if rule.micro_batches_per_update else None
        self._stages: list[VersionedStage] = []
        self._batches = 0
        self._channels = InProcessChannels(self._programs)
        self._clock = StepClock()
        if self._asynchronous is not None:
            check_nothing_is_shared(self._programs)
            self._stages = [
                VersionedStage(
                    number,
                    runner,
                    self._asynchronous,
                    own.optimizer,
                    own.update,
                    measure_every=measure_every,
                )
                for number, (runner, own) in enumerate(
                    zip(self._runners, self._optimizers, strict=True)
                )
            ]

    @property
    def versions(self) -> list[WeightVersions]:
        """The weight versions of every stage; empty if updates wait for a flush."""
        return [stage.versions for stage in self._stages]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of every stage."""
        return [own.optimizer for own in self._optimizers]

    def step(self, batch: Batch) -> PlayedStep:
        """Train on one batch; without a flush, its last micro-batches stay in flight.

        Raises:
            BadInput: the batch is not like the example.
        """
        leaves = self._checked(batch)
        rate = float(self._optimizers[-1].optimizer.param_groups[0]["lr"])
        if self._asynchronous is None:
            loss = self._whole_step(leaves)
        else:
            loss = self._part(self._asynchronous, leaves)
        self.steps += 1
        updates = tuple(versions.updates for versions in self.versions)
        return PlayedStep(self.steps, loss, rate, leaves[0].shape[0], updates)

    def drain(self) -> None:
        """Run the backwards of the micro-batches in flight; the next step warms up again."""
        if self._asynchronous is None or not self._batches:
            return
        self._play_on(
            self._asynchronous,
            [self._asynchronous.drain(s.number, self._batches) for s in self._stages],
        )
        self._batches = 0
        for stage in self._stages:
            stage.restart()

    def evaluate(self, batch: Batch) -> float:
        """Drain, then compute the mean loss on one batch in evaluation mode."""
        self.drain()
        leaves = self._checked(batch)
        cut = cut_batch(self.plan, leaves[0].shape[0])
        shape = schedule_of(self.plan, len(cut.micro_batches))[1]
        self._graph.set_training(False)
        try:
            self._begin(leaves, cut.micro_batches, training=False)
            self._play(forward_schedule(shape).orders)
        finally:
            self._graph.set_training(True)
        return mean_loss(self._runners[-1])[0]

    def _checked(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of a batch, checked."""
        leaves = self._graph.batch_leaves(batch)
        self._graph.lengths_of(dict(enumerate(leaves)))
        return leaves

    def _whole_step(self, leaves: Sequence[torch.Tensor]) -> float:
        """Run one batch and update all stages after it, as on one device."""
        cut = cut_batch(self.plan, leaves[0].shape[0])
        schedule, _ = schedule_of(self.plan, len(cut.micro_batches))
        orders = [tuple(order) for order in schedule.orders]
        self._begin(leaves, cut.micro_batches, training=True, orders=orders)
        self._play(orders)
        loss, weight = mean_loss(self._runners[-1])
        gradients = [g for own in self._optimizers for g in own.gradients]
        for gradient in gradients:
            gradient.mul_(1 / weight)
        if self._clip_norm is not None:
            clip_gradients(gradients, self._clip_norm)
        for own in self._optimizers:
            own.step()
        return loss

    def _begin(
        self,
        leaves: Sequence[torch.Tensor],
        rows: Sequence[range],
        *,
        training: bool,
        orders: Sequence[Sequence[Action]] = (),
    ) -> None:
        """Give every runner its rows of a batch that runs alone."""
        actions = [action for order in orders for action in order]
        for stage, runner in enumerate(self._runners):
            own = [action for action in actions if action.stage == stage]
            runner.begin(
                StageInputs(
                    tuple(rows_of(leaves, self._programs[stage], part) for part in rows),
                    tuple(map(len, rows)),
                    recomputed=frozenset(a.micro_batch for a in own if a.kind == "R"),
                    training=training,
                    halved=frozenset(a.micro_batch for a in own if a.kind == "I"),
                    names=tuple((self.steps, number) for number in range(len(rows))),
                )
            )

    def _part(self, order: AsynchronousOrder, leaves: Sequence[torch.Tensor]) -> float:
        """Run the part of one batch in the asynchronous order."""
        rows = cut_for(self.plan, order, leaves[0].shape[0]).micro_batches
        own = self._graph.as_own_steps(leaves, rows)
        for stage in self._stages:
            stage.feed(self._batches, own, rows, rows, step=self.steps)
        parts = [order.part(stage.number, self._batches) for stage in self._stages]
        self._batches += 1
        self._play_on(order, parts)
        return mean_loss(self._runners[-1])[0]

    def _play_on(self, order: AsynchronousOrder, parts: Sequence[Sequence[Action]]) -> None:
        """Run the given actions of every stage, with the updates of its weights."""
        runners = dict(enumerate(self._stages))
        self._run(
            [
                with_updates(steps_of(part, runners, self._channels), stage, order)
                for stage, part in zip(self._stages, parts, strict=True)
            ]
        )

    def _play(self, orders: Sequence[Sequence[Action]]) -> None:
        """Run every group's actions."""
        runners = dict(enumerate(self._runners))
        self._run([steps_of(order, runners, self._channels) for order in orders])

    def _run(self, orders: Sequence[Iterable[PreparedAction]]) -> None:
        """Run every group's steps, each as soon as its inputs are available."""
        self._clock.restart()
        execute(
            self._channels.in_turn([deque(steps) for steps in orders]), self._channels, self._clock
        )


def parameters_by_first_stage(programs: Sequence[StageProgram]) -> list[list[nn.Parameter]]:
    """The trained parameters of every stage; a tied parameter belongs to its first stage only.

    In one process it is one tensor with one gradient: a second optimizer would step it twice.
    """
    seen: set[nn.Parameter] = set()
    found: list[list[nn.Parameter]] = []
    for program in programs:
        own = [p for p in program.module.parameters() if p.requires_grad and p not in seen]
        seen.update(own)
        found.append(own)
    return found


def stage_optimizer(
    parameters: list[nn.Parameter],
    make: MakeOptimizer,
    make_schedule: MakeSchedule | None,
    clip_norm: float | None,
) -> StageOptimizer:
    """The optimizer of a stage's parameters, with gradients of zero."""
    gradients: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad.zero_())
    optimizer = make(parameters or [nn.Parameter(torch.zeros(0))])
    schedule = make_schedule(optimizer) if make_schedule is not None else None
    return StageOptimizer(parameters, optimizer, schedule, clip_norm, gradients)


def rows_of(
    leaves: Sequence[torch.Tensor], program: StageProgram, rows: range
) -> tuple[torch.Tensor, ...]:
    """The rows that a stage reads of a batch's leaves."""
    return tuple(leaves[index][rows.start : rows.stop] for index in program.batch_inputs)


def mean_loss(runner: ModuleRunner) -> tuple[float, float]:
    """The mean loss of the micro-batches that the last stage has run, and its weight."""
    loss_sum = weight_sum = 0.0
    for term in runner.loss_terms:
        weight = float(term.weight)
        if weight:
            loss_sum += weight * float(term.loss)
            weight_sum += weight
    return (loss_sum / weight_sum if weight_sum else float("nan")), weight_sum


def check_nothing_is_shared(programs: Sequence[StageProgram]) -> None:
    """Raise `BadInput` if stages that update at different times share a parameter."""
    owner: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, program in enumerate(programs):
        for name, parameter in program.module.named_parameters():
            first, other = owner.setdefault(parameter, (stage, name))
            if first != stage and parameter.requires_grad:
                raise BadInput(
                    f"parameter '{other}' is used by stages {first} and {stage}, which update "
                    f"their weights at different times; put its layers into one stage, untie "
                    f"it, or use a schedule that waits for a flush"
                )


Key = tuple[int, int]
"""A stage and a micro-batch."""


class InProcessChannels:
    """`Channels` between all stages of a plan in one process: nothing is sent, nothing waits."""

    device = 0

    def __init__(self, programs: Sequence[StageProgram]) -> None:
        self._programs = programs
        makers = {spec.name: s for s, program in enumerate(programs) for spec in program.sent}
        self._readers: dict[str, list[int]] = {name: [] for name in makers}
        for stage, program in enumerate(programs):
            for spec in program.received:
                self._readers[spec.name].append(stage)
        self._makers = [
            sorted({makers[spec.name] for spec in program.received}) for program in programs
        ]
        self._consumers = [
            sum(stage in own for own in self._makers) for stage in range(len(programs))
        ]
        self._inputs: dict[Key, dict[str, torch.Tensor]] = {}
        self._gradients: dict[Key, dict[str, torch.Tensor]] = {}
        self._reports: dict[Key, int] = {}

    def in_turn(self, queues: Sequence[deque[PreparedAction]]) -> Iterator[PreparedAction]:
        """The steps of all stages, each when its inputs are available."""
        while any(queues):
            for queue in queues:
                while queue and self._is_ready(queue[0]):
                    yield queue.popleft()

    def _is_ready(self, step: PreparedAction) -> bool:
        key = (step.stage, step.micro_batch)
        if step.kind == "F":
            return len(self._inputs.get(key, ())) == len(self._programs[step.stage].received)
        return step.kind not in "BI" or self._reports.get(key, 0) == self._consumers[step.stage]

    def receiver(self, action: Action) -> Callable[[], Tensors]:
        """A function that takes the inputs of a forward, or the gradients of its results."""
        key, program = (action.stage, action.micro_batch), self._programs[action.stage]

        def inputs() -> Tensors:
            found = self._inputs.pop(key, {})
            return [found[spec.name] for spec in program.received]

        def gradients() -> Tensors:
            self._reports.pop(key, None)
            found = self._gradients.pop(key, {})
            return [found.get(spec.name) for spec in program.sent]

        if action.kind in "RW":
            return tuple
        return inputs if action.kind == "F" else gradients

    def sender(self, action: Action) -> Callable[[Tensors], None] | None:
        """A function that passes tensors to their readers, or gradients to their producers."""
        stage, micro_batch = action.stage, action.micro_batch

        def outputs(sent: Tensors) -> None:
            for spec, tensor in zip(self._programs[stage].sent, sent, strict=True):
                assert tensor is not None
                for reader in self._readers[spec.name]:
                    inputs = self._inputs.setdefault((reader, micro_batch), {})
                    inputs[spec.name] = tensor.detach()

        def gradients(found: Tensors) -> None:
            names = [spec.name for spec in self._programs[stage].received]
            own = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            for maker in self._makers[stage]:
                key = (maker, micro_batch)
                sums = self._gradients.setdefault(key, {})
                for spec in self._programs[maker].sent:
                    if spec.name in own:
                        before, gradient = sums.get(spec.name), own[spec.name]
                        sums[spec.name] = gradient if before is None else before + gradient
                self._reports[key] = self._reports.get(key, 0) + 1

        if action.kind in "RW":
            return None
        return outputs if action.kind == "F" else gradients

    def drain(self) -> None:
        """Nothing to wait for."""
