"""A model whose batches hold tensors that all samples share, and what ranks run of it."""

from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from refused import refusal_of
from runtime.part_cases import adam, cut, join, seeded
from torch import nn
from torch.nn import functional

from penstock.capture.batch.part import BatchPart
from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan

WIDTH, WORDS, LENGTH = 8, 11, 6

Batch = dict[str, torch.Tensor]


class Placed(nn.Module):
    """Places of words, embedded by the first layer, are read again by the last ones.

    What is made of them has no samples, needs a gradient, and crosses from stage to stage. Its
    size is a part of the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(2, WIDTH)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Any, places: Any, mask: Any, scale: Any, labels: Any) -> torch.Tensor:
        where = torch.tanh(self.place(places))
        hidden = torch.tanh(self.first(self.words(words) + where))
        hidden = torch.tanh(self.middle(mask.softmax(-1) @ hidden)) + where
        scores = self.last(hidden) * scale
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return loss + 0.1 * where.square().mean()


def batch_of(number: int, samples: int, length: int = LENGTH) -> Batch:
    """Batch ``number``: its places, mask and scale are its own."""
    make = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (samples, length), generator=make)
    labels = words.clone()
    labels[0, 2:] = -100
    places = torch.randn(length, 2, generator=make, dtype=torch.float64)
    mask = torch.randn(1, length, length, generator=make, dtype=torch.float64)
    scale = torch.rand((), generator=make, dtype=torch.float64) + 0.5
    return {"words": words, "places": places, "mask": mask, "scale": scale, "labels": labels}


STEPS = ((0, 6), (1, 6)), ((2, 6), (3, 5)), ((4, 4),), ((5, 1),)
"""Number and samples of the batches of each step."""

PLANS = {
    "two stages": (((0,), (1,)), ((3,), (3,))),
    "unequal replicas": (((0, 1), (2,)), ((1, 2), (3,))),
    "replicas behind": (((0,), (1, 2)), ((3,), (2, 1))),
}


def alone() -> dict[str, Any]:
    """One process: the losses, the weights, and an evaluation."""
    model = seeded(Placed)
    optimizer = adam(list(model.parameters()))
    losses: list[float] = []
    for step in STEPS:
        batches = [batch_of(*own) for own in step]
        counts = [int((batch["labels"] != -100).sum()) for batch in batches]
        optimizer.zero_grad()
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            size = 0.1 * torch.tanh(model.place(batch["places"])).square().mean()
            share = count / sum(counts)
            rows = len(batch["labels"]) / sum(len(own["labels"]) for own in batches)
            loss = share * (model(**batch) - size) + rows * size
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    return {
        "losses": losses,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "evaluation": float(model(**batch_of(50, 5)).detach()),
    }


def part_of(pipe: Pipeline, number: int, samples: int) -> BatchPart:
    """What this rank reads of a batch, by columns."""
    return pipe.needs.read(batch_of(number, samples), range(samples), number=number)


def trained(name: str, *, parts: bool) -> dict[str, Any]:
    devices, slices = PLANS[name]
    example = batch_of(0, 4)
    graph = capture_model(seeded(Placed), example)
    stages = cut(len(graph.layer_names), *devices, slices=slices)
    with Pipeline(graph, example, plan=Plan(stages, 2, 3, "1f1b"), optimizer=adam) as pipe:
        take = (lambda *own: part_of(pipe, *own)) if parts else batch_of
        losses = [pipe.step(*(take(*own) for own in step)).loss for step in STEPS]
        wrong = {**batch_of(9, 6), "places": torch.zeros(7, 2, dtype=torch.float64)}
        refused = refusal_of(pipe.step, wrong)
        return {
            "losses": losses,
            "weights": {name: p.detach().clone() for name, p in pipe.named_parameters()},
            "evaluation": pipe.evaluate(take(50, 5)).loss,
            "refused": refused,
        }


def every_plan() -> dict[str, Any]:
    """Each plan with whole batches, and with parts of them."""
    join()
    return {
        f"{name}{', parts' * parts}": trained(name, parts=parts)
        for name in PLANS
        for parts in (False, True)
    }
