"""Training on preferences with TRL's own trainer and with the pipeline's."""

import os
from pathlib import Path
from typing import Any

import datasets
import transformers
from integrations.loops.hugging_face_cases import TEXT, model, plan_of
from tokenizers import Tokenizer, models, pre_tokenizers


def preferences(folder: Path) -> None:
    """Pairs of pieces of a Python file, for training and held out."""
    text = TEXT.decode("ascii", errors="ignore")
    rows = [
        {
            "prompt": text[i * 50 : i * 50 + 6 + i % 5],
            "chosen": text[i * 50 + 10 : i * 50 + 20 + i % 3],
            "rejected": text[i * 70 + 1000 : i * 70 + 1008 + i % 7],
        }
        for i in range(22)
    ]
    datasets.Dataset.from_list(rows[:18]).save_to_disk(folder / "train")
    datasets.Dataset.from_list(rows[18:]).save_to_disk(folder / "held")


def tokenizer() -> Any:
    """Bytes are the tokens; the last of 256 that a text has are not used by ASCII."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def trained(
    trainer: str, folder: str, data: str, changes: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The trainer's log, and the weights that it has saved."""
    import trl

    each = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = trl.DPOConfig(
        folder,
        **{
            "precompute_ref_log_probs": True,
            "per_device_train_batch_size": each,
            "per_device_eval_batch_size": each,
            "num_train_epochs": 2,
            "learning_rate": 3e-3,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "beta": 0.3,
            **changes,
        },
    )
    given: dict[str, Any] = {
        "args": arguments,
        "train_dataset": datasets.load_from_disk(f"{data}/train"),
        "eval_dataset": datasets.load_from_disk(f"{data}/held"),
        "processing_class": tokenizer(),
    }
    if trainer == "plain":
        made: Any = trl.DPOTrainer(model(), **given)
    else:
        from penstock.integrations.loops.preference import PipelineDPOTrainer

        made = PipelineDPOTrainer(model(), plan=plan_of, **given)
    made.train()
    made.save_model(f"{folder}/final")
    made.end()
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/final").state_dict()
    return made.state.log_history, saved
