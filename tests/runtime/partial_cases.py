"""Models of which only a part is trained, and what the ranks that train them run."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import refusal_of
from runtime.pipeline_cases import join, next_token_loss, plan_of
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.toml_file import local_cluster
from penstock.errors import BadInput, RunFailed
from penstock.measure.same_work import parameter_bytes_of
from penstock.plan.plan import Stage
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.runtime.measured_memory import distinct_bytes, lasting_tensors
from penstock.runtime.options import Update
from penstock.runtime.tables import Constraints
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.instances import StageUse

VOCABULARY, WORDS, ROWS = 31, 6, 6

Case = tuple[nn.Module, Callable[..., torch.Tensor], list[Any]]
"""A model, its loss function, and batches."""


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.05, weight_decay=0.1)


def low_rank() -> Case:
    """A GPT-2 of three blocks, with adapters in the attention of the last two only."""
    torch.manual_seed(0)
    gpt2 = models.gpt2(vocab_size=VOCABULARY, n_layer=3)
    adapters = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        target_modules=["c_attn"],
        layers_to_transform=[1, 2],
        task_type="CAUSAL_LM",
        fan_in_fan_out=True,
        init_lora_weights=False,
    )
    model = get_peft_model(gpt2, adapters).double()
    batches: list[Any] = []
    for step in range(4):
        make = torch.Generator().manual_seed(step)
        words = torch.randint(VOCABULARY, (ROWS, WORDS), generator=make)
        labels = words.clone()
        labels[0, 2:], labels[1] = -100, -100
        batches.append((words, labels))
    return model, next_token_loss, batches


def frozen_body() -> Case:
    """A body that is not trained, and a head that is."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3)
    ).double()
    model[:4].requires_grad_(False)
    make = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(ROWS, 8, generator=make, dtype=torch.float64),
            torch.randint(3, (ROWS,), generator=make),
        )
        for _ in range(3)
    ]
    return model, functional.cross_entropy, batches


def frozen_between() -> Case:
    """Trained layers before and behind a frozen one, whose input's gradient is needed."""
    model, loss, batches = frozen_body()
    assert isinstance(model, nn.Sequential)
    model[0].requires_grad_(True)
    return model, loss, batches


CASES: dict[str, Callable[[], Case]] = {
    "adapters": low_rank,
    "frozen body": frozen_body,
    "frozen between": frozen_between,
}


