"""What users write in forward, and do to their model between steps; each with what must happen.

Every case is compared with the user's own module: on the whole batch, or micro-batch by
micro-batch where its state changes with every call.
"""

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    one, two = (torch.randn(8, 8, generator=generator).double() for _ in range(2))
    return one, two


class Block(nn.Module):
    """An expansion and a contraction, with a residual."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def inner(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class Stack(nn.Module):
    """Four blocks, a head and a mean squared error."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Any, y: Any) -> Any:
        for number, block in enumerate(self.blocks):
            x = self.step(number, block, x)
        return functional.mse_loss(self.head(x), y)

    def step(self, number: int, block: Any, x: Any) -> Any:
        """The hidden states behind a block."""
        return block(x)


@dataclass(frozen=True)
class Case:
    """A model; what is done to it before step ``s`` (-1: before capture); and the outcome.

    ``outcome`` is "right", "refused", or words of the message of the refusal. ``apart``: the
    reference runs each micro-batch by itself.
    """

    make: Callable[[], nn.Module]
    before: Callable[[nn.Module, int], object] | None = None
    outcome: str = "right"
    apart: bool = False
    recompute: bool = False
    steps: int = 3
    cuts: tuple[int, ...] | None = None
    after: Callable[[nn.Module, nn.Module], object] | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


CASES: dict[str, Case] = {}


def given(model: nn.Module, **attributes: Any) -> nn.Module:
    """A model whose modules have other values of these attributes."""
    for module in model.modules():
        for key in attributes.keys() & dir(module):
            setattr(module, key, attributes[key])
    return model


def case(name: str, make: Callable[[], nn.Module], *args: Any, **options: Any) -> None:
    CASES[name] = Case(make, *args, **options)


# Sizes that values decide about.

MODULES = {"granularity": "module"}


