"""What the worker processes of the tests of lengths run: pipelines against the user's own model."""

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import named_refusal_of, refusal_of
from torch import nn
from torch.nn import functional

from penstock.capture.batch.lengths import Length
from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety

VOCABULARY, WIDTH, LONGEST = 23, 8, 512
UNLIKE = (
    "the ranks were given different batches: length is 20 on rank 1 and 16 on rank 0; give every "
    "rank the same batches in the same order"
)
DYNAMIC = {"tokens": {1: Length("length", max=LONGEST)}, "labels": {1: "length"}}


class Attention(nn.Module):
    """Heads that see earlier words only, and none that is padded; positions are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.distance = nn.Embedding(9, 2)

    def forward(self, words: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        samples, length, _ = words.shape
        parts = self.into(words).view(samples, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        query, key, value = rotated(parts[0]), rotated(parts[1]), parts[2]
        places = torch.arange(length, device=words.device)
        bias = self.distance((places[:, None] - places[None, :]).clamp(-4, 4) + 4)
        scores = query @ key.transpose(-1, -2) / 2 + bias.permute(2, 0, 1)
        future = places[None, :] > places[:, None]
        hidden = future[None, None] | ~seen[:, None, None, :]
        mixed = scores.masked_fill(hidden, -1e9).softmax(-1) @ value
        return words + self.out(mixed.transpose(1, 2).reshape(samples, length, WIDTH))


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """Rotary positions from a table that is made for the length at hand."""
    half = heads.shape[-1] // 2
    rates = 10.0 ** -torch.arange(half, dtype=heads.dtype)
    angles = torch.arange(heads.shape[-2], dtype=heads.dtype)[:, None] * rates
    one, other = heads[..., :half], heads[..., half:]
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1
    )


class Words(nn.Module):
    """Embeddings of words and positions, a convolution over words, attention, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = tokens > 0
        words = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        words = words + self.near(words.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            words = block(words, seen)
        # Words of all samples one after another: the rows of a sample are its length.
        flat = words.reshape(-1, WIDTH)
        return self.head(torch.tanh(self.dense(flat))).view(*tokens.shape, VOCABULARY)


def loss_of(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def model() -> Words:
    torch.manual_seed(5)
    return Words().double()


def batch_of(length: int, samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded words: rows have different numbers of them, and so of targets."""
    source = torch.Generator().manual_seed(1000 * seed + length)
    tokens = torch.randint(1, VOCABULARY, (samples, length), generator=source)
    words = torch.randint(length // 2, length + 1, (samples, 1), generator=source)
    padded = torch.arange(length) >= words
    tokens = tokens.masked_fill(padded, 0)
    return {"tokens": tokens, "labels": tokens.masked_fill(padded, -100).roll(-1, 1)}


def plan_of(replicas: Sequence[int], schedule: str) -> Plan:
    """The seven layers of `Words` in stages with so many replicas."""
    cuts = {1: [0, 7], 2: [0, 3, 7], 3: [0, 2, 5, 7]}[len(replicas)]
    stages, first = [], 0
    for lo, hi, count in zip(cuts, cuts[1:], replicas, strict=False):
        split = {1: (2,), 2: (1, 1)}[count]
        stages.append(Stage(range(lo, hi), tuple(range(first, first + count)), split))
        first += count
    return Plan(tuple(stages), 3, 2, schedule)


def run_all(
    lengths: Sequence[int],
    replicas: Sequence[int],
    schedule: str,
    transports: Sequence[str],
    sizes: Sequence[int] = (6,),
    refusing: bool = False,
) -> tuple[list[str], list[list[str]]]:
    """What differs from plain training of the user's module, on this rank; and refusals."""
    # Two pipelines that made a default group each would meet in one store.
    dist.init_process_group("gloo")
    own = model()
    graph = capture_model(own, batch_of(12, 6), loss=loss_of, granularity="block", dynamic=DYNAMIC)
    start = copy.deepcopy(own.state_dict())
    wrong: list[str] = []
    refused: list[list[str]] = []
    for transport in transports:
        own.load_state_dict(start)
        with Pipeline(
            graph,
            batch_of(12, 6),
            plan=plan_of(replicas, schedule),
            optimizer=sgd,
            safety=Safety(transport=transport),  # type: ignore[arg-type]
        ) as pipe:
            wrong += differences(pipe, lengths, sizes)
            if refusing:
                refused.append(refusals(pipe))
    dist.destroy_process_group()
    return wrong, refused


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def differences(pipe: Pipeline, lengths: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """What differs when a pipeline and the user's module are trained on the same batches."""
    reference = model()
    plain = sgd(reference.parameters())
    wrong: list[str] = []
    for step, length in enumerate(lengths):
        batch = batch_of(length, sizes[step % len(sizes)], step)
        expected = plain_step(plain, loss_of(reference(batch["tokens"]), batch))
        found = pipe.step(batch).loss
        if abs(found - expected) > 1e-12:
            wrong.append(f"step {step}, length {length}: loss {found} for {expected}")
        if step % 3 == 2:
            wrong += forwards_differ(pipe, reference, batch_of(length + 5, 4, 77))
    named = dict(reference.named_parameters())
    for name, tensor in pipe.named_parameters():
        off = float((tensor - named[name]).detach().abs().max())
        if off > 1e-12:
            wrong.append(f"{name} is off by {off}")
    return wrong


def forwards_differ(pipe: Pipeline, reference: Words, batch: dict[str, torch.Tensor]) -> list[str]:
    """What differs in an evaluation and in a prediction on a batch of another length."""
    with torch.no_grad():
        scores = reference(batch["tokens"])
        loss = float(loss_of(scores, batch))
    wrong = []
    if abs(pipe.evaluate(batch).loss - loss) > 1e-12:
        wrong.append("an evaluation differs")
    found = pipe.predict({"tokens": batch["tokens"]}, everywhere=True)
    if not torch.allclose(found, scores, rtol=0, atol=1e-12):
        wrong.append("a prediction differs")
    return wrong


def refusals(pipe: Pipeline) -> list[str]:
    """The messages for bad batches, and whether weights are as before; then it goes on."""
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    uneven = batch_of(12, 6)
    uneven["labels"] = uneven["labels"][:, :-1]
    other = batch_of(20 if pipe.rank == 1 else 16, 6)
    refused = (batch_of(600, 6), uneven, other)
    messages = [named_refusal_of(pipe.step, batch) for batch in refused]
    pairs = zip(before, pipe.parameters(), strict=True)
    unchanged = all(torch.equal(one, two) for one, two in pairs)
    pipe.step(batch_of(30, 6))
    return [*messages, f"unchanged: {unchanged}"]


def run_resumed(lengths: Sequence[int], directory: str) -> list[str]:
    """What differs between a run and one that was saved in its middle and taken up again."""
    dist.init_process_group("gloo")
    graph = capture_model(
        model(), batch_of(12, 6), loss=loss_of, granularity="block", dynamic=DYNAMIC
    )
    start = copy.deepcopy(graph.model.state_dict())
    half, ends = len(lengths) // 2, []
    batches = [batch_of(length, 6, step) for step, length in enumerate(lengths)]
    for resumed in (False, True):
        graph.model.load_state_dict(start)
        with Pipeline(graph, batch_of(12, 6), plan=plan_of((1, 1), "1f1b"), optimizer=sgd) as pipe:
            if resumed:
                pipe.load(directory)
            for batch in batches[half if resumed else 0 :]:
                pipe.step(batch)
                if pipe.steps == half:
                    pipe.save(directory)
            ends.append({name: p.detach().clone() for name, p in pipe.named_parameters()})
    dist.destroy_process_group()
    return [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])]


def run_without_flush(schedule: str) -> list[str]:
    """What differs where each batch is one micro-batch of another length than the one before.

    Then the pipeline runs empty in between, and every update is that of plain training.
    """
    dist.init_process_group("gloo")
    own = untied()
    reference = untied()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    plan = Plan((Stage(range(3), (0,), (6,)), Stage(range(3, 7), (1,), (6,))), 1, 6, schedule)
    wrong: list[str] = []
    batches = [batch_of(length, 6, step) for step, length in enumerate((16, 40, 17, 16, 23))]
    graph = capture_model(own, batch_of(12, 6), loss=loss_of, granularity="block", dynamic=DYNAMIC)
    with Pipeline(
        graph,
        batch_of(12, 6),
        plan=plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ) as pipe:
        for step, metrics in enumerate(pipe.stream(batches)):
            loss = plain_step(plain, loss_of(reference(batches[step]["tokens"]), batches[step]))
            if abs(metrics.loss - loss) > 1e-12:
                wrong.append(f"the loss of step {step} differs")
        wrong += forwards_differ(pipe, reference, batch_of(33, 4, 77))
        named = dict(reference.named_parameters())
        for name, tensor in pipe.named_parameters():
            if float((tensor - named[name]).detach().abs().max()) > 1e-12:
                wrong.append(f"{name} differs")
        refused = refusal_of(pipe.step, batch_of(20 if pipe.rank == 1 else 16, 6))
        if refused != UNLIKE:
            wrong.append(f"batches of different lengths: {refused}")
        pipe.step(batch_of(30, 6))
    dist.destroy_process_group()
    return wrong


def untied() -> Words:
    """Without tied weights, which stages that update at different times cannot share."""
    found = model()
    found.head.weight = nn.Parameter(found.head.weight.detach().clone())
    return found
