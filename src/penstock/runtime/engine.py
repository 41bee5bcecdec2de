"""One rank's part of a plan: its stages, messages, gradients, and the host memory that it keeps.

The C library returns freed memory to the system, which hands out zeroed pages at the next request.
That costs thousands of page faults for each micro-batch of a model of moderate size. An iteration
requests the same sizes repeatedly, so what one micro-batch frees is kept for the next.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from penstock.capture.batch.part import Leaf, PartialLeaf
from penstock.capture.contract import Batch
from penstock.capture.forward.call import casts_kept
from penstock.capture.forward.restored import kept_attributes, kept_buffers
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.kinds import kind_of_batch
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.elsewhere import StateLoads, refuse_foreign_values
from penstock.device import keep_freed_memory, without_nested_tensors
from penstock.errors import BadInput, RunFailed
from penstock.plan.ordering import schedule_refusal, updates_per_batch
from penstock.plan.plan import Plan
from penstock.plan.side_by_side import pipelines_in
from penstock.runtime.clock import clock_for
from penstock.runtime.gradients.buckets import GradientBuckets, make_groups, stages_of_parameters
from penstock.runtime.holdings import Holdings, share_attributes
from penstock.runtime.metrics import RankNumbers, Totals
from penstock.runtime.options import Options
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.heartbeat import BUILT, HEARTBEAT
from penstock.runtime.processes.world import World
from penstock.runtime.program import Place, RankStages, places_of_rank
from penstock.runtime.replica_check import ReplicaCheck
from penstock.runtime.stage.batch_norm import BatchNorms, groups_with_batch_norm, uses_batch_norm
from penstock.runtime.stage.building import runner_of, stages_of
from penstock.runtime.stage.compiled_call import StageCompiler
from penstock.runtime.stage.parameter_shards import ParameterShards
from penstock.runtime.stage.partial_recompute import fastest_call
from penstock.runtime.stage.random_stream import RandomStream
from penstock.runtime.stage.runner import LossTerm, ModuleRunner
from penstock.runtime.stage.whole_loss import EndOfPipeline
from penstock.runtime.transport.messages import BoundaryTensors, boundaries_of, messages_by_rank
from penstock.runtime.transport.open_transport import open_transport
from penstock.runtime.user_metrics import MetricSums

if TYPE_CHECKING:
    from penstock.runtime.stage.parallelized import ParallelizedShards

LeavesOfBatch: TypeAlias = Sequence[Leaf] | Mapping[int, Leaf]
"""The leaves of a batch, all of them or some by their numbers."""


class BatchKinds:
    """The graphs of all kinds of batches, and ``graph``, which runs, that of kind ``number``.

    ``paths`` are also those of evaluation mode, which run while the model does not train.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self.graphs, self.graph, self.number, self.trains = graph.kinds, graph, 0, True
        own = (kind.in_evaluation for kind in self.graphs)
        self.paths = [*self.graphs, *filter(None, own)]
        self._stages: list[RankStages[ModuleRunner]] = []

    @property
    def stages(self) -> RankStages[ModuleRunner]:
        """The stages of the graph that runs."""
        return next(s for p, s in zip(self.paths, self._stages, strict=True) if p is self.graph)

    def give_stages(self, stages: Sequence[RankStages[ModuleRunner]]) -> None:
        """Give each path its stages."""
        self._stages = list(stages)

    def programs(self) -> Iterator[Collection[StageProgram]]:
        """The programs of this rank's stages, path after path."""
        yield from (stages.programs.values() for stages in self._stages)

    def take(self, number: int) -> None:
        """Continue with a kind of batches; unless the model trains, as in evaluation mode."""
        own = self._of_mode(number)
        starts = self.graph.state.starts_training
        self.number, self.graph = number, own
        if not self.trains:
            own.set_training(False)
        # Once, for all kinds: the mode is the user's to set.
        own.state.starts_training &= starts

    def _of_mode(self, number: int) -> LayerGraph:
        own = self.graphs[number]
        return (None if self.trains else own.in_evaluation) or own

    def find(self, batches: Sequence[Batch], graph: LayerGraph | None) -> int:
        """The kind of the batches of one step; BadInput if they are of none, or of several.

        ``graph`` is one whose outputs alone are wanted.
        """
        of = graph or self.graphs[0]
        found = {kind_of_batch(of, batch, for_outputs=graph is not None) for batch in batches}
        if len(found) > 1:
            raise BadInput(
                f"the {len(batches)} batches of one step are of {len(found)} kinds, and must be "
                f"of one; take a step with those of each kind"
            )
        return found.pop()

    def by_path(self, number: int, batches: Sequence[Batch]) -> int:
        """Of the kinds for batches like those of a kind: that whose path of the loss fits.

        It is the first whose path the batches take, as far as they show it, or else the latest.
        """
        program = self.graphs[number].program
        fitting = [n for n, other in enumerate(self.graphs) if other.program is program]
        if len(fitting) == 1 or not batches:
            return number
        fitting.sort(key=lambda n: n != self.number)
        return next((n for n in fitting if self.follows_path(n, batches)), fitting[0])

    def follows_path(self, number: int, batches: Sequence[Batch]) -> bool:
        """Return whether the loss takes the path of a kind, in the mode of the next run."""
        graph = self._of_mode(number)
        if self.trains:
            return all(map(graph.follows_path, batches))
        graph.set_training(False)
        try:
            return all(map(graph.follows_path, batches))
        finally:
            graph.set_training(True)


