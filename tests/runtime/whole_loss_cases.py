"""Losses of a whole batch, and what the ranks that train them run beside one process."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join, plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan

ROWS, WIDTH = 12, 5


class Towers(nn.Module):
    """Two ends of each sample, and a learned temperature, which has none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.read = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.drop = nn.Dropout(0.0)

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both ends, and the factor on their products."""
        for seen in self.seen:
            picture = self.drop(torch.tanh(seen(picture)))
        for read in self.read:
            text = torch.tanh(read(text))
        return {"picture": picture, "text": text, "factor": self.scale.exp()}


def contrast(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """All other samples are negatives (CLIP); the labels say which two belong together."""
    scores = output["factor"] * output["picture"] @ output["text"].T
    target = batch["pair"]
    return functional.cross_entropy(scores, target) + functional.cross_entropy(scores.T, target)


def spread(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """Distance, deviation of each column over the batch, and covariance (VICReg)."""
    one, other = output["picture"], output["text"]
    loss = functional.mse_loss(one, other) + functional.relu(1 - one.std(0)).mean()
    return loss + one.T.cov().square().mean() * output["factor"]


def correlation(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """Pearson's, of all numbers."""
    both = torch.stack([output["picture"].flatten(), batch["text"].flatten()])
    return 1 - torch.corrcoef(both)[0, 1]


def twins(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """Correlations of columns over the batch (Barlow Twins)."""
    one, other = ((x - x.mean(0)) / x.std(0) for x in (output["picture"], output["text"]))
    matrix = one.T @ other / len(one)
    return (matrix - torch.eye(WIDTH, dtype=matrix.dtype)).square().sum()


def neighbours(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """The places of samples count."""
    return functional.mse_loss(output["picture"], output["text"].roll(1, 0)).sqrt()


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "contrast": contrast,
    "spread": spread,
    "correlation": correlation,
    "twins": twins,
    "neighbours": neighbours,
}


def batch_of(rows: int = ROWS) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(5)
    wide = torch.randn(2, rows, WIDTH, generator=make, dtype=torch.float64)
    return {"picture": wide[0], "text": wide[1], "pair": torch.arange(rows).roll(rows // 3)}


def plans(layers: int, ranks: int) -> dict[str, Plan]:
    """Plans whose last stages have all their forwards first."""

    def plan(replicas: Sequence[int], schedule: str = "gpipe", **options: Any) -> Plan:
        return plan_of(layers, replicas, schedule, micro_batches=3, rows=4, **options)

    def with_last(plan: Plan, **changes: Any) -> Plan:
        return replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], **changes)))

    if ranks == 2:
        alone = plan((1, 1))
        before, last = alone.stages
        cut = range(layers - 1), range(layers - 1, layers)
        at_once = tuple(replace(stage, slices=(ROWS,)) for stage in alone.stages)
        return {
            "two stages": alone,
            "a stage of the loss alone": replace(
                alone, stages=(replace(before, layers=cut[0]), replace(last, layers=cut[1]))
            ),
            "one stage, two replicas": plan((2,)),
            "in turn": plan((2,), in_turn=True),
            "one micro-batch": Plan(at_once, 1, ROWS, "1f1b"),
            "recompute": plan((1, 1), recompute=True),
            "breadth first": plan((1, 1), "breadth-first"),
            "by block": with_last(alone, by_block=True),
            "divided": with_last(plan((2,)), sharding="parameters"),
        }
    return {
        "three stages": plan((1, 1, 1)),
        "replicas last": plan((1, 2)),
        "replicas first": plan((2, 1)),
        "three replicas": plan((3,)),
        "recompute last": with_last(plan((1, 2)), recompute=True),
    }


def compared(ranks: int) -> dict[str, list[str]]:
    """What differs from one process on the whole batch, by loss and plan."""
    join()
    found: dict[str, list[str]] = {}
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        model = Towers().double()
        kept = copy.deepcopy(model)
        graph = capture_model(model, batch_of(), loss=loss)
        every = plans(len(graph.layer_names), ranks)
        for kind, plan in every.items() if name == "contrast" else list(every.items())[:3]:
            metrics = {"norm": picture_norm}
            with Pipeline(graph, batch_of(), plan=plan, metrics=metrics, timeout_s=60) as pipe:
                pipe.print_with(lambda line: None)
                wrong = found[f"{name}, {kind}"] = list[str]()
                for rows in (ROWS, ROWS - 5, 2):
                    plain, batch = copy.deepcopy(kept), batch_of(rows)
                    wrong += [
                        f"{rows} rows: {what}" for what in differing(pipe, plain, batch, loss)
                    ]
                if not str(pipe.verified).startswith("equal to your module on the whole batch"):
                    wrong.append(str(pipe.verified))
                pipe.close(gather=True)
    return found


