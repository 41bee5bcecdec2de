"""What the worker processes of the tests of averaged weights run."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import refusal_of
from runtime.pipeline_cases import plan_of
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock import Constraints, ExponentialAverage, capture_model

DECAY = 0.8


class Tied(nn.Module):
    """Blocks between an embedding and a head of the same weight, with a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(self.norm(hidden.mean(1)))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(20, (8, 6), generator=generator),
            torch.randint(20, (8,), generator=generator),
        )
        for _ in range(7)
    ]


def built() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def gap(found: Any, expected: Any) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def averaged(folder: Path) -> dict[str, float]:
    """The largest differences from torch's own average, of runs that go on from one another."""
    every, model = batches(), built()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = adam(model.parameters())
    expected = list[Any]()
    for x, y in every:
        plain_step(optimizer, cross_entropy(model(x), y))
        average.update_parameters(model)
        with torch.no_grad():
            loss = cross_entropy(average.module(every[0][0]), every[0][1]).item()
        states = average.module.state_dict(), model.state_dict()
        expected.append((loss, *copy.deepcopy(states)))
    layers = len(capture_model(built(), every[0], loss=cross_entropy).layer_names)
    two, one = (plan_of(layers, of, "1f1b", micro_batches=2, rows=4) for of in ((1, 1), (2,)))
    divided = replace(one, stages=(replace(one.stages[0], sharding="parameters"),))
    found, step = dict[str, float](), 0
    for name, plan, sharded, steps in (
        ("stages", two, False, 3),
        ("divided optimizer", one, True, 2),
        ("divided parameters", divided, False, 1),
        ("stages again", two, False, 1),
    ):
        graph = capture_model(built(), every[0], loss=cross_entropy)
        with Pipeline(
            graph,
            every[0],
            plan=plan,
            optimizer=adam,
            constraints=Constraints(sharding="optimizer") if sharded else None,
        ) as pipe:
            mean = ExponentialAverage(DECAY)
            pipe.notify(mean)
            if step:
                pipe.load(folder / "checkpoints")
            for batch in every[step : step + steps]:
                pipe.step(batch)
            step += steps
            loss, own, plain = expected[step - 1]
            with mean.weights(pipe):
                found[f"{name}: loss"] = abs(pipe.evaluate(every[0]).loss - loss)
                if weights := pipe.model_state_dict():
                    found[name] = gap(weights, own)
                pipe.save_pretrained(folder / name)
                for refused in (lambda: pipe.step(every[0]), lambda: pipe.save(folder / "no")):
                    assert "has averaged weights" in refusal_of(refused)
            if weights := pipe.model_state_dict():
                found[f"{name}: own"] = gap(weights, plain)
                files = map(load_file, (folder / name).glob("*.safetensors"))
                saved = {key: value for file in files for key, value in file.items()}
                found[f"{name}: file"] = gap(
                    saved, {n: v for n, v in own.items() if "head" not in n}
                )
            pipe.save(folder / "checkpoints")
    return found
