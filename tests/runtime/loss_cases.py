"""Losses of several terms, and what the ranks that train them run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import models
import torch
import transformers
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join, plan_of, sliced
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.contract import Loss

ROWS = 6
WORDS = 5
VOCABULARY = 13


@dataclass(frozen=True)
class Case:
    """A model with its loss, a batch, and whether micro-batches see something of their own."""

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    mixes: bool = False
    tolerance: float = 1e-9


class Heads(nn.Module):
    """Words, an order of sentences and a size, from one body; targets come with the batch."""

    def __init__(self, combine: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words, self.order = nn.Linear(8, VOCABULARY), nn.Linear(8, 3)
        self.size = nn.Linear(8, 1)
        self.combine = combine

    def forward(
        self, x: torch.Tensor, words: torch.Tensor, order: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        hidden = torch.tanh(self.body(self.embed(x)))
        hidden = torch.tanh(self.more(hidden)) + hidden
        pooled = hidden.mean(1)
        first = functional.cross_entropy(self.words(hidden).transpose(1, 2), words)
        second = functional.cross_entropy(self.order(pooled), order, ignore_index=2)
        return self.combine(self, first, second, self.size(hidden).squeeze(-1), mask)


def heads_batch() -> tuple[torch.Tensor, ...]:
    """Unequal numbers of targets; the second micro-batch has none at all."""
    make = torch.Generator().manual_seed(3)
    x = torch.randint(VOCABULARY, (ROWS, WORDS), generator=make)
    words = torch.randint(VOCABULARY, (ROWS, WORDS), generator=make)
    words[0, 1:], words[2:4], words[5, :2] = -100, -100, -100
    order = torch.tensor([0, 1, 2, 2, 1, 2])
    mask = torch.zeros(ROWS, WORDS, dtype=torch.float64)
    mask[0], mask[1, 0], mask[4, 1:3] = 1.0, 1.0, 1.0
    return x, words, order, mask


def masked(size: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mean over what a mask leaves, by hand, which is 0 where it leaves nothing."""
    return (size.square() * mask).sum() / mask.sum().clamp(min=1)


SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "sum of two": lambda m, a, b, s, k: a + b,
    "average of two": lambda m, a, b, s, k: (a + b) / 2,
    "mean of a stack": lambda m, a, b, s, k: torch.stack([a, 0.3 * b]).mean(),
    "difference": lambda m, a, b, s, k: 2 * a - b,
    "with rows": lambda m, a, b, s, k: a + 0.5 * s.square().mean(),
    "with a masked mean": lambda m, a, b, s, k: b + masked(s, k),
    "a masked mean that is clamped": lambda m, a, b, s, k: masked(s, k),
    "a masked mean": lambda m, a, b, s, k: (s.square() * k).sum() / k.sum(),
    "a sum": lambda m, a, b, s, k: (s.square() * k).sum(),
    "a sum over a number": lambda m, a, b, s, k: (s.square() * k).sum() / 24,
    "a sum by the rows": lambda m, a, b, s, k: s.sum() / k.shape[0] + 0.1 * a,
    "with regularisation": lambda m, a, b, s, k: a + 0.1 * m.body.weight.square().sum(),
    "learned weights": lambda m, a, b, s, k: (
        a * torch.exp(-m.size.bias[0]) + b * m.size.bias.exp().sum() + m.size.bias.sum()
    ),
    "scaled by the batch": lambda m, a, b, s, k: a * k.mean() + b,
    "with a constant of the batch": lambda m, a, b, s, k: a + b + k.sum(),
    "root of each row": lambda m, a, b, s, k: b + (1 + s.square().mean(1)).sqrt().mean(),
    "for each word": lambda m, a, b, s, k: b + ((s * k).sum(0) / k.sum().clamp(min=1)).mean(),
    "those that a mask keeps": lambda m, a, b, s, k: b + s[k > 0].square().mean(),
    "where there are any": lambda m, a, b, s, k: torch.where(k.sum() > 0, a, b) + b,
}
"""Of the model, two cross entropies, a number for each word, and a mask."""


