"""Parts 1.2 and 1.3: stages of thirty models are the user's own module, and make no host wait."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from inputs import attempts
from judging import Plain, distance, even_plan, gradients_of, made_model, narrowest_type
from registered import registered
from rows import Row, Setting, under
from torch import nn
from torch.optim import SGD

from penstock.capture.batch.call import loss_in_result
from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.device import without_tf32
from penstock.plan.plan import Plan
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.program import RankStages

MODELS = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "ViTForImageClassification",
    "ResNetForImageClassification",
    "Qwen2ForCausalLM",
    "Gemma2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "SwinForImageClassification",
    "RobertaForMaskedLM",
    "PhiForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",
    "XLNetLMHeadModel",
    "DebertaV2ForMaskedLM",
    "Wav2Vec2ForCTC",
    "LongformerForMaskedLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "ConvNextForImageClassification",
    "ElectraForMaskedLM",
    "PegasusForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
"""Of thirty families: attention of all kinds, experts, state spaces, convolutions, speech."""

FEW = ("GPT2LMHeadModel", "ResNetForImageClassification")

BARS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative differences, of models that compute in these types alone."""

BFLOAT16_BAR = 0.1
"""Eight bits of mantissa, in gradients that pass some layers: a tenth of the median one."""

LIMITS_OF_THE_STAND_IN = (
    "not linked with support for cuda",  # a fake tensor of a GPU that needs a gradient
    '_cpu" not implemented',  # an operator that only GPUs have for a type
    "index_add_",  # indices that C++ makes in the backward of unfolding
)
"""Errors of the CPU's torch, which cannot run such a model as a GPU would: not judged."""

Weighing = Callable[[Any, int], float]


def models_in_stages(setting: Setting) -> Iterator[Row]:
    """Each model in each precision; then recomputing and dropout."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    heads = dict(registered())
    yield from recomputed(setting)
    wanted = FEW if setting.small else MODELS
    for number, name in enumerate(wanted):
        if setting.is_over:
            yield Row("1.2", f"{len(wanted) - number} more models", "no time left", "failed")
            return
        try:
            yield from precisions(name, heads[name], setting)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            limit = setting.stand_in and any(one in text for one in LIMITS_OF_THE_STAND_IN)
            yield Row("1.2", name, text, "not judged" if limit else "failed")


def precisions(name: str, head: str, setting: Setting) -> Iterator[Row]:
    """One model captured on the CPU, in stages on the GPU: float64, float32, bfloat16."""
    import transformers

    model = made_model(getattr(transformers, name), head)
    batch = batch_of(model, head)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weights = torch.float32 if dtype is torch.bfloat16 else dtype
        typed, own = copy.deepcopy(model).to(weights), as_type(batch, weights)
        try:
            bar = BARS[narrowest_type(typed, own)]
        except (RuntimeError, TypeError):
            continue  # the module itself does not run in this type
        graph = capture_model(copy.deepcopy(typed), own)
        autocast = torch.bfloat16 if dtype is torch.bfloat16 else None
        with without_tf32():
            ours = in_stages(graph, own, setting.device, autocast)
            plain = nearest(typed, own, setting.device, autocast, ours)
        precision = str(dtype).removeprefix("torch.")
        if autocast is not None:
            apart = median(distances(ours, plain))
            yield under("1.2", f"{name}, {precision}, median tensor", apart, BFLOAT16_BAR)
            continue
        error, worst = distance(ours, plain, dtype)
        yield under("1.2", f"{name}, {precision}", error, bar, worst=worst)


def batch_of(model: nn.Module, head: str) -> dict[str, Any]:
    """The first batch that the module runs on."""
    for attempt in attempts(model, head):
        for dtype in (torch.float64, torch.float32):
            batch = as_type(attempt.batch, dtype)
            try:
                copy.deepcopy(model).to(dtype)(**batch)
            except Exception:  # another kind of batch
                continue
            return attempt.batch
    raise ValueError("runs on no batch")


def as_type(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A batch with its numbers in a type."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def in_stages(
    graph: LayerGraph, batch: Any, device: torch.device, autocast: torch.dtype | None
) -> Plain:
    """Loss and gradients of a step in three stages on a device."""
    plan = even_plan(len(graph.layer_names), graph.batch_size)
    options: dict[str, Any] = {"verify": "off", "device": device, "autocast": autocast}
    with Pipeline(
        graph, batch, plan=plan, safety=Safety(transport="in-process"), **options
    ) as pipe:
        loss = pipe.step(batch).loss
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().cpu()
            for name, p in pipe.named_parameters()
        }
    return Plain(loss, {name: gradient.cpu() for name, gradient in gradients.items()})


def nearest(
    model: nn.Module, batch: Any, device: torch.device, autocast: torch.dtype | None, ours: Plain
) -> Plain:
    """The own module's step, micro-batch by micro-batch, or on the whole batch.

    Which of them a model's loss calls for, and how micro-batches count, is the nearest's to say.
    """
    on_device = copy.deepcopy(model).to(device)
    placed = {name: value.to(device) for name, value in batch.items()}
    samples = next(iter(batch.values())).shape[0]
    halves = [range(n * samples // 2, (n + 1) * samples // 2) for n in range(2)]
    ways: list[tuple[list[range], Weighing]] = [
        (halves, lambda part, rows: rows / samples),
        (halves, valid_share(batch)),
        (halves, lambda part, rows: 1.0),
        ([range(samples)], lambda part, rows: 1.0),
    ]
    found = [own_step(on_device, placed, device, autocast, *way) for way in ways]
    return min(found, key=lambda plain: distance(ours, plain, torch.float32)[0])


def valid_share(batch: Any) -> Weighing:
    """A micro-batch's share of the targets that count; the first word of a row is no target."""
    labels = batch.get("labels")
    if labels is None or labels.dim() < 2:
        return lambda part, rows: rows / next(iter(batch.values())).shape[0]
    whole = int((labels[:, 1:] >= 0).sum())
    return lambda part, rows: int((part["labels"][:, 1:] >= 0).sum()) / max(whole, 1)


