"""Asynchronous training of a toy, written down from the papers' definitions in numpy.

Two toys, both with half the mean square of ``h - target`` as the loss. In the quadratic one a stage
adds a vector, ``h <- h + w``; in the linear one it is two layers, ``h <- (h A) B``. Nothing here
knows of the package: the order of passes comes from the definitions, the weights of each pass from
the history of all weights that a stage ever had, and gradients are written out by hand.

A stage's history: ``weights[u]`` after ``u`` updates, with the optimizer's memory of then.
"""

from dataclasses import dataclass, field

import numpy as np

METHODS = (
    "vanilla",
    "pipedream",
    "pipedream-vertical-sync",
    "2bw",
    "spectrain",
    "spectrain-v2",
    "xpipe",
    "pipeoptim",
)


@dataclass
class Settings:
    """An optimizer by name with its numbers; ``rates[u]`` is the learning rate of update ``u``."""

    optimizer: str
    rate: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-8
    decay: float = 0.0
    nesterov: bool = False
    shrink: float = 1.0

    def rate_of(self, update: int) -> float:
        """The learning rate of an update; it shrinks by a factor with every one."""
        return self.rate * self.shrink**update


@dataclass
class Stage:
    """All the weights that a stage has had, and its optimizer's memory after each update."""

    weights: list[np.ndarray]
    memory: list[dict[str, np.ndarray]] = field(default_factory=lambda: [{}])
    gradient: np.ndarray | None = None

    def update(self, settings: Settings) -> None:
        """Apply the gradient to the newest weights."""
        weight, memory, gradient = self.weights[-1], dict(self.memory[-1]), self.gradient
        number = len(self.weights) - 1
        rate = settings.rate_of(number)
        if settings.optimizer == "sgd":
            gradient = gradient + settings.decay * weight
            buffer = settings.momentum * memory.get("v", 0.0) + gradient
            memory["v"] = buffer
            step = gradient + settings.momentum * buffer if settings.nesterov else buffer
            self.weights.append(weight - rate * step)
        else:
            first, second = settings.betas
            if settings.optimizer == "adam":
                gradient = gradient + settings.decay * weight
            else:
                weight = weight - rate * settings.decay * weight
            memory["m"] = first * memory.get("m", 0.0) + (1 - first) * gradient
            memory["v"] = second * memory.get("v", 0.0) + (1 - second) * gradient**2
            mean = memory["m"] / (1 - first ** (number + 1))
            square = memory["v"] / (1 - second ** (number + 1))
            self.weights.append(weight - rate * mean / (np.sqrt(square) + settings.epsilon))
        self.memory.append(memory)
        self.gradient = None

    def predicted(self, lead: int, settings: Settings) -> np.ndarray:
        """The newest weights as expected ``lead`` updates later."""
        weight, memory, number = self.weights[-1], self.memory[-1], len(self.weights) - 1
        if not memory or not lead:
            return weight
        rate = settings.rate_of(number)
        if settings.optimizer == "sgd":
            return weight - lead * rate * memory["v"]
        first, second = settings.betas
        mean = memory["m"] / (1 - first**number)
        square = memory["v"] / (1 - second**number)
        step = rate * mean / (np.sqrt(square) + settings.epsilon)
        if settings.optimizer == "adamw":
            step = step + rate * settings.decay * weight
        return weight - lead * step