class Words(nn.Module):
    """A number of vectors for each sample, as many as its batch is long."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vectors."""
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden


def pooled_spread(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The deviation over the batch of means over words."""
    mask = batch["mask"].unsqueeze(-1).double()
    pooled = (output * mask).sum(1) / mask.sum(1)
    return functional.relu(1 - pooled.std(0)).mean()


def words_spread(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Covariance over all words of all samples; nothing of the batch is read."""
    return output.flatten(0, 1).T.cov().square().mean()


def words_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(rows + length)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=make)
    return {"words": torch.randint(20, (rows, length), generator=make), "mask": mask.long()}


def compared_lengths() -> dict[str, list[str]]:
    """What differs where batches have other lengths, by loss and replicas; on three ranks."""
    join()
    found: dict[str, list[str]] = {}
    for loss in (pooled_spread, words_spread):
        for replicas in ((1, 2), (3,)):
            torch.manual_seed(0)
            model = Words().double()
            plain, first = copy.deepcopy(model), words_of(ROWS, 6)
            dynamic: Any = {"words": {1: "length"}, "mask": {1: "length"}}
            graph = capture_model(model, first, loss=loss, dynamic=dynamic)
            layers = len(graph.layer_names)
            plan = plan_of(layers, replicas, "gpipe", micro_batches=3, rows=4)
            wrong = found[f"{loss.__name__}, {replicas}"] = list[str]()
            with Pipeline(graph, first, plan=plan, timeout_s=60) as pipe:
                pipe.print_with(lambda line: None)
                for rows, length in ((ROWS, 6), (ROWS, 4), (7, 5)):
                    batch = words_of(rows, length)
                    expected = loss(plain(**batch), batch)
                    plain.zero_grad()
                    expected.backward()
                    loss_here = pipe.step(batch).loss
                    if abs(loss_here - float(expected.detach())) > 1e-9:
                        wrong.append(f"{rows} x {length}: {loss_here} for {expected}")
                    theirs = {n: p.grad for n, p in plain.named_parameters()}
                    for name, parameter in pipe.named_parameters():
                        if not torch.allclose(parameter.grad, theirs[name], 1e-9, 1e-11):
                            wrong.append(f"{rows} x {length}: {name}")
                pipe.close(gather=True)
    return found


def picture_norm(output: Any, batch: Any) -> torch.Tensor:
    """A metric by samples; its target must be the same rows."""
    return (output["picture"] * batch["text"]).sum(1).mean()


def differing(pipe: Pipeline, plain: nn.Module, batch: Any, loss: Any) -> list[str]:
    """The loss, the metrics and the gradients that are not those of one process."""
    output = plain(batch["picture"], batch["text"])
    expected = loss(output, batch)
    expected.backward()
    step, evaluated = pipe.step(batch), pipe.evaluate(batch)
    norm = float(picture_norm(output, batch).detach())
    numbers = {
        "loss": (step.loss, float(expected.detach())),
        "evaluated": (evaluated.loss, float(expected.detach())),
        "norm": (step.metrics["norm"], norm),
        "evaluated norm": (evaluated.metrics["norm"], norm),
    }
    wrong = [f"{n} {a} for {b}" for n, (a, b) in numbers.items() if abs(a - b) > 1e-9]
    theirs = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        slope, other = parameter.grad, theirs[name].grad
        own = torch.zeros_like(parameter) if slope is None else slope
        expected = torch.zeros_like(theirs[name]) if other is None else other
        # Of divided parameters a rank has some rows, which the comparison of the first step saw.
        if own.shape == expected.shape and not torch.allclose(own, expected, 1e-9, 1e-11):
            wrong.append(f"{name} by {(own - expected).abs().max():.2e}")
    return wrong
