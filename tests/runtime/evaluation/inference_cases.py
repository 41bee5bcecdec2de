"""What the worker processes of the tests of predictions, metrics and callbacks run."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from runtime.checkpoints.resume_cases import classes, whole_weights
from runtime.pipeline_cases import captured, join, plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.runtime.callbacks import Closing, Event, Saved
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.options import Safety
from penstock.runtime.user_metrics import Evaluation

BATCH = 12


def logits_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.logits


def predictions(name: str, replicas: Sequence[int], schedule: str, **options: Any) -> list[str]:
    """What differs between the predictions of a pipeline and of the model left whole."""
    subject, graph = captured(name)
    batch = subject.batch(BATCH)
    plan = plan_of(len(graph.layer_names), replicas, schedule)
    wrong: list[str] = []
    whole = copy.deepcopy(subject.model)
    with Pipeline(graph, batch, plan=plan, timeout_s=60, **options) as pipe:
        pipe.step(batch)
        whole.load_state_dict(whole_weights(pipe), strict=False)
        whole.eval()
        for rows in (BATCH, 7, 1):
            some = subject.batch(rows)
            inputs = {"use_cache": False, **some} if isinstance(some, dict) else {}
            with torch.no_grad():
                result = whole(**inputs) if inputs else whole(some[0])
            given = some if isinstance(some, dict) else some[0]
            ours = pipe.predict(given, everywhere=True)
            if not isinstance(ours, type(result)):
                wrong.append(f"{rows} rows: a {type(ours).__name__}")
            gap = (logits_of(ours) - logits_of(result)).abs().max()
            if gap > 1e-9 * logits_of(result).abs().max():
                wrong.append(f"{rows} rows: differ by {float(gap)}")
            first = pipe.predict(given)
            if (first is None) != (pipe.rank != 0):
                wrong.append(f"rank {pipe.rank} got a {type(first).__name__}")
        kinds = {(e.device, e.kind) for e in pipe.timeline().events}
        if not {(rank, "F") for rank in plan.devices} <= kinds or any("B" in k for k in kinds):
            wrong.append(f"the timeline of a prediction shows {sorted(kinds)}")
    return wrong


def predict_everything() -> dict[str, list[str]]:
    """Predictions of chains, traced models and several outputs, under several plans."""
    join()
    cases: list[tuple[str, tuple[int, ...], str, dict[str, Any]]] = [
        ("convolutions", (2, 1), "1f1b", {}),
        ("convolutions", (1, 1, 1), "gpipe", {"safety": Safety(transport="process-groups")}),
        ("gpt2", (1, 2), "1f1b", {}),
        ("gpt2", (1, 1), "interleaved", {}),
        ("t5", (1, 1, 1), "1f1b", {}),
        ("mlp", (1, 1), "chimera", {}),
    ]
    return {f"{n} {r} {s}": predictions(n, r, s, **options) for n, r, s, options in cases}


class TwoHeads(nn.Module):
    """Its first output is made early and read by nothing later, its last is a mean of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.early = nn.Linear(8, 2)
        self.late = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = torch.tanh(self.trunk[0](x))
        early = self.early(first)
        scores = self.late(self.trunk[2](first) + first)
        return {"early": early, "scores": scores, "balance": scores.square().mean()}


def scores_loss(outputs: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs["scores"], target)


