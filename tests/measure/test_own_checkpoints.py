"""Costs of a model with checkpoints of its own (torch.utils.checkpoint) are those of what runs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.profile.model_profile import LayerCost, ModelProfile

ROWS, WORDS, WIDTH, BLOCKS = 4, 32, 64, 3
INPUT_BYTES = 4 * ROWS * WORDS * WIDTH
KINDS = {"reentrant": True, "not reentrant": False}

Costs = Callable[[bool | None], ModelProfile]


class Block(nn.Module):
    """Attention and MLP; ``reentrant`` is the kind of the checkpoint around them (None: none)."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = functional.gelu(self.up(mixed.transpose(1, 2).flatten(2)))
        return functional.dropout(self.down(hidden), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.run(x)
        made = checkpoint(self.run, x, use_reentrant=self.reentrant)
        assert isinstance(made, torch.Tensor)
        return x + made


def costs_by(find: Callable[..., ModelProfile], reentrant: bool | None) -> ModelProfile:
    """The costs of blocks between two linear layers."""
    torch.manual_seed(0)
    blocks = (Block(reentrant) for _ in range(BLOCKS))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 1))
    batch = (torch.randn(ROWS, WORDS, WIDTH), torch.randn(ROWS, WORDS, 1))
    graph = capture_model(model, batch, loss=nn.MSELoss())
    return find(graph, batch, batch_sizes=(ROWS,))


estimated = partial(costs_by, partial(estimate_profile, hardware_name="A100-80GB"))
measured = partial(costs_by, partial(measure_profile, repeats=1))


def with_checkpoints(profile: ModelProfile) -> list[LayerCost]:
    return [layer for layer in profile.layers if layer.workspace_bytes.at(ROWS)]


def saved_bytes(layers: list[LayerCost]) -> float:
    return sum(layer.saved_bytes.at(ROWS) for layer in layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("costs", [estimated, measured], ids=["estimated", "measured"])
def test_a_checkpoint_keeps_its_input_and_takes_all_else_in_the_backward(
    costs: Costs, kind: str
) -> None:
    plain, own = costs(None), costs(KINDS[kind])
    blocks = with_checkpoints(own)
    assert not with_checkpoints(plain)
    assert len(blocks) == BLOCKS
    # The last one's layer has the mean of the loss, too.
    assert [layer.saved_bytes.at(ROWS) for layer in blocks[:-1]] == [INPUT_BYTES] * (BLOCKS - 1)
    each = (saved_bytes(list(plain.layers)) - saved_bytes(list(own.layers))) / BLOCKS
    for layer in blocks:
        # What a block saves comes back. Beside it are gradients of GELU's input and output, of four
        # times the block's width each. Checkpoints that are not reentrant leave out the result.
        gradients = layer.workspace_bytes.at(ROWS) - each
        assert 7 * INPUT_BYTES <= gradients <= 9 * INPUT_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimated_backward_runs_checkpoints_again(kind: str) -> None:
    plain, own = estimated(None), estimated(KINDS[kind])
    again = range(len(own.layers))
    forward_s = own.forward_s(again, ROWS)
    assert forward_s == pytest.approx(plain.forward_s(range(len(plain.layers)), ROWS))
    more_s = own.backward_s(again, ROWS) - plain.backward_s(range(len(plain.layers)), ROWS)
    assert more_s == pytest.approx(forward_s, rel=0.2)


def test_no_layer_with_checkpoints_is_compiled() -> None:
    compiled = partial(estimate_profile, hardware_name="A100-80GB", compiled=True)
    plain = range(len(estimated(None).layers))
    faster = costs_by(compiled, None)
    assert faster.forward_s(plain, ROWS) < estimated(None).forward_s(plain, ROWS)
    found = with_checkpoints(costs_by(compiled, reentrant=False))
    assert found == with_checkpoints(estimated(False))
    assert len(found) == BLOCKS


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_checkpoints_get_their_gradients_in_the_first_half(kind: str) -> None:
    for layer in with_checkpoints(measured(KINDS[kind])):
        assert layer.backward_weight_s.at(ROWS) == 0
        assert layer.backward_input_s.at(ROWS) > 0