class Experts(nn.Module):
    """Each sample goes to its best two of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            made = self.add(made, expert, x, chosen == number, weights)
        return x + made

    def add(self, made: Any, expert: Any, x: Any, mine: Any, weights: Any) -> Any:
        rows, places = mine.nonzero(as_tuple=True)
        return made.index_add_(0, rows, expert(x[rows]) * weights[rows, places][:, None])


class ExpertsByWhere(Experts):
    def add(self, made: Any, expert: Any, x: Any, mine: Any, weights: Any) -> Any:
        rows, places = torch.where(mine)
        made[rows] += expert(x[rows]) * weights[rows, places, None]
        return made


class ExpertsByRows(Experts):
    def add(self, made: Any, expert: Any, x: Any, mine: Any, weights: Any) -> Any:
        rows = mine.any(-1).nonzero().squeeze(-1)
        share = (weights * mine).sum(-1)[rows]
        return made.index_add(0, rows, expert(x[rows]) * share[:, None])


class ExpertsSkipped(Experts):
    def add(self, made: Any, expert: Any, x: Any, mine: Any, weights: Any) -> Any:
        rows = mine.any(-1)
        if rows.any():
            made[rows] += expert(x[rows]) * (weights * mine).sum(-1)[rows][:, None]
        return made


class SkipsInRoot(Stack):
    """The model itself skips a block where activations say so."""

    def forward(self, x: Any, y: Any) -> Any:
        x = self.blocks[0](x)
        if len(x) > 1 and bool(x.square().mean() > 0):
            x = self.blocks[1](x)
        return functional.mse_loss(self.head(self.blocks[3](self.blocks[2](x))), y)


class SomeRows(Stack):
    """Blocks that compute the samples of a mask only; it has them all in the example."""

    def forward(self, x: Any, y: Any) -> Any:
        rows = (y[:, 0] < self.limit) if hasattr(self, "limit") else (y[:, 0] < 1e9)
        for block in self.blocks:
            made = x.clone()
            made[rows] = block(x[rows])
            x = made
        return functional.mse_loss(self.head(x), y)


class Assembles(Stack):
    """Results of blocks are written into tensors of the batch."""

    def forward(self, x: Any, y: Any) -> Any:
        for number, block in enumerate(self.blocks):
            made = x.clone()
            if number == 0:
                made[:, :5] = block(x)[:, :5]
            elif number == 1:
                made[y[:, 0] < 0] = block(x)[y[:, 0] < 0]
            else:
                made[:] = block(x)
            x = made
        return functional.mse_loss(self.head(x), y)


class PackedSequences(nn.Module):
    """Sequences are packed and padded in the model's own forward, as tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.Linear(2, 8), nn.Linear(8, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Any, y: Any) -> Any:
        sizes = 1 + (x > 0).sum(1) % 4
        steps = self.steps(x.view(-1, 4, 2))
        packed = nn.utils.rnn.pack_padded_sequence(
            steps, sizes.cpu(), batch_first=True, enforce_sorted=False
        )
        made, (hidden, _) = self.recurrent(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(made, batch_first=True, total_length=4)
        return functional.mse_loss(self.head(torch.tanh(padded.sum(1) + hidden[-1])), y)


class MovesAverage(Stack):
    """Forward moves an average of the first blocks' weights, which makes targets."""

    def __init__(self, *, by_data: bool = False) -> None:
        super().__init__()
        self.average, self.by_data = copy.deepcopy(self.blocks[0]).requires_grad_(False), by_data

    def forward(self, x: Any, y: Any) -> Any:
        made = self.blocks[0](x)
        with torch.no_grad():
            pairs = zip(self.average.parameters(), self.blocks[0].parameters(), strict=True)
            for own, other in pairs:
                if self.by_data:
                    own.data = own.data * 0.9 + other.data * 0.1
                else:
                    own.mul_(0.9).add_(other, alpha=0.1)
            target = self.average(x)
        for block in self.blocks[1:]:
            made = block(made)
        return functional.mse_loss(self.head(made), y) + functional.mse_loss(made, target)


case("experts by places", lambda: Stack(Experts), options=MODULES)
case("experts by where", lambda: Stack(ExpertsByWhere), options=MODULES)
case("experts by rows", lambda: Stack(ExpertsByRows), options=MODULES)
case("experts without samples are skipped", lambda: Stack(ExpertsSkipped), options=MODULES)
case("a block that one sample skips", SkipsInRoot)
case("blocks of all samples in the example", SomeRows, lambda m, s: setattr(m, "limit", s * 0.3))
case("results written into tensors of the batch", Assembles)
case("packed sequences", PackedSequences, options=MODULES)
case("an average of weights moved by forward", MovesAverage, apart=True)
case("an average of weights set by forward", lambda: MovesAverage(by_data=True), apart=True)

# Autograd of the user.


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # pyright: ignore
        return -0.5 * gradient


class OwnFunction(Block):
    def forward(self, x: Any) -> Any:
        return x + Reverse.apply(self.inner(x))


class BetweenBlocks(Stack):
    def step(self, number: int, block: Any, x: Any) -> Any:
        return Reverse.apply(block(x))


class AroundBlocks(torch.autograd.Function):
    """Runs blocks inside of itself, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Any, blocks: Any) -> Any:
        ctx.blocks = blocks
        ctx.save_for_backward(x)
        with torch.no_grad():
            for block in blocks:
                x = block(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = x
            for block in ctx.blocks:
                out = block(out)
            torch.autograd.backward(out, gradient)
        return x.grad, None


class Reversible(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        x = self.blocks[0](x)
        x = AroundBlocks.apply(x, [self.blocks[1], self.blocks[2]])
        return functional.mse_loss(self.head(self.blocks[3](x)), y)


def triple(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(None if gradient is None else gradient * 3 for gradient in given)


class TensorHook(Block):
    def forward(self, x: Any) -> Any:
        hidden = torch.relu(self.up(x))
        hidden.register_hook(lambda gradient: gradient * 0.1)
        return x + self.down(hidden)


def hooked() -> nn.Module:
    model = Stack(TensorHook)
    model.blocks[1].register_full_backward_hook(triple)
    model.blocks[2].register_forward_hook(lambda m, a, o: o * 2)
    model.blocks[0].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    return model


case("an own autograd function in blocks", lambda: Stack(OwnFunction))
case("an own autograd function between blocks", BetweenBlocks)
case("an own autograd function around blocks", Reversible)
case("hooks of tensors and of modules, of all kinds", hooked)


class Checkpointed(Block):
    reentrant = False

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class FirstHead(Stack):
    """A reentrant checkpoint of inputs without gradient would give none."""

    def forward(self, x: Any, y: Any) -> Any:
        return super().forward(self.head(x), y)


class CheckpointedOutside(FirstHead):
    reentrant = False

    def step(self, number: int, block: Any, x: Any) -> Any:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class Segments(Stack):
    reentrant = False

    def forward(self, x: Any, y: Any) -> Any:
        x = self.head(x)
        for k in (0, 2):
            x = checkpoint(
                lambda h, k=k: self.blocks[k + 1](self.blocks[k](h)),
                x,
                use_reentrant=self.reentrant,
            )
        return functional.mse_loss(self.head(x), y)


REENTRANT = {"reentrant": True}
case("a checkpoint in blocks", lambda: Stack(Checkpointed))
case("a reentrant checkpoint in blocks", lambda: given(FirstHead(Checkpointed), **REENTRANT))
case("a checkpoint around each block", CheckpointedOutside)
case("a reentrant checkpoint around each block", lambda: given(CheckpointedOutside(), **REENTRANT))
case("a checkpoint around two blocks", Segments)
case("a reentrant checkpoint around two blocks", lambda: given(Segments(), **REENTRANT))


class Grads(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        torch.set_grad_enabled(False)
        x = self.blocks[0](x)
        torch.set_grad_enabled(True)
        for block in self.blocks[1:]:
            x = block(x)
        with torch.no_grad():
            self.blocks[1](x)
        return functional.mse_loss(self.head(x), y)


class GradsOff(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        torch.set_grad_enabled(False)
        for block in self.blocks[:3]:
            x = block(x)
        torch.set_grad_enabled(True)
        return functional.mse_loss(self.head(self.blocks[3](x)), y)


class Teacher(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.teacher.requires_grad_(False)

    def forward(self, x: Any, y: Any) -> Any:
        with torch.no_grad():
            target = self.teacher(x)
        for block in self.blocks:
            x = block(x)
        loss = functional.mse_loss(self.head(x), y)
        return loss + 0.5 * functional.mse_loss(x, target)


case("set_grad_enabled without a context", Grads)
case("gradients off over a cut, on again later", GradsOff)
case("a frozen teacher inside of the model", Teacher)


# Memory.


class InPlace(Block):
    def forward(self, x: Any) -> Any:
        return (x + self.down(torch.relu_(self.up(x)))).mul_(0.5)


class InPlaceBetween(Stack):
    def step(self, number: int, block: Any, x: Any) -> Any:
        x = x + torch.sigmoid(block(x))
        x += 1
        x[:, :2] *= 0.5
        return x


class ViewAsItself(Stack):
    def step(self, number: int, block: Any, x: Any) -> Any:
        x = block(x)
        return x.view_as(x)


class Vmapped(Block):
    def forward(self, x: Any) -> Any:
        return x + self.down(torch.vmap(torch.relu)(self.up(x)))


class BatchWritten(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        x[:, 0] = 0.25
        return super().forward(x, y)


case("writes in place in blocks", lambda: Stack(InPlace))
case("writes in place, and through views, between blocks", InPlaceBetween)
case("x.view_as(x) between blocks", ViewAsItself)
case("vmap in blocks", lambda: Stack(Vmapped))
case("forward writes to the batch", BatchWritten, apart=True, steps=1)


# Values.


class Asks(Stack):
    def step(self, number: int, block: Any, x: Any) -> Any:
        x = block(x)
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x * 1.5 if x.detach().abs().max() > 1e-9 else x


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mean, self.spread = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.up, self.out, self.beta = nn.Linear(4, 16), nn.Linear(16, 8), 0.0

    def forward(self, x: Any, y: Any) -> Any:
        hidden = torch.tanh(self.down(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        loss = functional.mse_loss(self.out(torch.tanh(self.up(mean))), x)
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        return loss + self.beta * kl


case("a branch on activations between blocks", Asks)
case("an annealed attribute", Vae, lambda m, s: setattr(m, "beta", max(s, 0) / 4))


# Places.


def join(x: Any, y: Any) -> Any:
    return x + y


class Joins(Block):
    def forward(self, x: Any) -> Any:
        return join(x, self.inner(x))


class JoinsBlocks(Stack):
    def step(self, number: int, block: Any, x: Any) -> Any:
        return join(block(x), x)


case(
    "one line that is run in blocks, and after each",
    lambda: JoinsBlocks(Joins),
    cuts=(2, 4),
    options={"granularity": "module"},
)


# Weights.


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 8)

    def forward(self, x: Any, y: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        x = functional.linear(x, self.blocks[0].up.weight)
        return functional.mse_loss(self.out(x), y)


class Skeleton(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.position = nn.Parameter(torch.randn(8))

    def forward(self, x: Any, y: Any) -> Any:
        position = self.position.exp()
        x = x + position
        for block in self.blocks:
            x = block(x) * self.scale + position
        return functional.mse_loss(self.head(x), y)


class Shared(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


def spectral() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.up = torch.nn.utils.parametrizations.spectral_norm(block.up)
        block.down = torch.nn.utils.spectral_norm(block.down)
    return model


def thaw(model: nn.Module, step: int) -> None:
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(step >= 1)


def freeze(model: nn.Module, step: int) -> None:
    for parameter in model.blocks[2].parameters():
        parameter.requires_grad_(step != 1)


def new_data(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step + 5)
    for parameter in model.parameters():
        drawn = torch.randn(tuple(parameter.shape), generator=generator, dtype=parameter.dtype)
        parameter.data = drawn * 0.3


def scaled(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
            parameter.add_(0.01)


case("a weight read again between blocks", Tied)
case("parameters between blocks that all stages use", Skeleton)
case("one module called by all stages", Shared)
case("spectral norm, both forms", spectral, apart=True)
case("the first block thawed at step 1", Stack, thaw)
case("a middle block frozen at step 1, thawed again", Stack, freeze)
case("p.data = new values between steps", Stack, new_data)
case("all parameters changed in place between steps", Stack, scaled)


# State.


class Counted(Block):
    def forward(self, x: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return x + self.inner(x) * (1.0 / self.steps)


class Counts(Stack):
    late = True

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def step(self, number: int, block: Any, x: Any) -> Any:
        return block(x) * (1 + self.n)

    def forward(self, x: Any, y: Any) -> Any:
        if not self.late:
            self.n += 1
        loss = super().forward(x, y)
        if self.late:
            self.n += 1
        return loss


class CountsInBuffer(Stack):
    rebinds, step = False, Counts.step

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Any, y: Any) -> Any:
        loss = super().forward(x, y)
        if self.rebinds:
            self.n = self.n + 1
        else:
            self.n += 1
        return loss


class Running(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def step(self, number: int, block: Any, x: Any) -> Any:
        x = block(x)
        if number == 1:
            self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
            x = x - self.mean
        return x


class Ahead(Running):
    def forward(self, x: Any, y: Any) -> Any:
        x = x - self.mean
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return functional.mse_loss(self.head(x), y)


class Carries(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = None

    def step(self, number: int, block: Any, x: Any) -> Any:
        x = block(x)
        if number == 1:
            if self.memory is not None:
                x = x + self.memory
            self.memory = x.detach().mean(0)
        return x


class CarriesFar(Carries):
    def forward(self, x: Any, y: Any) -> Any:
        if self.memory is not None:
            x = x + self.memory
        for block in self.blocks:
            x = block(x)
        self.memory = x.detach().mean(0)
        return functional.mse_loss(self.head(x), y)


class Restores(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def step(self, number: int, block: Any, x: Any) -> Any:
        return block(x) * self.factor

    def forward(self, x: Any, y: Any) -> Any:
        self.factor = self.factor * 2
        loss = super().forward(x, y)
        self.factor = self.factor / 2
        return loss


class ByMode(Block):
    def forward(self, x: Any) -> Any:
        return x + self.inner(x) * (2 if self.training else 1)


class Modes(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        was = self.training
        x = self.blocks[0](x)
        self.eval()
        for block in self.blocks[1:]:
            x = block(x)
        loss = functional.mse_loss(self.head(x), y)
        self.train(was)
        return loss


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.k = nn.Linear(8, 8), 0

    def forward(self, x: Any) -> Any:
        self.k += 1
        return self.linear(x), self.k


class Reads(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        scale = 0
        for block in self.blocks:
            x, k = block(x)
            scale += k
        return functional.mse_loss(self.head(x) * scale, y)


class Configured(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=1.0)
        self.table = {"shift": 0.0}

    def step(self, number: int, block: Any, x: Any) -> Any:
        return block(x) * self.config.scale + self.table["shift"]


def configure(model: Any, step: int) -> None:
    model.config.scale, model.table["shift"] = 1.0 + max(step, 0), 0.1 * max(step, 0)


case("a counter in blocks", lambda: Stack(Counted), apart=True)
case("a counter in blocks, recomputed", lambda: Stack(Counted), apart=True, recompute=True)
case("a counter at the end of forward", Counts, apart=True)
case("a counter at the end of forward, recomputed", Counts, apart=True, recompute=True)
case("a counter at the start of forward", lambda: given(Counts(), late=False), apart=True)
case(
    "a counter that the user resets",
    Counts,
    lambda m, s: setattr(m, "n", 0) if s == 1 else None,
    apart=True,
)
case("a counter in a buffer, written in place", CountsInBuffer, apart=True)
case("a counter bound anew", lambda: given(CountsInBuffer(), rebinds=True), apart=True)
case("a running mean of activations", Running, apart=True)
case("a running mean read by the first block, written after the last", Ahead, apart=True)
case("a tensor carried to the next micro-batch", Carries, apart=True)
case("a tensor carried from the last stage to the first", CarriesFar, None, "refused")
case("an attribute changed for a while", Restores, apart=True)
case("the mode changed for a while", lambda: Modes(ByMode), apart=True)
case("blocks return counters that later stages read", lambda: Reads(Says), apart=True)
case("one module with a counter, called by all stages", lambda: counted_shared(), None, "refused")
case("a config object and a dict changed between steps", Configured, configure)


def counted_shared() -> nn.Module:
    model = Stack(Counted)
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    return model


# Another path.


class Skips(Stack):
    phase = 0

    def step(self, number: int, block: Any, x: Any) -> Any:
        return x if number == 2 and self.phase > 0 else block(x)


class CatchesException(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        try:
            for block in self.blocks:
                x = block(x)
        except Exception:
            x = x * 0
        return functional.mse_loss(self.head(x), y)


class CatchesAll(Stack):
    def forward(self, x: Any, y: Any) -> Any:
        try:
            for block in self.blocks:
                x = block(x)
        except:  # noqa: E722
            x = x * 0
        return functional.mse_loss(self.head(x), y)


def patch(model: Any, step: int) -> None:
    if step == 1:
        for block in (model.blocks[1], model.blocks[3]):
            block.forward = types.MethodType(
                lambda self, x: x + 2 * self.down(torch.tanh(self.up(x))), block
            )


def replace_block(model: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(3)
        model.blocks[1] = Block().double()


def late_backward_hook(model: Any, step: int) -> None:
    if step == 0:
        for block in model.blocks:
            block.register_full_backward_hook(triple)


def late_forward_hook(model: Any, step: int) -> None:
    if step == 0:
        model.blocks[0].register_forward_hook(lambda m, a, o: o * 2)


def compiled(model: Any, step: int) -> None:
    if step == 1:
        for block in model.blocks:
            block.compile(backend="eager")


case("a block skipped from step 1 on", Skips, lambda m, s: setattr(m, "phase", s), "another path")
case("users catch Exception around blocks", CatchesException)
case("users catch everything around blocks", CatchesAll, None, "another path")
case("forward of blocks patched at step 1", Stack, patch)
case("a block replaced at step 1", Stack, replace_block, "another path")
case("a backward hook registered later where a result is sent", Stack, late_backward_hook, "hook")
case("a forward hook registered later", Stack, late_forward_hook)
case("blocks compiled at step 1", Stack, compiled)
case("evaluation mode at step 1", lambda: Stack(ByMode), lambda m, s: m.train(s != 1))


class Inner(nn.Module):
    """Four blocks in a container of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Outer(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Inner()])


