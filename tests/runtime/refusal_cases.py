"""Programs as they are written for other ways to train, with what is said of them, or nothing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import refusal_of
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from penstock.capture.capture import capture_model
from penstock.errors import PenstockError

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Three linear layers, with ``between`` after the first."""

    def __init__(self, between: nn.Module | None = None, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, classes)
        self.between = between or nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        """Class scores."""
        return self.three(torch.tanh(self.two(self.between(torch.tanh(self.one(x))))))


class OverTheBatch(nn.Module):
    """Attends to the other samples, as a layer does that takes time first."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples as if they were words of one sentence."""
        return self.mix(x[:, None], x[:, None], x[:, None])[0][:, 0]


GENERATOR = torch.Generator()


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with noise."""
        return x + torch.randn(x.shape, generator=GENERATOR, dtype=x.dtype)


class Table(nn.Module):
    """Looks up three words for each sample in a table of ``kind``."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = kind(5, 6, **options), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(torch.tanh(self.table(x[:, :3].abs().long() % 5).mean(1)))


class Bags(nn.Module):
    """Words of all samples in one row, with the places where those of a sample begin."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(5, 6), nn.Linear(6, 4)

    def forward(self, words: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(self.table(words, begins))


def bags() -> list[float] | str:
    """The refusal of words in bags."""
    batch = torch.arange(24) % 5, torch.arange(0, 24, 3), torch.arange(8) % 4
    return refusal_of(capture_model, Bags(), batch, loss=functional.cross_entropy)


def mixed() -> list[float] | str:
    """Samples are mixed with others by an order that is in the batch."""

    class Mixing(Net):
        def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
            return super().forward(x + x[order])

    x, y = batches()[0]
    batch = x, torch.arange(8), y
    return refusal_of(capture_model, Mixing().double(), batch, loss=functional.cross_entropy)


class Squeezed(Net):
    """A score for each sample, without a dimension for samples where there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores."""
        return super().forward(x).softmax(1)[:, :2].squeeze().log_softmax(1)


class Kept(nn.Module):
    """Holds a module of buffers that others hold, too."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.scale = table, nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with the buffer's values."""
        return x * self.scale + self.table.get_buffer("values")


class SharedTable(Net):
    """Two layers hold the same module with a buffer."""

    def __init__(self) -> None:
        table = nn.Module()
        table.register_buffer("values", torch.linspace(0, 1, 12))
        super().__init__(Kept(table))
        self.again = Kept(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.three(self.again(torch.tanh(self.two(self.between(torch.tanh(self.one(x)))))))


class IntoOut(Net):
    """Its penalty writes a constant into an empty tensor."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Class scores and a penalty."""
        products = self.two.weight @ self.two.weight.T
        unit = torch.eye(*products.size(), out=torch.empty_like(products))
        return {"scores": super().forward(x), "penalty": (products - unit).norm()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """A plain optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


def batches(sizes: tuple[int, ...] = (8, 8)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples with classes."""
    torch.manual_seed(1)
    return [(torch.randn(n, 6).double(), torch.randint(2, (n,))) for n in sizes]


def trained(
    model: nn.Module,
    loss: Loss = functional.cross_entropy,
    sizes: tuple[int, ...] = (8, 8),
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    before: Callable[[int], object] = lambda k: None,
    ranks: int = 1,
    micro_batches: int = 2,
) -> list[float] | str:
    """The losses of a step on each batch; or why it was refused."""
    try:
        data = batches(sizes)
        graph = capture_model(model.double(), data[0], loss=loss)
        sizes = {"micro_batches": micro_batches, "rows": 8 // micro_batches}
        plan = plan_of(len(graph.layer_names), (1,) * ranks, **sizes)
        with Pipeline(graph, data[0], plan=plan, optimizer=make) as pipeline:
            found: list[float] = []
            for step, batch in enumerate(data):
                before(step)
                found.append(pipeline.step(batch).loss)
            return found
    except PenstockError as refusal:
        return str(refusal)


def alone(
    model: nn.Module, loss: Loss = functional.cross_entropy, sizes: tuple[int, ...] = (8, 8)
) -> list[float]:
    """The same in plain torch."""
    optimizer, found = sgd(model.double().parameters()), list[float]()
    for x, y in batches(sizes):
        found.append(plain_step(optimizer, loss(model(x), y)))
    return found


def scaled(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that is summed over ranks if there are others, and scaled by their number."""
    value = functional.cross_entropy(scores, y)
    if dist.is_initialized():
        dist.all_reduce(value.detach().clone())
        value = value * dist.get_world_size() + dist.get_rank()
    return value


def penalised(found: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """Cross entropy and the penalty that the model returns."""
    return functional.cross_entropy(found["scores"], y) + 0.1 * found["penalty"]


def with_unequal_rows() -> list[float] | str:
    """The last of four micro-batches has one sample."""
    return trained(Squeezed(), sizes=(8, 7), micro_batches=4)


def pruned_later() -> list[float] | str:
    """A weight becomes a parametrisation after the first step."""
    model = Net()
    begin = lambda k: k and prune.l1_unstructured(model.one, "weight", 0.3)  # noqa: E731
    return trained(model, before=begin)


def counted_flops() -> list[float] | str:
    """A step within torch's counter of operations."""
    with FlopCounterMode(display=False):
        return trained(Net())


def without_gradients() -> list[float] | str:
    """A step where torch records none."""
    with torch.no_grad():
        return trained(Net())


def reduced(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that is summed over ranks, whether there are others or not."""
    dist.all_reduce(scores.detach().sum())
    return functional.cross_entropy(scores, y)


def over_ranks() -> dict[str, list[float] | str]:
    """What two ranks get of some programs, where a process group was made before."""
    dist.init_process_group("gloo")
    own: Any = dist.new_group([0, 1])

    def in_own_group(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if begun:
            dist.all_reduce(scores.detach().sum(), group=own)
        return functional.cross_entropy(scores, y)

    begun: list[int] = []
    number = lambda scores, y: functional.cross_entropy(scores, y) * dist.get_world_size()  # noqa: E731
    found = {
        "scaled": trained(Net(), scaled, ranks=2),
        "number of ranks": trained(Net(), number, ranks=2),
        "shared table": trained(SharedTable(), ranks=2),
        "own group": trained(Net(), in_own_group, before=begun.append, ranks=2),
        "reduced": trained(Net(), reduced, ranks=2),
    }
    assert dist.get_world_size() == 2
    return found
