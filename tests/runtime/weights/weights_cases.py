"""What the worker processes of `test_weights_of_ranks` run."""

from pathlib import Path
from typing import Any

import models
import peft
import torch
import transformers
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import refusal_of
from runtime.pipeline_cases import join, plan_of, tokens
from torch import nn

from penstock.capture.capture import capture_model
from penstock.runtime.options import Update

STEPS, RATE = 2, 0.1


def llama() -> nn.Module:
    return models.llama(tie_word_embeddings=True)


def on_meta(dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return nn.Module.to(llama(), dtype)


def batch(rows: int = 12) -> dict[str, torch.Tensor]:
    return tokens(rows)


def train_plainly(directory: Path) -> nn.Module:
    """The model of ``directory`` after the steps, on one device, by plain torch."""
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        plain_step(optimizer, model(**batch()).loss)
    return model


def read_train_and_save(directory: Path) -> dict[str, Any]:
    """From the weights in ``directory``, under a plan with a replicated stage, and back."""
    join()
    graph = capture_model(on_meta(torch.float64), batch())
    found: dict[str, Any] = {}
    for name, replicas in {"replicas": (2, 1), "stages": (1, 1, 1)}.items():
        with Pipeline(
            graph,
            batch(),
            plan=plan_of(len(graph.layer_names), replicas),
            update=Update(weights=directory / "first"),
            optimizer=lambda p: torch.optim.SGD(p, lr=RATE),
        ) as pipe:
            found[f"{name} on meta"] = [n for n, p in pipe.named_parameters() if p.is_meta]
            for _ in range(STEPS):
                pipe.step(batch())
            pipe.save_pretrained(directory / name, max_shard_bytes=4000)
    return found


def adapted(saved_too: list[str] | None = None) -> Any:
    """The model with adapters beside the projections of its attention."""
    torch.manual_seed(3)
    settings = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=saved_too,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(nn.Module.to(llama(), torch.float64), settings)


def train_and_save_adapters(directory: Path) -> str:
    """Under a plan with a replicated stage; and why a tensor beside the adapter is refused."""
    join()
    model = adapted(["norm"])
    graph = capture_model(model, batch())
    plan = plan_of(len(graph.layer_names), (2, 1))
    with Pipeline(
        graph, batch(), plan=plan, optimizer=lambda p: torch.optim.SGD(p, lr=RATE)
    ) as pipe:
        for _ in range(STEPS):
            pipe.step(batch())
        pipe.save_adapters(directory / "adapter")
    other = adapted()
    other.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight").requires_grad_()
    with Pipeline(capture_model(other, batch()), batch(), plan=plan) as pipe:
        return refusal_of(pipe.save_adapters, directory / "other")


def initial_values() -> dict[str, dict[str, torch.Tensor]]:
    """The first weights of a model in half precision, on rank 0, by plan."""
    join()
    graph = capture_model(on_meta(torch.bfloat16), batch())
    layers = len(graph.layer_names)
    plans = {replicas: plan_of(layers, replicas) for replicas in ((3,), (1, 2), (1, 1, 1))}
    values: dict[str, dict[str, torch.Tensor]] = {}
    for replicas, plan in plans.items():
        with Pipeline(graph, batch(), plan=plan, update=Update(seed=5)) as pipe:
            values[str(replicas)] = pipe.model_state_dict()
    return values


class Unset(nn.Module):
    """A layer that only its constructor initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale


def refusals(directory: Path) -> list[str]:
    """What is refused, on every rank alike: what one of them cannot initialise or read."""
    join()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Unset())
    rows = (torch.ones(12, 4), torch.ones(12, 4))
    graph = capture_model(model, rows, loss=nn.functional.mse_loss)
    plan = plan_of(len(graph.layer_names), (1, 1, 1))
    given: Any = {"plan": plan, "timeout_s": 20}
    return [
        refusal_of(Pipeline, graph, rows, update=Update(weights=weights), **given)
        for weights in (None, directory / "nowhere")
    ]


class Scored(nn.Module):
    """A loss with weights and a buffer of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.score = nn.Linear(5, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("passing", torch.tensor(1.0), persistent=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.scale * self.score(output), target)


def scored_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def save_with_loss(directory: Path) -> dict[str, torch.Tensor]:
    """Weights of model and loss as they were saved, and as they are read by another pipeline."""
    join()
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    found: dict[str, torch.Tensor] = {}
    for seed, weights in ((1, None), (2, directory)):
        graph = capture_model(scored_model(seed), given, loss=Scored(seed))
        plan = plan_of(len(graph.layer_names), (1, 1))
        options: Any = {"optimizer": lambda p: torch.optim.SGD(p, lr=RATE)}
        with Pipeline(graph, given, plan=plan, update=Update(weights=weights), **options) as pipe:
            if weights is None:
                pipe.step(given)
                pipe.save_pretrained(directory)
            found |= {f"{seed} {n}": t for n, t in pipe.model_state_dict().items()}
    return found
