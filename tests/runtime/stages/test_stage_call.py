"""A stage called as functions made from its graph, against its module in plain autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.deferred_weights import LARGE, DeferredGradients
from penstock.capture.layer_graph import StageProgram
from penstock.capture.trace import capture_model
from penstock.runtime.stages.call import ModuleCall, TracedCall, stage_call
from penstock.runtime.stages.runner import ModuleRunner, StageInputs, edge_of

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


def gradients(kind: str, wide: int, hooked: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Those of two micro-batches, and how often a hook on one parameter ran."""
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
    if kind == "plain":
        for batch in tokens:
            loss, weight, *_ = program.module(*[batch for _ in program.batch_inputs])
            (loss * weight).backward()
    else:
        runner = ModuleRunner(program, torch.device("cpu"))
        leaves = tuple(tuple(batch for _ in program.batch_inputs) for batch in tokens)
        halved = frozenset({0, 1}) if kind == "IW" else frozenset[int]()
        runner.begin(StageInputs(leaves, (ROWS, ROWS), halved=halved))
        for m in (0, 1):
            runner.forward(m, [])
        for m in (0, 1):
            if kind == "IW":
                runner.backward_input(m, [])
            else:
                runner.backward(m, [])
        for m in (0, 1):
            if kind == "IW":
                runner.backward_weight(m)
    assert isinstance(stage_call(program.module), TracedCall)
    return {name: p.grad for name, p in named.items() if p.grad is not None}, calls


@pytest.mark.parametrize("kind", ["B", "IW"])
@pytest.mark.parametrize("wide", [16, LARGE // WIDTH])
def test_gradients_are_those_of_plain_autograd(kind: str, wide: int) -> None:
    expected, _ = gradients("plain", wide)
    found, _ = gradients(kind, wide)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-11, atol=1e-13), name


@pytest.mark.parametrize("kind", ["plain", "B", "IW"])
def test_hooks_of_a_parameter_run_once_for_each_micro_batch(kind: str) -> None:
    found, calls = gradients(kind, 16, hooked=True)
    assert calls == 2
    expected, _ = gradients("plain", 16)
    assert torch.allclose(found["twice.weight"], expected["twice.weight"], rtol=1e-11)


def test_the_module_may_get_other_tensors_between_calls() -> None:
    program = whole_stage(16)
    call = TracedCall(program.module)  # type: ignore[arg-type]
    leaves = [torch.zeros(ROWS, TOKENS, dtype=torch.long) for _ in program.batch_inputs]
    before = call.run(leaves, [])[0]
    owner = program.module.get_submodule("norm")
    owner._parameters["bias"] = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    after = call.run(leaves, [])[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, ModuleCall(program.module).run(leaves, [])[0])


def test_the_first_half_leaves_nothing_in_the_graph() -> None:
    program = whole_stage(16)
    call, deferred = TracedCall(program.module), DeferredGradients()  # type: ignore[arg-type]
    leaves = [torch.zeros(ROWS, TOKENS, dtype=torch.long) for _ in program.batch_inputs]
    loss = call.run(leaves, [], deferred)[0]
    # Four layers that may wait (one twice) and the tied one; the frozen one has no gradient.
    assert len(deferred) == 5
    assert edge_of(loss).node is loss.grad_fn
    names = {name for name, p in program.module.named_parameters() for q in call.others() if p is q}
    assert names == {"embedding.weight", "norm.weight", "norm.bias"}
