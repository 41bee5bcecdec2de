"""`Pipeline`: trains a model over several processes, from within a user's script."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from penstock.capture.batch.part import BatchPart, Leaf
from penstock.capture.capture import with_path
from penstock.capture.contract import Batch, Loss
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.files import shown
from penstock.plan.json_file import plan_from_json, plan_to_json, read_plan
from penstock.plan.plan import Plan, plan_words
from penstock.runtime.batch_needs import BatchNeeds
from penstock.runtime.callbacks import Callback, Closing, Event, Saved, check_callbacks
from penstock.runtime.checkpoints.checkpoint import CheckpointTarget, read_state
from penstock.runtime.checkpoints.loader_state import StatefulLoader
from penstock.runtime.checkpoints.pipeline_state import (
    checkpoint_tensors,
    chosen_checkpoint,
    load_state,
    restore_own,
    saved_state,
    state_tensors,
)
from penstock.runtime.checkpoints.weight_saving import (
    save_adapters,
    save_weights,
    whole_state_dict,
)
from penstock.runtime.clock import gather_timeline
from penstock.runtime.conflicts import check_conflicts, uses_of
from penstock.runtime.connection import Setup, connect, reconnect
from penstock.runtime.engine import Engine
from penstock.runtime.full_model import all_weights, gather_weights
from penstock.runtime.measured_memory import MeasuredMemory, lasting_tensors, measured_memory
from penstock.runtime.metrics import END, LossPathChanged, StepMetrics
from penstock.runtime.options import (
    MakeOptimizer,
    MakeSchedule,
    Options,
    Safety,
    Update,
    Verification,
)
from penstock.runtime.processes.heartbeat import LIMIT_S, doing
from penstock.runtime.processes.refusals import print_refusals_once
from penstock.runtime.stage.building import graph_of, module_for
from penstock.runtime.tables import Constraints
from penstock.runtime.update.average import ExponentialAverage
from penstock.runtime.update.training import Training
from penstock.runtime.user_metrics import Evaluation, Metric
from penstock.runtime.verify.verify import VerifyResult, verify
from penstock.timeline.timeline import Timeline
from penstock.waiting import say

if TYPE_CHECKING:
    from penstock.runtime.asynchronous.weight_versions import WeightVersions


Done = TypeVar("Done")


class NoPath(BadInput):
    """The loss takes a path that cannot be recorded."""


class Pipeline:
    """A model in training, cut into stages and replicated according to a plan.

    Without ``plan`` (or with "auto") all ranks measure the model's layers and the links between
    them, and rank 0 finds the plan that trains fastest and prints it; what was found is kept for
    the next start. ``constraints`` say what such a plan must keep to. A plan may also be given, or
    the path of its file.

    Every rank creates the same `Pipeline` and gives it the same batches, or what it reads of them
    (`BatchPart`). Each computes its rows of its stages. The gradient is that of the mean loss over
    the whole batch, as on one device.

        pipe = Pipeline(model, batch, loss=loss, optimizer=lambda p: AdamW(p, lr=1e-3))
        for batch in loader:
            metrics = pipe.step(batch)
        pipe.close()

    ``model`` is a module, whose `capture_model` then takes ``batch`` and ``loss``, or a graph that
    `capture_model` has made: it also says which dimensions of batches vary, and how stages are
    run. ``batch`` is an example of the loader's batches; later ones may differ in the number of
    samples. Without ``optimizer`` a step computes gradients and does not change weights. With
    ``Constraints(sharding="optimizer")``, which also goes with a given plan, its state is divided
    among the ranks that hold the same parameters.
    ``metrics`` are functions of the model's output and the target, computed in steps and
    evaluations. ``autocast`` is ``torch.bfloat16``, ``torch.float16`` or none. ``device`` is this
    rank's (default: a GPU of its own if there are enough, or else the CPU). A rank waits for
    another at most ``timeout_s`` seconds within a step. `Update` and `Safety` have what is set less
    often. Processes find each other by the environment variables of torchrun; without torchrun the
    pipeline runs in this process alone.

    The first step is compared with the whole model, as `verify` does, before anything changes,
    unless ``verify="off"``. Rank 0 prints a line about it, and `verified` is the latest result. The
    first run of each stage compares its calls with those of the example.

    Raises:
        BadInput: plan, model, batch and number of processes do not fit together.
        CaptureFailed: the model cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module | LayerGraph,
        batch: Batch,
        *,
        plan: Plan | Path | str | None = None,
        constraints: Constraints | None = None,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        learning_rate_schedule: MakeSchedule | None = None,
        clip_norm: float | None = None,
        metrics: Mapping[str, Metric] | None = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = LIMIT_S,
        verify: Verification = "first-step",
        update: Update = Update(),  # noqa: B008 (frozen)
        safety: Safety = Safety(),  # noqa: B008
    ) -> None:
        print_refusals_once()
        options = Options(
            optimizer=optimizer,
            learning_rate_schedule=learning_rate_schedule,
            clip_norm=clip_norm,
            shard_optimizer=constraints is not None and constraints.sharding == "optimizer",
            metrics=dict(metrics or {}),
            autocast=autocast,
            device=device,
            timeout_s=timeout_s,
            verify=verify,
            update=update,
            safety=safety,
        )
        check_conflicts(options.uses | (uses_of(plan) if isinstance(plan, Plan) else {}))
        graph = graph_of(model, batch, loss)
        is_found = plan in (None, "auto")
        if is_found:
            constraints = constraints or Constraints()
            if update.state_on == "host":
                constraints = replace(constraints, state_on="host")
        setup = Setup(
            graph.with_outputs() if metrics else graph,
            batch,
            plan_of(plan, constraints, graph, batch, options),
            options,
            constraints if is_found else None,
        )
        self._callbacks: list[Callback] = []
        self._is_gathered = False
        self._any_path = False
        self._connection = connect(setup, update.weights)

    @property
    def _setup(self) -> Setup:
        return self._connection.setup

    @property
    def _engine(self) -> Engine:
        return self._connection.engine

    @property
    def _training(self) -> Training:
        return self._connection.training

    @property
    def plan(self) -> Plan:
        """The plan of this pipeline."""
        return self._setup.plan

    @property
    def _found_for(self) -> list[Any]:
        """The ranks and constraints for which the plan was found; empty if it was given."""
        constraints = self._setup.constraints
        return [self._engine.world.size, constraints.text] if constraints else []

    @property
    def verified(self) -> VerifyResult | None:
        """Result of the latest step that was compared; ``None`` if none was here."""
        return self._connection.verified.result

    def notify(self, *callbacks: Callback) -> None:
        """Call these, with the pipeline and what has happened, after steps, evaluations and saves.

        Each is also called before the pipeline is closed. Every rank gives the same, and calls them
        with equal events, in the order in which they were given.

        Raises:
            BadInput: one cannot be called; or it averages weights, which this pipeline cannot.
        """
        check_callbacks(callbacks)
        if any(isinstance(callback, ExponentialAverage) for callback in callbacks):
            if self._training.averages is not None:
                raise BadInput("weights are averaged already; give one ExponentialAverage")
            check_conflicts(self._setup.uses | {"average": "ExponentialAverage"})
            self._training.averages = {}
        self._callbacks.extend(callbacks)

    def print_with(self, say: Callable[[str], None]) -> None:
        """Have rank 0 pass the lines about verification to ``say``, not to standard error."""
        self._connection.verified.say = say

    @property
    def compiled_graphs(self) -> int:
        """The number of graphs torch has compiled for this rank's stages; 0 without ``compile``."""
        compiler = self._connection.compiler
        return compiler.graphs if compiler is not None else 0

    @property
    def rank(self) -> int:
        """This process's rank. Only rank 0 should write logs and records."""
        return self._engine.world.rank

    @property
    def steps(self) -> int:
        """Training steps taken, including those before a loaded checkpoint."""
        return self._training.steps

    @property
    def weight_versions(self) -> "Mapping[int, WeightVersions]":
        """The weights of this rank's stages under an asynchronous schedule; empty under others."""
        return self._connection.steps.weight_versions

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that this rank trains."""
        return [p for _, p in self._engine.held.named_parameters() if p.requires_grad]

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by their first names in the model."""
        return self._engine.held.named_parameters()

    @property
    def needs(self) -> BatchNeeds:
        """The parts of every batch that this rank reads; a `BatchPart` may have just these."""
        return self._connection.reading.needs

    def samples_in(self, batch: Batch) -> int:
        """The number of samples of ``batch``."""
        return self._connection.reading.samples_in(batch)

    def lengths_of(self, batch: Batch) -> dict[str, int]:
        """The lengths of ``batch`` (or of its bucket) by name; empty for models without lengths."""
        return self._connection.reading.lengths_of(batch)

    @doing("takes a step", acts=True)
    def step(self, *batches: Batch) -> StepMetrics:
        """Train on a batch: forward, backward, clipping, optimizer, learning-rate schedule.

        Several batches make one step, as if they were one large batch. They go through the pipeline
        one after another, so they need no more memory, and their gradients are accumulated. Each
        rank may give a `BatchPart` with what it reads (`needs`), instead of the whole batch.

        Raises:
            BadInput: a batch is unlike the example or differs between ranks, or a part lacks what
                the rank reads; nothing was changed.
            LossNotFinite: loss or gradients are NaN or infinite, first in the layer and micro-batch
                that the message names; no optimizer step was taken.
            RunFailed: a rank failed, which the message names; the pipeline cannot be used any more.
                Or the step was verified and differs from that of the whole model.
            ReplicasDiffer: copies of a weight are not equal; the step was not taken.
        """
        if not batches:
            raise BadInput("step() was given no batch; give it one, or several to accumulate over")
        if not torch.is_grad_enabled():
            raise BadInput("step() is called within torch.no_grad(), where nothing can be trained")
        self._drain()
        self._follow_flags()
        metrics = self._on_its_path(self._step, batches)
        self._engine.release_others()
        self._tell(metrics)
        return metrics

    def _step(self, *batches: Batch) -> StepMetrics:
        connection, verified = self._connection, self._connection.verified
        leaves = connection.reading.of_step(batches)
        due = verified.due
        connection.training.loss_check = verified.loss_check
        self._check_calls(due)
        return verified.step(leaves) if due else connection.steps.step(leaves)

    def stream(self, batches: Iterable[Batch]) -> Iterator[StepMetrics]:
        """Train on batches one after another; yields the metrics of each.

        If the plan's schedule updates weights without a flush, each batch follows the previous one
        without a pause. Its metrics arrive while the next one is running, so `steps` may be one
        ahead of them. Methods that need final weights (`evaluate`, `save`, ...) drain the pipeline
        first; so does the end of the batches. Otherwise this calls `step` for each batch.

        Raises:
            BadInput: as `step`; or a batch has fewer samples than the plan has micro-batches.
            LossNotFinite: as `step`; without a flush weights have already changed.
            RunFailed: as `step`.
        """
        self._drain()
        self._follow_flags()
        steps, verified = self._connection.steps, self._connection.verified
        if steps.flushes:
            yield from map(self.step, batches)
            return
        for due, some in verified.stretches(batches):
            every = map(self._of_stream, some)
            if due:
                first = next(every)
                verified.beforehand([first])
                every = chain([first], every)
            for metrics in steps.stream(every):
                self._engine.release_others()
                self._tell(metrics)
                yield metrics

    def evaluate(self, *batches: Batch) -> Evaluation:
        """Mean loss and metrics on batches in evaluation mode; changes nothing.

        Means of several batches are weighted by their terms. What the model's code, the loss
        function or a metric raises, all ranks raise; the pipeline continues. The fast path of
        torch's transformer layers is off.

        Raises:
            BadInput: as in `step`; or there is no loss in evaluation mode.
            RunFailed: a rank failed, which the message names.
        """
        self._drain()
        found = [self._on_its_path(self._evaluate, [batch]) for batch in batches]
        evaluation = found[0] if len(found) == 1 else Evaluation.combined(found)
        self._tell(evaluation)
        return evaluation

    def _evaluate(self, batch: Batch) -> Evaluation:
        return self._connection.inference.evaluate(batch)

    def predict(self, batch: Batch, *, everywhere: bool = False) -> Any:
        """The model's result for one batch in evaluation mode; changes nothing.

        Returned on rank 0, or ``everywhere``; ``None`` on other ranks. Tensors are on the CPU, with
        samples in the order of the batch. A loss that the model itself returns is ``None`` in it.
        The batch may lack its target. An output without a batch dimension that is computed from
        samples (such as an auxiliary loss) is the mean over the slices, weighted by their samples.

        Raises:
            BadInput: as in `step`; or the model cannot predict, or its outputs cannot be joined.
            RunFailed: as in `step`.
        """
        self._drain()
        return self._connection.inference.predict(batch, everywhere=everywhere)

    def step_schedule(self, metric: float) -> None:
        """Step a learning-rate schedule that follows a metric, such as ``ReduceLROnPlateau``.

        It needs ``update=Update(schedule_follows="evaluation")``; all ranks must call this with the
        same value, as an evaluation's loss is.

        Raises:
            BadInput: there is no such schedule, it follows the loss, or the values differ.
        """
        self._drain()
        training = self._training
        if not training.follows or training.by_loss:
            kind = training.follows or type(training.schedule).__name__
            raise BadInput(
                f"step() steps the learning-rate schedule ({kind}) by itself; leave step_schedule "
                f'out, or use ReduceLROnPlateau with update=Update(schedule_follows="evaluation")'
            )
        given = self._engine.world.all_gather(float(metric))
        if len({repr(value) for value in given}) > 1:
            raise BadInput(
                f"step_schedule() was given {given} on the ranks; give each the same value, such "
                f"as evaluate(batch).loss"
            )
        training.follow(given[0])

    def skip_step(self) -> None:
        """Count a step without taking it; a checkpoint then continues behind its batch."""
        self._drain()
        self._training.steps += 1

    def meet(self) -> None:
        """Let pipelines that train alone (``meet_every``) meet now; all ranks must call this.

        The next meeting is after the step in which it would be. Does nothing if they have met
        since the latest step, or train as one.
        """
        if self._training.meetings is not None and not self._training.meetings.met:
            self._training.meetings.meet()

    def stop(self, reason: int = END) -> None:
        """Request that all ranks end the training; after the next step `stopping` is true."""
        self._engine.numbers.wants_stop = reason

    @property
    def stopping(self) -> int:
        """The largest reason of any `stop` before the latest step or evaluation, or 0; on all."""
        return self._engine.numbers.stopping

    def module_for(self, name: str) -> nn.Module:
        """The module on this rank that is used for ``name``, a part of the user's model.

        ``name`` is a submodule, parameter or buffer of the model; these keep their names. If a
        module is cut between stages, some of its parameters have no values here.

        Raises:
            BadInput: there is no such name, or it is on other ranks, which are named.
        """
        graph, engine = self._setup.graph, self._engine
        return module_for(name, graph, engine.stages.programs, engine.held.holders, self.rank)

    def verify(self, batch: Batch) -> VerifyResult:
        """Compare loss, gradients and buffers on ``batch`` with those of the whole model.

        The given model runs on rank 0 without the pipeline, with its hooks and custom backwards. It
        runs on the whole batch or, if samples affect one another, on each micro-batch. Dropout is
        off in both. Changes nothing.
        """
        self._drain("verify()")
        leaves = self._connection.reading.whole(batch, "verify()")
        self._check_calls(due=True)
        return verify(self._engine, [leaves])

    def timeline(self) -> Timeline:
        """Gather the events of all ranks in the latest iteration; all ranks must call this."""
        return gather_timeline(self._engine.world, self._engine.clock, "measured")

    def measuring_memory(self) -> AbstractContextManager[MeasuredMemory]:
        """Measure, within, the peak of this rank's tensors in bytes; slows the step."""

        def held() -> Iterator[torch.Tensor]:
            yield from lasting_tensors(self._engine, self._training)
            yield from self._connection.steps.copies

        return measured_memory(self._engine.world.device, held)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: tensors by the model's names, and ``state`` for the rest."""
        self._drain()
        return {**state_tensors(self._engine, self._training), "state": self._training.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank under the same plan."""
        self._drain()
        restore_own(self._engine, self._training, state_dict)

    def model_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict()`` of the trained model on rank 0; empty on other ranks.

        Weights, buffers that are kept, and extra state, by all their names; those of a loss that is
        a module begin with ``loss.``.

        All ranks must call this. The whole model must fit into rank 0's memory; `save_pretrained`
        does not need that.
        """
        self._drain("model_state_dict()")
        return whole_state_dict(self._engine)

    @contextmanager
    def full_model(self, *, rank0_only: bool = False) -> Iterator[nn.Module]:
        """Have, within, all weights and buffers in the user's model, as in one process.

        They are in the model's own tensors on every rank, or with ``rank0_only`` on rank 0 alone.
        Any code may read and write them, or run the model; the pipeline cannot be used there. What
        rank 0 has at the end is kept, whichever way it was written (in place, by ``p.data = x`` or
        ``load_state_dict``), also if the block raises. So all ranks run the same code, or rank 0
        writes alone. All ranks must enter and leave; each needs memory for the whole model.

            with pipe.full_model() as model, torch.no_grad():
                for ours, theirs in zip(model.teacher.parameters(), model.student.parameters()):
                    ours.lerp_(theirs, 0.01)

        Raises:
            BadInput: the weights of other ranks do not fit into free memory; or, at the end, a rank
                wrote to a weight that rank 0 did not write to.
        """
        self._drain("full_model()")
        self._check_own_weights("give all ranks its weights")
        self._is_gathered = True
        try:
            with all_weights(self._engine, rank0_only=rank0_only):
                yield self._setup.graph.model
        finally:
            self._is_gathered = False
        if self._training.meetings is not None:
            self._training.meetings.go_on_from_here()

    def save_pretrained(
        self, directory: Path | str, *, max_shard_bytes: int = 5_000_000_000
    ) -> Path:
        """Write the weights in the layout of Hugging Face's ``save_pretrained``.

        All ranks must call this. Each writes the tensors that it owns into files of at most
        ``max_shard_bytes`` (a larger tensor gets its own file), so nothing is gathered. Rank 0 adds
        the index, and the model's configuration if it has one. ``from_pretrained`` and ``weights``
        can read the directory. Hosts must share it. The weights of a loss that is a module are in
        ``loss.safetensors``, under ``loss.``.

        Raises:
            BadInput: the directory already has weights, or cannot be written.
        """
        self._drain("save_pretrained()")
        save_weights(self._engine, Path(directory), max_shard_bytes)
        return Path(directory)

    def save_adapters(self, directory: Path | str) -> Path:
        """Write only the trained adapter of peft; all ranks must call this.

        Rank 0 gathers and writes it. ``PeftModel.from_pretrained`` can read the directory.

        Raises:
            BadInput: there are no adapters; a trained tensor does not belong to the active one; the
                directory already has weights, or cannot be written.
        """
        self._drain("save_adapters()")
        save_adapters(self._engine, Path(directory))
        return Path(directory)

    @doing("saves a checkpoint")
    def save(
        self,
        directory: Path | str,
        *,
        extra: Any = None,
        loader: StatefulLoader | None = None,
        keep: int = 2,
        wait: bool = True,
    ) -> Path:
        """Write ``directory/step-<steps>`` atomically, and keep the newest ``keep`` checkpoints.

        Checkpoints of later steps, there when an earlier one was loaded, get ``abandoned-`` before
        their names.
        All ranks must call this. ``extra`` is saved as JSON; `read_state` returns it. The position
        of ``loader`` is saved too: of a `ResumableLoader`, or any loader with ``state_dict``. Hosts
        must share the directory. Without ``wait`` the checkpoint is written from a copy in CPU
        memory while training continues; the next `save`, or `close`, waits for it.

        Raises:
            BadInput: it cannot be written, writing the previous one failed, or ``keep`` is below 1.
        """
        self._drain()
        self._check_own_weights("save or load a checkpoint")
        engine, training = self._engine, self._training
        state = {
            **saved_state(engine, training, extra, loader),
            "plan": plan_to_json(self._setup.plan),
            "found_for": self._found_for,
        }
        target = CheckpointTarget(Path(directory), training.steps, state, keep)
        self._connection.checkpoints.save(target, checkpoint_tensors(engine, training), wait=wait)
        self._tell(Saved(self.steps, target.folder.final))
        return target.folder.final

    def load(self, directory: Path | str, *, loader: StatefulLoader | None = None) -> int:
        """Continue from a checkpoint of any plan, or from the newest undamaged one of a directory.

        ``loader`` continues at the saved position. Returns the number of steps taken before. All
        ranks must call this.

        A plan that was found here gives way, before the first step, to the checkpoint's, if that
        was found for the same number of ranks and the same constraints.

        Raises:
            BadInput: there is no undamaged checkpoint, it is of another model, or has no loader.
        """
        self._drain()
        self._check_own_weights("save or load a checkpoint")
        self._connection.checkpoints.wait()
        path = chosen_checkpoint(self._engine, Path(directory))
        state = self._engine.world.all_succeed(partial(read_state, path))
        if not self.steps and self._found_for and self._found_for == state.get("found_for"):
            self._keep_plan(plan_from_json(state["plan"], str(path)))
        load_state(self._engine, self._training, (path, state), loader)
        return self.steps

    def _keep_plan(self, plan: Plan) -> None:
        """Continue by the plan of a checkpoint, whose state is loaded next."""
        before, setup = self._connection, self._setup
        ends = [each.stages[-1].layers.stop for each in (plan, setup.plan)]
        measured = setup.constraints is not None and setup.constraints.remeasure
        if measured or plan == setup.plan or ends[0] != ends[1]:
            return
        self._connection = reconnect(before, replace(setup, plan=plan))
        self._training.averages = before.training.averages
        if self.rank == 0:
            say(f"the plan of the checkpoint is kept: {plan_words(plan, 'rank')}")

    def close(self, *, gather: bool = False) -> None:
        """Disconnect from the other ranks; the last pipeline destroys what pipelines created.

        After the first step a rank has only the parameters of its own stages. With ``gather`` the
        user's model gets all of them, and buffers, on every rank: to run it, or to make another
        pipeline of it. Then all ranks must call this, and the model must fit into their memory.
        """
        ended = self._engine.has_ended
        if gather and not (ended or self._is_gathered):
            self._drain("close(gather=True)")
            gather_weights(self._engine)
        with ExitStack() as closing:
            # All of these, whichever raises.
            closing.callback(self._engine.close)
            closing.callback(self._connection.checkpoints.close, failed=ended)
            for callback in () if ended else reversed(self._callbacks):
                closing.callback(callback, self, Closing(self.steps))

    def _of_stream(self, batch: Batch) -> Sequence[Leaf]:
        """Read this rank's parts of a batch that follows others without a pause."""
        if changed := self._setup.graph.cut.changed_flags:
            raise BadInput(
                f"requires_grad of '{changed[0]}' was changed within stream(); change it before "
                f"stream() is called, or between calls of step()"
            )
        self._check_calls()
        return self._connection.reading.of_stream(batch)

    def _check_calls(self, due: bool = False) -> None:
        """Compare the calls of the next step with those of the example, if it is ``due``."""
        every = self._setup.options.safety.check_every
        if due or (every and (self.steps + 1) % every == 0):
            for program in self._engine.stages.programs.values():
                program.module.unchecked = True

    def _follow_flags(self) -> None:
        """Reconnect the ranks if ``requires_grad`` of a parameter has changed."""
        self._check_own_weights("train")
        if self._setup.graph.cut.changed_flags:
            self._reconnect(self._setup)

    def _reconnect(self, setup: Setup) -> None:
        """Reconnect the ranks for a setup, and continue the training."""
        before = self._connection
        self._connection = reconnect(before, setup)
        self._training.go_on_from(before.training)

    def _on_its_path(self, act: Callable[..., Done], batches: Sequence[Batch]) -> Done:
        """Act on batches; where the loss takes a path without a record, record it and act again.

        A batch in one piece has any path right. It goes without where it cannot be recorded.
        """
        plan = self._setup.plan
        slices = [len(stage.slices) for stage in plan.stages]
        in_one_piece = len(batches) == plan.micro_batches == max(slices) == 1
        for _ in range(2):
            for path in self._engine.kinds.paths:
                path.state.any_path = in_one_piece and self._any_path
            try:
                return self._recorded(act, batches)
            except NoPath:
                if not in_one_piece or self._any_path:
                    raise
                self._any_path = True
        raise AssertionError("any path is right now")

    def _recorded(self, act: Callable[..., Done], batches: Sequence[Batch]) -> Done:
        try:
            return act(*batches)
        except LossPathChanged as problem:
            places = self._engine.world.all_gather(problem.where)
        where = next(filter(None, places))
        self._record_path(where, batches, evaluates=act != self._step)
        try:
            return act(*batches)
        except LossPathChanged:
            raise NoPath(
                f"the loss takes another path than the batch alone shows ({where}): activations or "
                f"a counter decide about it, or micro-batches differ; write it with tensors, as "
                f"torch.where and masks, or use one micro-batch"
            ) from None

    def _record_path(self, where: str, batches: Sequence[Batch], *, evaluates: bool) -> None:
        """Record the path that the loss takes on batches, as a further kind of batch."""
        words = f"a loss that takes another path later ({where})"
        check_conflicts(self._setup.uses | {"thawed": words, "kinds": words})
        if any(isinstance(batch, BatchPart) for batch in batches):
            raise BadInput(f"{words} needs whole batches; give them on every rank")
        engine, graph = self._engine, self._setup.graph
        with self._connection.inference.evaluating() if evaluates else nullcontext():
            engine.take_kind(batches)
            kind = engine.kinds.number
            if len(engine.kinds.graphs) > 1 and engine.kinds.follows_path(kind, batches):
                return
            others = (batch for batch in batches if not engine.kinds.follows_path(kind, [batch]))
            batch = next(others, batches[0])
        try:
            found = engine.world.all_succeed(lambda: with_path(graph, kind, batch))
        except BadInput as problem:
            raise NoPath(
                f"the loss takes another path ({where}), which cannot be recorded: {problem}"
            ) from problem
        if self.rank == 0:
            self._connection.verified.say(
                f"step {self.steps + 1}: the loss takes another path ({where}); it is recorded as "
                f"one more kind of batch, number {len(engine.kinds.graphs)}"
            )
        self._reconnect(replace(self._setup, graph=found))

    def _drain(self, needs_one_model: str = "") -> None:
        """Finish the micro-batches in flight, if any; all ranks must call this.

        ``needs_one_model`` names an operation that is invalid while pipelines have diverged.
        """
        if needs_one_model and self._training.meetings is not None:
            self._training.meetings.check_met(needs_one_model)
        if self._is_gathered:
            raise BadInput(
                "the pipeline cannot be used within full_model(), where its weights are the "
                "loop's; leave the block first"
            )
        self._connection.steps.drain()

    def _check_own_weights(self, to: str) -> None:
        """Raise `BadInput` while the pipeline has averaged weights."""
        if self._training.averaged:
            raise BadInput(
                f"the pipeline has averaged weights and cannot {to}; leave "
                f"ExponentialAverage.weights(pipe) first"
            )

    def _tell(self, event: Event) -> None:
        for callback in self._callbacks:
            callback(self, event)

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: object, failure: BaseException | None, *_: object) -> None:
        if failure is not None:
            self._engine.failures.leave(failure)
        self.close()


def plan_of(
    plan: Plan | Path | str | None,
    constraints: Constraints | None,
    graph: LayerGraph,
    batch: Batch,
    options: Options,
) -> Plan:
    """The plan that was given, that of a file, or one that is found for these ranks."""
    if plan is None or plan == "auto":
        # Imported here: a pipeline with a plan needs neither measurements nor planners.
        from penstock.plan_here import plan_here

        return plan_here(graph, batch, options, constraints or Constraints())
    if constraints not in (None, Constraints(sharding="optimizer")):
        raise BadInput(
            'constraints are for a plan that is found here, but for sharding="optimizer" alone, '
            "and plan=... was given too; leave one of them out"
        )
    if isinstance(plan, Path | str):
        return read_plan(plan)
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadInput(
            f"plan is {shown(plan)}; give a Plan, the path of a plan file, or 'auto' to find one"
        )
    return plan