def plainly(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training in one process."""
    model, loss, batches = copy.deepcopy(case[0]), case[1], case[2]
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    for batch in batches:
        losses.append(plain_step(optimizer, loss(model(batch[0]), batch[1])))
    return losses, dict(model.named_parameters(remove_duplicate=False))


def lasting_bytes(graph: LayerGraph, layers: range) -> float:
    """What the simulator counts for a stage between steps, with Adam's two moments."""
    own, shared = parameter_bytes_of(graph)
    nothing = Affine()
    costs = [LayerCost("", nothing, nothing, nothing, *sizes) for sizes in own]
    catalogue = Catalogue(ModelProfile("", tuple(costs), shared=shared), local_cluster(1, 1, 1e9))
    work = catalogue.stage(Stage(layers, (0,), (1,)), StageUse())
    return work.replicas[0].memory.fixed_bytes


def trained(name: str, schedule: str, replicas: Sequence[int]) -> dict[str, Any]:
    """What differs from plain training, and what this rank did and kept."""
    case = CASES[name]()
    losses, weights = plainly(case)
    model, loss, batches = case
    graph = capture_model(model, batches[0], loss=loss)
    plan = plan_of(len(graph.layer_names), replicas, schedule, micro_batches=3, rows=2)
    with Pipeline(graph, batches[0], plan=plan, optimizer=adam, timeout_s=60) as pipe:
        ours = [pipe.step(batch).loss for batch in batches]
        timeline = pipe.timeline()
        engine = pipe._engine
        kept = {n: t for n, t in pipe.state_dict().items() if n.startswith("optimizer.")}
        wrong = [
            n for n, p in pipe.named_parameters() if not torch.allclose(p, weights[n], 1e-9, 1e-11)
        ]
        sent = engine.stages.program(ROWS).messages.outgoing
        gradients = [m.receiver_stage for own in sent.values() for m in own if m.kind == "B"]
        return {
            "losses": (ours, losses),
            "wrong": wrong,
            "kinds": {
                stage: {e.kind for e in timeline.events if e.stage == stage} & set("FBIWR")
                for stage in range(len(plan.stages))
            },
            "gradients sent to": set(gradients),
            "frozen with gradients": [
                n for n, p in pipe.named_parameters() if not p.requires_grad and p.grad is not None
            ],
            "trained": sum(p.nbytes for p in pipe.parameters()),
            "held": distinct_bytes(p for _, p in pipe.named_parameters()),
            "summed": sum(b.flat.nbytes for b in engine.buckets.buckets),
            "state": sum(t.nbytes for t in kept.values() if t.dim()),
            "lasting": distinct_bytes(lasting_tensors(engine, pipe._training))
            - sum(t.nbytes for t in kept.values() if not t.dim()),
            "counts": sum(b.arrived.nbytes for b in engine.buckets.buckets),
            "predicted": sum(
                lasting_bytes(graph, plan.stages[s].layers) for s in engine.stages.programs
            ),
            "verified": str(pipe.verify(batches[0])),
        }


def trained_in_all_ways() -> dict[str, dict[str, Any]]:
    """Every case on three ranks, by schedule and replicas."""
    join()
    ways = [
        ("adapters", "1f1b", (1, 1, 1)),
        ("adapters", "zb-h1", (1, 1, 1)),
        ("frozen body", "1f1b", (1, 1, 1)),
        ("frozen body", "1f1b", (1, 2)),
        ("frozen body", "zb-h1", (1, 1, 1)),
        ("frozen between", "zb-h1", (1, 1, 1)),
        ("frozen between", "gpipe", (2, 1)),
    ]
    return {f"{n}, {s}, {r}": trained(n, s, r) for n, s, r in ways}


THAWED = {2, 3, 6, 7}
"""The steps in which the body is trained, too."""


def thaw(model: nn.Module, step: int) -> None:
    """Freeze or thaw the body, as is due in a step."""
    assert isinstance(model, nn.Sequential)
    model[:4].requires_grad_(step in THAWED)


def falling(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def thawing(schedule: str, replicas: Sequence[int], *, meta: bool = False) -> dict[str, Any]:
    """Training in which the body is thawed, frozen and thawed again, and plain training of it.

    With ``meta`` the model has no values when the pipeline is made; it reads them from a directory.
    """
    model, loss, batches = frozen_body()
    batches = [batches[step % len(batches)] for step in range(8)]
    plain = copy.deepcopy(model)
    optimizer = adam(list(plain.parameters()))
    rates = falling(optimizer)
    for step, (x, y) in enumerate(batches):
        thaw(plain, step)
        plain_step(optimizer, loss(plain(x), y))
        rates.step()
    weights: str | None = None
    if meta:
        weights = tempfile.mkdtemp()
        save_file(model.state_dict(), Path(weights, "model.safetensors"))
        model = copy.deepcopy(model).to("meta")
    graph = capture_model(model, batches[0], loss=loss)
    plan = plan_of(len(graph.layer_names), replicas, schedule, micro_batches=3, rows=2)
    rest: Any = {"optimizer": adam, "learning_rate_schedule": falling}
    update = Update(weights=weights)
    with Pipeline(graph, batches[0], plan=plan, timeout_s=60, update=update, **rest) as pipe:
        kinds: list[set[str]] = []
        for step, batch in enumerate(batches):
            thaw(model, step)
            metrics = pipe.step(batch)
            timeline = pipe.timeline()
            kinds.append({e.kind for e in timeline.events if e.stage == 0} & set("FBIW"))
        found = dict(pipe.named_parameters())
        expected = dict(plain.named_parameters())
        wrong = [n for n, p in found.items() if not torch.allclose(p, expected[n], 1e-9, 1e-11)]
        verified = str(pipe.verify(batches[0]))
        pipe.close(gather=True)
    whole = dict(model.named_parameters())
    wrong += [n for n, p in expected.items() if not torch.allclose(p, whole[n], 1e-9, 1e-11)]
    return {"wrong": wrong, "kinds": kinds, "rate": metrics.learning_rate, "verified": verified}


def as_if_loaded(folder: Path) -> float:
    """Without a flush: how far weights are from those of a pipeline made anew for the thawed."""
    ends: list[dict[str, torch.Tensor]] = []
    for made_anew in (False, True):
        model, loss, batches = frozen_body()
        graph = capture_model(model, batches[0], loss=loss)
        plan = plan_of(len(graph.layer_names), (1, 1, 1), "spectrain", micro_batches=3, rows=2)
        pipe = Pipeline(graph, batches[0], plan=plan, optimizer=adam, timeout_s=60)
        for metrics in pipe.stream(batches):
            assert metrics.loss > 0
        if made_anew:
            pipe.save(folder)
            pipe.close(gather=True)
            thaw(model, 2)
            pipe = Pipeline(model, batches[0], plan=plan, loss=loss, optimizer=adam, timeout_s=60)
            pipe.load(folder)
        else:
            thaw(model, 2)
        for metrics in pipe.stream(batches):
            assert metrics.loss > 0
        ends.append(pipe.model_state_dict())
        pipe.close()
    return max((float((a - ends[1][n]).abs().max()) for n, a in ends[0].items()), default=0.0)


def refusals() -> list[str]:
    """What is said where a change is not followed."""
    found: list[str] = []
    for sharded, schedule in ((True, "1f1b"), (False, "spectrain")):
        model, loss, batches = frozen_body()
        graph = capture_model(model, batches[0], loss=loss)
        replicas = (1, 2) if sharded else (1, 1, 1)
        plan = plan_of(len(graph.layer_names), replicas, schedule, micro_batches=3, rows=2)
        options = {
            "optimizer": adam,
            "constraints": Constraints(sharding="optimizer") if sharded else None,
            "timeout_s": 60,
        }
        with Pipeline(graph, batches[0], plan=plan, **options) as pipe:
            try:
                for number, _ in enumerate(pipe.stream(batches)):
                    if not number:
                        thaw(model, 2)
            except BadInput as problem:
                found.append(str(problem))
    return found


def half_followed() -> list[str]:
    """What two steps raise where rank 1 fails to make the optimizer of what is trained now."""
    model, loss, batches = frozen_body()
    graph = capture_model(model, batches[0], loss=loss)
    plan = plan_of(len(graph.layer_names), (1, 1, 1), "1f1b", micro_batches=3, rows=2)
    made: list[Optimizer] = []

    def once(parameters: list[nn.Parameter]) -> Optimizer:
        if made and dist.get_rank() == 1:
            raise ArithmeticError("one optimizer is enough")
        made.append(adam(parameters))
        return made[-1]

    pipe = Pipeline(graph, batches[0], plan=plan, optimizer=once, timeout_s=60)
    pipe.step(batches[0])
    thaw(model, 2)
    found: list[str] = []
    for batch in batches[:2]:
        try:
            pipe.step(batch)
        except (ArithmeticError, RunFailed) as problem:
            found.append(str(problem))
    pipe.close()
    return found


def unlike() -> list[str]:
    """What is said where rank 1 has another plan, other calls, or trains other parameters."""
    found: list[str] = []
    for case in ("plan", "calls", "trained"):
        model, loss, batches = frozen_body()
        odd = dist.get_rank() == 1
        assert isinstance(model, nn.Sequential)
        if odd and case == "trained":
            model[2].requires_grad_(True)
        if odd and case == "calls":
            model[3] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Tanh()).double()
            model[3].requires_grad_(False)
        graph = capture_model(model, batches[0], loss=loss)
        schedule = "gpipe" if odd and case == "plan" else "1f1b"
        plan = plan_of(len(graph.layer_names), (1, 1, 1), schedule, micro_batches=3, rows=2)
        given: Any = {"plan": plan, "optimizer": adam, "timeout_s": 60}
        found.append(refusal_of(Pipeline, graph, batches[0], **given))
    return found


def thawed_in_all_ways(folder: str) -> dict[str, Any]:
    """`thawing` on three ranks, by schedule and replicas; and the rest."""
    join()
    ways = [
        ("1f1b", (1, 1, 1)),
        ("zb-h1", (1, 1, 1)),
        ("gpipe", (1, 2)),
        ("interleaved", (1, 1, 1)),
    ]
    return {
        "by way": {f"{schedule}, {r}": thawing(schedule, r) for schedule, r in ways},
        "from meta": thawing("1f1b", (1, 1, 1), meta=True),
        "as if loaded": as_if_loaded(Path(folder)),
        "refused": refusals(),
        "half followed": half_followed(),
        "unlike": unlike(),
    }
