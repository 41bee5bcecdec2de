"""A quantised frozen base with adapters, in a pipeline and in one plain process."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_training import plain_step
from refused import refusal_of
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.tables import Weights

KINDS = ("int8", "int4", "nf4")
"""torchao's int8 and int4, weights only, and bitsandbytes' four bits."""

STEPS, SAVED, ROWS, WORDS = 5, 2, 8, 40


def tokens(step: int) -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, WORDS, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": drawn, "labels": drawn.clone()}


def base() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=32, use_cache=False)
    return LlamaForCausalLM(config)


def is_of_base(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lora" not in name and "lm_head" not in name


def quantise(model: nn.Module, kind: str) -> None:
    if kind in ("int8", "int4"):
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

        four = IntxWeightOnlyConfig(weight_dtype=torch.int4)
        quantize_(model, Int8WeightOnlyConfig() if kind == "int8" else four, filter_fn=is_of_base)
        return
    from bitsandbytes.functional import quantize_blockwise
    from bitsandbytes.nn import Linear4bit, Params4bit

    quantize_blockwise(torch.zeros(1))  # makes a table for all that follow, here and not on meta
    for name, module in list(model.named_modules()):
        if is_of_base(module, name):
            path, _, last = name.rpartition(".")
            sizes = module.in_features, module.out_features
            kept: Any = {"compute_dtype": torch.float32, "device": "meta"}
            new = Linear4bit(*sizes, bias=False, quant_type="nf4", **kept)
            new.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            setattr(model.get_submodule(path), last, new)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.weight = module.weight._quantize(module.weight.device)


def adapted(kind: str, *, on_meta: bool = False, adapters: Path | None = None) -> nn.Module:
    """A small Llama with a base of a kind, and adapters that are trained, perhaps saved ones."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta" if on_meta else "cpu"):
            model = base()
        quantise(model, kind)
        if adapters is not None:
            return peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
        torch.manual_seed(1)
        targets = ["q_proj", "v_proj", "up_proj"]
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        with torch.device("meta" if on_meta else "cpu"):
            return peft.get_peft_model(model, config)


def quantised_weight(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as `quantise` leaves it in a model."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    model = nn.ModuleDict({"layer": layer})
    quantise(model, kind)
    return model.get_parameter("layer.weight")


def captured(kind: str) -> LayerGraph:
    return capture_model(adapted(kind), tokens(0), granularity="block")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain_losses(kind: str, adapters: Path | None = None) -> list[float]:
    """The losses of the plain loop in this process."""
    model, found = adapted(kind, adapters=adapters), list[float]()
    stepper = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        found.append(plain_step(stepper, model(**tokens(step)).loss))
    return found


def plan_for(graph: LayerGraph, replicas: bool) -> Plan:
    layers = len(graph.layer_names)
    if replicas:
        return Plan((Stage(range(layers), (0, 1), (2, 2)),), 2, 4, "1f1b")
    cut = next(n for n, name in enumerate(graph.layer_names) if ".1" in name)
    stages = Stage(range(cut), (0,), (4,)), Stage(range(cut, layers), (1,), (4,))
    return Plan(stages, 2, 4, "1f1b")


def trained(kind: str, replicas: bool, folder: Path) -> dict[str, Any]:
    """A run that is saved, led astray and resumed, and what it says and keeps."""
    graph = captured(kind)
    own = {"plan": plan_for(graph, replicas), "optimizer": make_optimizer, "timeout_s": 100}
    with Pipeline(graph, tokens(0), **own) as pipe:
        losses = [pipe.step(tokens(step)).loss for step in range(SAVED)]
        pipe.save(folder / "checkpoint")
        pipe.step(tokens(50))
        pipe.load(folder / "checkpoint")
        losses += [pipe.step(tokens(step)).loss for step in range(SAVED, STEPS)]
        held = pipe._engine.held.held_tensors().values()
        found = {
            "losses": losses,
            "verified": str(pipe.verified),
            "evaluated": pipe.evaluate(tokens(7)).loss,
            "refusals": [
                refusal_of(pipe.save_pretrained, folder / "weights"),
                refusal_of(pipe.model_state_dict),
            ],
            "kinds": {type(tensor).__name__ for tensor in held},
        }
        pipe.save_adapters(folder / "adapters")
    return found


def all_trained(replicas: bool, folder: Path) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    return {kind: trained(kind, replicas, folder / f"{kind}-{replicas}") for kind in KINDS}


def trained_from_meta(kind: str, folder: Path) -> dict[str, Any]:
    """A run whose base is read and quantised by ranks; resumed from a base with other weights."""
    own: dict[str, Any] = {"optimizer": make_optimizer, "timeout_s": 100}
    seen = list[str]()

    def quantise_one(name: str, weight: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return quantised_weight(kind, weight)

    def pipe_of(directory: str, quantise: Any = quantise_one) -> Pipeline:
        graph = capture_model(adapted(kind, on_meta=True), tokens(0), granularity="block")
        update = Update(weights=Weights(folder / directory, quantise=quantise))
        return Pipeline(graph, tokens(0), plan=plan_for(graph, False), update=update, **own)

    with pipe_of("base") as pipe:
        quantised = tuple(seen)
        pipe.save_adapters(folder / f"{kind}-adapters")
        losses = [pipe.step(tokens(step)).loss for step in range(SAVED)]
        pipe.save(folder / f"{kind}-checkpoint")
        losses += [pipe.step(tokens(step)).loss for step in range(SAVED, STEPS)]
        found = {"losses": losses, "verified": str(pipe.verified), "quantised": quantised}
    with pipe_of("other") as pipe:
        pipe.load(folder / f"{kind}-checkpoint")
        resumed = [pipe.step(tokens(step)).loss for step in range(SAVED, STEPS)]
    refusal = refusal_of(pipe_of, "base", lambda name, weight: weight)
    return {**found, "resumed": resumed, "refusal": refusal}


def all_from_meta(folder: Path) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    return {kind: trained_from_meta(kind, folder) for kind in KINDS}
