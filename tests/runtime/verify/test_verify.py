"""`verify` compares with the user's own module, and finds pipelines that are wrong on purpose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from runtime.pipeline_cases import captured
from runtime.verify.verify_cases import (
    batch,
    hooking,
    net,
    one_rank,
    tampered,
    verified,
    with_flipped_sign,
    with_stale_buffer,
    with_weight_of_rows,
    without_gradient,
    wrong_on_three_ranks,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.runtime.gradients.buckets import GradientBucket
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers

WHOLE = "equal to your module on the whole batch: loss "


def test_a_right_pipeline_equals_the_module_on_the_whole_batch() -> None:
    result = verified(net())
    assert result.equal
    assert str(result).startswith(WHOLE)
    assert result.compared == 4
    assert 0 < result.largest < 1e-12


def test_where_samples_mix_it_is_compared_micro_batch_by_micro_batch() -> None:
    result = verified(net(nn.BatchNorm1d(8)))
    assert result.equal, str(result)
    assert result.reference == (
        "your module, micro-batch by micro-batch, because it mixes samples (BatchNorm1d 'between')"
    )
    assert result.compared == 9


class Summed(nn.Module):
    """A loss that is one sum over samples, or is divided by how many they are."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.layers, self.divided = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), divided

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.layers(x)
        loss = functional.cross_entropy(scores, y, reduction="sum")
        functional.mse_loss(scores, torch.zeros_like(scores), reduction="sum")  # to be logged
        return loss / len(x) if self.divided else loss


@pytest.mark.parametrize("divided", [False, True])
def test_sums_of_micro_batches_that_mix_samples_are_added(divided: bool) -> None:
    result = verified(Summed(divided).double(), loss=None)
    assert "micro-batch by micro-batch" in result.reference
    assert result.equal, str(result)


def test_dropout_is_off_in_both() -> None:
    assert verified(net(nn.Dropout(0.5))).equal


class Checkpointed(nn.Module):
    """Dropout in a checkpoint, which the backward runs again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_off_where_a_checkpoint_runs_it_again(reentrant: bool) -> None:
    assert verified(net(Checkpointed(reentrant))).equal


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_code_that_goes_through_the_samples_is_compared_with_the_module(times: float) -> None:
    subject, graph = captured("pictures")
    if times != 1.0:
        hooking(graph, lambda module, given, made: times * made, "blocks.0")
    with Pipeline(graph, subject.batch(8), plan=one_rank(graph)) as pipe:
        result = pipe.verify(subject.batch(8))
    assert result.equal == (times == 1.0), str(result)
    assert str(result).startswith(WHOLE) == result.equal


def doubled(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return 2 * output


def scaled(module: nn.Module, *gradients: object) -> tuple[torch.Tensor, ...]:
    """A module hook that scales the gradient of the output."""
    (gradient,) = gradients[0]  # type: ignore[misc]
    return (gradient * 0.1,)


def test_hooks_that_are_added_after_capture_count_in_both() -> None:
    def add_hooks(model: nn.Module) -> None:
        model.get_submodule("between").register_full_backward_pre_hook(scaled)
        model.get_submodule("first").register_forward_hook(doubled)

    result = verified(net(), after_capture=add_hooks)
    assert result.equal, str(result)
    assert result.reference_loss != pytest.approx(verified(net()).reference_loss)


def test_a_hook_on_a_parameter_counts_in_both() -> None:
    def add_hook(model: nn.Module) -> None:
        model.get_parameter("first.weight").register_hook(torch.neg)

    result = verified(net(), after_capture=add_hook)
    assert result.equal, str(result)


def test_a_flipped_sign_is_found() -> None:
    result = verified(net(), with_flipped_sign)
    assert str(result).startswith("gradient of 'first.weight' on stage 0 is ")
    assert result.difference is not None
    assert result.difference.value == pytest.approx(-result.difference.reference)


@pytest.mark.parametrize("between", [nn.Tanh(), nn.BatchNorm1d(8)], ids=["whole", "in parts"])
def test_a_wrong_weight_of_the_loss_is_found(between: nn.Module) -> None:
    assert str(verified(net(between), with_weight_of_rows)).startswith("loss is ")


def test_a_stale_buffer_is_found() -> None:
    result = verified(net(nn.BatchNorm1d(8)), with_stale_buffer)
    assert str(result).startswith("buffer of 'between.running_mean' on stage 0 is 0, of your ")


def test_a_missing_gradient_is_found() -> None:
    result = verified(net(), without_gradient)
    assert str(result).startswith("gradient of 'first.weight' on stage 0 is 0, of your module")


class Spare(nn.Linear):
    """Has a weight that counts nothing, and is read or not."""

    reads = True

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.spare = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer's output."""
        found = super().forward(x)
        return found + 0.0 * self.spare if Spare.reads else found


