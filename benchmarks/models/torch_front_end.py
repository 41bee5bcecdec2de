"""Torch's own front end, ``torch.distributed.pipelining.pipeline``, on well-known models.

The split points are two modules of the model, the micro-batch is fixed, and the stages are joined
in one process; the loss is computed outside, from the logits, for every micro-batch and weighed by
its valid targets, which is the best that a user of that front end can do by hand.
"""

import copy
from typing import Any

import torch
from judging import (
    LIMIT,
    MICRO_BATCHES,
    Plain,
    accumulations,
    distance,
    gradients_of,
    narrowest_type,
    told,
)
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

__all__ = ["BEST_KNOWN", "judge_torch"]

BEST_KNOWN = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",
    "BloomForCausalLM",
    "OPTForCausalLM",
    "MambaForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "ViTForImageClassification",
    "ResNetForImageClassification",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
)
Batch = dict[str, torch.Tensor]


def judge_torch(model: nn.Module, batch: Batch, penstock: str) -> dict[str, str]:
    """The row of a model: what torch's front end makes of it, and what Penstock did."""
    row = {"penstock": penstock, "splits": "no", "runs": "-", "as_they_come": "-", "summed": "-"}
    whole, dtype = _plain(model, batch), narrowest_type(model, batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    config: Any = model.config
    if config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = _shifted(batch["labels"], config)
    size = next(iter(batch.values())).shape[0] // MICRO_BATCHES
    own = copy.deepcopy(model)
    for module in own.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    try:
        part = {name: value[:size] for name, value in inputs.items()}
        pipe = pipeline(own, (), part, _splits(own))
        stages = [pipe.get_stage_module(n) for n in range(pipe.num_stages)]
    except Exception as error:
        return row | {"splits": f"no: {told(error)[:90]}"}
    row["splits"] = f"yes, {len(stages)} stages"
    try:
        found, tied = _trained(model, pipe, stages, inputs, batch["labels"], size)
    except Exception as error:
        return row | {"runs": f"no: {told(error)[:90]}"}
    row["runs"] = "yes"
    expected = [("right", whole)]
    expected += [("as accumulation", plain) for _, plain in accumulations(model, batch, None)]
    row["as_they_come"] = _said(found, expected, dtype)
    row["summed"] = _said(tied, expected, dtype)
    return row


def _shifted(labels: torch.Tensor, config: Any) -> torch.Tensor:
    """What the model makes of its labels for its decoder: begun anew, without ignored words."""
    begin = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    words = torch.cat([begin, labels[:, :-1]], dim=1)
    return words.masked_fill(words == -100, config.pad_token_id)


def _plain(model: nn.Module, batch: Batch) -> Plain:
    own = copy.deepcopy(model)
    loss = own(**batch).loss
    loss.backward()
    return Plain(float(loss), gradients_of(own))


def _said(
    found: dict[str, torch.Tensor], expected: list[tuple[str, Plain]], dtype: torch.dtype
) -> str:
    """What the gradients are equal to, or how far they are from the plain module's."""
    for words, plain in expected:
        if distance(Plain(plain.loss, found), plain, dtype)[0] <= LIMIT:
            return words
    whole = expected[0][1]
    return f"no, {distance(Plain(whole.loss, found), whole, dtype)[0]:.0e}"


def _splits(model: nn.Module) -> dict[str, SplitPoint]:
    """The beginnings of two entries of the module lists: a third and two thirds of the way."""
    blocks = [
        f"{name}.{index}"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
        for index in range(len(module))
        if not any(part.isdigit() for part in name.split("."))
    ]
    thirds = (len(blocks) // 3, 2 * len(blocks) // 3)
    chosen = {blocks[n] for n in (thirds if len(blocks) > 2 else (0, 1))}
    return {name: SplitPoint.BEGINNING for name in chosen}


def _trained(
    model: nn.Module,
    pipe: Any,
    stages: list[nn.Module],
    inputs: Batch,
    labels: torch.Tensor,
    size: int,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients by the names of the model: of the copy met first, and summed over tied copies."""
    joined: Any = pipe.split_gm
    total = _valid(model, labels)
    for number in range(MICRO_BATCHES):
        rows = slice(number * size, (number + 1) * size)
        part = {name: value[rows] for name, value in inputs.items()}
        # The pipe's own call detaches what passes between stages; the graph of stages does not.
        result = fx.Interpreter(joined).run(*_in_order(joined, part))
        logits = getattr(result, "logits", result)
        logits = next(iter(logits.values())) if isinstance(logits, dict) else logits
        logits = logits[0] if isinstance(logits, tuple | list) else logits
        loss = _loss(model, logits, labels[rows])
        (loss * _valid(model, labels[rows]) / total).backward()
    return _by_name(model, stages)


def _in_order(joined: Any, part: Batch) -> list[torch.Tensor]:
    """The inputs in the order in which the graph of stages takes them."""
    names = [node.name for node in joined.graph.nodes if node.op == "placeholder"]
    return [part[name] for name in names]


def _valid(model: nn.Module, labels: torch.Tensor) -> int:
    if labels.dim() == 1:
        return labels.shape[0]
    shifted = labels[:, 1:] if "CausalLM" in type(model).__name__ or _is_gpt(model) else labels
    return int((shifted != -100).sum())


def _is_gpt(model: nn.Module) -> bool:
    return type(model).__name__ == "GPT2LMHeadModel"


def _loss(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.dim() > 1 and ("CausalLM" in type(model).__name__ or _is_gpt(model)):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _by_name(
    model: nn.Module, stages: list[nn.Module]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    first: dict[str, torch.Tensor] = {}
    summed: dict[str, torch.Tensor] = {}
    of_model = dict(model.named_parameters(remove_duplicate=False))
    canonical = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            known = canonical[id(of_model[name])]
            if parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            first.setdefault(known, parameter.grad)
            summed[known] = summed[known] + parameter.grad if known in summed else parameter.grad
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    return zeros | first, zeros | summed
