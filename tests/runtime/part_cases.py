"""What the worker processes of the tests of parts of batches run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import recurrent_models
import torch
from pipelines_of_any_plan import Pipeline
from refused import named_refusal_of, refusal_of
from runtime import length_cases
from runtime.pipeline_cases import join
from torch import nn
from torch.nn import functional

from penstock.capture.batch.part import BatchPart
from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import SplitTable
from penstock.plan.plan import Plan, Stage

WIDTH, CLASSES = 6, 3


def rows_of(number: int, samples: int) -> dict[str, torch.Tensor]:
    """Batch ``number`` of made-up data."""
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64),
        "skip": torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64),
        "labels": torch.randint(CLASSES, (samples,), generator=generator),
    }


class Skipping(nn.Module):
    """The last layers read a second input of the model; two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.relu(self.first(x))))
        return self.last(torch.cat([torch.tanh(self.tied(hidden)), skip], 1))


def loss_of(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(scores, batch["labels"])


def two_terms(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Terms that are divided by their own numbers over the whole step."""
    labels = batch["labels"]
    chosen = (labels > 0).double()
    words = functional.cross_entropy(scores, labels, ignore_index=0)
    return words + (scores.square().mean(1) * chosen).sum() / chosen.sum()


def with_sum(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A mean and a sum: the samples of the whole step are counted, and no tensor is read for it."""
    right = scores.gather(1, batch["labels"][:, None])[:, 0]
    return (scores.logsumexp(1) - right).mean() + 0.1 * scores.square().sum()


def accuracy(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (scores.argmax(1) == batch["labels"]).double().mean()


def of_labels(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Reads an input of the first stage beside the target."""
    return (batch["x"].sum(1) > batch["labels"]).double().mean()


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def cut(layers: int, *devices: Sequence[int], slices: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    """Stages of about equal numbers of layers."""
    ends = [layers * (n + 1) // len(devices) for n in range(len(devices))]
    starts = [0, *ends]
    return tuple(
        Stage(range(starts[n], ends[n]), tuple(devices[n]), tuple(slices[n]))
        for n in range(len(devices))
    )


def part_of(pipe: Pipeline, number: int, batch: dict[str, torch.Tensor], **more: Any) -> BatchPart:
    """Exactly what a rank reads of a batch."""
    samples = len(batch["labels"])
    read = {key: pipe.needs.pick(key, range(samples)) for key in pipe.needs.keys}
    leaves = {key: batch[str(key)][rows] for key, rows in read.items() if rows}
    return BatchPart(number, samples, leaves, **more)


@dataclass(frozen=True)
class Case:
    """A plan and settings with which parts are tried."""

    name: str
    devices: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, ...], ...]
    schedule: str = "1f1b"
    micro_batches: int = 3
    loss: Any = loss_of
    options: tuple[tuple[str, Any], ...] = ()
    sizes: tuple[int, ...] = (12, 12, 7)
    streamed: bool = False
    accumulate: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    split: SplitTable | None = None


CASES = (
    Case("three stages", ((0,), (1,), (2,)), ((4,), (4,), (4,))),
    Case("unequal replicas", ((0, 1), (2,), (3,)), ((1, 3), (4,), (4,))),
    Case("a replica without rows", ((0,), (1, 2, 3)), ((4,), (1, 1, 2))),
    Case("metrics", ((0,), (1,), (2, 3)), ((4,), (4,), (3, 1)), options=(("metrics", True),)),
    Case("two terms", ((0, 1), (2, 3)), ((3, 1), (2, 2)), loss=two_terms),
    Case("two terms, two batches", ((0, 1), (2,), (3,)), ((2, 2), (4,), (4,)), loss=two_terms,
         accumulate=2),
    Case("a mean and a sum", ((0, 1), (2,), (3,)), ((3, 1), (4,), (4,)), loss=with_sum),
    Case("chimera", ((0,), (1,), (2,), (3,)), ((3,),) * 4, "chimera", 4),
    Case("dualpipe", ((0,), (1,), (2,), (3,)), ((2,),) * 4, "dualpipe", 8, sizes=(16, 16)),
    Case("interleaved", ((0,), (1,), (0,), (1,)), ((4,),) * 4, "interleaved", 4, sizes=(16, 16)),
    Case("v", ((0,), (1,), (1,), (0,)), ((4,),) * 4, "zb-v", 4, sizes=(16, 16)),
    Case("an unused rank", ((1,), (3,)), ((4,), (4,))),
    Case("without a flush", ((0, 1), (2,)), ((1, 3), (4,)), "pipedream", streamed=True,
         sizes=(12,) * 4),
    Case("tensor groups", ((0,), (1,), (2,)), ((4,),) * 3, groups=((0, 3), (1,), (2,)),
         split={"first": "colwise", "middle.0": "rowwise"}),
    Case("replicas of tensor groups", ((0, 1),), ((1, 3),), groups=((0, 2), (1, 3)),
         split={"first": "colwise", "middle.0": "rowwise"}),
)  # fmt: skip


def train(case: Case, *, parts: bool) -> dict[str, Any]:
    """Losses and weights of a few steps and an evaluation, on whole batches or on parts."""
    join()
    options = dict(case.options, verify="off")
    if options.pop("metrics", False):
        options["metrics"] = {"accuracy": accuracy, "of labels": of_labels}
    capturing: Any = {"loss": case.loss, "granularity": "operator", "tensor_parallel": case.split}
    model = seeded(Skipping)
    graph = capture_model(model, rows_of(0, 4), **capturing)
    stages = cut(len(graph.layer_names), *case.devices, slices=case.slices)
    samples = sum(case.slices[0])
    plan = Plan(stages, case.micro_batches, samples, case.schedule, tensor_groups=case.groups)
    if case.schedule == "pipedream" or case.groups:
        # Replicas of a tied weight would need a flush, and its holders groups of one size.
        model = seeded(lambda: untied(Skipping()))
        graph = capture_model(model, rows_of(0, 4), **capturing)
    with Pipeline(graph, rows_of(0, 4), plan=plan, optimizer=adam, **options) as pipe:

        def given(number: int, samples: int) -> Any:
            batch = rows_of(number, samples)
            return part_of(pipe, number, batch) if parts else batch

        numbered = [given(n, size) for n, size in enumerate(case.sizes)]
        if case.streamed:
            metrics = list(pipe.stream(numbered))
        else:
            grouped = [
                numbered[n : n + case.accumulate] for n in range(0, len(numbered), case.accumulate)
            ]
            metrics = [pipe.step(*group) for group in grouped]
        evaluation = pipe.evaluate(given(50, 5))
        return {
            "losses": [(m.loss, m.gradient_norm, m.samples, dict(m.metrics)) for m in metrics],
            "evaluation": (evaluation.loss, dict(evaluation.metrics)),
            "weights": {name: p.detach().clone() for name, p in pipe.named_parameters()},
            "needs": {
                key: [(r.start, r.stop) for r in pipe.needs.rows(key)] for key in pipe.needs.keys
            },
        }


def untied(model: Skipping) -> Skipping:
    model.tied = nn.Linear(WIDTH, WIDTH)
    return model


def both_ways(names: Sequence[str]) -> dict[str, Any]:
    """Every case with whole batches and with parts."""
    cases = {case.name: case for case in CASES}
    return {
        name: (train(cases[name], parts=False), train(cases[name], parts=True)) for name in names
    }


def norm() -> nn.Module:
    layers = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers)


def normalised() -> list[Any]:
    """Replicas that share statistics; of 7 samples one replica has none in the last micro-batch."""
    join()
    found: list[Any] = []
    for parts in (False, True):
        example = rows_of(0, 4)
        graph = capture_model(
            seeded(norm), (example["x"], example["labels"]), loss=functional.cross_entropy
        )
        layers = len(graph.layer_names)
        stages = (Stage(range(2), (0, 1), (1, 1)), Stage(range(2, layers), (2,), (2,)))
        plan = Plan(stages, 4, 2, "1f1b")
        with Pipeline(graph, (example["x"], example["labels"]), plan=plan, optimizer=adam) as pipe:
            losses: list[float] = []
            for number in range(3):
                batch = rows_of(number, 7)
                given: Any = (batch["x"], batch["labels"])
                if parts:
                    columns = {0: batch["x"], 1: batch["labels"]}
                    given = pipe.needs.read(columns, range(7))
                losses.append(pipe.step(given).loss)
            buffers = {n: b.clone() for n, b in pipe._engine.held.named_buffers()}
            found.append((losses, buffers, pipe.needs.rows(0, 7)))
    return found


def words() -> tuple[Any, ...]:
    """A model whose stages in the middle need the length, and read nothing for it."""
    graph = capture_model(
        length_cases.model(),
        length_cases.batch_of(12, 6),
        loss=length_cases.loss_of,
        granularity="block",
        dynamic=length_cases.DYNAMIC,
    )
    return graph, length_cases.plan_of((1, 1, 1), "1f1b"), length_cases.batch_of, (12, 9, 20)


def tagger() -> tuple[Any, ...]:
    """A model whose calls depend on the length."""
    graph = capture_model(
        recurrent_models.tagger(),
        recurrent_models.batch_of(4, 6),
        loss=recurrent_models.loss_of,
        granularity="block",
        dynamic=recurrent_models.DYNAMIC,
    )
    layers = len(graph.layer_names)
    stages = cut(layers, (0,), (1,), (2,), slices=((2,), (2,), (2,)))
    return graph, Plan(stages, 3, 2, "1f1b"), recurrent_models.batch_of, (4, 5, 2)


def of_lengths() -> dict[str, Any]:
    """Losses on whole batches and on parts of models with lengths, and what each rank reads."""
    join()
    found: dict[str, Any] = {}
    for name, make in (("words", words), ("tagger", tagger)):
        both: list[Any] = []
        for parts in (False, True):
            graph, plan, batch_of, lengths = make()
            with Pipeline(graph, batch_of(lengths[0], 6), plan=plan, optimizer=adam) as pipe:
                losses: list[float] = []
                for number, length in enumerate(lengths):
                    given = batch_of(length, 6, number)
                    if parts:
                        sizes = {"length": length}
                        given = pipe.needs.read(given, range(6), number=number, lengths=sizes)
                        assert list(pipe.lengths_of(given)) == ["length"]
                    losses.append(pipe.step(given).loss)
                    losses.append(pipe.evaluate(given).loss)
                both.append(losses)
                if parts:
                    both.append([pipe.needs.keys, untold(pipe, batch_of)])
        found[name] = both
    return found


def untold(pipe: Pipeline, batch_of: Any) -> list[str]:
    """The messages where a length is not told to all ranks, or not alike; then it goes on."""
    batch = batch_of(4, 6)
    sizes = [{}, {"length": 4 + (pipe.rank == 1)}, {"length": 5}]
    found = [
        named_refusal_of(pipe.step, pipe.needs.read(batch, range(6), lengths=own)) for own in sizes
    ]
    pipe.step(pipe.needs.read(batch, range(6), lengths={"length": 4}))
    return found


def refusals() -> dict[str, Any]:
    """The messages for parts that are wrong on one rank, with weights afterwards; of 3 ranks."""
    join()
    graph = capture_model(seeded(Skipping), rows_of(0, 4), loss=loss_of, granularity="operator")
    stages = cut(len(graph.layer_names), (0, 1), (2,), slices=((1, 3), (4,)))
    with Pipeline(graph, rows_of(0, 4), plan=Plan(stages, 3, 4, "1f1b"), optimizer=adam) as pipe:
        batch, rank = rows_of(1, 12), pipe.rank
        own = part_of(pipe, 1, batch)
        before = [p.detach().clone() for p in pipe.parameters()]
        one_of = {key: leaf[1:] for key, leaf in own.leaves.items()}
        single = {key: leaf.float() for key, leaf in own.leaves.items() if key != "labels"}
        wrong: dict[str, tuple[int, Any]] = {
            "number": (1, part_of(pipe, 2, batch)),
            "samples": (2, part_of(pipe, 1, rows_of(1, 11))),
            "indices": (0, part_of(pipe, 1, batch, indices=range(12))),
            "no leaf": (2, BatchPart(1, 12, {"skip": batch["skip"]})),
            "rows": (1, BatchPart(1, 12, one_of)),
            "type": (0, BatchPart(1, 12, single)),
            "key": (0, BatchPart(1, 12, {**own.leaves, "y": batch["x"]})),
            "count": (2, (own, own)),
        }
        found: dict[str, Any] = {}
        for name, (who, given) in wrong.items():
            given = given if rank == who else own
            found[name] = named_refusal_of(
                pipe.step, *(given if isinstance(given, tuple) else (given,))
            )
        found["mixed"] = named_refusal_of(pipe.step, own, batch if rank == 1 else own)
        found["predict"] = refusal_of(pipe.predict, own)
        found["verify"] = refusal_of(pipe.verify, own)
        bad = rows_of(1, 12)
        bad["x"][5, 0] = torch.nan
        found["not finite"] = named_refusal_of(pipe.step, part_of(pipe, 1, bad))
        pairs = zip(before, pipe.parameters(), strict=True)
        found["kept"] = all(torch.equal(one, two) for one, two in pairs)
        losses = [pipe.step(own).loss, pipe.step(batch).loss]
        steps = pipe.steps
    with Pipeline(
        graph, rows_of(0, 4), plan=Plan(stages, 3, 4, "1f1b"), verify="first-step"
    ) as pipe:
        pipe.step(own)
        found["first step"] = str(pipe.verified)
        found["after"] = (losses, steps, pipe.step(own).loss)
    return found


def whole_beside_part() -> str:
    """One rank gives a whole batch, the others parts: it must not hang."""
    join()
    graph = capture_model(seeded(Skipping), rows_of(0, 4), loss=loss_of, granularity="operator")
    stages = cut(len(graph.layer_names), (0,), (1,), (2,), slices=((4,),) * 3)
    options: Any = {"timeout_s": 10, "verify": "off"}
    with Pipeline(graph, rows_of(0, 4), plan=Plan(stages, 3, 4, "1f1b"), **options) as pipe:
        batch = rows_of(1, 12)
        return named_refusal_of(pipe.step, batch if pipe.rank == 1 else part_of(pipe, 1, batch))


def late_refusal(schedule: str) -> str:
    """A part that lacks rows in a stream without a flush: the run ends, and says why."""
    join()
    graph = capture_model(
        seeded(lambda: untied(Skipping())), rows_of(0, 4), loss=loss_of, granularity="operator"
    )
    stages = cut(len(graph.layer_names), (0,), (1,), (2,), slices=((4,),) * 3)
    plan = Plan(stages, 3, 4, schedule)
    with Pipeline(graph, rows_of(0, 4), plan=plan, optimizer=adam, timeout_s=30) as pipe:

        def parts() -> Any:
            for number in range(4):
                part = part_of(pipe, number, rows_of(number, 12))
                yield BatchPart(2, 12) if number == 2 and pipe.rank == 2 else part

        return refusal_of(list, pipe.stream(parts()))


class Patches(nn.Module):
    """Each sample has four rows of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(patches)).unflatten(0, (-1, 4)).mean(1))


def several_rows() -> tuple[list[float], list[float], Any]:
    """Losses of a model whose input has several rows for each sample, and the rows read of it."""
    join()
    labels = rows_of(0, 8)["labels"]
    patches = rows_of(1, 32)["x"]
    graph = capture_model(seeded(Patches), (patches, labels), loss=functional.cross_entropy)
    stages = (
        Stage(range(1), (0, 1), (1, 3)),
        Stage(range(1, len(graph.layer_names)), (2,), (4,)),
    )
    found: list[list[float]] = []
    for parts in (False, True):
        graph = capture_model(seeded(Patches), (patches, labels), loss=functional.cross_entropy)
        plan = Plan(stages, 2, 4, "1f1b")
        with Pipeline(graph, (patches, labels), plan=plan, optimizer=adam) as pipe:
            rows = pipe.needs.pick(0, range(8))
            given: Any = (patches, labels)
            if parts:
                own = {0: patches.unflatten(0, (8, 4))[rows].flatten(0, 1), 1: labels}
                given = BatchPart(0, 8, {key: own[key] for key in pipe.needs.keys})  # type: ignore[index]
            found.append([pipe.step(given).loss for _ in range(2)])
    return found[0], found[1], rows