def test_a_gradient_of_zeros_is_another_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_in_stages_only(graph: LayerGraph) -> None:
        def around(run: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*given: Any) -> Any:
                with monkeypatch.context() as within:
                    within.setattr(Spare, "reads", True)
                    return run(*given)

            return changed

        tampered(graph, around)
        monkeypatch.setattr(Spare, "reads", False)

    assert verified(net(Spare())).equal
    result = verified(net(Spare()), read_in_stages_only)
    assert str(result).startswith("gradient of 'between.spare' on stage 0 is 0, of your module on")
    assert " None: relative difference inf" in str(result)


def test_a_wrong_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GradientBucket.square
    monkeypatch.setattr(GradientBucket, "square", lambda *given: 2 * right(*given))
    result = verified(net())
    assert result.difference is not None and result.difference.kind == "gradient norm"
    assert result.difference.relative == pytest.approx(2**0.5 - 1)


@pytest.fixture(scope="module")
def three_ranks() -> dict[str, str]:
    """What `wrong_on_three_ranks` gave, the same on all ranks."""
    found = launch_workers(wrong_on_three_ranks, workers=3)
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("right", WHOLE),
        ("batch norm on replicas", "equal to your module, micro-batch by micro-batch, because "),
        ("one replica scaled", "gradient of '0.0.weight' on stage 0 is "),
        ("missing on one rank", "gradient of '2.0.weight' on stage 1 is 0, of your module on "),
        ("lost tied gradient", "gradient of 'embed.weight' on stage 0 is "),
        ("gpt2, first step", WHOLE),
        ("t5, first step", WHOLE),
        ("gpt2, first step, one replica scaled", "the first step is not that of your module, and"),
    ],
)
def test_over_three_ranks(three_ranks: dict[str, str], case: str, said: str) -> None:
    assert three_ranks[case].startswith(said), three_ranks[case]


class Careless(nn.Module):
    """Changes its buffers and attributes, and a list, in every forward; closes over a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.noted = 0, ""
        self.scaled = lambda x: x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        self.calls += 1
        self.seen += 1
        self.noted = f"run {self.seen}"
        return self.scaled(self.layer(x))


def state_of(model: nn.Module) -> list[torch.Tensor]:
    found = [torch.get_rng_state(), *model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.detach().clone() for tensor in found]


def test_nothing_is_changed_afterwards() -> None:
    torch.manual_seed(0)
    model = Careless().double()
    graph = capture_model(model, batch(), loss=functional.cross_entropy)
    with Pipeline(graph, batch(), plan=one_rank(graph)) as pipe:
        pipe.step(batch())
        model.eval()
        attributes = (model.seen, model.noted)
        before, objects = state_of(model), [id(p) for p in model.parameters()]
        result = pipe.verify(batch())
        after = state_of(model)
    assert result.equal, str(result)
    assert result.reference.endswith("because its forward updates buffer 'calls'")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(before) == len(after)
    assert [id(p) for p in model.parameters()] == objects
    assert (model.seen, model.noted) == attributes
    assert not any(part.training for part in model.modules())


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and noise."""
        return x + torch.randn_like(x)


def test_other_random_operators_are_named_and_not_compared() -> None:
    result = verified(net(Noisy()))
    assert not result.equal
    words = "not compared: random operators, which are not dropout: randn_like at "
    assert str(result).startswith(words) and "test_verify.py:" in str(result)