def bert(kind: str) -> Case:
    """A tiny BERT with two losses."""
    config = models.bert_config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        max_position_embeddings=8,
        attn_implementation="eager",
    )
    x, words, order, _ = heads_batch()
    if kind == "pre-training":
        model = transformers.BertForPreTraining(config)
        batch = {"input_ids": x, "labels": words, "next_sentence_label": order.clamp(max=1)}
    else:
        model = transformers.BertForQuestionAnswering(config)
        # Positions behind the end are ignored.
        starts, ends = torch.tensor([0, 5, 5, 5, 1, 2]), torch.tensor([1, 5, 5, 2, 4, 4])
        batch = {"input_ids": x, "start_positions": starts, "end_positions": ends}
    return Case(model.double(), batch)


def mixture() -> Case:
    """A tiny mixture of experts whose router has a loss; it mixes the samples of a micro-batch."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        experts_implementation="batched_mm",
    )
    x, words, _, _ = heads_batch()
    model = transformers.Qwen3MoeForCausalLM(config).double()
    # The router computes in float32.
    return Case(model, {"input_ids": x, "labels": words}, mixes=True, tolerance=1e-6)


def words_loss(output: tuple[torch.Tensor, torch.Tensor], batch: Any) -> torch.Tensor:
    """The first term of a list."""
    return functional.cross_entropy(output[0].transpose(1, 2), batch["words"])


class OrderLoss(nn.Module):
    """The second, with a parameter and class weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, output: tuple[torch.Tensor, torch.Tensor], batch: Any) -> torch.Tensor:
        """Cross entropy of scaled scores."""
        scores = output[1] * self.scale
        return functional.cross_entropy(scores, batch["order"], self.weight, ignore_index=2)


class TwoHeads(Heads):
    """The same body without a loss."""

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the words, and of the order."""
        hidden = torch.tanh(self.body(self.embed(x)))
        hidden = torch.tanh(self.more(hidden)) + hidden
        return self.words(hidden), self.order(hidden.mean(1))


def listed() -> Case:
    """A list of weighted terms."""
    x, words, order, _ = heads_batch()
    batch = {"x": x, "words": words, "order": order}
    model = TwoHeads(SUMS["a sum"])
    terms: Loss = [(1.0, words_loss), (0.25, OrderLoss().double())]
    return Case(model.double(), batch, terms)


def case_of(name: str) -> Case:
    """A case with the same weights on every rank."""
    torch.manual_seed(0)
    if name in SUMS:
        return Case(Heads(SUMS[name]).double(), heads_batch())
    others = {
        "BertForPreTraining": lambda: bert("pre-training"),
        "BertForQuestionAnswering": lambda: bert("answers"),
        "Qwen3Moe with router loss": mixture,
        "a list of terms": listed,
    }
    return others[name]()


def plain_loss(case: Case, model: nn.Module, loss: Any, batch: Any) -> torch.Tensor:
    """The user's own loss on a batch."""
    if isinstance(loss, list):
        output = model(batch["x"])
        return sum(factor * term(output, batch) for factor, term in loss)  # pyright: ignore
    return model(**batch).loss if isinstance(batch, dict) else model(*batch)


class Plain(nn.Module):
    """A copy of a case's model and loss, whose parameters have the names that the pipeline uses."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model, self.terms = copy.deepcopy((case.model, case.loss))
        for parameter in self.model.parameters():
            parameter.grad = None

    def run(self, batch: Any, cut: Sequence[range]) -> torch.Tensor:
        """The loss of a batch, with its gradients."""
        loss = self.loss(batch, cut)
        loss.backward()
        return loss.detach()

    def loss(self, batch: Any, cut: Sequence[range]) -> torch.Tensor:
        """On the whole batch; where samples mix, its router's loss micro-batch by micro-batch."""
        if not self.case.mixes:
            return plain_loss(self.case, self.model, self.terms, batch)
        outputs = [self.model(**sliced(batch, rows)) for rows in cut]
        rows = sum(map(len, cut))
        routers = [o.aux_loss * len(r) / rows for o, r in zip(outputs, cut, strict=True)]
        logits = torch.cat([output.logits for output in outputs])
        words = functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1)
        )
        return words + self.model.router_aux_loss_coef * sum(routers)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """By the names of the pipeline."""
        found = dict(self.model.named_parameters(remove_duplicate=False))
        if self.terms is not None:
            for place, (_, term) in enumerate(self.terms):
                own = term.named_parameters() if isinstance(term, nn.Module) else ()
                found |= {f"loss.{place}.{name}": parameter for name, parameter in own}
        return {name: parameter.grad for name, parameter in found.items()}


