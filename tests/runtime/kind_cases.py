"""What the worker processes of the tests of several kinds of batches run."""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from kind_models import batch_of, captions, decaying, loss_of, plain_step, scores_of
from pipelines_of_any_plan import Pipeline
from refused import named_refusal_of

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety

NEAR = 1e-9
KINDS = (0, 1, 1, 0, 1, 0, 0, 1)


def plan_of(cuts: Sequence[int], replicas: Sequence[int], schedule: str) -> Plan:
    """The eight layers in stages that begin at ``cuts``, with so many replicas."""
    stages: list[Stage] = []
    first = 0
    for (lo, hi), count in zip(pairwise([*cuts, 8]), replicas, strict=True):
        split = {1: (2,), 2: (1, 1)}[count]
        stages.append(Stage(range(lo, hi), tuple(range(first, first + count)), split))
        first += count
    return Plan(tuple(stages), 3, 2, schedule)


def run_kinds(plan: Plan, kinds: Sequence[int], transport: Any, directory: str) -> list[str]:
    """What differs from plain torch where two kinds of batches alternate, on this rank."""
    dist.init_process_group("gloo")
    reference = captions()
    plain = decaying(reference.parameters())
    said: list[str] = []
    wrong: list[str] = []
    own = captions()
    graph = capture_model(own, batch_of(0), loss=loss_of, other_examples=[batch_of(1)])
    metrics, safety = {"error": error_of}, Safety(transport=transport)
    with Pipeline(
        graph, batch_of(0), plan=plan, optimizer=decaying, metrics=metrics, safety=safety
    ) as pipe:
        pipe.print_with(said.append)
        for step, kind in enumerate(kinds):
            batch = batch_of(kind, 6 - step % 2, step)
            wrong += off("error", pipe.evaluate(batch).metrics["error"], error(reference, batch))
            expected = plain_step(reference, plain, batch)
            wrong += off(f"loss of step {step}", pipe.step(batch).loss, expected)
            if step == len(kinds) // 2:
                pipe.save(directory)
        for kind in (0, 1):
            batch = batch_of(kind, 4, 77)
            scores = scores_of(reference, batch)
            batch.pop("labels")
            wrong += off(f"scores of kind {kind}", pipe.predict(batch, everywhere=True), scores)
        for name, value in pipe.named_parameters():
            wrong += off(name, value, reference.get_parameter(name))
        pipe.close(gather=True)
    compared = [line.split(":")[0] for line in said if "equal to your module" in line]
    if dist.get_rank() == 0 and compared != [
        "step 1",
        f"step {list(kinds).index(1 - kinds[0]) + 1}",
    ]:
        wrong.append(f"other steps were compared: {said}")
    for name, value in own.named_parameters():
        wrong += off(f"gathered {name}", value, reference.get_parameter(name))
    return [*wrong, *resumed(plan, kinds, directory, own)]


def resumed(
    plan: Plan, kinds: Sequence[int], directory: str, trained: torch.nn.Module
) -> Iterator[str]:
    """What differs after a run that went on from the checkpoint."""
    graph = capture_model(captions(), batch_of(0), loss=loss_of, other_examples=[batch_of(1)])
    with Pipeline(graph, batch_of(0), plan=plan, optimizer=decaying) as pipe:
        pipe.load(directory)
        for step, kind in [*enumerate(kinds)][pipe.steps :]:
            pipe.step(batch_of(kind, 6 - step % 2, step))
        for name, value in pipe.named_parameters():
            yield from off(f"{name} of a resumed run", value, trained.get_parameter(name))
    dist.destroy_process_group()


def error_of(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """The mean of what depends on both kinds' entries."""
    shown = batch["picture"].mean(1) if "picture" in batch else torch.zeros(len(scores))
    return float((scores.mean((1, 2)) + shown).mean())


def error(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    return error_of(scores_of(model, batch).detach(), batch)


def off(what: str, found: object, expected: object) -> list[str]:
    """A line if two numbers or tensors differ."""
    gap = (torch.as_tensor(found) - torch.as_tensor(expected)).detach().abs().max()
    return [] if gap <= NEAR else [f"{what} is off by {float(gap)}"]


def run_refused() -> list[str]:
    """The messages for bad batches, and whether weights are as before; then it goes on."""
    dist.init_process_group("gloo")
    own = captions()
    plan = plan_of((0, 4), (1, 1), "1f1b")
    messages: list[str] = []
    graph = capture_model(own, batch_of(0), loss=loss_of, other_examples=[batch_of(1)])
    with Pipeline(graph, batch_of(0), plan=plan) as pipe:
        before = copy.deepcopy(own.state_dict())
        unknown = {**batch_of(0), "sound": torch.zeros(6, 3)}
        flat = {**batch_of(0), "picture": torch.zeros(6, 7, dtype=torch.float64)}
        for batches in (
            [unknown],
            [flat],
            [batch_of(0), batch_of(1)],
            [batch_of(pipe.rank)],
            [unknown if pipe.rank else batch_of(0)],
        ):
            messages.append(named_refusal_of(pipe.step, *batches))
        unchanged = all(torch.equal(value, before[n]) for n, value in own.state_dict().items())
        pipe.step(batch_of(1))
    dist.destroy_process_group()
    return [*messages, f"unchanged: {unchanged}"]