def forward(weight: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """What a stage passes on, and what it remembers of it."""
    if weight.ndim == 1:
        return h + weight, ()
    hidden = h @ weight[0]
    return hidden @ weight[1], (h, hidden)


def backward(
    weight: np.ndarray, remembered: tuple[np.ndarray, ...], of_output: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of what the stage got and of its weights, by the weights of the backward."""
    if weight.ndim == 1:
        return of_output, of_output.sum(0)
    h, hidden = remembered
    of_hidden = of_output @ weight[1].T
    return of_hidden @ weight[0].T, np.stack([h.T @ of_hidden, hidden.T @ of_output])


def order_of_stage(stages: int, stage: int, count: int, depth: int) -> list[tuple[str, int]]:
    """``depth`` forwards, then backward and forward in turns, then the backwards that are left."""
    order: list[tuple[str, int]] = [("F", m) for m in range(min(depth, count))]
    for m in range(count):
        order.append(("B", m))
        if m + depth < count:
            order.append(("F", m + depth))
    return order


def leads_by_slots(stages: int, stage: int, slots_of_backward: int) -> tuple[int, int]:
    """SpecTrain's s, counted on a clock: updates that end after a pass starts and before B at 0."""
    count = 8 * stages
    orders = [order_of_stage(stages, k, count, stages - k) for k in range(stages)]
    end: dict[tuple[str, int, int], int] = {}
    free, place = [0] * stages, [0] * stages
    starts: dict[tuple[str, int, int], int] = {}
    while any(place[k] < len(orders[k]) for k in range(stages)):
        for k in range(stages):
            if place[k] == len(orders[k]):
                continue
            kind, m = orders[k][place[k]]
            before = ("F", k - 1, m) if kind == "F" else ("B", k + 1, m)
            if 0 <= before[1] < stages and before not in end:
                continue
            start = max(free[k], end.get(before, 0))
            starts[kind, k, m] = start
            free[k] = end[kind, k, m] = start + (1 if kind == "F" else slots_of_backward)
            place[k] += 1
    middle = 4 * stages
    reference = starts["B", 0, middle]

    def lead(kind: str) -> int:
        start = starts[kind, stage, middle]
        return sum(start < end["B", stage, m] < reference for m in range(count))

    return lead("F"), lead("B")


def xpipe_leads(stages: int, stage: int, size: int) -> tuple[int, int]:
    """XPipe's two formulas, rounded halves up."""
    forward = (stages + size - stage / 2 - 2) / size
    backward = (size + stage // 2 - 1) / size
    return int(np.floor(forward + 0.5)), int(np.floor(backward + 0.5))


def train(
    method: str,
    weights: list[np.ndarray],
    inputs: np.ndarray,
    targets: np.ndarray,
    settings: Settings,
    size: int,
    slots_of_backward: int = 2,
    drain_every: int = 0,
) -> list[list[np.ndarray]]:
    """All the weights of every stage, after ``inputs[m]``, ``targets[m]`` for every ``m``.

    ``size`` micro-batches make an update. With ``drain_every`` the pipeline runs empty after so
    many micro-batches, and counts from 0 again.
    """
    stages = [Stage([weight]) for weight in weights]
    count = len(inputs)
    for first in range(0, count, drain_every or count):
        part = slice(first, first + (drain_every or count))
        stretch(method, stages, inputs[part], targets[part], settings, size, slots_of_backward)
    return [stage.weights for stage in stages]


def stretch(
    method: str,
    stages: list[Stage],
    inputs: np.ndarray,
    targets: np.ndarray,
    settings: Settings,
    size: int,
    slots_of_backward: int,
) -> None:
    """From an empty pipeline to an empty pipeline.

    With one stage nothing is in flight across an update, so 2BW is late by none.
    """
    n, count = len(stages), len(inputs)
    depth = [min(n - k, size) if method == "2bw" else n - k for k in range(n)]
    orders = [order_of_stage(n, k, count, depth[k]) for k in range(n)]
    start = [len(stage.weights) - 1 for stage in stages]
    place, ended = [0] * n, [0] * n
    activations: dict[tuple[int, int], np.ndarray] = {(0, m): inputs[m] for m in range(count)}
    gradients: dict[tuple[int, int], np.ndarray] = {}
    remembered: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
    used: dict[tuple[int, int], np.ndarray] = {}
    seen_by_first: dict[int, int] = {}
    bellwether: dict[tuple[str, int, int], np.ndarray] = {}

    def made(k: int) -> int:
        return len(stages[k].weights) - 1 - start[k]

    def weight_of(kind: str, k: int, m: int) -> np.ndarray:
        stage, group = stages[k], m // size
        if method == "vanilla" or (method == "2bw" and n == 1):
            return stage.weights[-1]
        if method == "pipedream":
            if kind == "F":
                used[k, m] = stage.weights[-1]
            return used[k, m]
        if method == "pipedream-vertical-sync":
            if k == 0 and kind == "F":
                seen_by_first[m] = made(0)
            return stage.weights[start[k] + seen_by_first[m]]
        if method == "2bw":
            return stage.weights[start[k] + max(group - 1, 0)]
        if method == "spectrain":
            leads = leads_by_slots(n, k, slots_of_backward)
            return stage.predicted(leads[kind == "B"], settings)
        if method == "spectrain-v2":
            if kind == "F":
                used[k, m] = stage.predicted(n - k - 1, settings)
            return used[k, m]
        if method == "pipeoptim":
            return stage.predicted(n - k - 1 if kind == "F" else 0, settings)
        assert method == "xpipe"
        if m % size == 0:
            lead = xpipe_leads(n, k, size)[kind == "B"]
            bellwether[kind, k, group] = stage.predicted(lead, settings)
        return bellwether[kind, k, group]

    while any(place[k] < len(orders[k]) for k in range(n)):
        for k in range(n):
            if place[k] == len(orders[k]):
                continue
            kind, m = orders[k][place[k]]
            if kind == "F" and (k, m) not in activations:
                continue
            if kind == "B" and k < n - 1 and (k, m) not in gradients:
                continue
            place[k] += 1
            weight = weight_of(kind, k, m)
            if kind == "F":
                activations[k + 1, m], remembered[k, m] = forward(weight, activations[k, m])
                continue
            if k == n - 1:
                gap = activations[n, m] - targets[m]
                gradients[k, m] = gap / gap.size
            of_input, own = backward(weight, remembered.pop((k, m)), gradients.pop((k, m)))
            gradients[k - 1, m] = of_input
            own = own / size
            stages[k].gradient = own if stages[k].gradient is None else stages[k].gradient + own
            ended[k] += 1
            if ended[k] % size == 0:
                stages[k].update(settings)
