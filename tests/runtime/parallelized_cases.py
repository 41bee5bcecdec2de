"""What the worker processes of the tests of functions that divide models run.

A group of two ranks holds the first stage, and the other ranks (one, or another group) the second.
Every rank trains the user's own module by itself, and compares.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from refused import named_refusal_of
from runtime.pipeline_cases import SINGLE_PRECISION, OneDevice, different, join, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

WIDTH, HEADS, WORDS, SEQUENCE = 16, 4, 24, 6
TOLERANCE = 1e-10
"""Sums over shards and micro-batches in another order than on one device."""

UP, DOWN = ("query", "key", "value", "up"), ("merge", "down")


class Block(nn.Module):
    """Attention and a perceptron; the number of heads follows from what a rank has."""

    def __init__(self, dropout: float, *, batch_norm: bool) -> None:
        super().__init__()
        self.dropout = dropout
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.merge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.third = nn.BatchNorm1d(SEQUENCE) if batch_norm else nn.Identity()

    def attend(self, query: Any, key: Any, value: Any) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        y = self.first(x)
        found = self.attend(heads(self.query(y)), heads(self.key(y)), heads(self.value(y)))
        found = self.merge(found.transpose(1, 2).flatten(2))
        x = x + functional.dropout(found, self.dropout, self.training)
        y = functional.dropout(functional.gelu(self.up(self.second(x))), self.dropout)
        return self.third(x + self.down(y))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, *, batch_norm: bool = False, tied: bool = False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, batch_norm=batch_norm) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        if tied:
            self.blocks[1].get_submodule("up").weight = self.blocks[0].get_submodule("up").weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    shape = 8, SEQUENCE
    return torch.randint(WORDS, shape, generator=drawn), torch.randint(
        WORDS, shape, generator=drawn
    )


# Functions, as a user writes them.


def by_styles(model: Any, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        styles: Any = {name: ColwiseParallel() for name in UP}
        parallelize_module(block, mesh, styles | {name: RowwiseParallel() for name in DOWN})
    return model


AT_EDGES: Any = {
    "input_layouts": (Replicate(),),
    "desired_input_layouts": (Shard(1),),
    "output_layouts": Shard(1),
    "desired_output_layouts": Replicate(),
    "use_local_output": True,
}
"""Within a block the sequence is divided; stages send and receive whole tensors."""


def by_sequence(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        norms = {n: SequenceParallel(use_local_output=False) for n in ("first", "second")}
        up = {name: ColwiseParallel(input_layouts=Shard(1)) for name in UP}
        down = {
            name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in DOWN
        }
        parallelize_module(block, mesh, {**norms, **up, **down})
        parallelize_module(block, mesh, PrepareModuleInputOutput(**AT_EDGES))


def by_context(model: Any, mesh: DeviceMesh) -> None:
    """Context parallelism: a rank has a part of the sequence, and gathers keys and values."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        local, rank = query.shape[2], mesh.get_local_rank()
        key, value = (
            DTensor.from_local(t, mesh, [Shard(2)], run_check=False).full_tensor(
                grad_placements=[Partial()]
            )
            for t in (key, value)
        )
        own = torch.arange(local)[:, None] + rank * local
        mask = own >= torch.arange(key.shape[2])[None]
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    for block in model.blocks:
        distribute_module(block, mesh)
        parallelize_module(block, mesh, PrepareModuleInputOutput(**AT_EDGES))
        local: Any = {"output_layouts": Shard(1), "desired_output_layouts": Shard(1)}
        styles: Any = {n: PrepareModuleOutput(**local) for n in UP[:3]}
        into: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Shard(1),)}
        parallelize_module(block, mesh, styles | {"merge": PrepareModuleInput(**into)})
        block.attend = attend


def by_checkpoints(model: Any, mesh: DeviceMesh) -> None:
    by_styles(model, mesh)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def by_compiling(model: Any, mesh: DeviceMesh) -> None:
    by_styles(model, mesh)
    for block in model.blocks:
        block.compile(backend="aot_eager")


