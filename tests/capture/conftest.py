"""Stages run one after another as a pipeline would, and small real models to run them on."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import transformers
from torch import nn

from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph

# Sums in another order than the unsplit model's: gradients of received tensors are added up.
RELATIVE_TOLERANCE = 1e-9
SEQUENCE = 6
VOCABULARY = 40


@dataclass
class Run:
    """What a sequential run of all stages gave."""

    loss: torch.Tensor
    weight: torch.Tensor


def split(graph: LayerGraph, cuts: Sequence[int]) -> list[StageProgram]:
    """The stages of ``graph`` between ``cuts``."""
    ends = [0, *cuts, len(graph.layer_names)]
    return [graph.stage(range(lo, hi)) for lo, hi in pairwise(ends)]


def run_programs(
    graph: LayerGraph, programs: list[StageProgram], batch: Any, *, backward: bool = True
) -> Run:
    """Forward and backward of every stage, with nothing but the named tensors between them.

    Checks on the way that every tensor is as its spec says.
    """
    leaves = graph.batch_leaves(batch)
    rows, lengths = leaves[0].shape[0], graph.lengths_of(dict(enumerate(leaves)))
    values: dict[str, torch.Tensor] = {}
    ran: list[tuple[StageProgram, list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    for program in programs:
        received = []
        for spec in program.received:
            tensor = values[spec.name]
            assert tuple(tensor.shape) == spec.at(lengths).shape_for(rows), spec
            assert tensor.dtype == spec.dtype, spec
            assert tensor.requires_grad == (spec.requires_grad and backward), spec
            received.append(tensor.detach().requires_grad_(spec.requires_grad))
        inputs = [leaves[index] for index in program.batch_inputs]
        sent = program.module(*inputs, *received)
        if not program.is_last:
            names = [spec.name for spec in program.sent]
            values |= dict(zip(names, sent, strict=True))
        ran.append((program, received, sent))
    loss, weight = ran[-1][2][:2]
    if backward:
        loss.backward()
        _backward(ran)
    return Run(loss, weight)


def _backward(ran: list[tuple[StageProgram, list[torch.Tensor], tuple[torch.Tensor, ...]]]) -> None:
    gradients: dict[str, torch.Tensor] = {}
    for program, received, sent in reversed(ran):
        if not program.is_last:
            pairs = [
                (tensor, gradients[spec.name])
                for spec, tensor in zip(program.sent, sent, strict=True)
                if spec.requires_grad
            ]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        for spec, tensor in zip(program.received, received, strict=True):
            if spec.requires_grad:
                assert tensor.grad is not None, spec
                before = gradients.get(spec.name)
                gradients[spec.name] = tensor.grad if before is None else before + tensor.grad


def call(model: nn.Module, batch: Any, loss: Any = None) -> torch.Tensor:
    """The loss of the unsplit model."""
    if loss is None:
        return model(**batch).loss
    if isinstance(batch, dict):
        return loss(model(batch["x"]), batch)
    return loss(model(*batch[:-1]), batch[-1])


def resize(batch: Any, rows: int) -> Any:
    """A batch of ``rows`` samples from one of fewer or more."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        repeats = -(-rows // tensor.shape[0])
        return torch.cat([tensor] * repeats)[:rows]

    if isinstance(batch, dict):
        return {key: one(tensor) for key, tensor in batch.items()}
    return tuple(one(tensor) for tensor in batch)


def assert_composition_equals_model(
    graph: LayerGraph,
    model: nn.Module,
    batch: Any,
    cuts: Sequence[int],
    *,
    loss: Any = None,
    rows: int | None = None,
    runs: int = 1,
) -> None:
    """Loss, every gradient and every buffer of the stages, against the model left whole.

    The batch is that of ``rows`` samples, if they are given. ``model`` is as before afterwards. Of
    several ``runs``, of a model without buffers, the first looks into every block; the last counts.
    """
    batch = batch if rows is None else resize(batch, rows)
    whole = copy.deepcopy(model)
    expected = call(whole, batch, loss)
    expected.backward()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    programs = split(graph, cuts)
    for _ in range(runs):
        model.zero_grad()
        found = run_programs(graph, programs, batch)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            difference = (one.grad - other.grad).norm()
            # The floor is for gradients that are zero but for rounding (biases before a norm).
            assert difference <= RELATIVE_TOLERANCE * other.grad.norm() + 1e-14, name
    for (name, one), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=RELATIVE_TOLERANCE, atol=0, msg=name)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    model.zero_grad()


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, VOCABULARY, (3, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _mask() -> torch.Tensor:
    return torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2])


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return models.gpt2(dropout, n_positions=512), _tokens()


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return models.llama(), _tokens()


def qwen2_tied() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return models.qwen2_tied(), _tokens() | {"attention_mask": _mask()}


def bert(dropout: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = models.bert_config(dropout, max_position_embeddings=512)
    batch = _tokens() | {"attention_mask": _mask()}
    # Row r has r + 1 masked words, so that rows have unequal numbers of terms.
    unmasked = torch.arange(SEQUENCE) > torch.arange(3)[:, None]
    batch["labels"] = batch["labels"].masked_fill(unmasked, -100)
    return transformers.BertForMaskedLM(config), batch


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return models.t5(), _tokens() | {"attention_mask": _mask()}


def resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    batch = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 3, 4])}
    return models.resnet(), batch


MODELS: dict[str, Callable[..., tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2_tied": qwen2_tied,
    "bert": bert,
    "t5": t5,
    "resnet": resnet,
}


@pytest.fixture
def pipeline() -> SimpleNamespace:
    """The functions of this file, for tests that cannot import it."""
    own = (split, run_programs, resize, assert_composition_equals_model)
    return SimpleNamespace(models=MODELS, **{function.__name__: function for function in own})


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``model_name`` runs over the small Hugging Face models."""
    if "model_name" in metafunc.fixturenames:
        metafunc.parametrize("model_name", list(MODELS))
