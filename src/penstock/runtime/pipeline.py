"""`Pipeline`: a model that trains over several processes, as a user's own script holds it."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penstock.capture.evaluation import set_training
from penstock.capture.layer_graph import Batch, LayerGraph, LossFunction
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.channels import TransportChoice
from penstock.runtime.checkpoint import (
    STATE_FILE,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    stored_tensors,
)
from penstock.runtime.clock import gather_timeline
from penstock.runtime.gradient_noise import NoiseMeter
from penstock.runtime.loss_scaling import LossScaling, check_parameter_types, loss_scaling_for
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.recompute import random_state, restore_random_state
from penstock.runtime.stage_building import build_stages, check_plan_fits, graph_of
from penstock.runtime.training import MakeOptimizer, MakeSchedule, Training, merged_states
from penstock.runtime.verify import VerifyResult, verify
from penstock.runtime.worker import Worker
from penstock.runtime.world import join_world
from penstock.timeline.timeline import Timeline

__all__ = ["MakeOptimizer", "MakeSchedule", "Pipeline", "StepMetrics"]


class Pipeline:
    """A model, cut and replicated as a plan says, in training.

    Every rank makes the same `Pipeline` and gives it the same batches; each computes its rows of
    its stage. The gradient is that of the mean loss over the whole batch, as on one device.

        pipe = Pipeline(model, plan, batch, loss=loss, optimizer=lambda p: AdamW(p, lr=1e-3))
        for batch in loader:
            metrics = pipe.step(batch)
        pipe.close()

    ``batch`` is an example of what the loader yields; later ones may differ in the number of
    samples only. Without ``optimizer`` a step computes gradients and leaves the weights alone.
    ``autocast`` is ``torch.bfloat16``, ``torch.float16`` or none; with float16 the loss is scaled
    as ``loss_scaling`` says. ``shard_optimizer`` divides the optimizer's state among the ranks that
    hold the same parameters. ``gradient_noise`` estimates the gradient noise scale. Processes
    are joined as torchrun describes them; without torchrun the pipeline runs in this one.

    Raises:
        BadInput: plan, model, batch and number of processes do not fit together.
        CaptureFailed: the model cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module | LayerGraph,
        plan: Plan,
        batch: Batch,
        *,
        loss: LossFunction | None = None,
        optimizer: MakeOptimizer | None = None,
        learning_rate_schedule: MakeSchedule | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout_s: float = 120.0,
        granularity: Literal["block", "module", "operator"] = "module",
        transport: TransportChoice = "auto",
        loss_scaling: LossScaling | None = None,
        shard_optimizer: bool = False,
        gradient_noise: bool = False,
    ) -> None:
        check_settings(clip_norm, timeout_s)
        scaling = loss_scaling_for(autocast, loss_scaling)
        self._graph = graph_of(model, batch, loss, granularity)
        self._world = join_world(device, timeout_s)
        check_plan_fits(plan, self._graph, self._world)
        self._graph.batch_leaves(batch)
        programs = build_stages(self._graph, plan, self._world, model, seed)
        if optimizer is not None:
            check_parameter_types(self._world, programs)
        self._worker = Worker(
            self._graph,
            plan,
            self._world,
            autocast=autocast,
            transport=transport,
            shard_optimizer=shard_optimizer,
            noise=NoiseMeter(plan, self._world.rank) if gradient_noise else None,
            programs=programs,
        )
        self._worker.share_first_values()
        self._training = Training(
            self._worker.stepped_parameters(),
            self._world.device,
            optimizer,
            learning_rate_schedule,
            clip_norm=clip_norm,
            loss_scaling=scaling,
        )

    @property
    def plan(self) -> Plan:
        """What this pipeline follows."""
        return self._worker.plan

    @property
    def rank(self) -> int:
        """This process's number; records are best written by rank 0."""
        return self._world.rank

    @property
    def steps(self) -> int:
        """Training steps taken, those before a loaded checkpoint included."""
        return self._training.steps

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that this rank trains."""
        return [p for _, p in self._worker.named_parameters() if p.requires_grad]

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by their first names in the model."""
        return self._worker.named_parameters()

    def samples_in(self, batch: Batch) -> int:
        """The number of samples of ``batch``."""
        return self._graph.batch_leaves(batch)[0].shape[0]

    def step(self, *batches: Batch) -> StepMetrics:
        """Train on a batch: forward, backward, clipping, optimizer, learning-rate schedule.

        Several batches are one step on all of them together, as if they had been one: each goes
        through the pipeline by itself, so that it needs no more memory, and gradients add up.

        Raises:
            BadInput: a batch is not like the example, or not the same on all ranks; nothing was
                changed.
            LossNotFinite: loss or gradients are NaN or infinite; no optimizer step was taken.
            RunFailed: a rank failed; the message names it; the pipeline cannot be used any more.
        """
        if not batches:
            raise BadInput("step() was given no batch; give it one, or several to accumulate over")
        leaves = [self._graph.batch_leaves(batch) for batch in batches]
        samples = sum(own[0].shape[0] for own in leaves)
        worker, training = self._worker, self._training
        worker.check_noise(len(batches))
        seed = training.seed(samples)
        totals = worker.run(*leaves, training=True, seed=seed)
        reduced, start = time.perf_counter(), worker.clock.now()
        update = training.update(totals, seed, samples, worker.buckets)
        if not update.skipped:
            worker.share_values()
        if worker.places:
            worker.clock.add("STEP", worker.places[0].stage, -1, start, worker.clock.now())
        worker.optimizer_s = time.perf_counter() - reduced
        return StepMetrics(
            training.steps,
            totals.loss,
            totals.gradient_norm,
            update.learning_rate,
            samples,
            totals.seconds,
            totals.bubble,
            update.skipped,
            update.loss_scale,
            update.noise,
        )

    def evaluate(self, batch: Batch) -> float:
        """The mean loss on one batch in evaluation mode; changes nothing.

        Raises:
            BadInput: as in `step`.
            RunFailed: as in `step`.
        """
        leaves = self._graph.batch_leaves(batch)
        worker = self._worker
        modules = [program.module for program in worker.programs.values()]
        for module in modules:
            set_training(module, False)
        try:
            return worker.run(leaves, training=False).loss
        finally:
            for module in modules:
                set_training(module, True)

    def verify(self, batch: Batch) -> VerifyResult:
        """Compare loss, gradients and buffers on ``batch`` with one device; changes nothing."""
        return verify(self._worker, self._graph.batch_leaves(batch))

    def timeline(self) -> Timeline:
        """What every rank did in the latest iteration; every rank must ask."""
        return gather_timeline(self._world, self._worker.clock, "measured")

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds: tensors by the model's names, and ``state`` for the rest."""
        return {**self._tensors(), "state": self._training.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank under the same plan."""
        tensors = {name: value for name, value in state_dict.items() if name != "state"}
        own = self._worker.named_tensors()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[f"model.{name}"])
        self._restore(tensors, state_dict["state"])

    def model_state_dict(self) -> dict[str, torch.Tensor]:
        """All weights and buffers by all their names, on rank 0; empty elsewhere; all must ask."""
        parts = self._world.gather_to_first(
            {name: tensor.detach().cpu() for name, tensor in self._worker.owned_tensors().items()}
        )
        whole = {name: tensor for part in parts for name, tensor in part.items()}
        tied = {other: whole[name] for other, name in self._graph.tied_names.items() if whole}
        return whole | tied

    def save(self, directory: Path | str, *, extra: Any = None, keep: int = 2) -> Path:
        """Write ``directory/step-<steps>`` atomically and keep the newest ``keep``; all must ask.

        ``extra`` is kept with it (JSON; read it back with `read_state`).

        Raises:
            BadInput: the directory cannot be written.
        """
        tensors = {
            name: tensor
            for name, tensor in self._tensors().items()
            if name.startswith("random.") or self._worker.owns(name.partition(".")[2])
        }
        state = merged_states(self._world.gather(self._training.state()))
        return save_checkpoint(
            Path(directory),
            self._training.steps,
            tensors,
            {**state, "extra": extra},
            keep=keep,
            group=self._world.control,
        )

    def load(self, directory: Path | str) -> int:
        """Continue from a checkpoint, or from the newest of a directory; any plan may have made it.

        Returns the number of steps taken before. All ranks must ask.

        Raises:
            BadInput: there is no whole checkpoint, or it is of another model.
        """
        path = Path(directory)
        if not (path / STATE_FILE).is_file():
            path = latest_checkpoint(path)
        tensors = {f"model.{n}": t.detach() for n, t in self._worker.named_tensors().items()}
        wanted = tuple(f"optimizer.{name}." for name in self._training.names.values())
        random = f"random.{self._world.rank}"
        for name, (shape, dtype) in stored_tensors(path).items():
            if name in (random, f"{random}.device") or (wanted and name.startswith(wanted)):
                tensors[name] = torch.empty(shape, dtype=dtype)
        state = load_checkpoint(path, tensors, group=self._world.control)
        self._restore(tensors, state)
        return self._training.steps

    def close(self) -> None:
        """Leave the other ranks; also destroys the default process group where it was made here."""
        self._worker.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{n}": t.detach() for n, t in self._worker.named_tensors().items()}
        tensors |= self._training.tensors()
        cpu, own = random_state(self._world.device)
        tensors[f"random.{self._world.rank}"] = cpu
        if own is not None:
            tensors[f"random.{self._world.rank}.device"] = own
        return tensors

    def _restore(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        self._training.restore(tensors, state)
        random = f"random.{self._world.rank}"
        if random in tensors:
            device = tensors.get(f"{random}.device")
            restore_random_state(self._world.device, tensors[random], device)


def check_settings(clip_norm: float | None, timeout_s: float) -> None:
    """Raise `BadInput` for a setting that cannot be right."""
    if clip_norm is not None and not clip_norm > 0:
        raise BadInput(f"clip_norm is {clip_norm}; it must be > 0, or None for no clipping")
    if not timeout_s > 0:
        raise BadInput(f"timeout_s is {timeout_s}; it must be > 0")
