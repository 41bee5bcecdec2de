"""A strategy for Lightning's `Trainer`, whose training steps go through a `Pipeline`."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.contract import Batch
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.pipeline import Pipeline
from penstock.torch_internals import pytree

try:
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ModuleNotFoundError as missing:
    raise BadInput(
        "penstock.integrations.loops.lightning needs Lightning: pip install 'penstock[lightning]'"
    ) from missing

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WITHIN_A_STEP = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of modules and callbacks for which a step of a pipeline has no place."""


@dataclass(slots=True)
class Seen:
    """Values that a training step logs, with `log`'s options, and its inputs of ``forward``.

    ``metrics`` are the places of the values in the output, but for the loss itself.
    """

    logged: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    inputs: list[int] = field(default_factory=list[int])
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])

    def __deepcopy__(self, memo: object) -> "Seen":
        """The same: capture runs a copy of the model."""
        return self


class TrainingStep(nn.Module):
    """A module's training step as a model; what it logs and ``forward`` gives are outputs."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.seen = Seen()

    def forward(self, *parts: Any, **named: Any) -> dict[str, Any]:
        module, batch = self.module, named or (parts[0] if parts[1:] == () else parts)
        given, forward = pytree.tree_leaves(batch), module.forward
        outputs: list[torch.Tensor] = []
        logged: dict[str, torch.Tensor] = {}

        def recorded(*arguments: Any) -> torch.Tensor:
            self.seen.inputs = places(arguments, given)
            outputs.append(forward(*arguments))
            return outputs[-1]

        def log(name: str, value: Any, **options: Any) -> None:
            if not isinstance(value, torch.Tensor):
                raise BadInput(
                    f"training_step logs '{name}', a {type(value).__name__}; log a tensor, the "
                    f"mean over the samples of the batch"
                )
            logged[name], self.seen.logged[name] = value, options

        module.log, module.forward = log, recorded
        try:
            # A training step may leave the number of the batch out.
            numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            step = module.training_step(batch, *([0] if numbered else []))
        finally:
            del module.log, module.forward
        loss = step["loss"] if isinstance(step, Mapping) else step
        output = outputs[0] if len(outputs) == 1 else None
        self.seen.metrics = {
            name: f"logged.{place}"
            for place, (name, value) in enumerate(logged.items())
            if value is not loss
        }
        values = {str(place): value for place, value in enumerate(logged.values())}
        return {"loss": loss, "logged": values, "output": output}


def places(arguments: tuple[Any, ...], given: list[Any]) -> list[int]:
    """Indices of the arguments among the tensors of a batch; empty where one is none of them."""
    found = [[i for i, leaf in enumerate(given) if leaf is each] for each in arguments]
    return [each[0] for each in found] if all(found) else []


def captured_step(module: Any, batch: Batch) -> LayerGraph:
    """The graph of ``module.training_step``, for which a plan is made."""
    return capture_model(TrainingStep(module), batch)


class PipelineStrategy(DDPStrategy):
    """``Trainer(strategy=PipelineStrategy(batch), devices=...)`` trains by a plan.

    ``batch`` is an example of the loader's batches; a batch is the global one, which each rank
    reads whole. ``plan`` is as of `Pipeline`, of the layers of `captured_step`; without it one is
    found. Other arguments are those of `Pipeline`, such as ``clip_norm``. Learning-rate schedules,
    callbacks, loggers and ``validation_step`` are Lightning's own; in validation ``self(...)`` is
    computed by all ranks. A checkpoint has the whole weights in Lightning's file, and the rest in a
    folder beside it.

    Raises:
        BadInput: when `fit` begins, for what a pipeline cannot do.
    """

    def __init__(
        self, batch: Batch, *, plan: Plan | Path | str | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.plan, self.batch, self.options = plan, batch, options
        self.pending: list[Any] = []
        self.pipe: Any = None
        self.failed = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, as the pipeline is made before a checkpoint is read into it."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False, as the pipeline reads its optimizer's state itself."""
        return False

    def setup(self, trainer: Any) -> None:
        """Make the pipeline."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        check_supported(trainer)
        # All ranks read the same batches, in the loader's own order.
        trainer._accelerator_connector.use_distributed_sampler = False
        self.step = TrainingStep(self.lightning_module)
        graph = capture_model(self.step, self.batch)
        self.pipe = Pipeline(
            graph,
            self.batch,
            plan=self.plan,
            optimizer=partial(self.own_optimizer, trainer),
            clip_norm=trainer.gradient_clip_val or None,
            metrics=self.step.seen.metrics,
            autocast=AUTOCAST[trainer.precision],
            device=self.root_device,
            **self.options,
        )

    def own_optimizer(self, trainer: Any, named: Any) -> torch.optim.Optimizer:
        """The optimizer of ``configure_optimizers``, with this rank's parameters alone."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise BadInput(
                f"configure_optimizers gives {len(self.optimizers)} optimizers; give one"
            )
        (optimizer,) = self.optimizers
        own, module = dict(named), self.lightning_module
        assert module is not None
        names = {p: f"module.{name}" for name, p in module.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state.pop(p, None)
            group["params"] = [own[names[p]] for p in group["params"] if names[p] in own]
        if "" in own:  # the rank trains nothing, and has an optimizer all the same
            optimizer.param_groups[0]["params"] = [own[""]]
        self.optimizers = [optimizer]
        return optimizer

    def batch_to_device(self, batch: Any, *_: Any, **__: Any) -> Any:
        """Leave the batch: the pipeline moves what each stage reads."""
        return batch

    def training_step(self, batch: Any, *_: Any) -> torch.Tensor:
        """Train on the batches since the latest step; NaN where more are to be accumulated."""
        module: Any = self.lightning_module
        self.pending.append(batch)
        if module.trainer.fit_loop._should_accumulate():
            return torch.tensor(torch.nan)
        batches, self.pending = self.pending, []
        taken = self.pipe.step(*batches)
        for name, options in self.step.seen.logged.items():
            module.log(name, taken.metrics.get(name, taken.loss), **options)
        return torch.tensor(taken.loss)

    def backward(self, closure_loss: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Part of the pipeline's step."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Part of the pipeline's step, which the closure takes."""
        return closure()

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        """Run the module's step, with what the pipeline predicts for ``self(...)``."""
        module: Any = self.lightning_module
        output = self.pipe.predict(batch, everywhere=True)["output"]
        given, trained_on = pytree.tree_leaves(batch), self.step.seen.inputs

        def predicted(*inputs: Any) -> Any:
            if output is None or not trained_on or places(inputs, given) != trained_on:
                raise BadInput(
                    "validation_step and training_step must each call self(...) on the same "
                    "tensors of the batch, as they are"
                )
            return output

        module.forward = predicted
        try:
            return module.validation_step(batch, *arguments)
        finally:
            del module.forward

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights, on rank 0."""
        weights = self.pipe.model_state_dict()
        return {name.removeprefix("module."): weights[name] for name in weights}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Save nothing: it is in the pipeline's own checkpoint."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's file, and what ranks continue from in a folder beside it."""
        if "optimizer_states" in checkpoint:
            self.pipe.save(beside(filepath), keep=1)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read both."""
        if not beside(checkpoint_path).is_dir():
            raise BadInput(
                f"{beside(checkpoint_path)} is missing, from which ranks go on; give ckpt_path= a "
                f"checkpoint of a PipelineStrategy that is more than weights"
            )
        self.pipe.load(beside(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Done by `load_checkpoint`."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove both."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(beside(filepath), ignore_errors=True)

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure: other ranks may not be there any more to gather the weights."""
        self.failed = True

    def teardown(self) -> None:
        """Close the pipeline; the module has all weights then."""
        if self.pipe is not None:
            self.pipe.close(gather=not self.failed)
            self.pipe = None
        super().teardown()


def beside(path: Any) -> Path:
    return Path(f"{path}.ranks")


def check_supported(trainer: Any) -> None:
    """Raise `BadInput` for what a pipeline cannot do, with what to do instead."""
    module = trainer.lightning_module
    found = [
        f"{type(each).__name__}.{name}"
        for each in (module, *trainer.callbacks)
        for name in WITHIN_A_STEP
        if hasattr(each, name) and is_overridden(name, each)
    ]
    averaging = StochasticWeightAveraging, WeightAveraging
    found += [type(c).__name__ for c in trainer.callbacks if isinstance(c, averaging)]
    if trainer.state.fn != TrainerFn.FITTING:
        why = "a PipelineStrategy only fits; give its checkpoint to a Trainer of one device"
    elif not module.automatic_optimization:
        why = "automatic_optimization is off, and a pipeline's step cannot be divided; leave it on"
    elif found:
        why = f"{found[0]} has no place in a pipeline's step; leave it out"
    elif trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_val:
        why = "gradient_clip_algorithm is 'value'; a pipeline clips by 'norm'"
    elif trainer.precision not in AUTOCAST:
        why = f"precision is '{trainer.precision}'; a pipeline takes {', '.join(AUTOCAST)}"
    else:
        return
    raise BadInput(why)
