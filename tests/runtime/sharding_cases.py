"""What the worker processes of the tests of choices run: every choice with what it may meet.

Every rank trains the model left whole by itself, from the same seed, and compares its rows.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import models
import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import (
    SUBJECTS,
    OneDevice,
    Subject,
    captured,
    different,
    gpt2,
    join,
    layer_norm_in_float64,
    next_token_loss,
    normal,
    plan_of,
)
from runtime.tensor_cases import continued
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.choices import REFUSED
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.stage.parameter_shards import Unit
from penstock.runtime.tables import Constraints
from penstock.train.optimizers import MuonWithAdamW

TOLERANCE = 1e-10
"""Sums over ranks and micro-batches in another order than on one device."""

CLIP = 0.05

LAYERS = 15
"""Of the small GPT of the tensor groups."""

Choose = Callable[[Plan], Plan]


def choosing(*choices: str) -> Choose:
    """Gives the stages of a plan some choices."""
    sharding = next((choice for choice in choices if choice != "blocks"), "")

    def chosen(plan: Plan) -> Plan:
        by_block = "blocks" in choices
        stages = tuple(replace(s, sharding=sharding, by_block=by_block) for s in plan.stages)
        return replace(plan, stages=stages)

    return chosen


def adam(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


def muon(parameters: Any) -> MuonWithAdamW:
    return MuonWithAdamW(parameters, lr=0.02, weight_decay=0.1)


def llama() -> Subject:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    LlamaRMSNorm.forward = layer_norm_in_float64
    return Subject(models.llama(), gpt2().batch, next_token_loss)


def untied() -> Subject:
    """The GPT-2, whose head has a weight of its own."""
    subject = gpt2()
    head: Any = subject.model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    return subject


OWN = {"llama": llama, "untied": untied}


def fresh(name: str, frozen: str = "") -> tuple[Subject, LayerGraph]:
    """A subject and its graph; parameters whose name begins with ``frozen`` are not trained."""
    torch.manual_seed(0)
    subject = (SUBJECTS | OWN)[name]()
    subject.model.double().train()
    for parameter_name, parameter in subject.model.named_parameters():
        if frozen and parameter_name.startswith(frozen):
            parameter.requires_grad_(requires_grad=False)
    return subject, capture_model(subject.model, subject.batch(3), loss=subject.loss)


known = cache(fresh)
"""For cases that give the model back as it was."""


def wrong_rows(pipe: Pipeline, whole: nn.Module) -> Iterator[str]:
    """This rank's weights, or rows of them, that are not those of one device."""
    theirs = dict(whole.named_parameters())
    for name, own in pipe.named_parameters():
        expected = pipe._engine.shards.own_part(name, theirs[name].detach())
        if different(own.detach(), expected, TOLERANCE):
            yield name


def trained(
    choose: Choose,
    name: str,
    schedule: str = "1f1b",
    replicas: tuple[int, ...] = (2, 2),
    *,
    parts: int = 1,
    make: Callable[[Any], Any] = adam,
    frozen: str = "",
    **options: Any,
) -> list[str]:
    """What differs from one device in two steps with clipping, the second on fewer samples.

    A step has ``parts`` batches. Parameters whose name begins with ``frozen`` are not trained.
    """
    subject, graph = known(name, frozen)
    micro_batches = 4 if schedule in ("interleaved", "chimera") else 3
    plan = plan_of(len(graph.layer_names), replicas, schedule, micro_batches=micro_batches)
    before = {n: t.detach().clone() for n, t in subject.model.state_dict().items()}
    one = OneDevice(copy.deepcopy(subject.model), subject.whole_loss, make, CLIP)
    wrong, full = list[str](), plan.global_batch
    settings: Any = {"clip_norm": CLIP, "timeout_s": 60, "verify": "off", **options}
    with Pipeline(
        graph,
        subject.batch(full),
        plan=choose(plan),
        optimizer=make,
        safety=Safety(compare_replicas_every=1),
        **settings,
    ) as pipe:
        for rows in (full, full - 5):
            batch = subject.batch(rows * parts)
            found = pipe.step(*zip(*(part.chunk(parts) for part in batch), strict=True))
            expected = one.step(batch)
            for own, theirs in zip((found.loss, found.gradient_norm), expected, strict=True):
                if abs(own - theirs) > TOLERANCE * theirs:
                    wrong.append(f"{rows} rows: {own} instead of {theirs}")
            wrong += [f"{rows} rows: {each}" for each in wrong_rows(pipe, one.model)]
        if options and pipe.verified is not None and not pipe.verified.equal:
            wrong.append(f"first step: {pipe.verified}")
        pipe.close(gather=True)
    theirs = dict(one.model.named_parameters())
    wrong += [
        f"given back: {n}"
        for n, p in subject.model.named_parameters()
        if different(p.detach(), theirs[n].detach(), TOLERANCE)
    ]
    subject.model.load_state_dict(before)
    return wrong