def accuracy(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return (outputs["scores"].argmax(1) == target).double().mean()


def recall_of_class_one(outputs: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its weight is not the number of samples: it counts those of one class."""
    found = outputs["scores"].argmax(1) == 1
    count = (target == 1).sum()
    return (found & (target == 1)).sum() / count, count


def early_size(outputs: Any, target: torch.Tensor) -> float:
    return float(outputs["early"].square().mean())


METRICS = {"accuracy": accuracy, "recall": recall_of_class_one, "early": early_size}


def expected_metrics(model: TwoHeads, batch: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    with torch.no_grad():
        outputs = model(batch[0])
        recall, _ = recall_of_class_one(outputs, batch[1])
        return [
            float(accuracy(outputs, batch[1])),
            float(recall),
            float(outputs["early"].square().mean()),
            float(scores_loss(outputs, batch[1])),
        ]


def metrics_of_plans() -> dict[str, list[str]]:
    """Metrics in steps (also of several batches, recomputed) and evaluations, under some plans."""
    join()
    found: dict[str, list[str]] = {}
    for replicas, schedule, recompute in (
        ((2, 1), "1f1b", False),
        ((1, 2), "gpipe", True),
        ((1, 1), "zero-bubble", False),
    ):
        torch.manual_seed(0)
        model = TwoHeads().double()
        graph = capture_model(model, classes(3), loss=scores_loss)
        plan = plan_of(len(graph.layer_names), replicas, schedule, recompute=recompute)
        wrong: list[str] = []
        with Pipeline(
            graph,
            classes(BATCH),
            plan=plan,
            metrics=METRICS,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            timeout_s=60,
        ) as pipe:
            whole = copy.deepcopy(model)
            evaluations: list[Evaluation] = []
            for rows in (BATCH, 7):
                expected = expected_metrics(whole, classes(rows))
                evaluation = pipe.evaluate(classes(rows))
                evaluations.append(evaluation)
                names = list(METRICS)
                ours = [*(evaluation.metrics[name] for name in names), evaluation.loss]
                wrong += differ(f"evaluation of {rows}", ours, expected)
            x, y = (torch.cat(pair) for pair in zip(classes(BATCH), classes(7), strict=True))
            both = Evaluation.combined(evaluations)
            expected = expected_metrics(whole, (x, y))
            wrong += differ("together", [*both.metrics.values(), both.loss], expected)
            step = pipe.step(classes(BATCH), classes(7))
            wrong += differ("step of two", [*step.metrics.values(), step.loss], expected)
            result = pipe.predict(x, everywhere=True)
            whole.load_state_dict(whole_weights(pipe))
            with torch.no_grad():
                theirs = whole.eval()(x)
            for name, tensor in theirs.items():
                wrong += differ(name, [float((result[name] - tensor).abs().max())], [0.0])
        found[f"{replicas} {schedule}"] = wrong
    return found


def differ(what: str, ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    return [
        f"{what}: {a} instead of {b}"
        for a, b in zip(ours, theirs, strict=True)
        if abs(a - b) > 1e-12
    ]


def follow_events(directory: Path) -> dict[str, Any]:
    """Events as callbacks see them, a stop that one rank asks for, names of modules."""
    join()
    subject, graph = captured("gpt2")
    batch = subject.batch(BATCH)
    seen: list[str] = []
    stops: list[int] = []

    def note(pipe: Pipeline, event: Event) -> None:
        match event:
            case StepMetrics():
                seen.append(f"step {event.step}")
                if event.step == 2 and pipe.rank == 1:
                    pipe.stop()
            case Evaluation():
                seen.append(f"evaluation of {event.samples}")
            case Saved():
                seen.append(f"saved {event.path.name}")
            case Closing():
                seen.append(f"closing after {event.step}")

    plan = plan_of(len(graph.layer_names), (1, 1, 1))
    modules: dict[str, str] = {}
    with Pipeline(graph, batch, plan=plan, timeout_s=60) as pipe:
        pipe.notify(note)
        for _ in range(3):
            pipe.step(batch)
            stops.append(pipe.stopping)
        pipe.evaluate(batch)
        pipe.save(directory)
        held = set(map(id, pipe.parameters()))
        for name in ("transformer.h.0.mlp", "lm_head.weight", "transformer.h.0.mpl", "transformer"):
            try:
                module = pipe.module_for(name)
                own = (n for n, p in module.named_parameters() if id(p) in held)
                modules[name] = ", ".join(sorted(own))
            except BadInput as refusal:
                modules[name] = f"BadInput: {refusal}"
        live = pipe.module_for("transformer.wte") if pipe.rank == 0 else None
        if live is not None:
            assert live.weight is dict(pipe.named_parameters())["transformer.wte.weight"]
    return {"seen": seen, "stops": stops, "modules": modules}
