"""What the worker processes of the runtime's tests run: pipelines against the model left whole.

Every rank computes the reference itself, from the same seed, by plain autograd on the unsplit
model, and compares the tensors that it holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import split_rows
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import placement_of_style

# Sums over micro-batches and replicas in another order than the unsplit model's.
RELATIVE_TOLERANCE = 1e-9
# These models round parts of the forward to float32, whatever the type of their weights.
SINGLE_PRECISION = 1e-5
# Gradients that are zero but for rounding (biases before a norm, attention's key biases).
NOISE = 1e-13
MICRO_BATCHES, ROWS = 3, 4
VOCABULARY, SEQUENCE = 40, 6


@dataclass(frozen=True)
class Subject:
    """A model, its loss where it does not compute one, a batch of any size, its granularity."""

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[..., torch.Tensor] | None = None
    per_micro_batch: bool = False
    tolerance: float = RELATIVE_TOLERANCE

    def whole_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of the unsplit model on a batch."""
        if isinstance(batch, dict):
            return model(**batch).loss
        assert self.loss is not None
        return self.loss(model(batch[0]), batch[1])


def mlp() -> Subject:
    loss = nn.MSELoss()
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    return Subject(
        Chain(layers, loss=loss), lambda rows: (normal(rows, 6, 1), normal(rows, 6, 2)), loss
    )


def convolutions() -> Subject:
    """A small net like that of the digits: convolutions with BatchNorm, then a dense part."""
    loss = nn.CrossEntropyLoss()
    layers = [
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(54, 10),
    ]

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return normal(rows, 64, 1).view(rows, 1, 8, 8), integers(rows, 1, 10)[:, 0]

    return Subject(Chain(layers, loss=loss), batch, loss, per_micro_batch=True)


def gpt2() -> Subject:
    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = integers(rows, SEQUENCE, VOCABULARY)
        # Rows have unequal numbers of targets, so a mean of means would be wrong.
        ignored = torch.arange(SEQUENCE) > 1 + torch.arange(rows)[:, None] % 4
        return tokens, tokens.masked_fill(ignored, -100)

    return Subject(models.gpt2(n_embd=8), batch, next_token_loss)