class Engine:
    """Engine of one rank's part of iterations, without an optimizer.

    ``held`` are the tensors of this rank, and ``replicas`` compares them with the copies on other
    ranks. ``stages`` are its stages with the work prepared for each batch size. ``numbers``
    exchanges loss and norms with the other ranks. ``failures`` makes all ranks fail together.

    ``programs`` are the stages' programs. A rank that the plan does not use has none and only takes
    part in exchanges. ``metrics`` are computed in every iteration. ``also_crossed`` are boundary
    tensors of other graphs that will run over the same connections, for each kind of batch.
    ``pipelines`` are the ranks of each, where several train alone
    (`penstock.runtime.update.local_sgd`).
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        world: World,
        programs: Mapping[int, StageProgram],
        options: Options,
        metrics: MetricSums | None = None,
        also_crossed: Sequence[Sequence[BoundaryTensors]] = (),
        compiler: StageCompiler | None = None,
    ) -> None:
        keep_freed_memory(world.device)
        self.kinds, self.plan, self.world = BatchKinds(graph), plan, world
        for path in self.kinds.paths:
            path.state.undoes = not updates_per_batch(plan)
        self._sizes_run = set[tuple[int, tuple[int, ...]]]()
        self.places = places_of_rank(plan, world.rank)
        self.pipelines = pipelines_in(plan) if options.update.meet_every else ()
        self.metrics = metrics
        self.autocast_dtype = options.autocast
        place = max(plan.device_of(world.rank), 0)
        self.random = RandomStream(world.device, options.update.seed, place)
        self._closed = self._released = False
        self._loads = StateLoads()
        self._abort, self.disconnect = ExitStack(), ExitStack()
        self.failures = Failures(world, self._abort.close)
        self.clock = clock_for(world.device, self.failures.check)
        with ExitStack() as undo, self.failures.shared():
            undo.push(self.disconnect)
            self._connect(programs, options, also_crossed, compiler)
            undo.pop_all()
        HEARTBEAT.phase = BUILT

    def _connect(
        self,
        programs: Mapping[int, StageProgram],
        options: Options,
        also_crossed: Sequence[Sequence[BoundaryTensors]],
        compiler: StageCompiler | None,
    ) -> None:
        """Connect this rank with the others, and make its stages.

        Each needs what is before it:

            shards                    tensors are divided before anything refers to them
            held, replicas            this rank's tensors, and who holds the same
            groups                    of ranks that sum gradients, or statistics of batch norms
            transport                 room for every message that any kind of batch sends
            numbers, buckets          what is summed in a step, by transport or groups
            kinds                     runners of the stages, which start the sums of the buckets
        """
        graph, plan, world = self.graph, self.plan, self.world
        self._abort.callback(world.abandon_gpus)
        # It imports DTensors, which take seconds and launchers never need.
        from penstock.runtime.stage.parallelized import ParallelizedShards

        by_rows = any(stage.sharding == "parameters" for stage in plan.stages)
        kind = ParameterShards if by_rows else ParallelizedShards
        self.shards: ParameterShards | ParallelizedShards = world.all_succeed(
            lambda: kind(graph, plan, world)
        )
        for closing in (self._abort, self.disconnect):
            closing.callback(self.shards.leave)
        world.all_succeed(lambda: self.shards.divide(programs))
        self.held = Holdings(
            graph, plan, world.rank, programs, self.shards, sharded=options.shard_optimizer
        )
        every = options.safety.compare_replicas_every
        equal_every = options.update.meet_every or 1
        self.replicas = ReplicaCheck(graph, plan, world, self.held, every, equal_every)
        holder_sets = [ranks for holders in self.held.holders_at for ranks in holders.values()]
        # Schedules without a flush need these, and have no tensor groups.
        device_groups = () if plan.tensor_groups else plan.device_groups
        self.groups = make_groups(world, [*holder_sets, *device_groups])
        others = world.all_succeed(
            lambda: [stages_of(kind, plan, world.rank) for kind in self.kinds.paths[1:]]
        )
        every = [programs, *others]
        normed = groups_with_batch_norm(plan, world, self.places, every)
        if normed and self.pipelines:
            raise BadInput(
                "batch normalisation exchanges statistics over replicas in every micro-batch, and "
                "does not work with meet_every; use another norm, such as GroupNorm"
            )
        self._norms = BatchNorms(plan, make_groups(world, normed))
        boundaries = [boundaries_of(kind, plan) for kind in self.kinds.paths]
        also = [*also_crossed, *[()] * (len(boundaries) - len(also_crossed))]
        of_kinds = [
            messages_by_rank(plan, world.size, own, more, kind.largest_lengths)
            for kind, own, more in zip(self.kinds.paths, boundaries, also, strict=True)
        ]
        ever = [list(chain(*sent)) for sent in zip(*of_kinds, strict=True)]
        self.transport = open_transport(world, options.safety.transport, ever)
        if self.transport is not None:
            self._abort.callback(self.transport.abort)
            self.disconnect.callback(self.transport.close)
        counts = not self.held.place
        of_all = self.transport, self.clock, len(plan.ranks)
        self.numbers = RankNumbers(
            *of_all,
            counts=counts,
            pipelines=self.pipelines,
            other_path=lambda: self.graph.state.other_path,
            loads=self._loads,
        )
        self.buckets = self._buckets(programs, options.update.gradient_dtype)
        for let_go in (self.buckets.close, self.groups.clear, self._norms.groups.clear):
            self.disconnect.callback(let_go)
        if self.transport is not None:
            self.transport.share_sums([b for b in self.buckets.shared if b.values is None])
        # Only the ranks that hold a stage can check it, so errors must reach the others.
        runners = world.all_succeed(
            lambda: [
                {p.stage: self._runner(kind, p, own[p.stage], compiler) for p in self.places}
                for kind, own in zip(self.kinds.paths, every, strict=True)
            ]
        )
        given = zip(boundaries, every, runners, strict=True)
        self.kinds.give_stages([self.stages_with(*own, self.metrics) for own in given])

    @property
    def graph(self) -> LayerGraph:
        """The graph of the kind of batches that runs."""
        return self.kinds.graph

    @property
    def stages(self) -> RankStages[ModuleRunner]:
        """Its stages on this rank."""
        return self.kinds.stages

    @property
    def pipeline(self) -> int:
        """The number of this rank's pipeline, where several train alone."""
        return self.places[0].replica if self.pipelines and self.places else 0

    def _buckets(
        self, programs: Mapping[int, StageProgram], dtype: torch.dtype | None
    ) -> GradientBuckets:
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
            self.world, trained, stages, held.copies, self.groups, self.clock, held.owners
        )
        if isinstance(self.shards, ParameterShards) and self.shards.group is not None:
            divided = {p for name, p in held.named_parameters() if name in self.shards.dims}
            buckets.share(divided, self.shards.group)
        if dtype is not None:
            buckets.sum_in(dtype)
        if held.place:
            named = held.named_parameters()
            whole = (p for name, p in named if self.shards.dim_of(name) is None)
            buckets.not_counted = frozenset(whole)
        return buckets

    def _runner(
        self,
        graph: LayerGraph,
        place: Place,
        program: StageProgram,
        compiler: StageCompiler | None,
    ) -> ModuleRunner:
        normed = uses_batch_norm(program.module)
        if why := schedule_refusal(self.plan.schedule, norms=normed):
            raise BadInput(
                f"stage {place.stage} has batch normalisation, and schedule "
                f"'{self.plan.schedule}' {why}; use a schedule that holds every stage once"
            )
        # Compiled for the first kind of batch only, and not where replicas exchange statistics.
        whole_loss = bool(graph.whole_loss) and program.is_last
        alone = self._norms.of(place, program) is None and not whole_loss
        compiled = graph is self.graph and alone
        launching = partial(self.buckets.launching, place.stage)
        take_outputs = self.metrics.take_outputs if self.metrics is not None else None
        calls = self.shards_of(place.stage) or (compiler if compiled else None)
        make = partial(
            runner_of,
            graph,
            device=self.world.device,
            call_of=calls.call_of if calls is not None else fastest_call,
            around_last_backward=launching if self.buckets.shared else nullcontext,
            **self.options_of(place, program),
        )
        stage = self.plan.stages[place.stage]
        if not whole_loss:
            return make(stage, program, take_outputs=take_outputs)
        group = self.groups.get(self.plan.device_groups[place.group])
        return EndOfPipeline(
            graph,
            program,
            self.world.device,
            lambda network: make(replace(stage, layers=stage.layers[:-1]), network),
            add_up=partial(dist.all_reduce, group=group) if group is not None else None,
            autocast=self.autocast_dtype,
            take_outputs=take_outputs,
        )

    def shards_of(self, stage: int) -> "ParameterShards | ParallelizedShards | None":
        """The shards on which a stage is called, if it is divided."""
        return self.shards if self.shards.divides(stage) else None

    def options_of(self, place: Place, program: StageProgram) -> dict[str, Any]:
        """The options of a stage's `ModuleRunner` that hold whatever it runs for."""
        norm = self._norms.of(place, program)
        return {
            "autocast": self.autocast_dtype,
            "synchronised": self.acts_jointly(place, program),
            "around_forward": norm.counting if norm is not None else None,
        }

    def stages_with(
        self,
        boundaries: Sequence[BoundaryTensors],
        programs: Mapping[int, StageProgram],
        runners: Mapping[int, ModuleRunner],
        metrics: MetricSums | None = None,
    ) -> RankStages[ModuleRunner]:
        """Stages of this rank that `run` can run."""
        to_others = self.plan, self.world, self.transport, self.clock
        return RankStages(
            *to_others, boundaries=boundaries, programs=programs, runners=runners, metrics=metrics
        )

    def acts_jointly(self, place: Place, program: StageProgram) -> bool:
        """Return whether replicas without rows take part: they share statistics, or parameters."""
        by_rows = self.plan.stages[place.stage].sharding == "parameters"
        return by_rows or self._norms.of(place, program) is not None

    def share_values(self) -> None:
        """Send the parameters stepped here to ranks that did not, after the optimizer's step."""
        if self.held.owners:
            with self.failures.shared():
                self.buckets.share_values()

    def run(
        self,
        *batches: LeavesOfBatch,
        stages: RankStages[ModuleRunner] | None = None,
        training: bool = True,
        sums: bool = True,
        seed: float = 1.0,
        step: int = 0,
    ) -> Totals:
        """Run an iteration on batches, given as their leaves, whatever it is for.

        In ``training`` all forwards and all backwards run, as iteration number ``step``. Several
        batches make one iteration. Each is a flush of the pipeline, and gradients are summed over
        ranks in the last one. On return they are summed over all ranks that hold them (unless
        without ``sums``), but not yet divided by the weight nor by ``seed``, which multiplies the
        gradient of the loss. Otherwise only forwards run, in evaluation mode, and no weights,
        buffers or random numbers change.

        ``stages`` are others than those that are trained.
        """
        stages = stages or self.stages
        rows = run_iteration(
            self, batches, stages, training=training, sums=sums, seed=seed, step=step
        )
        if not training and any(row[-1] for row in rows):
            failures = (runner.failure for runner in stages.runners.values())
            own = next(filter(None, failures), None)
            texts = self.world.all_gather(str(own or ""))
            raise own or RunFailed(next(text for text in texts if text))
        return self.numbers.put_together(rows, stages.metrics, seed, summed=sums)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold the model in evaluation mode; at the end restore all that its forward changes."""
        graph = self.graph
        graph.set_training(False)
        try:
            with (
                without_nested_tensors(),
                self.random.set_aside(),
                kept_attributes(graph.own_module()),
                graph.untouched_state(),
                kept_buffers(self.held.changed_by_forward().values()),
            ):
                yield
        finally:
            graph.set_training(True)

    def take_kind(self, batches: Sequence[Batch], graph: LayerGraph | None = None) -> None:
        """Continue with the kind of these batches; all ranks must call this.

        ``graph`` is one whose outputs alone are wanted. Of several kinds that differ in the path of
        the loss it is that of `BatchKinds.by_path`.
        """
        own = 0
        if len(self.kinds.graphs) > 1:
            problem = None
            try:
                own = self.kinds.find(batches, graph)
            except BadInput as cause:
                problem = cause
            with self.failures.shared():
                own = -1 if problem else self.kinds.by_path(own, () if graph else batches)
                rows = self.numbers.exchange([float(own)], "the kind of a batch")
            if problem is not None:
                raise problem
            check_sizes(rows, ["the number of its example"])
        self.take(own)

    def take(self, kind: int) -> None:
        """Continue with a kind of batches, whose number all ranks give."""
        self.kinds.take(kind)
        if self.metrics is not None:
            self.metrics.graph = self.graph

    def release_others(self) -> None:
        """Free the parameters of the user's model that no stage of this rank holds, once."""
        if not self._released and self.world.size > 1:
            programs = chain(*self.kinds.programs())
            self.graph.hold_only(list(programs), self.held.whence)
            modules = (module for _, module in self.graph.program.named_modules())
            self.disconnect.callback(refuse_foreign_values(modules, self._loads))
        self._released = True

    def begin(self, metrics: MetricSums | None) -> None:
        """Begin an iteration: clear the measurements of the previous one."""
        self.clock.restart()
        if self.transport is not None:
            # What is done now is this engine's.
            HEARTBEAT.action = self.transport.position
        if metrics is not None:
            metrics.begin()

    def run_sizes(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """Disable early all-reduce (NCCL) if one of ``sizes``, which run next, has not run before.

        That loads kernels, for which CUDA waits until the device is idle. It never would be while a
        sum waits on it for a rank that needs more of this one.
        """
        run = {(self.kinds.number, size) for size in sizes}
        self.buckets.starts_early = self.world.backend != "nccl" or run <= self._sizes_run
        self._sizes_run |= run

    def agree_on_lengths(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """Check that all ranks have the same lengths, if lengths vary, before anything is sent.

        Otherwise a rank would send messages of another size than its peers expect. ``sizes`` are
        the number of samples and the lengths of each batch.
        """
        if not self.graph.layout.lengths:
            return
        with self.failures.shared():
            own = [float(number) for size in sizes for number in size]
            rows = self.numbers.exchange(own, "the lengths of a batch")
        check_sizes(rows, ["samples", *(length.name for length in self.graph.layout.lengths)])

    @property
    def has_ended(self) -> bool:
        """True if this engine failed or was closed."""
        return bool(self.failures.first)

    def close(self) -> None:
        """Disconnect from the other ranks."""
        if self._closed:
            return
        self._closed = True
        if self.transport is not None:
            HEARTBEAT.closed(self.transport.position)
        self.failures.first = self.failures.first or "it was closed"
        try:
            self.disconnect.close()
        finally:
            self.world.leave()

    def prepare(self, batch: Batch, compiler: StageCompiler | None) -> None:
        """Give replicas equal values; compile stages, if chosen, for the size of ``batch``."""
        self.held.share_first_values(self.groups, self.world)
        share_attributes(self.graph, self.world)
        if compiler is not None:
            leaves = self.graph.batch_leaves(batch)
            lengths = self.graph.lengths_of(dict(enumerate(leaves)))
            compiler.prepare(self.plan, self.world, leaves, self.autocast, lengths)

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.autocast_dtype)

    def casting_once(self) -> AbstractContextManager[object]:
        """Around actions between which no weight changes: autocast casts each weight once."""
        return casts_kept(self.world.device, self.autocast_dtype)


def run_iteration(
    engine: Engine,
    batches: Sequence[LeavesOfBatch],
    stages: RankStages[ModuleRunner],
    *,
    training: bool,
    sums: bool,
    seed: float,
    step: int,
) -> list[list[float]]:
    """The numbers of all ranks of an iteration, whatever it is for; see `Engine.run`."""
    at_once = engine.graph.whole_loss or engine.graph.one_slice
    if len(batches) > 1 and at_once:
        raise BadInput(
            f"a step of {len(batches)} batches, but the loss needs all samples of a step at "
            f"once ({at_once}); give them as one batch, with a plan of more "
            f"micro-batches, or give the loss as a list, loss=[(1.0, loss)]"
        )
    named = [b if isinstance(b, Mapping) else dict(enumerate(b)) for b in batches]
    sizes = [(next(iter(b.values())).shape[0], engine.graph.lengths_of(b)) for b in named]
    programs = [stages.program(*size, training=training) for size in sizes]
    if not any(isinstance(leaf, PartialLeaf) for leaf in named[0].values()):
        # What all ranks received about parts has been compared already.
        engine.agree_on_lengths([program.size for program in programs])
    engine.begin(stages.metrics)
    engine.graph.state.other_path = ""
    terms: list[LossTerm] = []
    buckets = engine.buckets if training else None
    with engine.failures.shared():
        if buckets is not None:
            buckets.zero()
            engine.run_sizes([program.size for program in programs])
        with engine.random.drawn() if training else engine.evaluating():
            for number, (leaves, program) in enumerate(zip(named, programs, strict=True)):
                if number:
                    engine.clock.next_flush(len(programs[number - 1].cut.micro_batches))
                last, name = number == len(programs) - 1, engine.random.name(step, number)
                stages.take(leaves, program, last=sums and last, name=name)
                with engine.casting_once() if training else nullcontext():
                    terms += stages.run(program, seed)
        if buckets is not None:
            buckets.finish(sums=sums)
        given = [list(leaves.values()) for leaves in named]
        own = engine.numbers.own(given, terms, buckets, stages.metrics, summed=sums)
        if not training:
            own.append(float(any(r.failure is not None for r in stages.runners.values())))
        return engine.numbers.exchange(own, "the end of the iteration")


def check_sizes(sizes_by_rank: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Raise `BadInput` if two ranks have batches of different sizes.

    Each rank gives the sizes called ``names``, for one batch after another.
    """
    first = sizes_by_rank[0]
    for rank, sizes in enumerate(sizes_by_rank):
        for place, (own, expected) in enumerate(zip(sizes, first, strict=True)):
            if own != expected:
                raise BadInput(
                    f"the ranks were given different batches: {names[place % len(names)]} is "
                    f"{own:g} on rank {rank} and {expected:g} on rank 0; give every rank the same "
                    "batches in the same order"
                )
