"""The connection of a pipeline's ranks for what is trained now, and all that depends on it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn

from penstock.capture.contract import Batch
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.in_one_process import in_one_process
from penstock.plan.ordering import updates_per_batch
from penstock.plan.plan import Plan
from penstock.runtime.batch_reading import BatchReading
from penstock.runtime.checkpoints.checkpoint import CheckpointWriter
from penstock.runtime.conflicts import check_conflicts, uses_of, uses_of_graph, uses_of_training
from penstock.runtime.engine import Engine
from penstock.runtime.evaluation.inference import Inference, PredictionView
from penstock.runtime.gradients.loss_scaling import check_parameter_types
from penstock.runtime.options import Options, Update
from penstock.runtime.processes.world import World, join_world
from penstock.runtime.stage.building import build_stages, check_alike, check_plan_fits
from penstock.runtime.stage.compiled_call import StageCompiler
from penstock.runtime.tables import Constraints, Weights
from penstock.runtime.update.steps import Steps
from penstock.runtime.update.training import Training, state_bytes_of, stepped_together
from penstock.runtime.user_metrics import MetricSums
from penstock.runtime.verify.verified_steps import VerifiedSteps

if TYPE_CHECKING:
    from penstock.runtime.update.host_state import HostState
    from penstock.runtime.update.local_sgd import Meetings


@dataclass(frozen=True)
class Setup:
    """The model, plan and options of a pipeline.

    ``batch`` is the example. ``constraints`` are those for which the plan was found here, if it
    was.
    """

    graph: LayerGraph
    batch: Batch
    plan: Plan
    options: Options
    constraints: Constraints | None

    @property
    def uses(self) -> dict[str, str]:
        """The uses of all of these, for `check_conflicts`."""
        return self.options.uses | uses_of(self.plan) | uses_of_graph(self.graph, self.plan)


@dataclass(frozen=True, eq=False)
class Connection:
    """All that is made again when what is trained changes; `connect` makes it."""

    setup: Setup
    engine: Engine
    compiler: StageCompiler | None
    checkpoints: CheckpointWriter
    reading: BatchReading
    inference: Inference
    training: Training
    steps: Steps
    verified: VerifiedSteps


OPEN: "WeakSet[Connection]" = WeakSet()
"""The connections of this process, of which some may have ended."""


def connect(
    setup: Setup, weights: Weights | Path | str | None = None, before: Connection | None = None
) -> Connection:
    """Connect the ranks for a setup; ``before`` is the pipeline's connection until now."""
    graph, plan, options = setup.graph, setup.plan, setup.options
    uses = setup.uses
    check_conflicts(uses)
    if options.safety.transport == "in-process":
        plan = in_one_process(plan)
    with ExitStack() as undo:
        world = join_world(options.device, options.timeout_s)
        undo.callback(world.leave)
        if world.size > 1:
            world.all_succeed(partial(check_own_model, graph, before))
        check_alike(plan, graph, world)
        is_found = setup.constraints is not None
        check_plan_fits(plan, graph, world, may_idle=is_found or options.safety.idle_ranks)
        graph.batch_leaves(setup.batch)
        compiler = StageCompiler(world.device) if graph.compiles else None
        checkpoints = CheckpointWriter(world)
        programs = build_stages(graph, plan, world, options.update.seed, weights)
        if options.optimizer is not None:
            check_parameter_types(world, programs)
        view = PredictionView(graph, plan)
        sums = MetricSums(options.metrics, graph) if options.metrics else None
        engine = Engine(graph, plan, world, programs, options, sums, view.boundaries, compiler)
        undo.callback(engine.close)
        with engine.failures.shared():
            engine.prepare(setup.batch, compiler)
            reading = BatchReading(engine)
            inference = Inference(engine, reading, view)
            together = stepped_together(engine)
            stepped = [pair for own in together for pair in own]
            training = Training(
                together,
                world.device,
                options,
                meetings=meetings_of(engine, options.update),
                on_host=host_state(stepped, options, world) if uses.get("host state") else None,
            )
            trained = uses_of_training(training.optimizer, training.by_loss * training.follows)
            check_conflicts(uses | trained)
            steps = world.all_succeed(partial(way_to_train, engine, training, options.update))
            compared = options.verify, options.safety.verify_every
            verified = VerifiedSteps(
                engine, training, steps, *compared, checks_loss=options.safety.check_loss
            )
        undo.pop_all()
    of_ranks = engine, compiler, checkpoints, reading, inference
    connection = Connection(setup, *of_ranks, training, steps, verified)
    OPEN.add(connection)
    return connection


def reconnect(before: Connection, setup: Setup) -> Connection:
    """Connect the ranks for a setup, and end the connection ``before``.

    Messages, sums of gradients and the optimizer are made for what is trained.
    """
    if changed := setup.graph.cut.changed_flags:
        thawed = f"a change of requires_grad of '{changed[0]}'"
        check_conflicts(setup.uses | {"thawed": thawed})
    before.checkpoints.wait()
    engine = before.engine
    engine.buckets.close()
    for _, parameter in engine.held.named_parameters():
        parameter.grad = None
    setup.graph.cut.follow_flags()
    try:
        # Before the old connections end, with which processes would leave.
        connection = connect(setup, before=before)
    finally:
        engine.close()
    # A request to stop holds until the next step.
    connection.engine.numbers.wants_stop = engine.numbers.wants_stop
    connection.verified.go_on_from(before.verified)
    return connection


def check_own_model(graph: LayerGraph, before: Connection | None) -> None:
    """Raise `BadInput` if an open connection but ``before`` trains a part of the model.

    Each rank releases what its stages do not hold, which the other pipeline may need.
    """
    own = {id(p): name for name, p in graph.model.named_parameters()}
    for other in OPEN:
        shared = (own.get(id(p)) for p in other.setup.graph.model.parameters())
        is_open = other is not before and not other.engine.has_ended
        if is_open and (name := next(filter(None, shared), "")):
            raise BadInput(
                f"parameter '{name}' is in another open pipeline, and ranks release what "
                f"their stages do not hold; close that with close(gather=True) first, or give "
                f"this one a copy.deepcopy of the model"
            )


def host_state(
    named: Sequence[tuple[str, nn.Parameter]], options: Options, world: World
) -> "HostState | None":
    """Host memory for the state of the optimizer, if there is one."""
    if options.optimizer is None:
        return None
    # Imported here: few runs need it.
    from penstock.runtime.update.host_state import HostState, check_host_room

    parameters = [parameter for _, parameter in named]
    check_host_room(world, parameters, state_bytes_of(options.optimizer, named)[0])
    return HostState(parameters)


def meetings_of(engine: Engine, update: Update) -> "Meetings | None":
    """The meetings of this rank's pipeline, where several train alone."""
    if not engine.pipelines:
        return None
    from penstock.runtime.update.local_sgd import Meetings

    return Meetings(engine, update)


def way_to_train(engine: Engine, training: Training, update: Update) -> Steps:
    """Create a pipeline's `Steps` by schedule and options; the unusual is imported only here."""
    if updates_per_batch(engine.plan):
        from penstock.runtime.asynchronous.training import AsynchronousSteps

        return AsynchronousSteps(engine, training, update.prediction_error_every)
    return Steps(engine, training)
