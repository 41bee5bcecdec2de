"""What the worker processes of the matrix run: case after case, against one process."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.fixed_dropout import FixedDropout
from runtime.matrix_plans import Case
from runtime.pipeline_cases import SUBJECTS, Subject, different, normal, sliced
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput, PenstockError, RunFailed
from penstock.runtime.options import Safety
from penstock.runtime.transport.shared_memory import rings

DEVICE = torch.device("cpu")
"""Where all ranks run; `play` sets it."""

LAYERS = 13
SHORT_ROWS = 7

LOSS_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-11
# AdamW divides by the root of a gradient's square, which magnifies rounding where that is tiny.
WEIGHT_TOLERANCES = {"sgd": 1e-12, "adamw": 1e-9}
# Eight bits of mantissa; rounded once more wherever a stage ends.
BFLOAT16_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Expected:
    """What one process has after a step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    tensors: dict[str, torch.Tensor]


class Skipping(nn.Module):
    """A layer that also passes on what came before it, to be read stages later."""

    def __init__(self, width: int, *, opens: bool = False, closes: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.opens, self.closes = opens, closes

    def forward(self, x: torch.Tensor, *kept: torch.Tensor) -> Any:
        """Keep ``x``, pass on what is kept, or add it."""
        found = torch.tanh(self.linear(x))
        if self.opens:
            return found, x
        if self.closes:
            return found + kept[0]
        return (found, *kept) if kept else found


def deep(layers: int = LAYERS) -> Subject:
    """Layers of unequal widths, so that no two boundaries are alike."""
    loss = nn.MSELoss()
    widths = [6, *(3 + 2 * (i % 3) for i in range(layers - 2)), 4]
    modules = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return Subject(
        Chain(modules, loss=loss), lambda rows: (normal(rows, 6, 1), normal(rows, 4, 2)), loss
    )


def skips() -> Subject:
    """Tensors that pass many stages on their way."""
    loss = nn.MSELoss()
    layers = [Skipping(4, opens=i in (1, 7), closes=i in (5, 10)) for i in range(LAYERS - 1)]
    return Subject(
        Chain(layers, loss=loss), lambda rows: (normal(rows, 4, 1), normal(rows, 4, 2)), loss
    )


def dropping() -> Subject:
    """As `deep`, with dropout in every layer."""
    plain = deep()
    layers = [nn.Sequential(layer, nn.Dropout(0.3)) for layer in plain.model.children()][:-1]
    return Subject(Chain(layers, loss=plain.loss), plain.batch, plain.loss)


def gpt2_dropping() -> Subject:
    """GPT-2 with dropout after the embedding, in the attention's projection and in the dense part.

    Its attention itself drops inside a fused kernel, whose masks cannot be fixed.
    """
    subject = SUBJECTS["gpt2"]()
    for module in subject.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    for block in subject.model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    return subject


def t5_dropping() -> Subject:
    """T5 with dropout wherever it is a module."""
    subject = SUBJECTS["t5"]()
    for module in subject.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return subject


OWN_SUBJECTS: dict[str, Callable[[], Subject]] = {
    "deep": deep,
    "deeper": lambda: deep(2 * LAYERS),
    "skips": skips,
    "dropping": dropping,
    "gpt2_dropping": gpt2_dropping,
    "t5_dropping": t5_dropping,
}

PLAIN = ("deep", "deeper", "skips", "dropping")
"""Models without norms."""


@cache
def captured(name: str, precise: bool) -> tuple[Subject, LayerGraph]:
    """A subject and its graph, in float64 or as it is."""
    torch.manual_seed(0)
    subject = (OWN_SUBJECTS | SUBJECTS)[name]()
    subject.model.to(DEVICE)
    if precise:
        subject.model.double()
    subject.model.train()
    return subject, capture_model(subject.model, batch_of(subject, 3, precise), loss=subject.loss)


def batch_of(subject: Subject, rows: int, precise: bool) -> Any:
    """A batch in the precision of the model."""
    made = subject.batch(rows)
    batch = (
        {name: tensor.to(DEVICE) for name, tensor in made.items()}
        if isinstance(made, dict)
        else tuple(tensor.to(DEVICE) for tensor in made)
    )
    if precise:
        return batch
    if isinstance(batch, dict):
        return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    return tuple(v.float() if v.is_floating_point() else v for v in batch)


def make_optimizer(name: str, haste: float = 1.0) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    if name == "sgd":
        return lambda parameters: SGD(parameters, lr=0.1 * haste, momentum=0.9, weight_decay=0.01)
    return lambda parameters: AdamW(parameters, lr=0.01 * haste, weight_decay=0.1)


def expected_steps(
    case: Case, subject: Subject, cuts: Sequence[Sequence[range]]
) -> tuple[Expected, ...]:
    """One process's steps over batches so cut.

    Where the cut does not matter, one process takes the whole batch at once. A mean of the losses
    of micro-batches, weighted by rows, is right only where each row has as many targets.
    """
    rows = tuple(tuple(cut) if subject.per_micro_batch else (range(cut[-1].stop),) for cut in cuts)
    return play_alone(case.model, case.optimizer, case.autocast, rows)


@cache
def play_alone(
    name: str, optimizer_name: str, autocast: bool, cuts: tuple[tuple[range, ...], ...]
) -> tuple[Expected, ...]:
    subject, _ = captured(name, not autocast)
    whole = copy.deepcopy(subject.model)
    optimizer = make_optimizer(optimizer_name)(list(whole.parameters()))
    steps: list[Expected] = []
    for cut in cuts:
        rows = cut[-1].stop
        batch = batch_of(subject, rows, not autocast)
        optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for part in cut:
            with surroundings(autocast):
                loss = subject.whole_loss(whole, sliced(batch, part) if len(cut) > 1 else batch)
            share = loss * (len(part) / rows)
            share.backward()
            loss_sum += share.detach().double()
        gradients = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in whole.named_parameters(remove_duplicate=False)
        }
        optimizer.step()
        tensors = {
            name: tensor.detach().clone()
            for name, tensor in (
                *whole.named_parameters(remove_duplicate=False),
                *whole.named_buffers(),
            )
        }
        steps.append(Expected(loss_sum, gradients, tensors))
    return tuple(steps)


