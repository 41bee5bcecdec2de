"""Models that take another path in evaluation, between and before steps, on two ranks."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import refusal_of
from runtime.pipeline_cases import join, plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model

STEPS = 3


class Net(nn.Module):
    """Three hidden layers and a head; what it does besides is that of its kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aux, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.third, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def early(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def late(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.third(hidden)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.late(self.early(x))


class AuxiliaryHead(Net):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        aux = self.aux(hidden) if self.training else None
        scores = self.late(torch.tanh(self.second(hidden)))
        return (scores, aux) if self.training else scores


class HiddenToo(Net):
    """The same calls, and another structure."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.early(x)
        scores = self.late(hidden)
        return (scores, self.aux(hidden)) if self.training else (scores, self.aux(hidden), 1)


class Scaled(Net):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.early(x)
        return self.late(2.0 * hidden if self.training else hidden)


class LossInTraining(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = super().forward(x)
        return {"loss": functional.cross_entropy(scores, y)} if self.training else scores  # type: ignore[arg-type]


class DropsScores(Net):
    """The flag that turns dropout off is no other path of the loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return functional.dropout(super().forward(x), 0.0, self.training)


class Moves(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("grown", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.early(x)
        if not self.training:
            self.written.add_(1)  # type: ignore[operator]
            self.assigned = self.assigned + 1  # type: ignore[operator]
            self.grown.resize_(3).fill_(1.0)  # type: ignore[operator]
            self.calls += 1
        return self.late(hidden)


class Encoder(nn.Module):
    """Torch's own layers, whose fast path makes nested tensors of what is not padded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.first, self.head = nn.Linear(1, 8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = x > 0.5
        padded[:, 0] = False
        hidden = self.encoder(self.first(x[..., None]), src_key_padding_mask=padded)
        keep = (~padded).to(hidden)[..., None]
        return self.head((hidden * keep).sum(1) / keep.sum(1))


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    if not isinstance(output, tuple):
        return functional.cross_entropy(output, target)
    return functional.cross_entropy(output[0], target) + 0.3 * output[1].square().mean()


def accuracy(output: Any, target: torch.Tensor) -> torch.Tensor:
    scores = output[0] if isinstance(output, tuple) else output
    return (scores.argmax(1) == target).double().mean()


@dataclass
class Case:
    build: Callable[[], nn.Module]
    loss: Any = loss_of
    around: Callable[[], Any] = nullcontext


CASES = {
    "a head that exists in training only": Case(AuxiliaryHead),
    "another structure": Case(HiddenToo),
    "a call that is made in training only": Case(Scaled),
    "a loss in training, scores in evaluation": Case(LossInTraining, None),
    "buffers and attributes that move in evaluation": Case(Moves),
    "dropout before the loss": Case(DropsScores),
    "nested tensors": Case(Encoder),
    "inference mode": Case(Scaled, around=torch.inference_mode),
}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 6, generator=drawn).double(), torch.randint(4, (8,), generator=drawn))
        for _ in range(count)
    ]


def state_of(model: nn.Module) -> dict[str, Any]:
    own = {n: t.clone() for n, t in model.named_buffers()}
    return own | {"calls": getattr(model, "calls", 0)}


def of_case(case: Case) -> list[str]:
    """What differs from the model left whole: steps, evaluations and predictions in turn."""
    torch.manual_seed(0)
    model, (held, *data) = case.build().double(), batches(STEPS + 1)
    whole, wrong = copy.deepcopy(model), list[str]()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    graph = capture_model(model, held, loss=case.loss)
    options: dict[str, Any] = {"metrics": {"accuracy": accuracy}} if case.loss else {}
    plan = plan_of(len(graph.layer_names), (1, 1))
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    with Pipeline(graph, held, plan=plan, optimizer=make, timeout_s=60, **options) as pipe:
        for batch in (None, *data):
            if batch is not None:
                found = pipe.step(batch).loss
                loss = plain_step(
                    optimizer,
                    case.loss(whole(batch[0]), batch[1]) if case.loss else whole(*batch)["loss"],
                )
                if abs(found - loss) > 1e-9:
                    wrong.append(f"a loss of {found}, not {loss}")
            before = state_of(model)
            with torch.no_grad():
                output = copy.deepcopy(whole).eval()(held[0])
            with case.around():
                given = (held[0].clone(), held[1].clone())
                made = pipe.predict(given[0] if case.loss else given, everywhere=True)
                evaluation = pipe.evaluate(given) if case.loss else None
            pairs = zip(*(o if isinstance(o, tuple) else (o,) for o in (made, output)), strict=True)
            if not all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs):
                wrong.append("a prediction")
            if evaluation is not None:
                own = evaluation.loss, evaluation.metrics["accuracy"]
                for value, function in zip(own, (loss_of, accuracy), strict=True):
                    if abs(value - float(function(output, held[1]))) > 1e-9:
                        wrong.append(f"an evaluation, {value}")
            after = state_of(model)
            wrong += [n for n in before if str(before[n]) != str(after[n])]
        names = dict(whole.named_parameters())
        for name, tensor in pipe.model_state_dict().items():
            if name in names and not torch.allclose(tensor, names[name].detach()):
                wrong.append(name)
        if not case.loss:
            refused = refusal_of(pipe.evaluate, held)
            wrong += [] if "has no loss in evaluation mode" in refused else [f"said '{refused}'"]
    return wrong


def every_case() -> dict[str, list[str]]:
    join()
    return {name: of_case(case) for name, case in CASES.items()}


def failures_in_turn() -> list[str]:
    """What evaluations that fail in forward, loss or metric raise; steps between them go on."""
    join()
    failing = ""

    def fail_in(place: str) -> None:
        if place == failing:
            raise ValueError(f"{place} fails")

    class Fails(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.early(x)
            fail_in("forward")
            return self.late(hidden)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fail_in("loss")
        return functional.cross_entropy(output, target)

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        fail_in("metric")
        return 1.0

    torch.manual_seed(0)
    model, data = Fails().double(), batches(2)
    graph, found = capture_model(model, data[0], loss=loss), list[str]()
    plan = plan_of(len(graph.layer_names), (1, 1))
    with Pipeline(graph, data[0], plan=plan, metrics={"one": metric}, timeout_s=60) as pipe:
        first = pipe.step(data[0]).loss
        for place in ("forward", "loss", "metric"):
            failing = place
            found.append(refusal_of(pipe.evaluate, data[1]))
            failing = ""
            pipe.evaluate(data[1])
            if pipe.step(data[0]).loss != first or not model.training:
                found.append("another step")
    return found