def with_another_tensor(model: Any, mesh: DeviceMesh) -> None:
    model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.chunk(2)[0].detach())


def with_another_module(model: Any, mesh: DeviceMesh) -> None:
    model.blocks[0].up = nn.Linear(WIDTH, 2 * WIDTH)


def with_another_model(model: Any, mesh: DeviceMesh) -> nn.Module:
    return copy.deepcopy(model)


def with_one_of_two_tied(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model.blocks[0], mesh, {"up": ColwiseParallel(output_layouts=Replicate())})


# What differs from one device.


def plan_of(cut: int, layers: int, schedule: str = "1f1b") -> Plan:
    stages = Stage(range(cut), (0,), (4,)), Stage(range(cut, layers), (1,), (4,))
    last = tuple(range(2, dist.get_world_size()))
    return Plan(stages, 2, 4, schedule, tensor_groups=((0, 1), last))


def trained(
    parallelize: Callable[..., object],
    schedule: str = "1f1b",
    *,
    cut: int = 3,
    model: dict[str, Any] | None = None,
    granularity: Any = "block",
    **options: Any,
) -> list[str]:
    """What differs from one device in three steps with clipping, evaluated, and in weights."""
    torch.manual_seed(0)
    ours = GPT(**(model or {})).double()
    one = copy.deepcopy(ours)
    graph = capture_model(
        ours, batch_of(0), loss=loss_of, granularity=granularity, tensor_parallel=parallelize
    )
    make: Any = partial(SGD, lr=0.5, momentum=0.9)
    whole = OneDevice(one, lambda model, batch: loss_of(model(batch[0]), batch[1]), make, 0.5)
    wrong = list[str]()
    given: Any = {
        "optimizer": make,
        "clip_norm": 0.5,
        "timeout_s": 60,
        **options,
    }
    layers = len(graph.layer_names)
    with Pipeline(graph, batch_of(0), plan=plan_of(cut, layers, schedule), **given) as pipe:
        for step in range(3):
            loss, norm = whole.step(batch_of(step))
            found = pipe.step(batch_of(step))
            pairs = ("loss", found.loss, loss), ("norm", found.gradient_norm, norm)
            wrong += [
                f"step {step}: {name} is {here} instead of {expected}"
                for name, here, expected in pairs
                if abs(here - expected) > TOLERANCE
            ]
        if pipe.verified is None or not pipe.verified.equal:
            wrong.append(f"the first step: {pipe.verified}")
        words, targets = batch_of(9)
        with torch.no_grad():
            expected = float(loss_of(one(words), targets))
        if abs(pipe.evaluate((words, targets)).loss - expected) > TOLERANCE:
            wrong.append("evaluated loss")
        with pipe.full_model(), torch.no_grad():
            if different(ours(words), one(words), TOLERANCE):
                wrong.append("the model within full_model()")
        weights = pipe.model_state_dict()
    own = one.state_dict()
    return wrong + [n for n, value in weights.items() if different(value, own[n], TOLERANCE)]


def rows_that_run() -> dict[str, list[str]]:
    join()
    return {
        "styles": trained(by_styles),
        "styles, halves of backwards": trained(by_styles, "zb-h1"),
        "sequence": trained(by_sequence),
        "context": trained(by_context),
        "context, halves of backwards": trained(by_context, "zb-h1"),
        "checkpoints": trained(by_checkpoints),
        "tied": trained(by_styles, model={"tied": True}),
    }


def two_groups() -> dict[str, list[str]]:
    """The same where both stages are divided."""
    join()
    return {
        "sequence": trained(by_sequence, "gpipe"),
        "context, halves of backwards": trained(by_context, "zb-h1"),
        "mixtral, experts": transformers_differences("mixtral", by_transformers("experts")),
        "mixtral, packed": transformers_differences("mixtral", by_transformers("tensor")),
    }


def compiled() -> list[str]:
    join()
    return trained(by_compiling, timeout_s=200)