def surroundings(autocast: bool) -> AbstractContextManager[object]:
    return torch.autocast(DEVICE.type, torch.bfloat16) if autocast else nullcontext()


def wrong_in(case: Case) -> list[str]:
    """What differs from one process after a step on a full batch and one on a short one."""
    precise = not case.autocast
    subject, graph = captured(case.model, precise)
    plan = case.plan(len(graph.layer_names))
    sizes = (plan.global_batch, SHORT_ROWS)
    wrong: list[str] = []
    with Pipeline(
        graph,
        batch_of(subject, sizes[0], precise),
        plan=plan,
        optimizer=make_optimizer(case.optimizer, case.haste),
        safety=Safety(transport=case.transport),
        autocast=None if precise else torch.bfloat16,
        timeout_s=60,
        device=DEVICE,
        verify="off",
    ) as pipe:
        # The graph's own tensors are trained: they must start anew in every case.
        first = {n: t.detach().clone() for n, t in pipe._engine.held.named_tensors().items()}
        cuts = [pipe._engine.stages.program(rows).cut.micro_batches for rows in sizes]
        for rows, expected in zip(sizes, expected_steps(case, subject, cuts), strict=True):
            metrics = pipe.step(batch_of(subject, rows, precise))
            found = torch.tensor(metrics.loss, dtype=torch.float64, device=DEVICE)
            wrong += [f"{rows} rows: {what}" for what in compared(case, pipe, found, expected)]
            if metrics.samples != rows:
                wrong.append(f"{metrics.samples} samples instead of {rows}")
        with torch.no_grad():
            for name, tensor in pipe._engine.held.named_tensors().items():
                tensor.copy_(first[name])
        pipe.close(gather=True)  # for the next case with this model
    return wrong


def compared(case: Case, pipe: Pipeline, loss: torch.Tensor, expected: Expected) -> list[str]:
    """Loss, gradients, weights and buffers of this rank that are not those of one process."""
    limits = [LOSS_TOLERANCE, GRADIENT_TOLERANCE, WEIGHT_TOLERANCES[case.optimizer]]
    if case.model not in PLAIN:
        # Norms magnify rounding, and some models round parts of the forward to float32 themselves.
        limits = [captured(case.model, not case.autocast)[0].tolerance] * 3
    if case.autocast:
        limits = [BFLOAT16_TOLERANCE] * 3
    wrong: list[str] = []
    if different(loss, expected.loss, limits[0]):
        wrong.append(f"loss {float(loss)} instead of {float(expected.loss)}")
    wrong += [
        f"gradient of {name}"
        for name, p in pipe.named_parameters()
        if different(p.grad, expected.gradients[name], limits[1])
    ]
    wrong += [
        f"value of {name}"
        for name, tensor in pipe._engine.held.named_tensors().items()
        if different(tensor.detach(), expected.tensors[name], limits[2])
    ]
    return wrong


def play(cases: Sequence[Case], device: str = "cpu") -> dict[Case, list[str]]:
    """What is wrong in each case, on this rank; every worker plays all cases."""
    global DEVICE
    DEVICE = torch.device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    transport = rings.SharedMemoryTransport
    limits = transport.slot_limit, transport.ring_limit
    found: dict[Case, list[str]] = {}
    for case in cases:
        small = case.slot_bytes, 4 * case.slot_bytes
        transport.slot_limit, transport.ring_limit = small if case.slot_bytes else limits
        try:
            with FixedDropout() if case.dropout else nullcontext():
                found[case] = wrong_in(case)
        except BadInput as refusal:
            found[case] = [f"refused: {refusal}"]
        except PenstockError as failure:
            raise RunFailed(f"{case}: {failure}") from failure
    return found
