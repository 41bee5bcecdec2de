"""The stages of one rank, with all that is prepared once for batches of one size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from penstock.capture.batch_part import Leaf
from penstock.capture.lengths import LengthsOf
from penstock.capture.stage_program import StageProgram
from penstock.plan.plan import Plan
from penstock.runtime.clock import Clock
from penstock.runtime.execute import PreparedAction, execute, steps_of
from penstock.runtime.iteration import DeviceCopies, Iteration, SizeCache, prepare_iteration
from penstock.runtime.processes.world import World
from penstock.runtime.stages.runner import LossTerm, StageInputs, StageRunner
from penstock.runtime.transport.channels import PipelineChannels, Places
from penstock.runtime.transport.messages import BoundaryTensors, RankMessages
from penstock.runtime.transport.transport import Transport
from penstock.runtime.user_metrics import MetricSums
from penstock.schedule.action import ActionKind

__all__ = ["FedRunner", "RankStages", "Ready"]


class FedRunner(StageRunner, Protocol):
    """A stage that receives its rows before each iteration.

    ``loss_terms`` are those of the iteration. ``seed`` multiplies the gradients from which its
    backwards start.
    """

    loss_terms: list[LossTerm]
    seed: float

    def has_work(self, kind: ActionKind) -> bool:
        """Whether actions of this kind have any effect in this stage."""
        ...

    def begin(self, work: StageInputs) -> None:
        """Take the inputs of the next iteration."""
        ...


Runner = TypeVar("Runner", bound=FedRunner)


@dataclass(frozen=True)
class Ready:
    """What is prepared once for batches of one size."""

    iteration: Iteration
    channels: PipelineChannels
    steps: tuple[PreparedAction, ...]


class RankStages(Generic[Runner]):
    """The stages of one rank, with a program and a runner for each; none on unused ranks.

    ``metrics`` are computed from the outputs of the last stage.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        transport: Transport | None,
        clock: Clock,
        *,
        boundaries: Sequence[BoundaryTensors],
        programs: Mapping[int, StageProgram],
        runners: Mapping[int, Runner],
        metrics: MetricSums | None,
    ) -> None:
        self.boundaries, self.programs, self.runners = boundaries, programs, runners
        self._plan, self._world, self._transport, self._clock = plan, world, transport, clock
        self._metrics = metrics
        self._ready = SizeCache[Ready]()

    @property
    def loss_terms(self) -> list[LossTerm]:
        """The loss terms of the latest batch that this rank computed."""
        return [term for runner in self.runners.values() for term in runner.loss_terms]

    def check_next_runs(self) -> None:
        """Compare the calls of each stage's next run with those of the example."""
        for program in self.programs.values():
            program.module.check_next_run()

    def prepared(self, rows: int, training: bool, lengths: LengthsOf = ()) -> Ready:
        """The work prepared for a batch of ``rows`` samples with these lengths."""

        def make() -> Ready:
            rank, boundaries = self._world.rank, self.boundaries
            iteration = prepare_iteration(self._plan, boundaries, rank, rows, training, lengths)
            channels = self.channels(iteration.messages)
            order = [a for a in iteration.order if self.runners[a.stage].has_work(a.kind)]
            return Ready(iteration, channels, steps_of(order, self.runners, channels))

        return self._ready.find((rows, lengths, training), make)

    def channels(self, messages: RankMessages) -> PipelineChannels:
        """Channels for the messages of one iteration."""
        places = {stage: Places(p.received, p.sent) for stage, p in self.programs.items()}
        world, clock = self._world, self._clock
        return PipelineChannels(world.rank, self._transport, places, clock, messages, world.device)

    def take(
        self,
        leaves: Mapping[int, Leaf],
        iteration: Iteration,
        seed: float = 1.0,
        *,
        last: bool = True,
        name: tuple[int, ...] = (),
    ) -> None:
        """Give the stages their rows of a batch; the ``last`` batch completes the gradients.

        ``name`` tells the batch from all others of the run.
        """
        if self._metrics is not None:
            part = iteration.parts.get(len(self._plan.stages) - 1)
            self._metrics.take_batch(leaves, part.rows if part is not None else ())
        device = DeviceCopies(self._world.device)
        for stage, runner in self.runners.items():
            inputs = self.programs[stage].batch_inputs
            work = iteration.work(stage, leaves, inputs, device)
            runner.begin(
                replace(
                    work,
                    last_backward=work.last_backward if last else -1,
                    names=tuple((*name, number) for number in range(len(work.rows))),
                )
            )
            runner.seed = seed

    def run(self, ready: Ready) -> list[LossTerm]:
        """Run the batch given to `take` through the pipeline; returns its loss terms."""
        ready.channels.begin()
        execute(ready.steps, ready.channels, self._clock)
        return self.loss_terms
