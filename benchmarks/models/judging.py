"""One architecture judged: eager, captured, cut, and every gradient against the plain module."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from inputs import Attempt, attempts
from tiny import tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.batch.call import loss_in_result
from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline

LIMIT = 1e-4
STAGES = 3
MICRO_BATCHES = 2
FLOORS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Gradients smaller than this share of the largest one are compared with that share of it.

By the narrowest type that the model computes in: many compute norms or losses in float32.
"""
NOISE = {torch.float64: 1e-9, torch.float32: 1e-4}

Batch = dict[str, Any]
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plain:
    """Loss and gradients of the user's own module, outside Penstock."""

    loss: float
    gradients: Gradients


def made_model(model_class: Any, head: str) -> nn.Module:
    """The tiny version with random weights; those that begin as constants get values, too."""
    config = tiny_config(model_class.config_class())
    if getattr(config, "is_decoder", None) is False and head == "causal":
        config.is_decoder = True
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if not parameter.isfinite().all():
                parameter.zero_()
            if (parameter == parameter.flatten()[0]).all():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.train()


def judge(model_class: Any, head: str, device: str = "cpu") -> dict[str, Any]:
    """The row of one architecture, on a device."""
    row: dict[str, Any] = {"name": model_class.__name__, "head": head}
    try:
        model = made_model(model_class, head)
    except Exception as error:
        return row | {"outcome": "does not run eagerly", "reason": told(error)}
    found = _runnable(model, head, device)
    if isinstance(found, str):
        return row | {"outcome": "does not run eagerly", "reason": found}
    model, attempt, dtype = found
    row |= {"batch": attempt.kind, "dtype": str(dtype).removeprefix("torch.")}
    row |= {"parameters": sum(p.numel() for p in model.parameters())}
    row |= judge_model(model, attempt.batch)
    if row["outcome"] == "refused" and dtype == torch.float64:
        batch = {k: v.float() if v.is_floating_point() else v for k, v in attempt.batch.items()}
        single = judge_model(model.float(), batch)
        if single["outcome"].startswith("right"):
            row |= single | {"dtype": "float32", "in_float64": row["reason"], "reason": ""}
    return row


def judge_family(name: str, library: str, device: str = "cpu") -> dict[str, Any]:
    """The row of a family of torchvision or timm, on a device."""
    from families import family_batches, family_loss, family_model

    row: dict[str, Any] = {"name": name, "head": library}
    try:
        model = family_model(name, library)
    except Exception as error:
        return row | {"outcome": "does not run eagerly", "reason": told(error)}
    reasons: list[str] = []
    for pictures, target in family_batches(model, name):
        for dtype in (torch.float64, torch.float32):
            typed = copy.deepcopy(model).to(device, dtype)
            batch = pictures.to(device, dtype), target.to(device)
            try:
                run_plain(typed, batch, family_loss)
            except Exception as error:
                reasons.append(told(error))
                continue
            kind = "picture " + "x".join(map(str, pictures.shape[2:]))
            row |= {"batch": kind, "dtype": str(dtype).removeprefix("torch.")}
            row |= {"parameters": sum(p.numel() for p in model.parameters())}
            return row | judge_model(typed, batch, family_loss)
    reason = "; ".join(dict.fromkeys(reasons))[:2000]
    return row | {"outcome": "does not run eagerly", "reason": reason}


def _runnable(
    model: nn.Module, head: str, device: str = "cpu"
) -> tuple[nn.Module, Attempt, torch.dtype] | str:
    """The model in the widest type that it runs in, with a batch that it runs on."""
    reasons: list[str] = []
    for attempt in attempts(model, head):
        for dtype in (torch.float64, torch.float32):
            typed = copy.deepcopy(model).to(device, dtype)
            batch = {
                k: v.to(device, dtype if v.is_floating_point() else v.dtype)
                for k, v in attempt.batch.items()
            }
            try:
                plain = run_plain(typed, batch)
            except Exception as error:
                reasons.append(f"{attempt.kind}: {told(error)}")
                continue
            if not torch.isfinite(torch.tensor(plain.loss)):
                reasons.append(f"{attempt.kind}: the loss is {plain.loss}")
                continue
            infinite = [n for n, g in plain.gradients.items() if not g.isfinite().all()]
            if infinite:
                reasons.append(f"{attempt.kind}: the gradient of {infinite[0]} is not finite")
                continue
            return typed, Attempt(attempt.kind, batch), dtype
    return "; ".join(dict.fromkeys(reasons))[:2000]


