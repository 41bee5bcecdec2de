"""What the worker processes of `test_larger_than_a_rank` run, within a limit on their data."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from runtime.pipeline_cases import join
from torch import nn

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Update

STAGES, STEPS, RATE = 4, 2, 0.1
WIDTH, INNER, WORDS = 1024, 2816, 64
SHARD_BYTES = 30_000_000


def config(blocks: int) -> transformers.LlamaConfig:
    """Some 51 MB of weights in each block."""
    return transformers.LlamaConfig(
        num_hidden_layers=blocks,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=16,
    )


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """One that needs no memory of its own."""
    return torch.optim.SGD(parameters, lr=RATE, foreach=False)


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def data_bytes() -> int:
    """What counts against a limit on this process's data."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def limit_data(more_bytes: float) -> None:
    """Let this process have no more than ``more_bytes`` of data beyond what it has."""
    limit = int(data_bytes() + more_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@dataclass(frozen=True)
class Trained:
    """What a rank found; on rank 0 also what the model returns.

    ``own_bytes`` are those of its weights, ``more_bytes`` what it has at the end beyond the start;
    ``skipped`` says why the first step was not compared with the whole model.
    """

    own_bytes: int
    more_bytes: int
    skipped: str
    losses: list[float]
    logits: torch.Tensor | None


def train_within(directory: Path, blocks: int, more_bytes: float) -> Trained:
    """Read a stage, train it, write it; the limit holds from before anything is read."""
    join()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config(blocks))
    graph = capture_model(model, batch())
    each = 2 * blocks // STAGES
    # The embedding comes before the blocks' halves, the head and the loss after them.
    cuts = [0, *(1 + each * stage for stage in range(1, STAGES)), len(graph.layer_names)]
    stages = (Stage(range(cuts[s], cuts[s + 1]), (s,), (2,)) for s in range(STAGES))
    plan = Plan(tuple(stages), 2, 2, "1f1b")
    limit_data(more_bytes)
    before = data_bytes()
    with Pipeline(
        graph,
        batch(),
        plan=plan,
        update=Update(weights=directory / "first"),
        optimizer=optimizer,
        verify="first-step",
    ) as pipe:
        own = sum(p.numel() * p.element_size() for p in pipe.parameters())
        losses = [pipe.step(batch()).loss for _ in range(STEPS)]
        skipped = pipe.verified.skipped if pipe.verified is not None else ""
        result = pipe.predict(batch())
        pipe.save_pretrained(directory / "last", max_shard_bytes=SHARD_BYTES)
        more = data_bytes() - before
    return Trained(own, more, skipped, losses, result["logits"] if result is not None else None)


def load_within(directory: Path, blocks: int, more_bytes: float) -> str:
    """How loading the whole model ends within the same limit."""
    limit_data(more_bytes)
    try:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config(blocks))
        model.to_empty(device="cpu")
    except (RuntimeError, MemoryError) as failure:
        return str(failure)
    return ""


def train_plainly(directory: Path) -> tuple[nn.Module, list[float]]:
    """The same steps on one device without a limit, by plain torch."""
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    stepper = optimizer(model.parameters())
    losses: list[float] = []
    for _ in range(STEPS):
        losses.append(plain_step(stepper, model(**batch()).loss))
    return model.eval(), losses
