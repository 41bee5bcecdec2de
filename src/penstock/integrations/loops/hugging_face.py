"""The loop of Hugging Face's `Trainer`, in which a pipeline takes the steps.

The trainer still reads data, counts steps, logs, evaluates, calls callbacks, keeps checkpoints.
Each rank runs all of it as if it were alone, on whole batches; steps, evaluations and checkpoints
are the pipeline's.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from penstock.capture.batch.found_lengths import find_dynamic
from penstock.capture.batch.lengths import Dynamic
from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.outside_state import kept_random_state
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.weights.pretrained import is_adapted

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments
except ImportError as missing:
    raise ImportError(
        f"penstock.integrations.loops.hugging_face needs Hugging Face's trainer ({missing}); "
        f"install it with pip install 'penstock[hf]'"
    ) from missing

ModelCall = Callable[..., Any]
"""A call of the model with keyword arguments."""

EXAMPLES = 8
"""Batches that are searched for sizes that vary, such as the length of the text."""

OF_THE_PIPELINE = "pipeline"
"""The folder of a checkpoint with what an exact resume needs."""

REFUSED = {
    "deepspeed": "divide the optimizer by Constraints(sharding='optimizer') in pipeline={...}",
    "fsdp": "let the plan divide the model",
    "parallelism_config": "let the plan divide the model",
    "torch_compile": "compile stages with capture={'compile': True}",
    "use_liger_kernel": "use the model's own layers",
    "auto_find_batch_size": "plan for a batch that fits",
    "neftune_noise_alpha": "add the noise in the model",
    "optim_target_modules": "choose another optim",
    "fp16_full_eval": "evaluate in the type of training",
    "bf16_full_eval": "evaluate in the type of training",
    "enable_jit_checkpoint": "save every save_steps",
    "save_on_each_node": "let all hosts share output_dir",
    "push_to_hub": "upload the folder of the checkpoint afterwards",
    "debug": "leave it out; a bad loss is found and named by the pipeline",
}
"""Arguments of `TrainingArguments` that a pipeline cannot follow, and what to do instead."""

REFUSED_VALUES = {
    "lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"),
    "optim": ("galore", "apollo", "lomo", "adalomo", "schedule_free"),
    "train_sampling_strategy": ("batch_rebalance",),
}
"""Beginnings of values that need the whole model, or a step of another form."""

OF_THE_LOOP = (
    "training_step",
    "prediction_step",
    "create_optimizer",
    "create_scheduler",
    "create_optimizer_and_scheduler",
    "_inner_training_loop",
)
"""Methods that would not be called as their author expects."""


class OneProcess(Accelerator):
    """Accelerate in a rank that reads whole batches, and so has nothing to gather."""

    def gather(self, tensor: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return model.of if isinstance(model, InPipeline) else model


class InPipeline(nn.Module):
    """A proxy for the model in the trainer's loop: a pipeline has its parameters.

    While the pipeline records the forward, it calls the model without its loss.
    """

    def __init__(self, model: nn.Module, call: ModelCall | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "of", model)
        self.call = call

    def __call__(self, **inputs: Any) -> Any:
        assert self.call is not None
        return self.call(**inputs)


class Stepped:
    """An optimizer or schedule that the pipeline steps, as the trainer and its callbacks see it."""

    def __init__(self, stepped: Any) -> None:
        self._stepped = stepped

    def step(self, *_: Any) -> None:
        """Do nothing: the pipeline has stepped it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepped, name)