def next_token_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """In float64 throughout; the model's own loss rounds the logits to float32."""
    logits = output.logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def layer_norm_in_float64(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """T5's, without its rounding of the variance to float32, which depends on the loss's scale."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def t5() -> Subject:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    T5LayerNorm.forward = layer_norm_in_float64
    return Subject(models.t5(d_model=8, d_kv=4, d_ff=16), tokens)


def resnet() -> Subject:
    def batch(rows: int) -> dict[str, torch.Tensor]:
        pixels = normal(rows, 3 * 16 * 16, 1).view(rows, 3, 16, 16)
        return {"pixel_values": pixels, "labels": integers(rows, 1, 5)[:, 0]}

    return Subject(models.resnet(4), batch, per_micro_batch=True)


def llama() -> Subject:
    return Subject(models.llama(), tokens, tolerance=SINGLE_PRECISION)


def qwen2_tied() -> Subject:
    return Subject(models.qwen2_tied(), tokens, tolerance=SINGLE_PRECISION)


PATCHES, WIDTH = 8, 6


def places_of(grids: torch.Tensor) -> torch.Tensor:
    """The row of every patch; each sample's picture has a grid of its own."""
    return torch.cat([torch.arange(h).repeat_interleave(w) for h, w in grids.tolist()])


class PictureAttention(nn.Module):
    """Among the patches of each picture, one picture after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Other vectors of the patches."""
        parts = torch.split(self.first(hidden), grids.prod(1).tolist())
        return torch.cat([(part @ part.T).softmax(-1) @ part for part in parts])


class Pictures(nn.Module):
    """The patches of all pictures in one list, and code that goes through the pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.place = nn.Embedding(PATCHES, WIDTH)
        self.blocks = nn.ModuleList([PictureAttention(), PictureAttention()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, patches: torch.Tensor, grids: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss, and scores of each picture."""
        hidden = self.patch(patches) + self.place(places_of(grids))
        for block in self.blocks:
            hidden = hidden + block(hidden, grids)
        scores = self.head(hidden.view(-1, PATCHES, WIDTH).mean(1))
        return Scored(loss=functional.cross_entropy(scores, labels), scores=scores)


class Scored(dict[str, torch.Tensor]):
    """What the model returns."""

    @property
    def loss(self) -> torch.Tensor:
        """The loss."""
        return self["loss"]


def pictures() -> Subject:
    def batch(rows: int) -> dict[str, torch.Tensor]:
        grids = torch.tensor([(2, 4), (4, 2), (1, 8), (8, 1)]).repeat(-(-rows // 4), 1)[:rows]
        patches = normal(rows * PATCHES, 4, 1)
        return {"patches": patches, "grids": grids, "labels": integers(rows, 1, 5)[:, 0] - 2}

    return Subject(Pictures(), batch)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "mlp": mlp,
    "convolutions": convolutions,
    "gpt2": gpt2,
    "t5": t5,
    "resnet": resnet,
    "llama": llama,
    "qwen2_tied": qwen2_tied,
    "pictures": pictures,
}


def tokens(rows: int) -> dict[str, torch.Tensor]:
    found = integers(rows, SEQUENCE, VOCABULARY)
    return {"input_ids": found, "labels": found.clone()}


def normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def integers(rows: int, columns: int, limit: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, limit, (rows, columns), generator=generator)


def plan_of(
    layers: int,
    replicas: Sequence[int],
    schedule: str = "1f1b",
    *,
    recompute: bool = False,
    in_turn: bool = False,
    micro_batches: int = MICRO_BATCHES,
    rows: int = ROWS,
) -> Plan:
    """Stages of about equally many layers; a stage of two replicas has slices 3 and 1.

    With ``in_turn`` replicas take whole micro-batches in turn instead.

    Devices hold two stages where the schedule places several on them.
    """
    style = FAMILIES[schedule].placement
    rounds = 2 if style in ("looped", "folded") else 1
    placement = placement_of_style(style, len(replicas), rounds)
    bounds = [round(layers * i / len(placement)) for i in range(len(placement) + 1)]
    starts = list(accumulate(replicas, initial=0))
    groups = [tuple(range(lo, hi)) for lo, hi in pairwise(starts)]
    return Plan(
        tuple(
            Stage(
                range(lo, hi),
                groups[group],
                (rows,) * replicas[group]
                if in_turn
                else split_rows(rows, (3, 1) if replicas[group] == 2 else (1,) * replicas[group]),
                recompute,
                in_turn=in_turn and replicas[group] > 1,
            )
            for (lo, hi), group in zip(pairwise(bounds), placement, strict=True)
        ),
        micro_batches,
        rows,
        schedule,
    )


class OneDevice:
    """Training of the user's own model left whole, with gradient clipping."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        make: Callable[[Any], torch.optim.Optimizer],
        clip: float,
    ) -> None:
        self.model, self._loss, self._clip = model, loss, clip
        self._optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step(self, batch: Any) -> tuple[float, float]:
        """The loss and the gradient's norm."""
        self._optimizer.zero_grad()
        loss = self._loss(self.model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        return float(loss.detach()), float(norm)


def reference(subject: Subject, model: nn.Module, batch: Any, cut: Sequence[range]) -> torch.Tensor:
    """Loss of the unsplit ``model`` on a batch; leaves gradients and buffers in it."""
    if not subject.per_micro_batch:
        loss = subject.whole_loss(model, batch)
        loss.backward()
        return loss.detach()
    total = sum(len(rows) for rows in cut)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for rows in cut:
        loss = subject.whole_loss(model, sliced(batch, rows)) * (len(rows) / total)
        loss.backward()
        loss_sum += loss.detach()
    return loss_sum


def sliced(batch: Any, rows: range) -> Any:
    if isinstance(batch, dict):
        return {key: value[rows.start : rows.stop] for key, value in batch.items()}
    return tuple(value[rows.start : rows.stop] for value in batch)


def different(ours: torch.Tensor | None, theirs: torch.Tensor | None, tolerance: float) -> bool:
    """Whether two gradients or buffers differ by more than rounding."""
    if ours is None or theirs is None:
        present = ours if ours is not None else theirs
        return present is not None and bool(present.abs().max() > 0)
    if not ours.is_floating_point():
        return not torch.equal(ours, theirs)
    ours, theirs = ours.double(), theirs.double()
    gap = (ours - theirs).abs().max() if ours.numel() else torch.zeros(())
    size = theirs.abs().max() if theirs.numel() else torch.zeros(())
    return not bool(gap <= tolerance * size + NOISE * tolerance / RELATIVE_TOLERANCE)


def differences(pipe: Pipeline, whole: nn.Module, tolerance: float) -> list[str]:
    """Gradients and buffers of this rank that are not those of the model left whole."""
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    buffers = dict(whole.named_buffers())
    wrong = [
        f"gradient of {name}"
        for name, p in pipe.named_parameters()
        if different(p.grad, theirs[name].grad, tolerance)
    ]
    held = pipe._engine.held.named_tensors()
    return wrong + [
        f"buffer {name}"
        for name, tensor in held.items()
        if name in buffers and different(tensor, buffers[name], tolerance)
    ]


def captured(name: str) -> tuple[Subject, LayerGraph]:
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    subject.model.double().train()
    return subject, capture_model(subject.model, subject.batch(3), loss=subject.loss)


def join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
