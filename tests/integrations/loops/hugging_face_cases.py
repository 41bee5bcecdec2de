"""Training with transformers' own trainer and with the pipeline's, in processes of their own."""

import os
import random
from pathlib import Path
from typing import Any

import models
import torch
import transformers
from transformers import Trainer, TrainingArguments

from penstock import Constraints, Plan, Stage

TEXT = Path(transformers.__file__).read_bytes()

ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}


def model() -> Any:
    torch.manual_seed(0)
    return models.llama(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
    )


def data(samples: int, seed: int) -> list[dict[str, list[int]]]:
    """Pieces of a Python file, of different lengths."""
    draw = random.Random(seed)
    pieces = []
    for _ in range(samples):
        start = draw.randrange(len(TEXT) - 20)
        words = list(TEXT[start : start + draw.randint(8, 20)])
        pieces.append({"input_ids": words, "labels": words, "attention_mask": [1] * len(words)})
    return pieces


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [pad] * (longest - len(row[name])) for row in rows])
        for name, pad in pads.items()
    }


def accuracy(predicted: Any) -> dict[str, float]:
    words, labels = predicted.predictions[:, :-1].argmax(-1), predicted.label_ids[:, 1:]
    return {"accuracy": float((words == labels)[labels != -100].mean())}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's: squares, divided by the number of words that count."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none", ignore_index=-100)
    total = losses.square().sum()
    return total / (
        num_items_in_batch if num_items_in_batch is not None else (wanted != -100).sum()
    )


def plan_of(graph: Any, batch: Any, ranks: int) -> Plan:
    layers, middle = len(graph.layer_names), len(graph.layer_names) // 2
    stages = (Stage(range(middle), (0,), (2,)), Stage(range(middle, layers), (1,), (2,)))
    return Plan(stages, micro_batches=2, micro_batch_size=2, schedule="1f1b")


class Noted(transformers.TrainerCallback):
    """Notes what a callback is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told.append(("step", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told.append(("save", state.global_step))

    def finish(self) -> None:
        """The end of a tracker."""
        self.told.append(("finish", 0))


def trained(
    trainer: str,
    folder: str,
    changes: dict[str, Any],
    resume: str | None = None,
    own_loss: bool = False,
) -> tuple[list[dict[str, float]], list[tuple[str, int]], dict[str, torch.Tensor]]:
    """The trainer's log, what a callback was told, and the weights that it has saved."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    each = 4 // ranks
    sizes = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each}
    arguments = TrainingArguments(folder, **{**ARGUMENTS, **sizes, **changes})
    noted = Noted()
    given: dict[str, Any] = {
        "train_dataset": data(54, 0),
        "eval_dataset": data(10, 1),
        "data_collator": padded,
        "compute_metrics": accuracy,
        "callbacks": [noted],
    }
    if own_loss:
        given["compute_loss_func"] = summed
    if trainer == "plain":
        made: Any = Trainer(model(), arguments, **given)
    else:
        from penstock.integrations.loops.hugging_face import PipelineTrainer

        made = PipelineTrainer(model(), arguments, plan=plan_of, **given)
    made.train(resume_from_checkpoint=resume)
    made.evaluate()
    made.save_model(f"{folder}/final")
    made.accelerator.trackers.append(noted)
    made.end()
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/final").state_dict()
    return made.state.log_history, noted.told, saved


def without_a_plan(
    folder: str, constraints: Constraints, resume: str | None = None
) -> tuple[int, list[float]]:
    """Stages and losses of a run whose plan is found."""
    from penstock.integrations.loops.hugging_face import PipelineTrainer

    changes = {"max_steps": 4, "save_steps": 2, "eval_strategy": "no"}
    sizes = {"per_device_train_batch_size": 2, "load_best_model_at_end": False}
    arguments = TrainingArguments(folder, **{**ARGUMENTS, **sizes, **changes})
    own = {"pipeline": {"constraints": constraints}, "data_collator": padded}
    trainer = PipelineTrainer(model(), arguments, train_dataset=data(54, 0), **own)
    trainer.train(resume_from_checkpoint=resume)
    trainer.end()
    assert trainer.pipe is not None
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return len(trainer.pipe.plan.stages), losses