class OnThisRank:
    """The parameters of this rank instead of the model's, from which an optimizer is made."""

    def __init__(self, model: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = list(named)
        self.modules = model.modules

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._named


def as_one_process(state: Any) -> Any:
    """A state of Accelerate whose process has its rank, and does not share work with others."""
    alone = copy.copy(state)
    alone.num_processes, alone.distributed_type = 1, DistributedType.NO
    return alone


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose steps a pipeline takes; every rank of torchrun has the same.

        trainer = PipelineTrainer(model, args, train_dataset=data)
        trainer.train()
        trainer.end()

    ``plan`` is as of `Pipeline`: without it one is found for these ranks. It may also be a function
    that makes it of the graph, an example batch and the number of ranks. ``pipeline`` are further
    arguments of `Pipeline`, ``capture`` further ones of `capture_model`. Others are the trainer's.
    A batch has ``per_device_train_batch_size`` samples for each rank, which need not be a multiple
    for the plan. The loss is what `compute_loss` gives, also where a subclass overrides it. `pipe`
    is the pipeline, from `train` until `end`.

    Raises:
        BadInput: an argument that cannot be followed, which is named.
    """

    def __init__(
        self,
        *arguments: Any,
        plan: Plan | Path | str | Callable[[LayerGraph, Any, int], Plan] | None = None,
        pipeline: Mapping[str, Any] | None = None,
        capture: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        check_methods(type(self))
        given = arguments_in(arguments, others)
        if given is not None:
            check_arguments(given)
            # A plan says what is computed again.
            given.gradient_checkpointing = given.activation_checkpointing = False
        super().__init__(*arguments, **others)
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise BadInput(
                "optimizers= was given objects, but each rank makes its own of its parameters; "
                "give optimizer_cls_and_kwargs=, or optim and lr_scheduler_type of the arguments"
            )
        self.pipe: Pipeline | None = None
        self._plan, self._pipeline, self._capture = plan, dict(pipeline or {}), dict(capture or {})
        self._latest: StepMetrics | None = None
        self._batches: list[Any] = []
        self._set_signature_columns_if_needed()
        self.args = args = copy.copy(self.args)
        ranks, args.distributed_state = args.world_size, as_one_process(args.distributed_state)
        self._ranks = ranks
        args.per_device_train_batch_size *= ranks
        args.per_device_eval_batch_size *= ranks
        self._train_batch_size = args.train_batch_size
        self.accelerator.state = as_one_process(self.accelerator.state)
        self.accelerator.__class__ = OneProcess

    def loss_and_outputs(self, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """The outputs of the last stage: the trainer's loss, and those of ``model``."""
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return {**cast(dict[str, Any], outputs), "loss": loss}

    def batch_of(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of the collator's, in which each sample has a row."""
        return dict(inputs)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep the pipeline's metrics of a step or an evaluation for the logs."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: Any
    ) -> tuple[nn.Module, DataLoader[Any]]:
        if self.pipe is not None:
            raise BadInput("train() was called before on this trainer; make another for more steps")
        model = cast(nn.Module, self.model)
        with kept_random_state(self.args.device):
            loader: Any = getattr(train_dataloader, "base_dataloader", train_dataloader)
            examples = [self.batch_of(batch) for batch in islice(loader, EXAMPLES)]
        batch = max(examples, key=samples_in_batch)
        own = type(model).forward

        def forward(module: nn.Module, **inputs: Any) -> dict[str, Any]:
            called = InPipeline(model, lambda **some: own(module, **some))
            return self.loss_and_outputs(called, inputs)

        def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> Any:
            self.optimizer = None
            return self.create_optimizer(cast(Any, OnThisRank(model, named)))

        def schedule(optimizer: Any) -> Any:
            self.lr_scheduler = None
            return self.create_scheduler(max_steps, optimizer)

        model.forward = MethodType(forward, model)
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.mixed_precision)
        dynamic: Dynamic | None = find_dynamic(examples) if len(examples) > 1 else None
        graph = capture_model(
            model, batch, **{"dynamic": dynamic, "autocast": autocast} | self._capture
        )
        self.pipe = Pipeline(
            graph,
            batch,
            plan=plan(graph, batch, self._ranks) if callable(plan := self._plan) else plan,
            optimizer=optimizer,
            learning_rate_schedule=schedule,
            clip_norm=self.args.max_grad_norm or None,
            autocast=autocast,
            **self._pipeline,
        )
        if resume_from_checkpoint is not None:
            self._load_pipeline(resume_from_checkpoint)
        self.optimizer, self.lr_scheduler = Stepped(self.optimizer), Stepped(self.lr_scheduler)
        self.model_wrapped = InPipeline(model)
        handler: Any = self.callback_handler
        handler.model, handler.optimizer = model, self.optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, train_dataloader
        return self.model_wrapped, train_dataloader

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return super().get_decay_parameter_names(cast(Any, self.model))

    def get_batch_samples(self, *arguments: Any, **others: Any) -> Any:
        self._batches.clear()  # of an update that a callback has ended
        return super().get_batch_samples(*arguments, **others)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        assert self.pipe is not None
        cast(nn.Module, self.model).train()
        self._batches.append(self.batch_of(inputs))
        if len(self._batches) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        self._latest = self.pipe.step(*self._batches)
        self.note(self._latest.metrics)
        return torch.tensor(self._latest.loss, device=self.args.device)

    def _clip_grad_norm(self, model: Any) -> float:
        return self._latest.gradient_norm if self._latest is not None else 0.0

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._clip_grad_norm(model)

    def _get_learning_rate(self) -> float:
        return self._latest.learning_rate if self._latest else super()._get_learning_rate()

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.model_wrapped if self.pipe is not None else super()._wrap_model(model, training)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if self.pipe is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        labels: Any = tuple(inputs.get(name) for name in self.label_names)
        loss = self._evaluated(inputs) if all(label is not None for label in labels) else None
        if prediction_loss_only:
            return loss, None, None
        outputs = self.pipe.predict(self.batch_of(inputs), everywhere=True)
        left_out = ignore_keys or getattr(
            getattr(self.model, "config", None), "keys_to_ignore_at_inference", []
        )
        logits = tuple(v for k, v in outputs.items() if k not in (*left_out, "loss"))
        labels = (labels if len(labels) > 1 else labels[0]) if loss is not None else None
        return loss, logits[0] if len(logits) == 1 else logits, labels

    def _evaluated(self, inputs: Any) -> torch.Tensor:
        assert self.pipe is not None
        cast(nn.Module, self.model).eval()
        found = self.pipe.evaluate(self.batch_of(inputs))
        self.note(found.metrics)
        return torch.tensor(found.loss, device=self.args.device)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.pipe is None:
            return super()._save(output_dir, state_dict)
        folder = Path(output_dir or cast(str, self.args.output_dir))
        if self.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.safetensors*"):
                old.unlink()
        save = (
            self.pipe.save_adapters
            if is_adapted(cast(nn.Module, self.model))
            else self.pipe.save_pretrained
        )
        save(folder)
        if self.is_world_process_zero():
            tokenizer: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.pipe is not None
        self.pipe.save(Path(output_dir) / OF_THE_PIPELINE, keep=1)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.is_world_process_zero():
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, *arguments: Any, **others: Any) -> None:
        """Load nothing yet: the pipeline loads what it holds, once it is there."""

    def _load_best_model(self) -> None:
        self._load_pipeline(cast(str, self.state.best_model_checkpoint))

    def _load_pipeline(self, checkpoint: str) -> None:
        assert self.pipe is not None
        folder = Path(checkpoint) / OF_THE_PIPELINE
        if not folder.is_dir():
            raise BadInput(
                f"'{checkpoint}' has no folder '{OF_THE_PIPELINE}', so a pipeline cannot go on "
                f"from it; start from its weights with from_pretrained"
            )
        self.pipe.load(folder)

    def end(self) -> None:
        """Close the pipeline, and what the trainer itself ends; the last call of a script."""
        if self.pipe is not None:
            self.pipe.close()
        super().end()