def resized(batch: Any, rows: int) -> Any:
    """The first rows of a batch."""
    return sliced(batch, range(rows))


def close(ours: torch.Tensor, theirs: torch.Tensor | None, case: Case) -> bool:
    """Whether a gradient is right; none is zero."""
    expected = torch.zeros_like(ours) if theirs is None else theirs
    return bool((ours - expected).abs().max() <= case.tolerance * (expected.abs().max() + 1e-3))


def wrong_gradients(pipe: Pipeline, plain: Plain) -> list[str]:
    """Gradients of this rank that are not the user's own, of which some are none."""
    expected, case = plain.gradients(), plain.case
    wrong: list[str] = []
    for name, parameter in pipe.named_parameters():
        ours, theirs = parameter.grad, expected[name]
        alike = ours is theirs if ours is None or theirs is None else close(ours, theirs, case)
        wrong += [name] * (not alike)
    return wrong


def trained_by_ranks(names: Sequence[str]) -> dict[str, list[str]]:
    """What differs from the user's own model, by case, on this rank of three."""
    join()
    found: dict[str, list[str]] = {}
    for name in names:
        case = case_of(name)
        graph = capture_model(case.model, case.batch, loss=case.loss)
        layers = len(graph.layer_names)
        whole, half = case.batch, resized(case.batch, 5)
        model, loss = copy.deepcopy((case.model, case.loss))
        kept = replace(case, model=model, loss=loss)
        for schedule, replicas in (("1f1b", (2, 1)), ("zb-h1", (1, 1, 1)), ("1f1b", (1, 2))):
            wrong = found[f"{name}, {schedule}, {replicas}"] = []
            plan = plan_of(layers, replicas, schedule, micro_batches=3, rows=2)
            with Pipeline(graph, whole, plan=plan, timeout_s=60) as pipe:
                for batches in ((whole,), (half,), (whole, half)):
                    plain = Plain(kept)
                    rows = [len(next(iter(leaves(batch)))) for batch in batches]
                    cut = pipe._engine.stages.program(rows[0]).cut.micro_batches
                    loss = plain.run(joined(batches), cut)
                    metrics = pipe.step(*batches)
                    if not close(torch.tensor(metrics.loss, dtype=torch.float64), loss, case):
                        wrong.append(f"{rows}: loss {metrics.loss} for {float(loss)}")
                    wrong += [f"{rows}: {n}" for n in wrong_gradients(pipe, plain)]
                evaluated = pipe.evaluate(half).loss
                with torch.no_grad():
                    expected = Plain(kept).loss(half, cut_of(pipe, 5))
                if not close(torch.tensor(evaluated, dtype=torch.float64), expected, case):
                    wrong.append(f"evaluation {evaluated} for {float(expected)}")
                verified = str(pipe.verify(whole))
                if not verified.startswith("equal"):
                    wrong.append(verified)
                pipe.close(gather=True)
    return found


def cut_of(pipe: Pipeline, rows: int) -> tuple[range, ...]:
    """The micro-batches of a batch."""
    return pipe._engine.stages.program(rows).cut.micro_batches


def leaves(batch: Any) -> Sequence[torch.Tensor]:
    """The tensors of a batch."""
    return tuple(batch.values()) if isinstance(batch, dict) else batch


def joined(batches: Sequence[Any]) -> Any:
    """Batches as one."""
    if isinstance(batches[0], dict):
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