def in_float32(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.float() for tensor in batch)


def verified(choose: Choose, name: str, *, single: bool = False, **options: Any) -> list[str]:
    """What the comparison of a step with the user's own module finds."""
    subject, graph = fresh(name)
    if single:
        make = subject.batch
        subject = replace(subject, batch=lambda rows: in_float32(make(rows)))
        graph = capture_model(subject.model.float(), subject.batch(3), loss=subject.loss)
    plan = choose(plan_of(len(graph.layer_names), (2, 2)))
    with Pipeline(graph, subject.batch(12), plan=plan, optimizer=adam, **options) as pipe:
        pipe.step(subject.batch(12))
        found = [pipe.verified, pipe.verify(subject.batch(7))]
    return [str(each) for each in found if each is None or not each.equal]


def thawed(choose: Choose) -> list[str]:
    """A change of what is trained: what differs then, or its refusal."""
    subject, graph = captured("mlp")
    plan = choose(plan_of(len(graph.layer_names), (2, 2)))
    with Pipeline(graph, subject.batch(12), plan=plan, optimizer=adam) as pipe:
        pipe.step(subject.batch(12))
        for name, parameter in subject.model.named_parameters():
            if name.endswith("bias"):
                parameter.requires_grad_(requires_grad=False)
        try:
            pipe.step(subject.batch(12))
        except BadInput as refusal:
            return [str(refusal)]
        result = pipe.verify(subject.batch(12))
    return [] if result.equal else [str(result)]


def each_another(plan: Plan) -> Plan:
    """The first stage divides parameters, on devices in another order, and the second nothing."""
    first, second = plan.stages
    devices = first.devices[::-1]
    first = replace(first, devices=devices, sharding="parameters", recompute=True)
    return replace(plan, stages=(first, second))


def resumed(choose: Choose) -> list[str]:
    """What differs when a run goes on under a plan with other stages, of which one divides rows."""
    after = each_another(plan_of(LAYERS, (3, 1), "gpipe"))
    with tempfile.TemporaryDirectory() as own:
        places: list[Any] = [own]
        dist.broadcast_object_list(places)
        wrong = continued(places[0], choose(plan_of(LAYERS, (2,))), after)
        dist.barrier()
    return wrong


RUNS: dict[str, tuple[frozenset[str], Callable[[Choose], list[str]]]] = {
    "replicas": (
        frozenset({"whole backwards", "unequal replicas", "clipping", "first step"}),
        lambda choose: trained(choose, "untied", verify="first-step"),
    ),
    "looped": (frozenset({"interleaved"}), lambda choose: trained(choose, "llama", "interleaved")),
    "split": (frozenset({"split backwards"}), lambda choose: trained(choose, "untied", "zb-h1")),
    "mirrored": (frozenset({"mirrored"}), lambda choose: trained(choose, "mlp", "chimera")),
    "tied": (frozenset({"tied stages"}), lambda choose: trained(choose, "gpt2")),
    "parts": (
        frozenset({"accumulate", "frozen"}),
        lambda choose: trained(choose, "gpt2", "gpipe", (4,), parts=2, frozen="transformer.h.0"),
    ),
    "convolutions": (frozenset({"norms"}), lambda choose: verified(choose, "convolutions")),
    "bfloat16": (
        frozenset({"autocast"}),
        lambda choose: verified(choose, "mlp", single=True, autocast=torch.bfloat16),
    ),
    "muon": (frozenset({"whole parameters"}), lambda choose: trained(choose, "mlp", make=muon)),
    "thawed": (frozenset({"thawed"}), thawed),
    "resumed": (frozenset({"other plan"}), resumed),
}
"""What is run for which features."""


