"""What two ranks do in a loop that reads and writes weights of the model itself."""

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock import BadInput, Constraints, Plan, Stage, capture_model
from penstock.machine import FreeMemory
from penstock.runtime import full_model

SIZES = (8, 6, 8)
OPTIONS: dict[str, Any] = {"timeout_s": 60, "verify": "off"}
Form = Callable[[Any], object]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


class TeacherAndStudent(nn.Module):
    """The teacher is in front, so that two stages put the two on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = net(), net()
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            soft = self.teacher(x).softmax(1)
        out = self.student(x)
        return functional.cross_entropy(out, y) - (soft * out.log_softmax(1)).sum(1).mean()


def batches(sizes: Sequence[int] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=draw).double(), torch.randint(4, (n,), generator=draw))
        for n in sizes
    ]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.2, momentum=0.9)


TWO = Plan((Stage(range(2), (0,), (4,)), Stage(range(2, 5), (1,), (4,))), 2, 4, "gpipe")


# Forms of the loop: in one process and within full_model() right, outside of it refused.


def pairs(model: Any) -> Any:
    return zip(model.teacher.parameters(), model.student.parameters(), strict=True)


def moved_data(model: Any) -> None:
    for t, s in pairs(model):
        t.data.mul_(0.9).add_(s.detach().data, alpha=0.1)


def lerped(model: Any) -> None:
    for t, s in pairs(model):
        t.lerp_(s, 0.1)


def copied(model: Any) -> None:
    for t, s in pairs(model):
        t.copy_(0.9 * t + 0.1 * s)


def assigned(model: Any) -> None:
    for t, s in pairs(model):
        t.data = 0.9 * t.data + 0.1 * s.data


def given(model: Any) -> None:
    for t, s in pairs(model):
        t.data = s.data.clone()


def loaded(model: Any) -> None:
    model.teacher.load_state_dict(model.student.state_dict())


def rescaled(model: Any) -> None:
    norm = torch.sqrt(sum(p.square().sum() for p in model.parameters()))  # pyright: ignore
    for p in model.parameters():
        p.data *= 3 / norm


def as_a_vector(model: Any) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.flip(0) * 0.9, model.parameters())


AVERAGES: dict[int, AveragedModel] = {}


def averaged(model: Any) -> None:
    """An average by torch, whose lists of tensors are moved at once."""
    move = get_ema_multi_avg_fn(0.9)
    average = AVERAGES.setdefault(id(model), AveragedModel(model, multi_avg_fn=move))
    average.update_parameters(model)
    for p, a in zip(model.parameters(), average.module.parameters(), strict=True):
        p.lerp_(a, 0.5)


def averaged_before(model: Any) -> None:
    """An average that was begun before the weights were elsewhere."""
    average = AveragedModel(net().double(), avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
    for t, a in zip(model.teacher.parameters(), average.module.parameters(), strict=True):
        a.copy_(t)
    average.update_parameters(model.student)
    for t, a in zip(model.teacher.parameters(), average.module.parameters(), strict=True):
        t.copy_(a)


def by_lists(model: Any) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.9)
    torch._foreach_add_(list(model.teacher.parameters()), list(model.student.parameters()))


def masked_by_all(model: Any) -> None:
    every = torch.cat([p.abs().flatten() for p in model.parameters()])
    for p in model.parameters():
        p[p.abs() < every.quantile(0.2)] = 0


def pruned_and_made_permanent(model: Any) -> None:
    layers = [(m, "weight") for m in model.modules() if isinstance(m, nn.Linear)]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.2)
    for layer, name in layers:
        prune.remove(layer, name)


def saved(model: Any) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict({n: 0.9 * t for n, t in torch.load(file).items()})


def run_itself(model: Any) -> None:
    loss = float(model(*batches()[1]))
    for p in model.parameters():
        p.mul_(1 / (1 + loss))


def clipped_by_the_largest(model: Any) -> None:
    most = max(p.abs().max() for p in model.parameters())
    for p in model.parameters():
        p.div_(most)


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        *(moved_data, lerped, copied, assigned, given, loaded, rescaled, as_a_vector),
        *(averaged_before, by_lists, masked_by_all, pruned_and_made_permanent, saved, run_itself),
        clipped_by_the_largest,
    )
}


def by_name(model: Any) -> None:
    """What the loop does to each weight by itself, which needs no full model."""
    kept = model.__dict__.setdefault("own", {})
    draw = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        kept[name] = p.detach().clone() if name not in kept else kept[name].lerp_(p, 0.1)
        p.copy_(0.9 * p + 0.1 * kept[name])
        p.mul_(0.5).add_(0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
        p.data = p.data * 0.9
    torch.manual_seed(5)
    model.teacher[0].reset_parameters()
    model.student[2].reset_parameters()
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def plain(model: nn.Module, form: Form, loss: Any) -> list[float]:
    """The losses of one process whose loop ends each step with ``form``."""
    optimizer, losses = momentum(model.parameters()), list[float]()
    for batch in batches():
        losses.append(plain_step(optimizer, loss(model, batch)))
        with torch.no_grad():
            form(model)
    return losses


def difference(pipe: Pipeline, losses: list[float], wanted: nn.Module, truth: list[float]) -> float:
    """The largest difference of losses and, on rank 0, of weights."""
    gaps = [abs(a - b) for a, b in zip(losses, truth, strict=True)]
    whole = pipe.model_state_dict()
    if whole:
        named = [*wanted.named_parameters(), *wanted.named_buffers()]
        gaps += [float((whole[n] - t.detach()).abs().max()) for n, t in named]
    return max(gaps)


def whole_loss(model: Any, batch: Any) -> Any:
    return model(*batch)


def teacher_and_student() -> TeacherAndStudent:
    torch.manual_seed(0)
    return TeacherAndStudent().double()


def in_loop(form: Form, *, inside: bool = True) -> float:
    """The difference from one process where the form is within full_model(), or not."""
    model, wanted = teacher_and_student(), teacher_and_student()
    truth, losses = plain(wanted, form, whole_loss), list[float]()
    with Pipeline(model, batches()[0], plan=TWO, optimizer=momentum, **OPTIONS) as pipe:
        for batch in batches():
            losses.append(pipe.step(batch).loss)
            with pipe.full_model() if inside else nullcontext(), torch.no_grad():
                form(model)
        return difference(pipe, losses, wanted, truth)


def outside(form: Form) -> tuple[str, str]:
    """What the form raises outside of it, and how the pipeline's next step ends."""
    model, said, after = teacher_and_student(), "nothing", "nothing"
    try:
        with Pipeline(model, batches()[0], plan=TWO, optimizer=momentum, **OPTIONS) as pipe:
            pipe.step(batches()[0])
            try:
                with torch.no_grad():
                    form(model)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                raise
            pipe.step(batches()[1])
    except Exception as error:
        after = f"{type(error).__name__}: {error}"
    return said, after


