"""What the worker processes of the tests of tensor groups run: plans with groups, and one device.

Every rank trains the user's own module by itself, from the same seed, and compares its tensors.
"""

import copy
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import models
import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from refused import named_refusal_of
from runtime.pipeline_cases import SINGLE_PRECISION, OneDevice, different, join, tokens
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.torch_internals import forget_groups, own_parameters

VOCABULARY, SEQUENCE, WIDTH, HEADS = 24, 6, 16, 4
STYLES = {
    **dict.fromkeys(("query", "key", "value", "up"), "colwise"),
    **dict.fromkeys(("merge", "down"), "rowwise"),
}
TABLE: Any = {f"blocks.*.{name}": kind for name, kind in STYLES.items()}
TOLERANCE = 1e-10
"""Sums over shards, replicas and micro-batches in another order than on one device."""

CLIP = 0.05


class Block(nn.Module):
    """Attention and a perceptron, with biases, norms and a scale that stay whole."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.merge = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width // heads,), 0.9))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], self.heads, y.shape[2] // self.heads).transpose(1, 2)

        y = self.first(x)
        query = heads(self.query(y)) * self.scale
        found = functional.scaled_dot_product_attention(
            query, heads(self.key(y)), heads(self.value(y)), None, self.dropout, True
        )
        x = x + self.merge(found.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class SmallGPT(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(
        self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.0, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(SEQUENCE, width) / 4)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        if tied:
            self.blocks[1].get_submodule("up").weight = self.blocks[0].get_submodule("up").weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide attention and perceptron of each block, as in torchtitan."""
    kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    for block in model.blocks:
        block.heads //= mesh.size()
        parallelize_module(block, mesh, {name: kinds[kind]() for name, kind in STYLES.items()})
        block.scale = nn.Parameter(distribute_tensor(block.scale, mesh, [Replicate()]))
        block.forward = partial(on_own_heads, block, block.forward)


def on_own_heads(block: Any, forward: Any, x: torch.Tensor) -> torch.Tensor:
    """The scale multiplies the heads of this rank, so its gradient is summed over the group."""
    own = own_parameters(block)
    scale: Any = own["scale"]
    if not isinstance(scale, DTensor):  # another stage has these heads
        return forward(x)
    own["scale"] = scale.to_local(grad_placements=[Partial()])
    try:
        return forward(x)
    finally:
        own["scale"] = scale


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def small_gpt(seed: int = 0, **options: Any) -> SmallGPT:
    torch.manual_seed(seed)
    return SmallGPT(**options).double()