def test_a_module_that_cannot_run_by_itself_is_not_compared() -> None:
    running: list[bool] = []

    def around(run: Any) -> Any:
        def noted(*given: Any) -> Any:
            running.append(True)
            try:
                return run(*given)
            finally:
                running.clear()

        return noted

    def only_in_stages(*_: object) -> None:
        if not running:
            raise AttributeError("'Net' has lost something")

    model = net()
    result = verified(
        model,
        lambda graph: tampered(graph, around),
        after_capture=lambda model: model.register_forward_pre_hook(only_in_stages),
    )
    assert not result.equal
    assert str(result).startswith("not compared: Net does not run by itself on rank 0: Attr")


def test_a_module_that_is_deleted_after_capture_is_named() -> None:
    def forget(model: nn.Module) -> None:
        del model.between

    with pytest.raises(BadInput, match="Net has no module 'between' any more"):
        verified(net(), after_capture=forget)


def test_a_chain_is_compared_with_itself() -> None:
    torch.manual_seed(0)
    recurrent = nn.Sequential(nn.LSTM(8, 3, num_layers=2, dropout=0.5, batch_first=True), Last())
    layers = [nn.Linear(4, 8), nn.Unflatten(1, (1, 8)), recurrent, nn.Flatten(), nn.Linear(3, 3)]
    result = verified(Chain(layers, functional.cross_entropy).double(), loss=None)
    assert result.equal, str(result)


class Last(nn.Module):
    def forward(self, output: tuple[torch.Tensor, object]) -> torch.Tensor:
        """Without the states."""
        return output[0]


def test_a_model_on_the_meta_device_is_compared_with_the_values_of_the_ranks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    result = verified(model)
    assert result.equal, str(result)
    assert result.reference_loss > 0
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_mixture_of_experts_with_router_loss_and_ignored_targets_is_equal() -> None:
    """Words count by targets, of which the last micro-batch has one only; routers count by rows."""
    options: dict[str, Any] = {"experts_implementation": "batched_mm"}
    config = transformers.MixtralConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        **options,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double()
    ids = torch.randint(13, (8, 5))
    labels = ids.clone()
    labels[0, 2:], labels[4:], labels[7, 3] = -100, -100, 5
    words = {"input_ids": ids, "labels": labels}
    result = verified(model, loss=None, example=words)
    assert result.equal, str(result)
    assert result.reference.startswith("your module, micro-batch by micro-batch, because it mixes")
    assert result.largest < 1e-6


class InPlace(nn.Module):
    """Changes its mean, and makes one, in place."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.layer, self.divided = nn.Linear(4, 3), divided

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over targets, and squares counted by rows."""
        scores = self.layer(x)
        if self.divided:
            loss = (scores.square().sum(1) * (y >= 0)).sum()
            loss /= (y >= 0).sum()
        else:
            loss = functional.cross_entropy(scores, y)
        loss += nn.functional.batch_norm(scores, None, None, training=True).pow(4).mean()
        return loss


@pytest.mark.parametrize("divided", [False, True])
def test_what_is_added_to_a_mean_in_place_is_no_part_of_it(divided: bool) -> None:
    torch.manual_seed(0)
    result = verified(InPlace(divided).double(), loss=None)
    assert "micro-batch by micro-batch" in result.reference
    assert result.equal, str(result)


FIRST_HALF = batch()[0], torch.tensor([0, 1, 2, 0, -100, -100, -100, -100])
"""Samples of which those of the second micro-batch have no targets."""


def test_a_micro_batch_whose_mean_has_no_terms_is_not_compared() -> None:
    torch.manual_seed(0)
    result = verified(InPlace(divided=False).double(), loss=None, given=FIRST_HALF)
    assert "gives a loss of nan, as a mean over no targets does" in str(result)


def test_a_micro_batch_without_targets_counts_for_nothing_where_the_loss_is_one_mean() -> None:
    result = verified(net(nn.BatchNorm1d(8)), given=FIRST_HALF)
    assert result.equal, str(result)