def forms() -> dict[str, Any]:
    inside = {name: in_loop(form) for name, form in {**FORMS, "averaged": averaged}.items()}
    refused = {name: outside(form) for name, form in FORMS.items()}
    return {"inside": inside, "by name": in_loop(by_name, inside=False), "outside": refused}


# Every way to divide weights.


class Normed(nn.Module):
    """Layers that every plan can divide, with buffers, of which a loop puts others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)
        )
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed().double()


def mixed(model: Any) -> None:
    """Weights in place, by other memory and as a loaded state; a buffer moved and replaced."""
    rescaled(model)
    model.layers[0].weight.data = model.layers[0].weight.data.flip(0)
    model.layers[2].weight.add_(model.layers[0].weight.sum())
    model.layers[4].load_state_dict({n: 0.9 * t for n, t in model.layers[4].state_dict().items()})
    model.scale = model.scale.flip(0) * 0.9
    float(cross(model, batches()[1]))


def cross(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch[0]), batch[1])


def one(sharding: str = "", groups: Any = ()) -> Plan:
    ranks, rows = ((0,), (4,)) if groups else ((0, 1), (2, 2))
    stage = Stage(range(4), ranks, rows, sharding=sharding)
    return Plan((stage,), 2, 4, "gpipe", tensor_groups=groups)


TABLE = {"layers.0": "colwise", "layers.2": "rowwise"}
# One micro-batch in flight is updated as in one process.
FLUSHED = Plan((Stage(range(2), (0,), (8,)), Stage(range(2, 4), (1,), (8,))), 1, 8, "pipedream")
HALVES = Plan((Stage(range(2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))), 2, 4, "gpipe")
PLANS: dict[str, tuple[Plan, dict[str, Any], dict[str, Any]]] = {
    "two stages": (HALVES, {}, {}),
    "replicas": (one(), {}, {}),
    "divided state": (one(), {}, {"constraints": Constraints(sharding="optimizer")}),
    "divided parameters": (one("parameters"), {}, {}),
    "tensor group": (one(groups=((0, 1),)), {"tensor_parallel": TABLE}, {}),
    "asynchronous": (FLUSHED, {}, {}),
}


def rebound(model: Any) -> None:
    """Each weight alone, in other memory."""
    for p in model.parameters():
        p.data = p.data * 0.9


def under(name: str, form: Form, how: str) -> float:
    """The difference from one process; the loop writes on all ranks, the first or by itself."""
    plan, capture, options = PLANS[name]
    model, wanted = normed(), normed()
    graph = capture_model(model, batches()[0], loss=functional.cross_entropy, **capture)
    truth, losses = plain(wanted, form, cross), list[float]()
    with Pipeline(graph, batches()[0], plan=plan, optimizer=momentum, **OPTIONS, **options) as pipe:
        for batch in batches():
            losses.append(pipe.step(batch).loss)
            around = nullcontext() if how == "alone" else pipe.full_model(rank0_only=how == "first")
            with around, torch.no_grad():
                if how != "first" or pipe.rank == 0:
                    form(model)
        return difference(pipe, losses, wanted, truth)


def plans() -> dict[str, float]:
    found = {f"{n}, {how}": under(n, mixed, how) for n in PLANS for how in ("all", "first")}
    return found | {f"{n}, rebound": under(n, rebound, "alone") for n in PLANS}


# What goes wrong within.


def faults() -> dict[str, Any]:
    """What both ranks hear of errors, and whether the pipeline then trains as before."""
    model = teacher_and_student()
    said: dict[str, Any] = {}

    def tried(name: str, act: Callable[[], object]) -> None:
        try:
            said[name] = str(act())
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    with Pipeline(model, batches()[0], plan=TWO, optimizer=momentum, **OPTIONS) as pipe:
        rank = pipe.rank

        def on_rank_1_alone() -> None:
            with pipe.full_model():
                if rank == 1:
                    model.teacher[0].weight.data.mul_(2)

        def raised_on_one() -> None:
            with pipe.full_model():
                model.student[0].bias.data.fill_(2.0)
                if rank == 1:
                    model.student[0].bias.data.fill_(3.0)
                    raise ValueError("in the loop")

        def stepped_within() -> None:
            with pipe.full_model():
                pipe.step(batches()[0])

        pipe.step(batches()[0])
        before = pipe.model_state_dict()
        tried("one", on_rank_1_alone)
        tried("raised", raised_on_one)
        tried("step", stepped_within)
        plenty, full_model.free_memory = full_model.free_memory, lambda _: FreeMemory(99, "a limit")
        tried("memory", pipe.full_model().__enter__)
        full_model.free_memory = plenty
        after = pipe.model_state_dict()
        said["changed"] = [n for n in after if not torch.equal(before[n], after[n])]
        with pipe.full_model(rank0_only=True):
            kept = {}
            if rank == 0:
                kept = {n: t + 1 for n, t in model.state_dict().items()}
                model.load_state_dict(kept, assign=True)
        after = pipe.model_state_dict()
        said["kept"] = all(torch.equal(kept[n], after[n]) for n in after)
        said["verified"] = pipe.verify(batches()[1]).compared
        pipe.step(batches()[1])
    return said


def loaded_by() -> dict[str, str]:
    """How the next step ends where some ranks load a kept state, of the model or of a part."""
    found: dict[str, str] = {}
    for name, loading in {"both": (0, 1), "rank 0": (0,), "none": ()}.items():
        for part in ("", "teacher"):
            model = teacher_and_student()
            with Pipeline(model, batches()[0], plan=TWO, optimizer=momentum, **OPTIONS) as pipe:
                pipe.step(batches()[0])
                own = model.get_submodule(part)
                kept = copy.deepcopy(own.state_dict())
                pipe.step(batches()[1])
                if pipe.rank in loading:
                    own.load_state_dict(kept)
                try:
                    pipe.step(batches()[2])
                    found[f"{name} {part}"] = "trained"
                except BadInput as problem:
                    found[f"{name} {part}"] = str(problem)
                    pipe.step(batches()[2])  # who goes on all the same is not held up
    return found
