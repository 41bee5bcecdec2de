"""One rank's share of a plan: its stages, its channels, its gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from penstock.capture.layer_graph import LayerGraph, StageProgram
from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput, RunFailed
from penstock.plan.plan import Plan
from penstock.runtime.clock import clock_for
from penstock.runtime.execute import Step, execute, steps_of
from penstock.runtime.gradients.buckets import (
    GradientBuckets,
    holders_of_parameters,
    make_groups,
    stages_of_parameters,
)
from penstock.runtime.gradients.noise import NoiseMeter, check_replicated
from penstock.runtime.gradients.sharding import owners_of_parameters
from penstock.runtime.gradients.shared_memory_sum import share_sums
from penstock.runtime.iteration import (
    Iteration,
    Place,
    Prepared,
    check_sizes,
    places_of,
    prepare_iteration,
)
from penstock.runtime.metrics import RankTotals, Totals, fingerprint
from penstock.runtime.processes.abort_note import AbortNote
from penstock.runtime.processes.host_memory import keep_freed_memory
from penstock.runtime.processes.world import World
from penstock.runtime.stages.batch_norm import SynchronisedBatchNorm, uses_batch_norm
from penstock.runtime.stages.building import runner_of
from penstock.runtime.stages.compiled_call import StageCompiler
from penstock.runtime.stages.random_stream import RandomStream
from penstock.runtime.stages.runner import LossTerm, ModuleRunner
from penstock.runtime.transport.channels import (
    PipelineChannels,
    Places,
    TransportChoice,
    open_transport,
)
from penstock.runtime.transport.messages import Boundary, boundaries_of
from penstock.runtime.transport.possible_messages import messages_by_rank
from penstock.runtime.transport.segments import PeerFailed
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.runtime.transport.transport import announced
from penstock.runtime.user_metrics import Means, MetricSums

__all__ = ["Worker"]

INSTANCES = count()
"""Pipelines are made in the same order on every rank, so their numbers agree."""


class Worker:
    """Runs one rank's part of iterations; knows nothing of optimizers.

    ``programs`` are its stages; a rank that the plan does not use has none and takes part in
    exchanges only. ``seed`` is that of the stages' random numbers. ``metrics`` are computed in
    every iteration. ``also_crossed`` are the boundaries of what else will be run over the same
    ways.

    Raises:
        BadInput: plan, model and number of processes do not fit together.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        world: World,
        *,
        autocast: torch.dtype | None = None,
        transport: TransportChoice = "auto",
        shard_optimizer: bool = False,
        noise: NoiseMeter | None = None,
        seed: int = 0,
        metrics: MetricSums | None = None,
        also_crossed: Sequence[Boundary] = (),
        compiler: StageCompiler | None = None,
        programs: Mapping[int, StageProgram],
    ) -> None:
        if world.device.type == "cpu":
            keep_freed_memory()
        self.graph, self.plan, self.world = graph, plan, world
        self.places = places_of(plan, world.rank)
        self.boundaries = boundaries_of(graph, plan)
        self.clock = clock_for(world.device)
        self.holders = holders_of_parameters(graph, plan)
        self.owners: Mapping[str, int] = {}
        if shard_optimizer:
            self.owners = owners_of_parameters(graph.parameter_uses, self.holders)
        self.noise = noise
        self.programs = programs
        self.compiler = compiler
        self.autocast_dtype = autocast
        self.optimizer_s = 0.0
        self.random = RandomStream(world.device, seed, world.rank)
        self.metrics = metrics
        self.means: Means = {}
        self.wants_stop = self.stopping = False
        self._iterations = Prepared[Iteration]()
        self._failed = ""
        self._closed = False
        self._note = AbortNote(next(INSTANCES), alone=world.size == 1)
        stage_devices = plan.device_groups
        self.groups = make_groups(world, [*self.holders.values(), *stage_devices])
        self._norm_groups = make_groups(world, stage_devices)
        ever = messages_by_rank(
            plan, world.size, self.boundaries, also_crossed, graph.largest_lengths
        )
        self.transport = open_transport(world, transport, ever)
        self.buckets: GradientBuckets | None = None
        self._running = Prepared[tuple[PipelineChannels, tuple[Step, ...]]]()
        if programs:
            self.buckets = self._buckets()
        self._share_sums()
        # Only its holders know what is in a stage, so a refusal has to reach the others.
        self.runners = world.agreed(lambda: {p.stage: self._runner(p) for p in self.places})

    def _buckets(self) -> GradientBuckets:
        tied = self.graph.tied_names
        trained = {
            stage: {
                tied.get(name, name): parameter
                for name, parameter in program.module.named_parameters()
                if parameter.requires_grad
            }
            for stage, program in self.programs.items()
        }
        stages = stages_of_parameters(self.graph, self.plan)
        return GradientBuckets(
            self.world, trained, stages, self.holders, self.groups, self.clock, self.owners
        )

    def _share_sums(self) -> None:
        """Sum gradients in shared memory where messages go through it, and they are on the CPU."""
        on_cpu = all(device == "cpu" for device in self.world.devices)
        if isinstance(self.transport, SharedMemoryTransport) and on_cpu and not self.owners:
            shared = self.buckets.shared if self.buckets is not None else []
            share_sums(self.world, self.transport.segments, shared)

    def _runner(self, place: Place) -> ModuleRunner:
        world, program, buckets = self.world, self.programs[place.stage], self.buckets
        devices = self.plan.device_groups[place.group]
        norm, launching = None, nullcontext
        if buckets is not None and buckets.shared:
            launching = partial(buckets.launching, place.stage)
        if self.plan.mirrored and uses_batch_norm(program.module):
            raise BadInput(
                f"stage {place.stage} has batch normalisation, and schedule "
                f"'{self.plan.schedule}' holds it twice: the copies would average different "
                f"statistics; use a schedule that holds every stage once"
            )
        if devices in self._norm_groups and uses_batch_norm(program.module):
            group = self._norm_groups[devices]
            norm = SynchronisedBatchNorm(group, place.replica, len(devices))
        return runner_of(
            self.graph,
            self.plan.stages[place.stage],
            program,
            world.device,
            autocast=self.autocast_dtype,
            synchronised=norm is not None,
            around_forward=norm.counting if norm is not None else None,
            around_last_backward=launching,
            compiler=self.compiler,
            take_outputs=self.metrics.take_outputs if self.metrics is not None else None,
        )

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by their first names in the model."""
        tied = self.graph.tied_names
        modules = [program.module for program in self.programs.values()]
        named = (pair for module in modules for pair in module.named_parameters())
        return list({tied.get(name, name): parameter for name, parameter in named}.items())

    def stepped_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained ones of `named_parameters` that this rank's optimizer steps."""
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        return [(name, p) for name, p in trained if not self.owners or self.owns(name)]

    def share_values(self) -> None:
        """After the optimizer's step, hand on the parameters that other ranks have not stepped."""
        if self.owners and self.buckets is not None:
            with self.guarded():
                self.buckets.share_values()

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's buffers by their first names in the model."""
        tied = self.graph.tied_names
        modules = [program.module for program in self.programs.values()]
        named = (pair for module in modules for pair in module.named_buffers())
        return list({tied.get(name, name): buffer for name, buffer in named}.items())

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of this rank's stages by their first names, constants included."""
        return dict([*self.named_parameters(), *self.named_buffers()])

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers that belong to the model, by name."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor for name, tensor in named if name in self.holders}

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """Those of `named_tensors` that this rank stands for."""
        return {n: t for n, t in self.named_tensors().items() if self.owns(n)}

    def owns(self, name: str) -> bool:
        """Whether this rank stands for the tensor ``name``, or for a state ``<name>.<key>``.

        It is the first of their holders, or the one that steps a parameter where that is sharded.
        """
        if name not in self.holders:
            name = name.rpartition(".")[0]
        holders = self.holders.get(name)
        return holders is not None and self.owners.get(name, holders[0]) == self.world.rank

    def share_first_values(self) -> None:
        """Make all copies of a tensor equal to that of its first holder.

        Scripts that do not seed would otherwise train replicas that drift apart in silence.
        """
        for name, tensor in sorted(self.named_tensors().items()):
            group = self.groups.get(self.holders[name])
            if group is not None:
                value = tensor.detach().contiguous()
                plain = value.view(torch.uint8) if value.dtype == torch.bool else value
                dist.broadcast(plain, self.holders[name][0], group=group)
                with torch.no_grad():
                    tensor.copy_(value)

    def run(
        self,
        *batches: Sequence[torch.Tensor],
        training: bool,
        within: AbstractContextManager[object] | None = None,
        seed: float = 1.0,
    ) -> Totals:
        """One iteration over a batch: all forwards, and in training all backwards.

        Several batches are one iteration together: each is a flush of the pipeline, and gradients
        are summed over ranks in the last one. Afterwards they are summed over all ranks that hold
        them, but not yet divided by the weight nor by ``seed``, which multiplies the gradient of
        the loss. ``within`` is entered around the actions.

        Raises:
            BadInput: the ranks were given different batches.
            RunFailed: this rank, or another, cannot go on; the worker cannot be used again.
        """
        lengths_of = self.graph.lengths_of
        iterations = [
            self.iteration(leaves[0].shape[0], training, lengths_of(dict(enumerate(leaves))))
            for leaves in batches
        ]
        self.agree_on_lengths(iterations)
        buckets = self.buckets if training else None
        terms: list[LossTerm] = []
        self.clock.restart()
        if self.metrics is not None:
            self.metrics.begin()
        with self.guarded():
            if buckets is not None:
                self.zero_gradients(buckets, iterations)
            with within or nullcontext(), self.random.drawn():
                for number, (leaves, iteration) in enumerate(zip(batches, iterations, strict=True)):
                    if number:
                        self.clock.next_flush(len(iterations[number - 1].cut.micro_batches))
                    last = number == len(batches) - 1
                    terms += self._flush(leaves, iteration, seed, last)
                    if number == 0 and not last and buckets is not None and self.noise is not None:
                        for bucket in buckets.buckets:
                            self.noise.measure(bucket)
            if buckets is not None:
                buckets.finish()
            rows = self.end_numbers(batches, terms, buckets, self.metrics)
        totals, self.means = self.put_together(rows, self.metrics, seed)
        return totals

    def end_numbers(
        self,
        batches: Sequence[Sequence[torch.Tensor]],
        terms: Sequence[LossTerm],
        buckets: GradientBuckets | None,
        metrics: MetricSums | None,
    ) -> list[list[float]]:
        """Exchange the numbers of an iteration; those of every rank, for `put_together`."""
        own = self.own_numbers(batches, terms, buckets, metrics)
        return self.exchange(own, "the end of the iteration")

    def own_numbers(
        self,
        batches: Sequence[Sequence[torch.Tensor]],
        terms: Sequence[LossTerm],
        buckets: GradientBuckets | None,
        metrics: MetricSums | None,
    ) -> list[float]:
        """This rank's numbers of an iteration."""
        own = self._totals(batches, terms, buckets)
        return [*own, float(self.wants_stop), *(metrics.totals() if metrics is not None else ())]

    def put_together(
        self, rows: Sequence[list[float]], metrics: MetricSums | None, seed: float = 1.0
    ) -> tuple[Totals, Means]:
        """The totals of an iteration, and the means of metrics.

        Raises:
            BadInput: the ranks were given different batches.
        """
        count = len(fields(RankTotals))
        totals = Totals.of([row[:count] for row in rows], len(self.plan.devices), seed)
        self.stopping = any(row[count] for row in rows)
        if metrics is None:
            return totals, {}
        return totals, metrics.combined([row[count + 1 :] for row in rows])

    def _flush(
        self, leaves: Sequence[torch.Tensor], iteration: Iteration, seed: float, last: bool
    ) -> list[LossTerm]:
        """One batch through the pipeline; gradients are summed over ranks behind the last one."""
        if not self.programs:
            return []
        self.take(leaves, iteration, seed, last=last)
        channels, steps = self.ready(iteration)
        channels.begin()
        execute(steps, channels, self.clock)
        return self.loss_terms

    @property
    def loss_terms(self) -> list[LossTerm]:
        """Those of the latest batch that this rank computed."""
        return [term for runner in self.runners.values() for term in runner.loss_terms]

    def take(
        self,
        leaves: Sequence[torch.Tensor],
        iteration: Iteration,
        seed: float = 1.0,
        *,
        last: bool = True,
    ) -> None:
        """Give the stages their rows of a batch; see `run` for the others."""
        if self.metrics is not None:
            rows = self.rows_of_last_stage(iteration)
            self.metrics.take_batch(dict(enumerate(leaves)), rows)
        for stage, runner in self.runners.items():
            inputs = self.programs[stage].batch_inputs
            work = iteration.work(stage, leaves, inputs, self.world.device)
            runner.begin(work if last else replace(work, last_backward=-1))
            runner.seed = seed

    def ready(self, iteration: Iteration) -> tuple[PipelineChannels, tuple[Step, ...]]:
        """The channels and the steps of ``iteration``, looked up once."""
        rows = iteration.cut.micro_batches[-1].stop

        def make() -> tuple[PipelineChannels, tuple[Step, ...]]:
            places = {s: Places(p.received, p.sent) for s, p in self.programs.items()}
            channels = PipelineChannels(
                self.world.rank, self.transport, places, self.clock, iteration.messages
            )
            order = [a for a in iteration.order if self.runners[a.stage].has_work(a.kind)]
            return channels, steps_of(order, self.runners, channels)

        return self._running.find((rows, iteration.lengths, iteration.training), make)

    def agree_on_lengths(self, iterations: Sequence[Iteration]) -> None:
        """Where lengths vary, find out before anything is sent whether all ranks have the same.

        What a rank sends would not fit what its peers expect.

        Raises:
            BadInput: they have not.
        """
        if not self.graph.lengths:
            return
        with self.guarded():
            own = [float(n) for i in iterations for n in (i.cut.micro_batches[-1].stop, *i.lengths)]
            rows = self.exchange(own, "the lengths of a batch")
        check_sizes(rows, ["samples", *(length.name for length in self.graph.lengths)])

    def zero_gradients(self, buckets: GradientBuckets, iterations: Sequence[Iteration]) -> None:
        """Before the backwards of a step; norms are taken behind its first batch, or unsummed."""
        buckets.zero()
        if self.noise is not None:
            samples = sum(iteration.cut.micro_batches[-1].stop for iteration in iterations)
            self.noise.begin(iterations[0].cut, samples)
            buckets.before_sum = self.noise.measure if len(iterations) == 1 else None

    def check_noise(self, batches: int) -> None:
        """Raise `BadInput` where a step of so many batches cannot tell the gradient's noise."""
        if self.noise is not None and batches == 1:
            check_replicated(self.graph.parameter_uses, self.holders)

    def exchange(self, values: list[float], what: str) -> list[list[float]]:
        """Numbers of every rank, by rank."""
        return self.announce(values, what)()

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Give numbers of this rank; what is returned waits for those of all, by rank.

        Every rank calls it before it announces more.
        """
        return announced(self.transport, values, what)

    def rows_of_last_stage(self, iteration: Iteration) -> Sequence[range]:
        """The rows of each micro-batch that this rank's replica of the last stage computes."""
        part = iteration.parts.get(len(self.plan.stages) - 1)
        return part.rows if part is not None else ()

    def iteration(self, rows: int, training: bool, lengths: LengthsOf = ()) -> Iteration:
        """The prepared work for a batch of ``rows`` samples with these lengths."""

        def make() -> Iteration:
            rank = self.world.rank
            return prepare_iteration(self.plan, self.boundaries, rank, rows, training, lengths)

        return self._iterations.find((rows, lengths, training), make)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever goes wrong within ends all ranks, each with the message of the first failure."""
        if self._failed:
            raise RunFailed(f"this pipeline has failed before ({self._failed}); build a new one")
        try:
            yield
        except PeerFailed as failure:
            text = self._note.read() or str(failure)
            self._give_up(text)
            raise RunFailed(f"rank {self.world.rank} stopped: {text}") from failure
        except BaseException as failure:
            text = str(failure).partition("\n")[0] or type(failure).__name__
            who = f"rank {self.world.rank}"
            self._give_up(text if who in text else f"{who}: {text}")
            raise

    @property
    def has_ended(self) -> bool:
        """Whether it failed or was closed."""
        return bool(self._failed)

    def close(self) -> None:
        """Leave the other ranks in peace."""
        if self._closed:
            return
        self._closed = True
        if self.transport is not None and not self._failed:
            self.transport.close()
        if self.buckets is not None:
            self.buckets.close()
        self._failed = self._failed or "it was closed"
        self.world.leave()

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.autocast_dtype)

    def _give_up(self, text: str) -> None:
        self._failed = text
        self._note.write(text)
        if self.transport is not None:
            self.transport.abort()

    def _totals(
        self,
        batches: Sequence[Sequence[torch.Tensor]],
        terms: Sequence[LossTerm],
        buckets: GradientBuckets | None,
    ) -> list[float]:
        loss_sum = weight = 0.0
        if terms:
            losses = torch.stack([term.loss for term in terms]).double()
            weights = torch.stack([term.weight for term in terms]).to(losses)
            weight = float(weights.sum())
            loss_sum = float(torch.where(weights > 0, losses * weights, 0.0).sum())
        noise = (0.0, 0.0)
        if self.noise is not None and buckets is not None:
            noise = self.noise.totals(buckets.buckets)
        return RankTotals(
            loss_sum,
            weight,
            buckets.square_sum() if buckets is not None else 0.0,
            self.clock.busy_s,
            self.clock.now() - self.clock.start_s,
            self.optimizer_s,
            float(sum(leaves[0].shape[0] for leaves in batches)),
            sum(n * fingerprint(leaf) for n, leaves in enumerate(batches, 1) for leaf in leaves),
            *noise,
        ).values()