def batch_of(step: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; rows have unequal numbers of targets."""
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (rows, SEQUENCE), generator=drawn)
    targets = torch.randint(0, VOCABULARY, (rows, SEQUENCE), generator=drawn)
    ignored = torch.arange(SEQUENCE) > 1 + torch.arange(rows)[:, None] % 4
    return tokens, targets.masked_fill(ignored, -100)


def grouped_plan(layers: int, cut: int, schedule: str = "1f1b", **options: Any) -> Plan:
    """Two replicas of two ranks each, then a stage of one rank."""
    stages = (
        Stage(range(cut), (0, 1), (3, 1), **options),
        Stage(range(cut, layers), (2,), (4,)),
    )
    return Plan(stages, 3, 4, schedule, tensor_groups=((0, 1), (2, 3), (4,)))


def captured_gpt(model: nn.Module, **options: Any) -> LayerGraph:
    """The model with its loss; groups `divide` it, unless something else is given."""
    return capture_model(model, batch_of(0), loss=loss_of, **{"tensor_parallel": divide, **options})


SETTINGS: Any = {
    "optimizer": lambda parameters: adam(parameters),
    "clip_norm": CLIP,
    "timeout_s": 60,
}


def shard_of(pipe: Pipeline, name: str, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds."""
    shards = pipe._engine.shards
    dim = shards.dim_of(name)
    return whole if dim is None else whole.chunk(len(shards.ranks), dim)[shards.place]


def wrong_tensors(
    pipe: Pipeline, whole: nn.Module, what: str, tolerance: float = TOLERANCE
) -> list[str]:
    """Gradients, or weights, of this rank that are not those of one device."""
    theirs = dict(whole.named_parameters())
    wrong: list[str] = []
    for name, own in pipe.named_parameters():
        expected: Any = theirs[name].grad if what == "gradient" else theirs[name].detach()
        found = own.grad if what == "gradient" else own.detach()
        if different(found, shard_of(pipe, name, expected), tolerance):
            wrong.append(f"{what} of {name}")
    return wrong


def adam(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.05)


def one_device() -> OneDevice:
    return OneDevice(small_gpt(), own_loss, adam, CLIP)


def own_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(model(batch[0]), batch[1])


def differences(plan: Plan, transport: Any = "auto", **options: Any) -> list[str]:
    """What differs from one device in three steps with clipping, the second on fewer samples."""
    # Training starts with the weights that the first rank of each stage has.
    firsts = {plan.ranks_of(stage.devices[0])[0] for stage in plan.stages}
    ours = small_gpt(seed=0 if dist.get_rank() in firsts else 7)
    one = one_device()
    safety = Safety(compare_replicas_every=1, transport=transport)
    wrong: list[str] = []
    with Pipeline(
        captured_gpt(ours, **options),
        batch_of(0),
        plan=plan,
        verify="first-step",
        safety=safety,
        **SETTINGS,
    ) as pipe:
        for number in range(3):
            rows = 7 if number == 1 else 12
            loss, norm = one.step(batch_of(number, rows))
            found = pipe.step(batch_of(number, rows))
            figures = {"loss": (found.loss, loss), "norm": (found.gradient_norm, norm)}
            here = [
                f"{name} is {number} instead of {expected}"
                for name, (number, expected) in figures.items()
                if abs(number - expected) > TOLERANCE * expected
            ]
            here += wrong_tensors(pipe, one.model, "gradient")
            here += wrong_tensors(pipe, one.model, "weight")
            wrong += [f"step {number}: {each}" for each in here]
        wrong += wrongly_verified(pipe)
    return wrong


def mean_output(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.float().mean()


def unequal_with_settings(plan: Plan, autocast: torch.dtype | None) -> list[str]:
    """What differs from one device in three steps of different lengths, with a metric."""
    join()
    torch.manual_seed(0)
    one = SmallGPT()
    ours, optimizer = copy.deepcopy(one), adam(one.parameters())
    graph = captured_gpt(ours, dynamic={0: {1: "words"}, 1: {1: "words"}})
    options = {**SETTINGS, "metrics": {"mean": mean_output}, "verify": "first-step"}
    rounding = SINGLE_PRECISION if autocast is None else 0.01
    batch, wrong = list(batch_of(0)), list[str]()
    with Pipeline(graph, tuple(batch), plan=plan, autocast=autocast, **options) as pipe:
        for number in range(3):
            batch = [leaf[:, : SEQUENCE - number] for leaf in batch_of(number)]
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                output = one(batch[0])
                loss = loss_of(output, batch[1])
            loss.backward()
            nn.utils.clip_grad_norm_(one.parameters(), CLIP)
            optimizer.step()
            found = pipe.step(tuple(batch))
            pairs = {
                "loss": (found.loss, float(loss.detach())),
                "mean": (found.metrics["mean"], float(output.detach().float().mean())),
            }
            wrong += [
                f"step {number}: {name} is {is_now} instead of {expected}"
                for name, (is_now, expected) in pairs.items()
                if abs(is_now - expected) > rounding
            ]
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = float(one(batch[0]).float().mean())
        mean = pipe.evaluate(tuple(batch)).metrics["mean"]
        if abs(mean - expected) > rounding:
            wrong.append(f"evaluated mean {mean} instead of {expected}")
        if pipe.verified is None or not pipe.verified.equal:
            wrong.append(f"the first step: {pipe.verified}")
    return wrong


def wrongly_verified(pipe: Pipeline) -> list[str]:
    """What the comparisons with the model left whole get wrong, also that with a wrong weight."""
    wrong: list[str] = []
    if pipe.verified is None or not pipe.verified.equal:
        wrong.append(f"the first step: {pipe.verified}")
    if not (result := pipe.verify(batch_of(7, 8))).equal:
        wrong.append(f"verified: {result}")
    name = "blocks.0.query.weight"
    shards = pipe._engine.shards
    for own, parameter in pipe.named_parameters():
        if own == name and shards.place:
            # The whole weight is what the ranks hold together, so a change of one shard counts.
            parameter.register_hook(lambda gradient: 1.5 * gradient)
    if any(len(pipe.plan.ranks_of(device)) > 1 for device in pipe.plan.stages[0].devices):
        result = pipe.verify(batch_of(8, 8))
        found = result.difference.name if result.difference is not None else ""
        if result.equal or found != name:
            wrong.append(f"not noticed: {result}")
    return wrong


def llama_differences() -> list[str]:
    """What differs in a model of Hugging Face, divided by its own plan."""
    join()
    torch.manual_seed(0)
    whole = models.llama(num_key_value_heads=2).double()
    ours, batch = copy.deepcopy(whole), tokens(12)
    loss = whole(**batch).loss
    loss.backward()
    layers = len(capture_model(copy.deepcopy(ours), batch).layer_names)
    stages = Stage(range(3), (0,), (4,)), Stage(range(3, layers), (1,), (4,))
    plan = Plan(stages, 3, 4, "1f1b", tensor_groups=((0,), (1, 2)))
    with Pipeline(ours, batch, plan=plan, timeout_s=60) as pipe:
        found = pipe.step(batch).loss
        wrong = wrong_tensors(pipe, whole, "gradient", SINGLE_PRECISION)
        shards = pipe._engine.shards
        divided = {n for n, _ in pipe.named_parameters() if shards.dim_of(n) is not None}
    if abs(found - float(loss.detach())) > SINGLE_PRECISION:
        wrong.append(f"loss {found} instead of {float(loss.detach())}")
    expected = {f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    if dist.get_rank() and not expected <= divided:
        wrong.append(f"only {sorted(divided)} are divided")
    return wrong


class Unusual(nn.Module):
    """Code between divided layers that reads a whole weight and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y *= 0.9
        return self.down(y) + functional.linear(y.tanh(), self.down.weight)


def unusual_refusal() -> str:
    """The message with which code that torch cannot run on shards is refused."""
    join()
    model = nn.Sequential(Unusual(), nn.Linear(WIDTH, WIDTH)).double()
    table: Any = {"*.up": "colwise", "*.down": "rowwise"}
    batch = tuple(torch.randn(2, 8, WIDTH).double())
    graph = capture_model(model, batch, loss=nn.MSELoss(), tensor_parallel=table)
    stages = (Stage(range(len(graph.layer_names)), (0,), (4,)),)
    plan = Plan(stages, 2, 4, "gpipe", tensor_groups=((0, 1),))
    try:
        with Pipeline(graph, batch, plan=plan, timeout_s=60) as pipe:
            pipe.step(batch)
    except PenstockError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "nothing"


def continued(directory: str, before: Plan, after: Plan) -> list[str]:
    """What differs when training goes on under another plan; and in all that reads weights."""
    join()
    one, wrong = one_device(), list[str]()
    with Pipeline(captured_gpt(small_gpt()), batch_of(0), plan=before, **SETTINGS) as pipe:
        for number in range(2):
            one.step(batch_of(number))
            pipe.step(batch_of(number))
        pipe.save(directory)
    with Pipeline(captured_gpt(small_gpt(5)), batch_of(0), plan=after, **SETTINGS) as pipe:
        pipe.load(directory)
        kept = {n: copy.deepcopy(value) for n, value in pipe.state_dict().items()}
        for number in (2, 3):
            pipe.step(batch_of(number))
        pipe.load_state_dict(kept)
        for number in (2, 3):
            one.step(batch_of(number))
            pipe.step(batch_of(number))
            wrong += wrong_tensors(pipe, one.model, "weight")
        if pipe.steps != 4:
            wrong.append(f"{pipe.steps} steps")
        tokens, targets = batch_of(9, 7)
        with torch.no_grad():
            output = one.model(tokens)
        loss = pipe.evaluate((tokens, targets)).loss
        if abs(loss - float(loss_of(output, targets))) > TOLERANCE * loss:
            wrong.append(f"evaluated loss {loss} instead of {float(loss_of(output, targets))}")
        if different(pipe.predict((tokens, targets), everywhere=True), output, TOLERANCE):
            wrong.append("prediction")
        weights = pipe.model_state_dict()
        pipe.save_pretrained(f"{directory}/weights")
    if dist.get_rank() == 0:
        files = sorted(Path(f"{directory}/weights").glob("*.safetensors"))
        written = {name: t for file in files for name, t in load_file(file).items()}
        for name, expected in one.model.state_dict().items():
            for where, found in (("state", weights), ("file", written)):
                if different(found.get(name), expected, TOLERANCE):
                    wrong.append(f"{name} in the {where}")
    return wrong


def compared(
    plans: Sequence[Plan], transports: Sequence[str] = (), granularity: str = "module"
) -> list[list[str]]:
    join()
    chosen = transports or ["auto"] * len(plans)
    return [
        differences(plan, transport=transport, granularity=granularity)
        for plan, transport in zip(plans, chosen, strict=True)
    ]


MODEL = ("width", "heads", "dropout", "tied")
GRAPH = ("compile", "tensor_parallel")
"""The options of the model and of its capture; all others are those of the pipeline."""


def refusals(plan: Plan, settings: Sequence[dict[str, Any]]) -> list[str]:
    """The messages with which pipelines with these settings are refused."""
    join()
    found: list[str] = []
    for options in settings:
        try:
            model = small_gpt(**{n: v for n, v in options.items() if n in MODEL})
            graph = captured_gpt(model, **{n: v for n, v in options.items() if n in GRAPH})
            own = {n: v for n, v in options.items() if n not in MODEL + GRAPH}
            with Pipeline(graph, batch_of(0), plan=plan, **{**SETTINGS, **own}) as pipe:
                pipe.step(batch_of(0))
        except PenstockError as refusal:
            found.append(f"{type(refusal).__name__}: {refusal}")
        else:
            found.append("nothing")
    return found


def keeps_a_group_that_was_left() -> bool:
    """Whether something refers to a mesh's process group, and so to its connections, afterwards."""
    join()
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    mesh, watched = DeviceMesh.from_group(group, "cpu"), ref(group)
    dist.destroy_process_group(group)
    forget_groups(mesh)
    del group
    gc.collect()
    return watched() is not None


def with_a_failure(plan: Plan) -> str:
    """How a run ends in which one rank of a tensor group raises an error within a step."""
    join()
    with Pipeline(captured_gpt(small_gpt()), batch_of(0), plan=plan, **SETTINGS) as pipe:
        pipe.step(batch_of(0))
        if dist.get_rank() == 1:
            weight = dict(pipe.named_parameters())["blocks.0.down.weight"]
            weight.register_hook(fail)
        try:
            pipe.step(batch_of(1))
        except (PenstockError, ZeroDivisionError) as failure:
            return f"{type(failure).__name__}: {failure}"
    return "nothing"


def with_shards_left_out(plan: Plan) -> str:
    """How a first step ends in which the norm counts none of the second rank's gradients."""
    join()
    with Pipeline(captured_gpt(small_gpt()), batch_of(0), plan=plan, **SETTINGS) as pipe:
        if dist.get_rank() == 1:
            pipe._engine.buckets.not_counted = frozenset(pipe.parameters())
        return named_refusal_of(pipe.step, batch_of(0))


def fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError("a hook of the user's")