class _Narrowest(TorchDispatchMode):
    """Finds whether anything is computed in a type narrower than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() > 0:
                self.found = self.found if one.dtype == torch.float64 else torch.float32
        return result


def narrowest_type(model: nn.Module, batch: Any, loss: Any = None) -> torch.dtype:
    """float64 where forward and backward compute in nothing else, float32 otherwise."""
    with _Narrowest() as mode:
        run_plain(model, batch, loss)
    return mode.found


def run_plain(model: nn.Module, batch: Any, loss: Any = None, seed: int = 0) -> Plain:
    """Forward and backward of the module as it is."""
    torch.manual_seed(seed)
    own = copy.deepcopy(model)
    result = own(**batch) if isinstance(batch, Mapping) else own(*batch[:-1])
    value = loss_in_result(result, "model") if loss is None else loss(result, batch[-1])
    value.backward()
    return Plain(float(value), gradients_of(own))


def gradients_of(model: nn.Module) -> Gradients:
    """Every trainable parameter's gradient, zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def judge_model(model: nn.Module, batch: Any, loss: Any = None) -> dict[str, Any]:
    """Capture, cut and compare a model that runs eagerly on ``batch``."""
    whole, dtype = run_plain(model, batch, loss), narrowest_type(model, batch, loss)
    noise = distance(run_plain(model, batch, loss, seed=1), whole, dtype)[0]
    if noise > NOISE[dtype]:
        reason = f"draws numbers, so that its gradients differ by {noise:.1e} from run to run"
        return {"outcome": "does not run eagerly", "reason": reason}
    start_s = perf_counter()
    try:
        graph = capture_model(copy.deepcopy(model), batch, loss=loss)
        row: dict[str, Any] = {"narrowest": str(dtype).removeprefix("torch.")}
        row |= {"capture_s": round(perf_counter() - start_s, 2)}
        row |= {"layers": len(graph.layer_names), "outputs": graph.outputs.problem or "kept"}
        ours = run_stages(graph, batch)
    except PenstockError as error:
        taken = {"capture_s": round(perf_counter() - start_s, 2)}
        return taken | {"outcome": "refused", "reason": str(error)}
    except Exception as error:
        taken = {"capture_s": round(perf_counter() - start_s, 2)}
        return taken | {"outcome": outcome_of(error), "reason": told(error)}
    return row | compared(model, batch, loss, whole, ours, dtype)


def outcome_of(error: Exception) -> str:
    """The verdict of an exception that is not Penstock's own: none, where memory ended.

    Torch raises a RuntimeError where its allocator reaches the census's limit.
    """
    full = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return "out of memory" if full else "crash"


def compared(
    model: nn.Module, batch: Any, loss: Any, whole: Plain, ours: Plain, dtype: torch.dtype
) -> dict[str, Any]:
    """The outcome of a run in stages, with the largest relative difference."""
    error, worst = distance(ours, whole, dtype)
    row: dict[str, Any] = {"error": error, "worst": worst}
    if error <= LIMIT:
        return row | {"outcome": "right"}
    for weighing, accumulated in accumulations(model, batch, loss):
        other, _ = distance(ours, accumulated, dtype)
        if other <= LIMIT:
            row |= {"accumulation_error": other, "accumulation": weighing}
            return row | {"outcome": "right as gradient accumulation"}
    return row | {"outcome": "WRONG", "loss": whole.loss, "our_loss": ours.loss}


def distance(ours: Plain, plain: Plain, dtype: torch.dtype) -> tuple[float, str]:
    """The largest relative difference of loss and gradients, and where it is."""
    worst, name = abs(ours.loss - plain.loss) / max(abs(plain.loss), 1e-12), "loss"
    largest = max((float(g.abs().max()) for g in plain.gradients.values() if g.numel()), default=0)
    floor = FLOORS[dtype] * largest
    for key, gradient in plain.gradients.items():
        if not gradient.numel():
            continue
        scale = max(float(gradient.abs().max()), floor, 1e-300)
        apart = float((ours.gradients[key] - gradient).abs().max()) / scale
        if not apart <= worst:
            worst, name = apart, key
    return worst, name


