"""The script of `loop_hugging_face_before.py`, in which a pipeline takes the steps.

torchrun --nproc-per-node 2 examples/loop_hugging_face.py checkpoints
"""

import sys
from pathlib import Path

import torch
import transformers

from penstock.integrations.loops.hugging_face import PipelineTrainer

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = transformers.LlamaConfig(vocab_size=256, **sizes, **heads)
model = transformers.LlamaForCausalLM(config)
text = list(Path(transformers.__file__).read_bytes())
pieces = [text[start : start + 32] for start in range(0, 32 * 80, 32)]
data = [{"input_ids": piece, "labels": piece} for piece in pieces]
arguments = transformers.TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e-3,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = PipelineTrainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model(sys.argv[1])
trainer.end()
for row in trainer.state.log_history:
    if "loss" in row and trainer.is_world_process_zero():
        print(f"loss {row['loss']:.4f}")
