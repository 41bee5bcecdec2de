"""Models, and pipelines that are wrong on purpose, for the tests of verification."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import SUBJECTS, Subject, captured, join, normal, plan_of
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from penstock.capture.capture import capture_model
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import RunFailed
from penstock.plan.plan import Plan, Stage
from penstock.runtime import holdings
from penstock.runtime.verify.verify import VerifyResult

ROWS = 8
TARGETS = torch.tensor([0, 1, 2, -100, -100, -100, 1, 2])


class Net(nn.Module):
    """Two linear layers with a norm or dropout in between."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.between = between or nn.Tanh()
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.last(self.between(self.first(x)))


def net(between: nn.Module | None = None) -> nn.Module:
    return Net(between).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples, three of them without a target, in unequal shares of two micro-batches."""
    return normal(ROWS, 4, 1), TARGETS


def one_rank(graph: LayerGraph, micro_batches: int = 2) -> Plan:
    """All layers on one rank, in micro-batches."""
    rows = ROWS // micro_batches
    stage = Stage(range(len(graph.layer_names)), (0,), (rows,))
    return Plan((stage,), micro_batches, rows, "1f1b")


def verified(
    model: nn.Module,
    tamper: Callable[[LayerGraph], None] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = functional.cross_entropy,
    after_capture: Callable[[nn.Module], object] | None = None,
    example: Any = None,
    given: Any = None,
) -> VerifyResult:
    """What `verify` says of a pipeline on one rank whose graph, or model, was changed before."""
    example = batch() if example is None else example
    graph = capture_model(model, example, loss=loss)
    if tamper is not None:
        tamper(graph)
    if after_capture is not None:
        after_capture(model)
    with Pipeline(graph, example, plan=one_rank(graph)) as pipe:
        return pipe.verify(example if given is None else given)


class Tied(nn.Module):
    """Embedding and output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.head(torch.tanh(self.middle(self.embed(words))))


Results = tuple[torch.Tensor, ...]


def tampered(graph: LayerGraph, around: Callable[[Callable[..., Results]], Any]) -> None:
    """Let ``around`` wrap the runs of all stages, but not those of the user's own module."""
    plain = graph.stage

    def stage(layers: range) -> StageProgram:
        program = plain(layers)
        program.module.__dict__["run"] = around(program.module.run)  # type: ignore[operator]
        return program

    vars(graph)["stage"] = stage


def hooking(graph: LayerGraph, hook: Callable[..., Any], *names: str) -> None:
    """Let the stages' runs have a forward hook on modules, but not those of the user's own."""

    def around(run: Callable[..., Results]) -> Callable[..., Results]:
        def changed(leaves: Any, received: Any) -> Results:
            modules = [graph.model.get_submodule(name) for name in names]
            handles = [module.register_forward_hook(hook) for module in modules]
            try:
                return run(leaves, received)
            finally:
                for handle in handles:
                    handle.remove()

        return changed

    tampered(graph, around)


class Reversed(torch.autograd.Function):
    """Passes numbers on, and their gradients with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The gradient, negated."""
        return -gradients[0]


def with_flipped_sign(graph: LayerGraph) -> None:
    """The gradient that leaves the first layer gets the wrong sign, its value stays."""
    hooking(graph, lambda module, given, made: Reversed.apply(made), "first")


def with_weight_of_rows(graph: LayerGraph) -> None:
    """Slices of the loss count by their rows, whether they have targets or not."""

    def around(run: Callable[..., Results]) -> Callable[..., Results]:
        def changed(leaves: Any, received: Any) -> Results:
            *others, loss, _ = run(leaves, received)
            return (*others, loss, torch.tensor(float(len(leaves[0]))))

        return changed

    tampered(graph, around)


def with_stale_buffer(graph: LayerGraph) -> None:
    """The batch norm does not move its running statistics."""
    norm = graph.model.get_submodule("between")

    def around(run: Callable[..., Results]) -> Callable[..., Results]:
        def changed(leaves: Any, received: Any) -> Results:
            with mock.patch.object(norm, "momentum", 0.0):
                return run(leaves, received)

        return changed

    tampered(graph, around)


def without_gradient(graph: LayerGraph) -> None:
    """The first layer is not trained."""
    hooking(graph, lambda module, given, made: made.detach() + 0 * made, "first")


@contextmanager
def holders_without_ties() -> Iterator[None]:
    """Within, a tied parameter's gradient is not summed over the ranks of the stages it ties."""
    original = holdings.holders_of_parameters

    def first_stage_only(
        graph: LayerGraph, plan: Plan, place: int = 0
    ) -> dict[str, tuple[int, ...]]:
        stages = {use.name: plan.stage_of_layer(use.layers[0]) for use in graph.parameter_uses}
        return {name: plan.devices_of(stages[name]) for name in original(graph, plan)}

    holdings.holders_of_parameters = first_stage_only
    try:
        yield
    finally:
        holdings.holders_of_parameters = original


def with_dropout(name: str) -> tuple[Subject, LayerGraph]:
    """A model that drops wherever it can, also inside of attention, and its graph."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    for module in subject.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    subject.model.double().train()
    return subject, capture_model(subject.model, subject.batch(3), loss=subject.loss)


def wrong_on_three_ranks() -> dict[str, str]:
    """What `verify` says of pipelines over three ranks, of a right one and of wrong ones."""
    join()
    found: dict[str, str] = {}
    rank = dist.get_rank()

    def say(name: str, subject: str, replicas: Sequence[int], scale: float = 1.0) -> None:
        if subject == "tied":
            example = torch.arange(12) % 7, normal(12, 7, 1).argmax(1)
            graph = capture_model(Tied().double(), example, loss=functional.cross_entropy)
        else:
            kind, graph = captured(subject)
            example = kind.batch(12)
        with Pipeline(graph, example, plan=plan_of(len(graph.layer_names), replicas)) as pipe:
            if scale != 1.0 and rank == 1:
                for _, parameter in pipe.named_parameters():
                    parameter.register_hook(lambda gradient: gradient * scale)
            found[name] = str(pipe.verify(example))

    def step(subject: str, verify: Any, scale: float = 1.0) -> tuple[float, str]:
        kind, graph = with_dropout(subject)
        example = kind.batch(12)
        plan = plan_of(len(graph.layer_names), (2, 1), recompute=True)
        options: dict[str, Any] = {"optimizer": lambda p: SGD(p, lr=0.1), "verify": verify}
        with Pipeline(graph, example, plan=plan, **options) as pipe:
            if scale != 1.0 and rank == 1:
                for _, parameter in pipe.named_parameters():
                    parameter.register_hook(lambda gradient: gradient * scale)
            try:
                return pipe.step(example).loss, str(pipe.verified)
            except RunFailed as failure:
                return 0.0, str(failure)

    say("right", "tied", (1, 1, 1))
    say("batch norm on replicas", "convolutions", (2, 1))
    say("one replica scaled", "mlp", (2, 1), 1.01)
    say("missing on one rank", "mlp", (1, 1, 1), 0.0)
    with holders_without_ties():
        say("lost tied gradient", "tied", (1, 1, 1))
    for subject in ("gpt2", "t5"):
        losses = [step(subject, verify) for verify in ("off", "first-step")]
        found[f"{subject}, first step"] = losses[1][1]
        assert losses[0][0] == losses[1][0], "verification has changed the step"
    found["gpt2, first step, one replica scaled"] = step("gpt2", "first-step", 1.01)[1]
    return found
