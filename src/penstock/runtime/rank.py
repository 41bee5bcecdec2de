"""One rank's part of a plan: its stages, its messages, its gradients."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from penstock.capture.batch_part import Leaf, PartialLeaf
from penstock.capture.layer_graph import Batch, LayerGraph, StageProgram
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.clock import clock_for
from penstock.runtime.gradients.buckets import GradientBuckets, make_groups, stages_of_parameters
from penstock.runtime.gradients.noise import NoiseMeter, check_replicated
from penstock.runtime.gradients.shared_memory_sum import share_sums
from penstock.runtime.holdings import Holdings
from penstock.runtime.iteration import Iteration, Place, check_sizes, places_of
from penstock.runtime.metrics import Totals
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.host_memory import keep_freed_memory
from penstock.runtime.processes.watch import BUILT, WATCH
from penstock.runtime.processes.world import World
from penstock.runtime.rank_numbers import RankNumbers
from penstock.runtime.rank_stages import RankStages
from penstock.runtime.replica_check import ReplicaCheck
from penstock.runtime.settings import RankSettings
from penstock.runtime.stages.batch_norm import SynchronisedBatchNorm, uses_batch_norm
from penstock.runtime.stages.building import runner_of
from penstock.runtime.stages.compiled_call import StageCompiler
from penstock.runtime.stages.random_stream import RandomStream
from penstock.runtime.stages.runner import LossTerm, ModuleRunner
from penstock.runtime.stages.tensor_shards import TensorShards
from penstock.runtime.transport.channels import open_transport
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of
from penstock.runtime.transport.possible_messages import messages_by_rank
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.runtime.user_metrics import Means, MetricSums

__all__ = ["Worker"]


class Worker:
    """Runs one rank's part of iterations, without an optimizer.

    ``held`` are the tensors of this rank, and ``replicas`` compares them with the copies on other
    ranks. ``stages`` are its stages with the work prepared for each batch size. ``numbers``
    exchanges loss and norms with the other ranks. ``failures`` makes all ranks fail together.

    ``programs`` are the stages' programs. A rank that the plan does not use has none and only takes
    part in exchanges. ``metrics`` are computed in every iteration. ``also_crossed`` are boundary
    tensors of other graphs that will run over the same connections.

    Raises:
        BadInput: plan, model and number of processes do not fit together.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        world: World,
        programs: Mapping[int, StageProgram],
        settings: RankSettings,
        *,
        metrics: MetricSums | None = None,
        also_crossed: Sequence[BoundaryTensors] = (),
        compiler: StageCompiler | None = None,
    ) -> None:
        if world.device.type == "cpu":
            keep_freed_memory()
        self.graph, self.plan, self.world = graph, plan, world
        self.places = places_of(plan, world.rank)
        self.clock = clock_for(world.device)
        self.noise = NoiseMeter(plan, world.rank) if settings.gradient_noise else None
        self.metrics = metrics
        self.autocast_dtype, self.compiled = settings.autocast, compiler is not None
        self.random = RandomStream(world.device, settings.seed, max(plan.device_of(world.rank), 0))
        self.means: Means = {}
        self._closed = False
        self.failures = Failures(world, self._abort)
        self.tensor = world.agreed(
            lambda: TensorShards(graph, plan, world, settings.tensor_parallel)
        )
        world.agreed(lambda: self.tensor.divide(programs))
        self.held = Holdings(
            graph, plan, world.rank, programs, self.tensor, sharded=settings.shard_optimizer
        )
        self.replicas = ReplicaCheck(graph, plan, world, self.held, settings.compare_replicas_every)
        holder_sets = [ranks for holders in self.held.holders_at for ranks in holders.values()]
        # Batch normalisation and schedules without a flush need these, and have no tensor groups.
        device_groups = () if plan.tensor_groups else plan.device_groups
        self.groups = make_groups(world, [*holder_sets, *device_groups])
        self._norm_groups = make_groups(world, device_groups)
        boundaries = boundaries_of(graph, plan)
        ever = messages_by_rank(plan, world.size, boundaries, also_crossed, graph.largest_lengths)
        self.transport = open_transport(world, settings.transport, ever)
        self.numbers = RankNumbers(self.transport, self.clock, len(plan.ranks), self.noise)
        self.buckets = self._buckets(programs)
        self._share_sums()
        # Only the ranks that hold a stage can check it, so errors must reach the others.
        runners = world.agreed(
            lambda: {p.stage: self._runner(p, programs[p.stage], compiler) for p in self.places}
        )
        self.stages: RankStages[ModuleRunner] = RankStages(
            plan,
            world,
            self.transport,
            self.clock,
            boundaries=boundaries,
            programs=programs,
            runners=runners,
            metrics=metrics,
        )
        WATCH.phase = BUILT

    def _buckets(self, programs: Mapping[int, StageProgram]) -> GradientBuckets:
        tied, held = self.graph.tied_names, self.held
        trained = {
            stage: {
                tied.get(name, name): parameter
                for name, parameter in program.module.named_parameters()
                if parameter.requires_grad
            }
            for stage, program in programs.items()
        }
        stages = stages_of_parameters(self.graph, self.plan)
        buckets = GradientBuckets(
            self.world, trained, stages, held.holders, self.groups, self.clock, held.owners
        )
        if held.place:
            named = held.named_parameters()
            whole = (p for name, p in named if self.tensor.dim_of(name) is None)
            buckets.not_counted = frozenset(whole)
        return buckets

    def _share_sums(self) -> None:
        """Sum gradients on the CPU in shared memory if messages use it."""
        on_cpu = all(device == "cpu" for device in self.world.devices)
        whole = on_cpu and not self.held.owners
        if isinstance(self.transport, SharedMemoryTransport) and whole:
            share_sums(self.world, self.transport.segments, self.buckets.shared)

    def _runner(
        self, place: Place, program: StageProgram, compiler: StageCompiler | None
    ) -> ModuleRunner:
        norm, launching = self.norm_of(place, program), nullcontext
        if self.buckets.shared:
            launching = partial(self.buckets.launching, place.stage)
        if self.plan.mirrored and uses_batch_norm(program.module):
            raise BadInput(
                f"stage {place.stage} has batch normalisation, and schedule "
                f"'{self.plan.schedule}' holds it twice: the copies would average different "
                f"statistics; use a schedule that holds every stage once"
            )
        return runner_of(
            self.graph,
            self.plan.stages[place.stage],
            program,
            self.world.device,
            autocast=self.autocast_dtype,
            synchronised=norm is not None,
            around_forward=norm.counting if norm is not None else None,
            around_last_backward=launching,
            calls=self.tensor if self.tensor.is_divided else compiler,
            take_outputs=self.metrics.take_outputs if self.metrics is not None else None,
        )

    def check_replicas(self, step: int) -> None:
        """Compare copies of weights before step ``step``, if it is time to.

        Raises:
            ReplicasDiffer: two copies are not equal.
        """
        self.replicas.run(step, self.numbers, self.failures)

    def norm_of(self, place: Place, program: StageProgram) -> SynchronisedBatchNorm | None:
        """How the replicas of a stage share the statistics of batch norm; None without any."""
        devices = self.plan.device_groups[place.group]
        if devices not in self._norm_groups or not uses_batch_norm(program.module):
            return None
        return SynchronisedBatchNorm(self._norm_groups[devices], place.replica, len(devices))

    def share_values(self) -> None:
        """After the optimizer's step, send the parameters stepped here to ranks that did not."""
        if self.held.owners:
            with self.failures.shared():
                self.buckets.share_values()

    def run(
        self,
        *batches: Sequence[Leaf],
        within: AbstractContextManager[object] | None = None,
        seed: float = 1.0,
    ) -> Totals:
        """Run one training iteration on a batch: all forwards and all backwards.

        Several batches make one iteration. Each is a flush of the pipeline, and gradients are
        summed over ranks in the last one. On return gradients are summed over all ranks that hold
        them, but not yet divided by the weight nor by ``seed``, which multiplies the gradient of
        the loss. The actions run inside the context manager ``within``.

        Raises:
            BadInput: the ranks were given different batches.
            RunFailed: this rank or another failed; the worker cannot be used again.
        """
        named = [dict(enumerate(leaves)) for leaves in batches]
        every = [
            self.stages.prepared(leaves[0].shape[0], True, self.graph.lengths_of(leaves))
            for leaves in named
        ]
        iterations = [ready.iteration for ready in every]
        if not isinstance(batches[0][0], PartialLeaf):
            # What all ranks were told of parts has been compared already.
            self.agree_on_lengths(iterations)
        terms: list[LossTerm] = []
        self.begin()
        with self.failures.shared():
            self.zero_gradients(iterations)
            with within or nullcontext(), self.random.drawn():
                for number, (leaves, ready) in enumerate(zip(named, every, strict=True)):
                    if number:
                        self.clock.next_flush(len(iterations[number - 1].cut.micro_batches))
                    last = number == len(every) - 1
                    self.stages.take(leaves, ready.iteration, seed, last=last)
                    terms += self.stages.run(ready)
                    if number == 0 and not last and self.noise is not None:
                        for bucket in self.buckets.buckets:
                            self.noise.measure(bucket)
            self.buckets.finish()
            # All ranks of a tensor group have equal loss terms, of which those of the first count.
            counted = [] if self.held.place else terms
            own = self.numbers.own(batches, counted, self.buckets, self.metrics)
            rows = self.numbers.exchange(own, "the end of the iteration")
        totals, self.means = self.numbers.put_together(rows, self.metrics, seed)
        return totals

    def begin(self) -> None:
        """Begin an iteration: clear the measurements of the previous one."""
        self.clock.restart()
        if self.metrics is not None:
            self.metrics.begin()

    def agree_on_lengths(self, iterations: Sequence[Iteration]) -> None:
        """Check that all ranks have the same lengths, if lengths vary, before anything is sent.

        Otherwise a rank would send messages of another size than its peers expect.

        Raises:
            BadInput: the lengths differ.
        """
        if not self.graph.lengths:
            return
        with self.failures.shared():
            own = [float(n) for i in iterations for n in (i.cut.micro_batches[-1].stop, *i.lengths)]
            rows = self.numbers.exchange(own, "the lengths of a batch")
        check_sizes(rows, ["samples", *(length.name for length in self.graph.lengths)])

    def zero_gradients(self, iterations: Sequence[Iteration]) -> None:
        """Zero the gradients, and begin to measure noise in the first of several batches."""
        self.buckets.zero()
        if self.noise is not None:
            samples = sum(iteration.cut.micro_batches[-1].stop for iteration in iterations)
            self.noise.begin(iterations[0].cut, samples)
            self.buckets.before_sum = self.noise.measure if len(iterations) == 1 else None

    def check_noise(self, batches: int) -> None:
        """Raise `BadInput` if gradient noise cannot be estimated from this number of batches."""
        if self.noise is not None and batches == 1:
            check_replicated(self.graph.parameter_uses, self.held.holders)

    @property
    def has_ended(self) -> bool:
        """Whether this worker failed or was closed."""
        return bool(self.failures.first)

    def close(self) -> None:
        """Disconnect from the other ranks."""
        if self._closed:
            return
        self._closed = True
        WATCH.closed()
        if self.transport is not None and not self.has_ended:
            self.transport.close()
        self.buckets.close()
        self.tensor.leave()
        self.failures.first = self.failures.first or "it was closed"
        self.world.leave()

    def prepare(self, batch: Batch, compiler: StageCompiler | None) -> None:
        """Give replicas equal values; compile stages, if they are to be, for the size of ``batch``.

        Stages of tensor groups are tried with one sample of it.

        Raises:
            BadInput: an operator cannot run on shards.
        """
        self.held.share_first_values(self.groups)
        leaves = self.graph.batch_leaves(batch)
        if self.plan.tensor_groups:
            self.world.agreed(lambda: self._try_shards(leaves))
        if compiler is None:
            return
        lengths = self.graph.lengths_of(dict(enumerate(leaves)))
        compiler.prepare(self.plan, self.world, leaves, self.autocast, lengths)

    def _try_shards(self, leaves: Sequence[torch.Tensor]) -> None:
        if self.tensor.is_divided:
            lengths = self.graph.lengths_of(dict(enumerate(leaves)))
            with self.random.set_aside():
                for program in self.stages.programs.values():
                    self.tensor.attempt(program, leaves, lengths)
            self.buckets.zero()

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.autocast_dtype)

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        self.tensor.leave()
