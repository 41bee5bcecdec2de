"""Models and losses whose state moves with every batch, beside the same program in one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.runtime.options import Safety

ROWS, CLASSES, STEPS = 8, 5, 4
LIMIT = 1e-9
"""Relative, in float64: sums over micro-batches have another order."""


class Net(nn.Module):
    """Three layers; ``before`` and ``after`` act on input and output, as lines of its forward."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.before, self.after = before, after
        self.calls, self.hidden = 0, None
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("places", torch.linspace(0, 1, 6), persistent=False)
        self.register_buffer("moving", torch.zeros(CLASSES), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        given = self.before(self, x) if self.before else x
        found = torch.tanh(self.two(torch.tanh(self.one(given))))
        found = self.three(found)
        return self.after(self, x, found) if self.after else found


def counts_calls(net: Net, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    return found / (1 + 0.1 * net.calls)


def keeps_rows(net: Net, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    if net.hidden is not None:
        found = found + net.hidden
    net.hidden = 0.5 * found.detach()
    return found


def notes_rows(net: Net, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    net.hidden = found.detach()
    return found


def moves_an_attribute(net: Net, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    found = found - (0.0 if net.hidden is None else net.hidden)
    net.hidden = found.detach().mean(0) * 0.5
    return found


def means_behind_the_cut(net: Net, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    found = found + (x - net.mean)[:, :CLASSES]
    net.mean = 0.9 * net.mean + 0.1 * x.mean(0)
    return found


def moves_what_is_not_kept(net: Net, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    found = found + net.places[:CLASSES] - net.moving
    with torch.no_grad():
        net.moving.mul_(0.9).add_(found.mean(0), alpha=0.1)
    return found


class Layer(nn.Linear):
    """Counts its calls, which are its extra state."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Less with each call."""
        self.calls += 1
        return super().forward(input) / (1 + 0.1 * self.calls)

    def get_extra_state(self) -> dict[str, int]:
        """The calls so far."""
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.calls = state["calls"]


class Remembers(nn.Linear):
    """Adds what it gave last, which it keeps in a list."""

    kept: tuple[Any, ...] | list[torch.Tensor] = ()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product, and a half of the last."""
        found = super().forward(input) + (0.5 * self.kept[0] if self.kept else 0.0)
        self.kept = [found.detach()]
        return found


def with_a_list() -> Net:
    net = Net()
    net.three = Remembers(12, CLASSES)
    return net


def with_layers() -> Net:
    net = Net()
    net.one, net.three = Layer(6, 12), Layer(12, CLASSES)
    return net


class Counts(nn.Module):
    """A loss that counts labels: ``assigns`` them or adds in place, ``first`` or afterwards."""

    def __init__(self, *, assigns: bool, first: bool = False) -> None:
        super().__init__()
        self.assigns, self.first = assigns, first
        self.register_buffer("counts", torch.ones(CLASSES))

    def forward(self, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy of scores that are shifted by the logarithms of the counts."""
        if self.first:
            self.count(labels)
        loss = functional.cross_entropy(found + self.counts.log(), labels)
        if not self.first:
            self.count(labels)
        return loss

    def count(self, labels: torch.Tensor) -> None:
        found = torch.bincount(labels, minlength=CLASSES)
        if self.assigns:
            self.counts = self.counts + found
        else:
            self.counts += found


class Queue(nn.Module):
    """A loss with a queue of labels, a pointer into it, and a number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, CLASSES))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Distance from the mean of the queue, too."""
        self.calls += 1
        loss = functional.cross_entropy(found - self.queue.mean(0), labels) * self.calls.sqrt()
        with torch.no_grad():
            places = (self.at + torch.arange(len(labels))) % 16
            self.queue[places] = functional.one_hot(labels, CLASSES).to(found.dtype)
            self.at = (self.at + len(labels)) % 16
        return loss


class Teacher(nn.Module):
    """A teacher's scores, centred by a running mean that a part of the model keeps."""

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.teacher, self.student, self.assigns = Net(), Net(), assigns
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The student's scores, less what the centred teacher gives."""
        with torch.no_grad():
            taught = self.teacher(x)
        found = self.student(x) - (taught - self.centre).softmax(1)
        with torch.no_grad():
            if self.assigns:
                self.centre = self.centre * 0.9 + taught.mean(0) * 0.1
            else:
                self.centre.mul_(0.9).add_(taught.mean(0), alpha=0.1)
        return found


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "counter": lambda: (Net(after=counts_calls), functional.cross_entropy),
    "rows": lambda: (Net(after=keeps_rows), functional.cross_entropy),
    "rows in a list": lambda: (with_a_list(), functional.cross_entropy),
    "rows that are noted": lambda: (Net(after=notes_rows), functional.cross_entropy),
    "attribute": lambda: (Net(after=moves_an_attribute), functional.cross_entropy),
    "mean behind the cut": lambda: (Net(after=means_behind_the_cut), functional.cross_entropy),
    "not kept": lambda: (Net(after=moves_what_is_not_kept), functional.cross_entropy),
    "extra state": lambda: (with_layers(), functional.cross_entropy),
    "counts assigned": lambda: (Net(), Counts(assigns=True)),
    "counts in place": lambda: (Net(), Counts(assigns=False)),
    "counts assigned first": lambda: (Net(), Counts(assigns=True, first=True)),
    "counts in place first": lambda: (Net(), Counts(assigns=False, first=True)),
    "queue": lambda: (Net(), Queue()),
    "teacher assigned": lambda: (Teacher(assigns=True), functional.cross_entropy),
    "teacher in place": lambda: (Teacher(assigns=False), functional.cross_entropy),
}
OF_ROWS = ("rows", "rows in a list")
ALONE = (*OF_ROWS, "counts assigned first", "counts in place first")
"""They are refused with several micro-batches."""

ATTRIBUTES = ("counter", "attribute", *OF_ROWS)
"""Their state is no buffer and no extra state, so a checkpoint of torch has not got it."""


def program_of(name: str) -> tuple[nn.Module, Any]:
    """The model in float64 and its loss; equal in every process."""
    torch.manual_seed(0)
    model, loss = PROGRAMS[name]()
    return model.double(), loss.double() if isinstance(loss, nn.Module) else loss


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many as steps, all different."""
    draw = torch.Generator().manual_seed(1)

    def one() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(ROWS, 6, dtype=torch.float64, generator=draw)
        return x, torch.randint(CLASSES, (ROWS,), generator=draw)

    return [one() for _ in range(STEPS)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain(name: str, micro_batches: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and state dict of the program itself, micro-batch by micro-batch."""
    model, loss = program_of(name)
    optimizer, losses = sgd([p for p in model.parameters() if p.requires_grad]), list[float]()
    for batch in batches():
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
            own = loss(model(x), y) / micro_batches
            own.backward()
            total += own.item()
        optimizer.step()
        losses.append(total)
    return losses, state_dict_of(model, loss)


def state_dict_of(model: nn.Module, loss: Any) -> dict[str, Any]:
    """The state dict of a model, and that of its loss."""
    own = loss.state_dict(prefix="loss.") if isinstance(loss, nn.Module) else {}
    return {**model.state_dict(), **own}


def piped(
    name: str, micro_batches: int, folder: str, safety: Safety
) -> tuple[list[float], dict[str, Any]]:
    """The same in a pipeline of two stages, which a new one goes on from half-way."""
    losses, weights = list[float](), dict[str, Any]()
    data, half = batches(), STEPS if name in ATTRIBUTES else STEPS // 2
    for part in (data[:half], data[half:]):
        if not part:
            break
        model, loss = program_of(name)
        graph = capture_model(model, data[0], loss=loss)
        sizes = {"micro_batches": micro_batches, "rows": ROWS // micro_batches}
        plan = plan_of(len(graph.layer_names), (1, 1), **sizes)
        with Pipeline(graph, data[0], plan=plan, optimizer=sgd, safety=safety) as pipe:
            if losses:
                pipe.load(folder)
            for batch in part:
                pipe.evaluate(data[-1])
                losses.append(pipe.step(batch).loss)
                assert pipe.verified is None or pipe.verified.equal, pipe.verified
            pipe.save(folder)
            weights = pipe.model_state_dict()
            if weights:
                held = {n: t for n, t in weights.items() if not n.startswith("loss.")}
                program_of(name)[0].load_state_dict(copy.deepcopy(held))
    return losses, weights


def compared(folder: str, micro_batches: int, transport: Any = "auto") -> dict[str, str]:
    """What differs between pipeline and program, by name."""
    found: dict[str, str] = {}
    for name in PROGRAMS:
        if micro_batches > 1 and name in (*ALONE, *ATTRIBUTES, "extra state"):
            continue
        own = str(Path(folder) / name)
        # The last compares what was moved since.
        safety = Safety(transport=transport, verify_every=STEPS)
        losses, weights = piped(name, micro_batches, own, safety)
        wanted, state = plain(name, micro_batches)
        found[name] = difference(losses, wanted)
        if weights:
            found[name] += "" if list(weights) == list(state) else f" {list(weights)} {list(state)}"
            found[name] += "".join(difference_of(n, weights.get(n), state[n]) for n in state)
    return found


def difference(ours: list[float], theirs: list[float]) -> str:
    pairs = zip(ours, theirs, strict=True)
    return "" if all(abs(a - b) <= LIMIT * abs(b) for a, b in pairs) else f"{ours} for {theirs}"


def difference_of(name: str, ours: Any, theirs: Any) -> str:
    if not isinstance(theirs, torch.Tensor):
        return "" if ours == theirs else f" {name}: {ours} for {theirs}"
    if ours is None or ours.shape != theirs.shape:
        return f" {name} is missing"
    gap = (ours - theirs).abs().max() if theirs.numel() else torch.tensor(0.0)
    return "" if gap <= LIMIT * theirs.abs().max().clamp(min=1) else f" {name} differs by {gap}"