def with_dropout() -> list[tuple[str, float]]:
    """The sums of whole parameters after steps with dropout."""
    join()
    torch.manual_seed(0)
    graph = capture_model(
        GPT(dropout=0.3), batch_of(0), loss=loss_of, granularity="block", tensor_parallel=by_styles
    )
    plan = plan_of(3, len(graph.layer_names))
    options: Any = {"optimizer": lambda p: SGD(p, lr=0.5), "timeout_s": 60}
    with Pipeline(graph, batch_of(0), plan=plan, **options) as pipe:
        for step in range(3):
            pipe.step(batch_of(step))
        return [
            (name, float(p.detach().double().sum()))
            for name, p in pipe.named_parameters()
            if "first" in name or "second" in name or "words" in name
        ]


def refused() -> dict[str, str]:
    join()
    tied = {"tied": True}
    return {
        name: named_refusal_of(trained, function, **options)
        for name, function, options in (
            ("another tensor", with_another_tensor, {}),
            ("another module", with_another_module, {}),
            ("another model", with_another_model, {}),
            ("one of two tied", with_one_of_two_tied, {"model": tied}),
            ("batch norm", by_styles, {"model": {"batch_norm": True}}),
            ("a cut", by_styles, {"granularity": "module", "cut": 4}),
        )
    }


# Models of Hugging Face, divided by its own plans.


def by_transformers(kind: str) -> Callable[..., object]:
    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        size = mesh.size()
        experts: Any = {} if kind == "tensor" else {"ep_size": size}
        config = DistributedConfig(tp_size=size, **experts)
        styles, of_experts, _ = model._resolve_parallel_plans(config)
        apply_tensor_parallelism(model, mesh, {} if kind == "experts" else styles)
        if of_experts:
            apply_expert_parallelism(model, mesh, mesh, of_experts)

    return parallelize


def of_transformers(name: str) -> nn.Module:
    import transformers

    kind, config = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig),
    }[name]
    own: dict[str, Any] = {"head_dim": 4} if name == "qwen3" else {}
    if name == "mixtral":
        own = {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "grouped_mm",
        }
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return kind(config(**sizes, **heads, use_cache=False, **own))


def transformers_differences(name: str, parallelize: Any) -> list[str]:
    """What differs from one device in two steps, and in the weights that are written."""
    ours = of_transformers(name)
    one, batch = copy.deepcopy(ours), tokens(8)
    graph = capture_model(ours, batch, granularity="block", tensor_parallel=parallelize)
    names, wrong = graph.layer_names, list[str]()
    cut = next(number for number, layer in enumerate(names) if ".2" in layer)
    make: Any = partial(SGD, lr=0.5)
    whole = OneDevice(one, lambda model, batch: model(**batch).loss, make, 0.5)
    options: Any = {"optimizer": make, "clip_norm": 0.5, "timeout_s": 60}
    with Pipeline(graph, batch, plan=plan_of(cut, len(names)), **options) as pipe:
        for step in range(2):
            loss, _ = whole.step(batch)
            found = pipe.step(batch).loss
            if abs(found - loss) > SINGLE_PRECISION:
                wrong.append(f"step {step}: loss {found} instead of {loss}")
        if pipe.verified is None or not pipe.verified.equal:
            wrong.append(f"the first step: {pipe.verified}")
        weights = pipe.model_state_dict()
    own = one.state_dict()
    return wrong + [n for n, value in weights.items() if different(value, own[n], SINGLE_PRECISION)]


def plans_of_transformers() -> dict[str, list[str]]:
    join()
    return {
        "llama, tensor": transformers_differences("llama", by_transformers("tensor")),
        "mixtral, packed": transformers_differences("mixtral", by_transformers("tensor")),
        "mixtral, experts": transformers_differences("mixtral", by_transformers("experts")),
        "qwen3, its own plan": transformers_differences("qwen3", None),
    }


def summed_twice() -> str:
    join()
    return named_refusal_of(transformers_differences, "qwen3", by_transformers("tensor"))