def arguments_in(arguments: Iterable[Any], others: Mapping[str, Any]) -> Any:
    """The `TrainingArguments` among what a trainer is given; ``None`` if there are none."""
    every = (*arguments, *others.values())
    return next((each for each in every if isinstance(each, TrainingArguments)), None)


def samples_in_batch(batch: Mapping[str, Any]) -> int:
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


def check_arguments(args: TrainingArguments) -> None:
    """Raise `BadInput` for the first argument that a pipeline cannot follow."""
    for name, remedy in REFUSED.items():
        if getattr(args, name, None):
            raise BadInput(f"{name}={getattr(args, name)!r} is not for a pipeline; {remedy}")
    for name, beginnings in REFUSED_VALUES.items():
        value = getattr(args, name, "")
        value = str(getattr(value, "value", value))
        if value.startswith(beginnings):
            raise BadInput(f"{name}='{value}' is not for a pipeline; choose another {name}")
    if args.load_best_model_at_end and args.save_only_model:
        raise BadInput("load_best_model_at_end needs save_only_model=False with a pipeline")
    if getattr(args.accelerator_config, "split_batches", False):
        raise BadInput("split_batches=True is not for a pipeline, which reads whole batches")


def check_methods(kind: type) -> None:
    """Raise `BadInput` if a user's trainer behind this one overrides what would not be called."""
    behind = kind.__mro__[kind.__mro__.index(PipelineTrainer) + 1 :]
    for other in behind:
        if other.__module__.partition(".")[0] in ("transformers", "trl"):
            continue
        for name in OF_THE_LOOP:
            if name in vars(other):
                raise BadInput(
                    f"{other.__name__}.{name} would not be called, since the pipeline takes the "
                    f"steps; change the loss in compute_loss, or use callbacks"
                )