RUN_ELSEWHERE = frozenset({("optimizer", "other plan")})


def choices_for(features: frozenset[str]) -> list[tuple[str, ...]]:
    """The choices to run with these features, recompute by block together with others."""
    left_out = REFUSED.keys() | RUN_ELSEWHERE
    kept = [c for c in ("parameters", "optimizer") if not any((c, f) in left_out for f in features)]
    blocks = ("blocks",) * (not any(("blocks", f) in REFUSED for f in features))
    return [(choice, *blocks) for choice in kept] or [blocks]


class Checkpointed(nn.Module):
    """Blocks of which one checkpoint of the user's runs several again within the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.reentrant = reentrant

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.both, self.blocks[0](x), use_reentrant=self.reentrant)
        return self.blocks[3](x).square().mean()


def with_checkpoints(choose: Choose) -> list[str]:
    """What the comparison of a step finds in models with checkpoints of the user's."""
    found: list[str] = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        graph = capture_model(Checkpointed(reentrant=reentrant).double(), normal(3, 6, 1))
        stage = Stage(range(len(graph.layer_names)), (0, 1, 2, 3), (1, 1, 1, 1))
        plan = choose(Plan((stage,), 3, 4, "gpipe"))
        with Pipeline(graph, normal(12, 6, 1), plan=plan) as pipe:
            pipe.step(normal(12, 6, 1))
            if pipe.verified is None or not pipe.verified.equal:
                found.append(f"{reentrant}: {pipe.verified}")
    return found


class TiedChain(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def gathered(choose: Choose) -> tuple[dict[str, int], float]:
    """How often units are gathered and reduced in a step of a model, and the share that a rank has.

    ``most`` is the most units that are whole at once. ``messages`` are the gathers that were begun,
    and ``ahead`` those of them beside the work of another unit.
    """
    subject, graph = known("untied")
    plan = choose(plan_of(len(graph.layer_names), (4,)))
    counted: dict[str, int] = dict.fromkeys(("gather", "reduce", "most", "messages", "ahead"), 0)
    whole: set[Unit] = set()
    plain = {kind: getattr(Unit, kind) for kind in ("gather", "reduce", "free", "begin")}

    def begin(unit: Unit) -> None:
        if not unit.is_whole and unit._coming is None:
            counted["messages"] += 1
            counted["ahead"] += bool(whole)
        plain["begin"](unit)

    def counting(kind: str) -> Callable[[Unit], None]:
        def act(unit: Unit) -> None:
            counted[kind] = counted.get(kind, 0) + (unit.is_whole != (kind == "gather"))
            plain[kind](unit)
            (whole.add if unit.is_whole else whole.discard)(unit)
            counted["most"] = max(counted["most"], len(whole))

        return act

    with Pipeline(graph, subject.batch(12), plan=plan, optimizer=adam, verify="off") as pipe:
        held = sum(p.numel() for _, p in pipe.named_parameters())
        pipe.step(subject.batch(12))  # the order of the units is known after it
        for kind in plain:
            setattr(Unit, kind, begin if kind == "begin" else counting(kind))
        try:
            pipe.step(subject.batch(12))
        finally:
            for kind, act in plain.items():
                setattr(Unit, kind, act)
        pipe.close(gather=True)
    counted.pop("free", None)
    return counted | {"left": len(whole)}, held / sum(p.numel() for p in subject.model.parameters())


def every_run() -> tuple[dict[str, list[str]], list[tuple[dict[str, int], float]]]:
    """What differs in every run, by its name and choices; and how often units are gathered."""
    join()
    found: dict[str, list[str]] = {}
    for name, (features, act) in RUNS.items():
        for choices in choices_for(features):
            found[f"{name}: {', '.join(choices)}"] = act(choosing(*choices))
    alone = choosing("parameters")
    found["llama on one stage"] = trained(alone, "llama", "gpipe", (4,))
    found["mixed"] = trained(each_another, "untied", constraints=Constraints(sharding="optimizer"))
    found["checkpoints"] = with_checkpoints(alone)
    found["refused"] = thawed(alone)
    return found, [gathered(alone), gathered(choosing("parameters", "blocks"))]