class _Recorder(torch.optim.SGD):
    """Changes nothing; keeps the gradients of its parameters."""

    found: dict[int, torch.Tensor]

    def step(self, closure: Any = None) -> None:
        """Keep a copy of every gradient."""
        self.found = {
            id(p): p.grad.detach().clone()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }


def even_plan(layers: int, samples: int, micro_batches: int = MICRO_BATCHES) -> Plan:
    """Stages of as equal numbers of layers as possible, one device each."""
    stages = min(STAGES, layers)
    ends = [round(layers * n / stages) for n in range(stages + 1)]
    size = samples // micro_batches
    cut = tuple(Stage(range(ends[n], ends[n + 1]), (n,), (size,)) for n in range(stages))
    return Plan(cut, micro_batches, size, "1f1b")


def run_stages(graph: LayerGraph, batch: Any) -> Plain:
    """One step of a pipeline in this process: its loss and gradients."""
    torch.manual_seed(0)
    samples = graph.batch_size
    plan = even_plan(len(graph.layer_names), samples)
    made: list[_Recorder] = []

    def make(parameters: Any) -> _Recorder:
        made.append(_Recorder(parameters, lr=0.0))
        return made[-1]

    options: Any = {
        "safety": Safety(transport="in-process"),
        "verify": "off",
        "device": graph.recorded.device,
    }
    with Pipeline(graph, batch, plan=plan, optimizer=make, **options) as pipe:
        loss = pipe.step(batch).loss
    found: dict[int, torch.Tensor] = {}
    for one in made:
        # The stages that hold a tied parameter share its gradient, which the first one ends.
        found = one.found | found
    own: Any = graph
    gradients = {
        name: found.get(id(p), torch.zeros_like(p))
        for name, p in own.program.tensors.parameters.items()
        if p.requires_grad
    }
    return Plain(loss, gradients)


def accumulations(model: nn.Module, batch: Any, loss: Any) -> Sequence[tuple[str, Plain]]:
    """Plain gradient accumulation over the micro-batches: by rows, by valid targets, and summed."""
    entries = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    samples = next(v.shape[0] for v in entries.values() if isinstance(v, torch.Tensor))
    size = samples // MICRO_BATCHES
    own = copy.deepcopy(model)
    parts, weights, unshifted = list[Plain](), list[int](), list[int]()
    for number in range(MICRO_BATCHES):
        rows = slice(number * size, (number + 1) * size)
        part = {k: v[rows] for k, v in entries.items()}
        own.zero_grad()
        result = own(**part) if isinstance(batch, Mapping) else own(*list(part.values())[:-1])
        last = list(part.values())[-1]
        value = loss_in_result(result, "model") if loss is None else loss(result, last)
        value.backward()
        parts.append(Plain(float(value), gradients_of(own)))
        labels = part.get("labels", last)
        weights.append(int((labels[..., 1:] != -100).sum()) if labels.dim() > 1 else size)
        unshifted.append(int((labels != -100).sum()))
    return [
        ("rows", _weighed(parts, [size] * MICRO_BATCHES)),
        ("targets", _weighed(parts, weights)),
        ("targets, none shifted", _weighed(parts, unshifted)),
        ("sum", _weighed(parts, [1] * MICRO_BATCHES, total=1)),
    ]


def _weighed(parts: Sequence[Plain], weights: Sequence[int], total: int = 0) -> Plain:
    total = total or sum(weights)
    loss = sum(w * p.loss for w, p in zip(weights, parts, strict=True)) / total
    gradients = {
        name: sum(w * p.gradients[name] for w, p in zip(weights, parts, strict=True)) / total
        for name in parts[0].gradients
    }
    return Plain(loss, gradients)  # pyright: ignore[reportArgumentType]


def told(error: BaseException) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '0x', text)}"[:400]