def own_step(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    autocast: torch.dtype | None,
    parts: list[range],
    weighing: Weighing,
) -> Plain:
    """Loss and gradients of the module, accumulated over parts of the batch."""
    own, loss = copy.deepcopy(model), 0.0
    for rows in parts:
        part = {name: value[rows.start : rows.stop] for name, value in batch.items()}
        precision: AbstractContextManager[object] = nullcontext()
        if autocast is not None:
            precision = torch.autocast(device.type, autocast)
        with precision:
            value = loss_in_result(own(**part), "model")
        share = value * weighing(part, len(rows))
        share.backward()
        loss += float(share)
    return Plain(loss, {name: gradient.cpu() for name, gradient in gradients_of(own).items()})


def distances(ours: Plain, plain: Plain) -> list[float]:
    """Relative distances of the loss, and of the gradients that are more than noise."""
    sizes = {name: float(g.norm()) for name, g in plain.gradients.items()}
    largest = max(sizes.values(), default=0.0)
    found = [abs(ours.loss - plain.loss) / abs(plain.loss)]
    for name, size in sizes.items():
        if size > 1e-3 * largest:
            found.append(float((ours.gradients[name] - plain.gradients[name]).norm()) / size)
    return found


def text_model(dropout: float, in_attention: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small GPT-2 and a batch."""
    import transformers

    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": in_attention}
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=1,
        eos_token_id=1, **drops,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(2, 64, (8, 16))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


Made: TypeAlias = tuple[nn.Module, Any, Any]
"""A model, a batch and its loss."""


def transformer() -> Made:
    """A small transformer of torch's own layers."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))
    tokens = torch.randint(2, 64, (8, 16))
    return model, (tokens, tokens.roll(-1, 1)), next_word_loss


def next_word_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all words."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def t5() -> Made:
    """A small T5."""
    import transformers

    config = transformers.T5Config(
        num_layers=2, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=64,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(2, 64, (8, 16))
    batch = {"input_ids": tokens, "labels": tokens.flip(1)}
    return transformers.T5ForConditionalGeneration(config).train(), batch, None


def resnet() -> Made:
    """A small ResNet, with batch norms."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], num_labels=5, layer_type="basic"
    )
    torch.manual_seed(0)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(5, (8,))}
    return transformers.ResNetForImageClassification(config).train(), batch, None


def recomputed(setting: Setting) -> Iterator[Row]:
    """Stages that recompute give the same bits, and draw the same dropout again."""
    for what, dropout in (("recomputing", 0.0), ("recomputing with dropout", 0.3)):
        found: list[dict[str, torch.Tensor]] = []
        for again in (False, True):
            # Attention on the CPU makes masks that no longer say which device they are on.
            model, batch = text_model(dropout, 0.0 if setting.stand_in else dropout)
            graph = capture_model(model, batch)
            plan = recomputing(even_plan(len(graph.layer_names), 8), again)
            options: dict[str, Any] = {"verify": "off", "device": setting.device}
            safety = Safety(transport="in-process")
            with Pipeline(graph, batch, plan=plan, safety=safety, **options) as pipe:
                pipe.step(batch)
                found.append({n: p.grad.cpu() for n, p in pipe.named_parameters()})  # type: ignore[union-attr]
        first, second = found
        unequal = sum(not torch.equal(first[name], second[name]) for name in first)
        yield under("1.2", f"{what}: tensors that differ in a bit", unequal, 0)


def recomputing(plan: Plan, again: bool) -> Plan:
    """The plan with all stages recomputed, or none."""
    return replace(plan, stages=tuple(replace(s, recompute=again) for s in plan.stages))


@contextmanager
def refused_waits() -> Iterator[None]:
    """Raise in the block whatever makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def no_host_waits(setting: Setting) -> Iterator[Row]:
    """The actions of a flushed iteration run where waits are errors."""
    # GPT-2 of transformers reads whether rows are packed, and waits for it.
    models = {"transformer": transformer, "T5": t5, "ResNet": resnet}
    run = RankStages.run

    def without_waits(*given: Any, **named: Any) -> Any:
        with refused_waits():
            return run(*given, **named)

    for name, make in models.items():
        model, batch, loss = make()
        graph = capture_model(model, batch, loss=loss)
        plan = even_plan(len(graph.layer_names), graph.batch_size)
        options: dict[str, Any] = {"verify": "off", "device": setting.device}
        options["optimizer"] = lambda parameters: SGD(parameters, lr=1e-3)
        safety = Safety(transport="in-process")
        what = f"{name}: host waits inside an iteration"
        with Pipeline(graph, batch, plan=plan, safety=safety, **options) as pipe:
            pipe.step(batch)  # what is made at first use may wait
            try:
                with patch.object(RankStages, "run", without_waits):
                    pipe.step(batch)
            except Exception as error:
                text = str(error.__cause__ or error)[:200]
                yield Row("1.3", what, text, "wrong", "0")
                continue
        yield under("1.3", what, 0, 0)
