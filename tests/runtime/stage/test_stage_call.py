"""A stage whose linear layers defer or accumulate gradients, against the user's module."""

from typing import TypeAlias

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.capture.forward.call import ProgramCall
from penstock.capture.forward.deferred_weights import LARGE, DeferredGradients
from penstock.capture.forward.stage_module import StageModule, StageProgram
from penstock.runtime.stage.runner import ModuleRunner, StageInputs
from penstock.schedule.action import ActionKind

Kinds: TypeAlias = tuple[ActionKind, ...]
BACKWARDS: list[Kinds] = [("B",), ("I", "W")]

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 5, 8, 11


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's, a norm, and a frozen layer."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH, bias=False)
        self.norm, self.frozen = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits by the embedding's own weight; one layer is used twice."""
        hidden = self.embedding(tokens)
        hidden = hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))
        hidden = self.twice(torch.tanh(self.twice(self.frozen(hidden))))
        return functional.linear(hidden, self.embedding.weight)


def whole_stage(wide: int) -> StageProgram:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    model = Tied(wide).double()
    graph = capture_model(model, (tokens, tokens), loss=token_loss)
    return graph.stage(range(len(graph.layer_names)))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients(kinds: Kinds, wide: int, hooked: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Those of two micro-batches by these actions or by plain autograd, and a hook's calls."""
    program = whole_stage(wide)
    named = {n: p for n, p in program.module.named_parameters() if p.requires_grad}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    calls = 0

    def count(_: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    if hooked:
        named["twice.weight"].register_post_accumulate_grad_hook(count)
    tokens = torch.randint(
        0, VOCABULARY, (2, ROWS, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    if not kinds:
        for batch in tokens:
            loss, weight, *_ = program.module(*[batch for _ in program.batch_inputs])
            (loss * weight).backward()
    else:
        runner = ModuleRunner(program, torch.device("cpu"))
        leaves = tuple(tuple(batch for _ in program.batch_inputs) for batch in tokens)
        halved = frozenset({0, 1}) if "I" in kinds else frozenset[int]()
        runner.begin(StageInputs(leaves, (ROWS, ROWS), halved=halved))
        for kind in ("F", *kinds):
            for m in (0, 1):
                runner.work(kind)(m, [])
    return {name: p.grad for name, p in named.items() if p.grad is not None}, calls


@pytest.mark.parametrize("kinds", BACKWARDS)
@pytest.mark.parametrize("wide", [16, LARGE // WIDTH])
def test_gradients_are_those_of_plain_autograd(kinds: Kinds, wide: int) -> None:
    expected, _ = gradients((), wide)
    found, _ = gradients(kinds, wide)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-11, atol=1e-13), name


@pytest.mark.parametrize("kinds", [(), *BACKWARDS])
def test_hooks_of_a_parameter_run_once_for_each_micro_batch(kinds: Kinds) -> None:
    found, calls = gradients(kinds, 16, hooked=True)
    assert calls == 2
    expected, _ = gradients((), 16)
    assert torch.allclose(found["twice.weight"], expected["twice.weight"], rtol=1e-11)


def whole_call() -> tuple[ProgramCall, StageModule, list[torch.Tensor]]:
    """A call, its module and leaves of a batch."""
    program = whole_stage(16)
    leaves = [torch.zeros(ROWS, TOKENS, dtype=torch.long) for _ in program.batch_inputs]
    return ProgramCall(program.module), program.module, leaves


def test_the_module_may_get_other_tensors_between_calls() -> None:
    call, module, leaves = whole_call()
    before = call.run(leaves, [])[0]
    owner = module.get_submodule("norm")
    owner._parameters["bias"] = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    after = call.run(leaves, [])[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, module.run(leaves, [])[0])


def test_the_first_half_leaves_nothing_in_the_graph() -> None:
    call, module, leaves = whole_call()
    deferred = DeferredGradients()
    call.run(leaves, [], deferred)
    # Three layers that may wait (one twice); the frozen one has no gradient.
    assert len(deferred.products) == 4
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    assert {id(p) for p in call.others()} == trained


@pytest.mark.parametrize("deferring", [False, True])
def test_the_users_modules_are_as_he_made_them_and_his_own_forward_stays(deferring: bool) -> None:
    call, module, leaves = whole_call()
    linear = module.get_submodule("wide")
    calls = list[int]()

    def own(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return type(linear).forward(linear, x)

    linear.forward = own
    before = {name: dict(part.__dict__) for name, part in module.named_modules() if name}
    deferred = DeferredGradients() if deferring else None
    call.run(leaves, [], deferred)
    assert calls == [ROWS]
    assert deferred is None or len(deferred.products) == 3
    for name, part in module.named_modules():
        assert not name or before[name] == part.__dict__, name


class Checkpointed(nn.Module):
    """Three linear layers, the second of them in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant
        self.wide, self.second = nn.Linear(WIDTH, LARGE // WIDTH), nn.Linear(LARGE // WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.wide, self.first(x), use_reentrant=self.reentrant)
        assert isinstance(hidden, torch.Tensor)
        return self.second(hidden.tanh())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kinds", BACKWARDS)
def test_what_is_in_the_users_checkpoint_runs_as_it_is(kinds: Kinds, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    graph = capture_model(model, (x, x[:, :1]), loss=nn.MSELoss())
    program = graph.stage(range(len(graph.layer_names)))
    nn.MSELoss()(model(x), x[:, :1]).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    runner = ModuleRunner(program, torch.device("cpu"))
    halved = frozenset({0}) if "I" in kinds else frozenset[int]()
    runner.begin(StageInputs(((x, x[:, :1]),), (ROWS,), halved=halved))
    for kind in ("F", *kinds):
        runner.work(kind)(0, [])
    assert len(expected) == 6
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / ROWS, expected[name])