def hook_container(at: int) -> Callable[[Any, int], None]:
    def before(model: Any, step: int) -> None:
        if step == at:
            model.blocks[1].register_full_backward_hook(triple)

    return before


case("a backward hook on a container", Outer, hook_container(-1))
case("a backward hook on a container, registered later", Outer, hook_container(1), "backward hook")


# What users do beside training.


def copies_run(model: nn.Module, plain: nn.Module) -> None:
    """A deep copy and the model itself run as ever, where all parameters are here."""
    from penstock.capture.record.absent import Absent, NeedsValues

    own = copy.deepcopy(model)
    device = next(plain.parameters()).device
    x, y = (tensor.to(device) for tensor in inputs())
    if any(type(p) is Absent for p in own.parameters()):
        try:
            float(model(x, y))
        except NeedsValues:
            return
        raise AssertionError("a loss without values")
    assert torch.equal(own(x, y), plain(x, y))
    assert torch.equal(model(x, y), plain(x, y))
    assert not any("forward" in module.__dict__ for module in model.modules())


case("deep copies, and calls of the model, after steps", Stack, after=copies_run)


# Objects of the user's own that hold tensors, which torch's trees do not open.


class Beside:
    """Tensors beside the hidden states."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask


class HandsOn(Block):
    """A block that returns the object that it was given."""

    grows = False

    def forward(self, x: Any, beside: Any) -> Any:
        if self.grows:
            beside.mask = beside.mask + x.abs().mean(1, keepdim=True)
        return x + self.inner(x) * beside.mask, beside


class GrowsWhatItHandsOn(HandsOn):
    """A block that puts another tensor into the object that it returns."""

    grows = True


class ReturnsAnother(Block):
    """A block that makes an object of a tensor that it was given in one."""

    def forward(self, x: Any, beside: Any) -> Any:
        return x + self.inner(x) * beside.mask, Beside(beside.mask)


class ReturnsSlots(ReturnsAnother):
    """The object has no dictionary."""

    def forward(self, x: Any, beside: Any) -> Any:
        x, other = super().forward(x, beside)
        slots = WithSlots()
        slots.mask = other.mask
        return x, slots


class ReturnsFunction(ReturnsAnother):
    """The tensor is in the closure of a function."""

    def forward(self, x: Any, beside: Any) -> Any:
        mask = beside() if callable(beside) else beside.mask
        return x + self.inner(x) * mask, lambda: mask


class WithSlots:
    __slots__ = ("mask",)
    mask: torch.Tensor


class Passes(Stack):
    """Blocks pass an object on, beside the hidden states."""

    def forward(self, x: Any, y: Any) -> Any:
        beside = Beside(x[:, :1])
        for block in self.blocks:
            x, beside = block(x, beside)
        mask = beside() if callable(beside) else beside.mask
        return functional.mse_loss(self.head(x) * mask, y)


for block in (HandsOn, GrowsWhatItHandsOn, ReturnsAnother, ReturnsSlots, ReturnsFunction):
    for granularity in ("block", "module"):
        case(
            f"an object beside hidden states, {block.__name__}, by {granularity}",
            lambda block=block: Passes(block),
            options={"granularity": granularity},
        )
